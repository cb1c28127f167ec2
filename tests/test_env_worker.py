"""Where a run's environment works changes nothing of what it gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from drq.config import EnvConfig
from drq.envs import make
from drq.training.env_worker import InlineEnv, ThreadedEnv

AGENT_STEPS = 60


def episodes(worker: Any, seeds: list[int]) -> list[np.ndarray]:
    """First frames and what follows."""
    record: list[Any] = []
    for seed in seeds:
        record.append(worker.reset(seed)())
        for agent_step in range(AGENT_STEPS):
            step = worker.step(agent_step % 3)()
            record += [step.frame, np.array([step.reward, step.discount, step.done, step.score])]
            if step.done:
                break
    worker.close()
    return record


@pytest.mark.parametrize("task", ["toy/catch", "atari/breakout"])
def test_in_this_thread_and_in_another(task: str) -> None:
    inline, threaded = (kind(lambda: make(task, EnvConfig(image_size=36), 4)) for kind in (InlineEnv, ThreadedEnv))
    for one, other in zip(episodes(inline, [1, 2, 3]), episodes(threaded, [1, 2, 3]), strict=True):
        np.testing.assert_array_equal(one, other)
