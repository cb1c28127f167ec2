"""How fast environments step and draw."""

from __future__ import annotations

import itertools
import statistics
import time

from drq import envs
from drq.config import EnvConfig
from drq.presets import action_repeat_for, preset_values
from drq.speed.results import EnvironmentSpeed
from drq.training.seeds import random_action


def measure_environment(task: str, config: EnvConfig, blocks: int, block_seconds: float) -> EnvironmentSpeed:
    """Random actions in the calling thread, at the paper's action repeat. The figures are medians over blocks."""
    env = envs.make(task, config, action_repeat_for(preset_values("planet", task)))
    try:
        actions = itertools.cycle([random_action(env.spec, 1, number) for number in range(256)])
        seeds = itertools.count(1)
        env.reset(next(seeds))
        rates, drawn = [], []
        timed = 0
        for block in range(blocks + 1):
            agent_steps = frames = 0
            drawing = env.render_seconds
            started = time.perf_counter()
            while (spent := time.perf_counter() - started) < block_seconds or not agent_steps:
                agent_steps += 1
                frames += 1
                if env.step(next(actions)).done:
                    env.reset(next(seeds))
                    frames += 1
            drawing = env.render_seconds - drawing
            if block:  # the first is the warm-up
                timed += agent_steps
                rates.append(agent_steps / spent)
                drawn.append(frames / drawing if drawing else 0.0)
        rate = statistics.median(rates)
        return EnvironmentSpeed(
            task=task,
            render=config.render if envs.family_of(task).has_suite_settings else "",
            agent_steps_per_second=rate,
            env_steps_per_second=rate * env.spec.action_repeat,
            frames_per_second=statistics.median(drawn) or None,
            agent_steps=timed,
        )
    finally:
        env.close()
