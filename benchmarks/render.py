"""How `--env.render fast` differs from `paper`, in pixels and in time: python benchmarks/render.py [TASK ...]

Both draw the same episode: random actions, 40 frames at action repeat 2, drawn in turns. Times are medians.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

from drq.config import EnvConfig
from drq.envs import make
from drq.envs.rendering import renderer_name
from drq.training.seeds import random_action

TASKS = ("cartpole-swingup", "cheetah-run", "walker-walk", "reacher-easy", "finger-spin", "ball_in_cup-catch")
FRAMES = 40


def compare(task: str) -> tuple[float, int, float]:
    """Mean and largest difference of 255, and paper's time of an agent step over fast's."""
    envs = [make(task, EnvConfig(render=render), 2) for render in ("paper", "fast")]
    pictures = [[env.reset(0)] for env in envs]
    spent: list[list[float]] = [[], []]
    for agent_step in range(FRAMES):
        action = random_action(envs[0].spec, 0, agent_step)
        for env, seen, times in zip(envs, pictures, spent, strict=True):
            drawn = env.render_seconds
            seen.append(env.step(action).frame)
            times.append(env.render_seconds - drawn)
    paper, fast = (np.stack(seen).astype(int) for seen in pictures)
    for env in envs:
        env.close()
    difference = abs(paper - fast)
    return float(difference.mean()), int(difference.max()), statistics.median(spent[0]) / statistics.median(spent[1])


def main() -> None:
    tasks = [f"dmc/{task}" for task in sys.argv[1:] or TASKS]
    started = time.perf_counter()
    rows = [(task, *compare(task)) for task in tasks]
    print(f"{renderer_name()}; {FRAMES} frames a task, {time.perf_counter() - started:.0f} s in all")
    print(f"{'task':28}mean of 255  largest  times as fast")
    for task, mean, largest, ratio in rows:
        print(f"{task:28}{mean:11.3f}{largest:9d}{ratio:15.1f}")


if __name__ == "__main__":
    main()
