"""How long a run would take here, from a few of its env steps and updates."""

from __future__ import annotations

import dataclasses
import statistics
import time

import torch

from drq.agents import make_agent, make_replay
from drq.config import TrainConfig
from drq.engine import EngineSettings, FastBackend, Learner, choose_device
from drq.training.components import make_env
from drq.training.seeds import random_action

ENV_STEPS = 40
SECONDS = 5.0
"""Updates are timed for about so long, two at least."""
CPU_BATCH = 32
"""A CPU's time grows with the batch, and a paper update would keep it busy for long: there a small one is scaled up."""


def seconds_per_agent_step(config: TrainConfig) -> float:
    """The slower of an environment step and the updates beside it, on real components. Evaluations are not counted."""
    device = choose_device(config.device)
    scale = max(config.agent.batch_size / CPU_BATCH, 1.0) if device.type == "cpu" else 1.0
    agent_config = dataclasses.replace(config.agent, batch_size=int(config.agent.batch_size / scale))
    engine = EngineSettings.resolve(config.engine, device, config.agent, updates=0)
    backend = FastBackend(engine)
    env = make_env(config)
    try:
        agent = make_agent(env.spec, agent_config, backend, seed=0)
        replay = make_replay(env.spec, config.agent, backend, 2 * ENV_STEPS)
        replay.begin(env.reset(0))
        started = time.perf_counter()
        for agent_step in range(ENV_STEPS):
            action = random_action(env.spec, 0, agent_step)
            step = env.step(action)
            replay.add(action, step.reward, step.discount, step.done, step.frame)
            if step.done:
                replay.begin(env.reset(agent_step + 1))
        env_seconds = (time.perf_counter() - started) / ENV_STEPS
    finally:
        env.close()

    learner = Learner(agent, replay, backend, seed=0)

    def two_updates() -> float:
        before = time.perf_counter()
        learner.update()
        learner.update()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - before) / 2

    two_updates()  # the first ones prepare what later ones reuse
    timed = [two_updates()]
    while 2 * sum(timed) < SECONDS and len(timed) < 50:
        timed.append(two_updates())
    return max(env_seconds, statistics.median(timed) * scale * config.agent.updates_per_step)
