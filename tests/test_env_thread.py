"""Where a run's environment works changes nothing of what it gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from drq.config import EnvConfig
from drq.envs import make
from drq.training.env_thread import EnvHere, EnvThread

AGENT_STEPS = 60


def episodes(worker: Any, seeds: list[tuple[int, int]]) -> list[np.ndarray]:
    """First frames and what follows, for each seed with the one that was announced to follow it."""
    record: list[Any] = []
    for seed, announced in seeds:
        record.append(worker.reset(seed, announced))
        for agent_step in range(AGENT_STEPS):
            step = worker.step(agent_step % 3)()
            record += [step.frame, np.array([step.reward, step.discount, step.done, step.score])]
            if step.done:
                break
    worker.close()
    return record


@pytest.mark.parametrize("task", ["toy/catch", "atari/breakout"])
def test_here_and_in_a_thread(task: str) -> None:
    here, thread = (kind(lambda: make(task, EnvConfig(image_size=36), 4)) for kind in (EnvHere, EnvThread))
    seeds = [(1, 2), (2, 3), (3, 4)]
    for one, other in zip(episodes(here, seeds), episodes(thread, seeds), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("game", ["pong", "hero"])
def test_an_episode_is_the_same_whichever_was_expected(game: str) -> None:
    """Expected and played, expected in vain, expected twice over, not expected at all."""
    played = [1, 2, 1, 5, 2]
    expected = []
    for seed in played:
        env = make(f"atari/{game}", EnvConfig(), 4)
        expected.append(env.reset(seed))
        for agent_step in range(AGENT_STEPS):
            step = env.step(agent_step % 3)
            expected += [step.frame, np.array([step.reward, step.discount, step.done, step.score])]
        env.close()
    for announced in ([2, 1, 5, 2, 9], [7, 7, 7, 7, 7], [2, 9, 9, 2, 2], [1, 2, 1, 5, 2]):
        worker = EnvHere(lambda: make(f"atari/{game}", EnvConfig(), 4))
        for one, other in zip(
            episodes(worker, list(zip(played, announced, strict=True))), expected, strict=True
        ):
            np.testing.assert_array_equal(one, other)


def test_an_environment_closes_while_the_next_episode_is_being_made_ready() -> None:
    env = make("atari/pong", EnvConfig(), 4)
    env.reset(1)
    env.expect(2)
    env.expect(3)
    env.close()
