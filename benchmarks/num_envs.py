"""What `--num-envs` gains where a step of the environment takes 10 ms.

    python benchmarks/num_envs.py

Agent steps/s of a small SAC from state, before its first update and with one update an agent step, for an environment
that waits 10 ms a step, as for a robot or another machine, and for one that computes as long.
"""

import sys
import tempfile
import time
from pathlib import Path

import gymnasium
import numpy as np

STEP_SECONDS = 0.01
RANDOM, LEARNING = 400, 400


class Slow(gymnasium.Env):
    """Nothing to learn, and slow."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, computes: bool = False) -> None:
        self.computes = computes

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation(), {}

    def observation(self):
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)

    def step(self, action):
        if self.computes:
            ends = time.process_time() + STEP_SECONDS
            while time.process_time() < ends:
                pass
        else:
            time.sleep(STEP_SECONDS)
        return self.observation(), float(action[0]), False, False, {}


if "Slow-v0" not in gymnasium.registry:  # imported again by its file's name
    gymnasium.register("Slow-v0", Slow, max_episode_steps=50)


def rates(count: int, computes: bool) -> tuple[float, float]:
    import drq

    times: dict[int, float] = {}

    class Clock(drq.Callback):
        def on_step(self, run: drq.RunView) -> None:
            times[run.agent_step] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        drq.train(
            "gym/Slow-v0",
            preset="state",
            imports=[str(Path(__file__).resolve())],
            dir=folder,
            device="cpu",
            steps=RANDOM + LEARNING,
            num_envs=count,
            agent={"batch_size": 32, "hidden_dim": 64, "seed_steps": RANDOM},
            env={"kwargs": f'{{"computes": {str(computes).lower()}}}'},
            eval={"every": 0, "episodes": 1, "min_agent_steps": 0, "video": False},
            callbacks=[Clock()],
            quiet=True,
        )
    first, learns, last = 5 * count, RANDOM + 5 * count, RANDOM + LEARNING

    def rate(begin: int, end: int) -> float:
        return (end - begin) / (times[end] - times[begin])

    return rate(first, RANDOM), rate(learns, last)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    print("environment  num_envs  random steps/s  learning steps/s")
    for computes in (False, True):
        for count in (1, 2, 4, 8):
            random, learning = rates(count, computes)
            print(f"{'computes' if computes else 'waits':11}  {count:8}  {random:14.0f}  {learning:16.0f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
