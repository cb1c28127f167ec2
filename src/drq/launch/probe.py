"""How long a run would take here, from a few of its env steps and updates."""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from drq.agents import make_agent, make_replay
from drq.config import TrainConfig
from drq.engine import EngineSettings, FastBackend, Learner, choose_device
from drq.envs import Environment, EnvSpec, family_of
from drq.training.components import make_acting_agent, make_env
from drq.training.evaluate import EvaluationStopped
from drq.training.evaluation_service import make_evaluator, settings_beside_training
from drq.training.schedule import Schedule
from drq.training.seeds import random_action

ENV_STEPS = 40
SECONDS = 5.0
"""Updates are timed for about so long, two at least."""
CPU_BATCH = 32
"""A CPU's time grows with the batch, and a paper update would keep it busy for long: there a small one is scaled up."""
WARM_STEPS, TIMED_STEPS = 3, 40
EVALUATION_SECONDS = 2.0
"""Of an evaluation so many steps are timed after the first ones, or those of this time."""
GAME_AGENT_STEPS = 1_250
"""How long a game is taken to be whose end is up to the player: of the paper's 125,000 agent steps a hundredth."""
COST_NOTHING = ("learning_rate", "init_temperature", "discount", "tau", "pad", "intensity_scale", "freeze_encoder")


@dataclass(frozen=True)
class Cost:
    """What a run is made of, in seconds."""

    agent_step: float
    """The slower of an environment step and the updates beside it."""
    evaluation: float
    assumed: str
    """What was taken for granted, in words."""
    beside: bool
    """Whether evaluations are played beside training, which waits for the last one alone."""

    def of_run(self, config: TrainConfig) -> float:
        """A whole run, evaluations included."""
        schedule = Schedule(config)
        training, before_last = schedule.agent_steps * self.agent_step, schedule.evaluations_after(0) - 1
        if self.beside:
            return max(training, before_last * self.evaluation) + self.evaluation
        return training + (before_last + 1) * self.evaluation


def costs_as(config: TrainConfig) -> TrainConfig:
    """The same for runs that differ in nothing that takes time."""
    same: dict[str, Any] = {name: 0 for name in COST_NOTHING if hasattr(config.agent, name)}
    return dataclasses.replace(config, agent=dataclasses.replace(config.agent, **same), seed=1, dir=None)


def cost_of(config: TrainConfig) -> Cost:
    """Timed on real components: some steps, some updates, and the beginning of an evaluation."""
    device = choose_device(config.device)
    engine = EngineSettings.resolve(config.engine, device, config.agent, updates=0)
    env = make_env(config)
    try:
        agent_step = _seconds_per_agent_step(config, env, engine)
    finally:
        env.close()
    return Cost(agent_step, *_seconds_per_evaluation(config, env.spec, device), engine.eval_process)


def _seconds_per_evaluation(config: TrainConfig, spec: EnvSpec, device: torch.device) -> tuple[float, str]:
    """And what was taken for granted."""
    engine, _ = settings_beside_training(config, device)
    evaluator = make_evaluator(config, make_acting_agent(config, spec, engine), engine)
    wanted = config.eval
    began, steps = time.perf_counter(), 0

    def stopping() -> bool:
        nonlocal began, steps
        steps += 1
        if steps == WARM_STEPS:
            began = time.perf_counter()
        return steps > WARM_STEPS and (
            steps == WARM_STEPS + TIMED_STEPS or time.perf_counter() > began + EVALUATION_SECONDS
        )

    evaluator.stopping = stopping
    try:
        evaluator.evaluate(0, episodes=wanted.episodes, min_agent_steps=wanted.min_agent_steps)
        return time.perf_counter() - began, ""
    except EvaluationStopped:
        per_step = (time.perf_counter() - began) / (steps - WARM_STEPS)
    finally:
        evaluator.close()
    at_once = evaluator.at_once(wanted.episodes, wanted.min_agent_steps)
    if wanted.min_agent_steps:
        return wanted.min_agent_steps / at_once * per_step, ""
    length, assumed = spec.max_episode_agent_steps, ""
    if family_of(config.task).scores or length is None:
        length, assumed = GAME_AGENT_STEPS, f" if episodes have {GAME_AGENT_STEPS:,} agent steps"
    return wanted.episodes * length / at_once * per_step, assumed


def _seconds_per_agent_step(config: TrainConfig, env: Environment, engine: EngineSettings) -> float:
    """The slower of an environment step and the updates beside it."""
    scale = max(config.agent.batch_size / CPU_BATCH, 1.0) if engine.device.type == "cpu" else 1.0
    agent_config = dataclasses.replace(config.agent, batch_size=int(config.agent.batch_size / scale))
    backend = FastBackend(engine)
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
    learner = Learner(agent, replay, backend, seed=0)

    def two_updates() -> float:
        before = time.perf_counter()
        learner.update()
        learner.update()
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - before) / 2

    two_updates()  # the first ones prepare what later ones reuse
    timed = [two_updates()]
    while 2 * sum(timed) < SECONDS and len(timed) < 50:
        timed.append(two_updates())
    return max(env_seconds, statistics.median(timed) * scale * config.agent.updates_per_step)
