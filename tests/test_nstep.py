"""n-step returns and stacks of the replay against a slow one that keeps everything in lists."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from drq.envs.protocol import EnvSpec
from drq.replay import Replay

GAMMA = 0.9
STACK = 3
SPEC = EnvSpec("toy/lists", (1, 2, 2), STACK, "discrete", 4, 1, None)


def frame(number: int) -> np.ndarray:
    """Frames that can be told apart, by 24 bits of their number."""
    return np.array([[[number % 256, number // 256 % 256], [number // 65536, 7]]], dtype=np.uint8)


@dataclass
class Episode:
    frames: list[np.ndarray] = field(default_factory=list)
    steps: list[tuple[int, float, float, bool]] = field(default_factory=list)
    """(action, reward, discount, done)"""


@dataclass
class Lists:
    """All episodes, and returns by the definition."""

    episodes: list[Episode] = field(default_factory=list)

    def transitions(self) -> list[tuple[Episode, int]]:
        return [(episode, t) for episode in self.episodes for t in range(len(episode.steps))]

    @staticmethod
    def stack(episode: Episode, t: int) -> np.ndarray:
        return np.concatenate([episode.frames[max(t - back, 0)] for back in reversed(range(STACK))])

    @staticmethod
    def complete(episode: Episode, t: int, n: int) -> bool:
        return t + n <= len(episode.steps) or episode.steps[-1][3]

    def expected(self, episode: Episode, t: int, n: int) -> tuple[float, float, np.ndarray]:
        """The return, what multiplies the bootstrap, and the state to bootstrap from."""
        total, weight = 0.0, 1.0
        for at in range(t, t + n):
            _, reward, discount, done = episode.steps[at]
            total += weight * reward
            weight *= GAMMA
            if discount == 0.0:
                return total, 0.0, self.stack(episode, at + 1)  # nothing is bootstrapped
            if done:
                break
        return total, weight, self.stack(episode, at + 1)


class Both:
    """The replay and the lists, fed with the same random play."""

    def __init__(self, seed: int, capacity: int, n: int, longest: int) -> None:
        self.random = random.Random(seed)
        self.replay = Replay(SPEC, capacity, n_step=n, discount=GAMMA, device=torch.device("cpu"))
        self.lists = Lists()
        self.n, self.longest = n, longest
        self.frames = 0
        self.left = 0

    def next_frame(self) -> np.ndarray:
        self.frames += 1
        return frame(self.frames)

    def step(self) -> None:
        if self.left == 0:
            self.left = self.random.randint(1, self.longest)
            episode = Episode([self.next_frame()])
            self.lists.episodes.append(episode)
            self.replay.begin(episode.frames[0])
        episode = self.lists.episodes[-1]
        self.left -= 1
        done = self.left == 0
        # A third of the ends are time limits; now and then a life is lost on the way.
        discount = float(self.random.random() < 1 / 3) if done else float(self.random.random() > 0.15)
        step = (self.random.randrange(4), self.random.uniform(-1, 1), discount, done)
        episode.steps.append(step)
        episode.frames.append(self.next_frame())
        self.replay.add(*step, episode.frames[-1])

    def check(self) -> int:
        """Compares every transition that may be sampled; gives how many."""
        every = self.lists.transitions()
        kept = every[self.replay.oldest :]
        assert len(kept) == len(self.replay) <= self.replay.capacity
        sampleable = [self.lists.complete(episode, t, self.n) for episode, t in kept].count(True)
        assert self.replay.sampleable == sampleable
        assert self.replay.window.tolist() == [self.replay.oldest % self.replay.capacity, sampleable]
        if not sampleable:
            return 0
        numbers = torch.arange(self.replay.oldest, self.replay.oldest + sampleable)
        batch = self.replay.gather(numbers % self.replay.capacity)
        obs, next_obs = batch.obs.tensor().numpy(), batch.next_obs.tensor().numpy()
        for row, (episode, t) in enumerate(kept[:sampleable]):
            total, weight, bootstrap_from = self.lists.expected(episode, t, self.n)
            assert int(batch.action[row]) == episode.steps[t][0]
            assert float(batch.reward[row]) == pytest.approx(total, abs=1e-5)
            assert float(batch.discount[row]) == pytest.approx(weight, abs=1e-6)
            np.testing.assert_array_equal(obs[row], self.lists.stack(episode, t))
            if weight:
                np.testing.assert_array_equal(next_obs[row], bootstrap_from)
        return sampleable


@pytest.mark.parametrize("n", [1, 2, 3, 10])
@pytest.mark.parametrize("seed", range(3))
def test_returns_and_stacks_at_every_edge(n: int, seed: int) -> None:
    both = Both(seed, capacity=45 + seed, n=n, longest=25)
    checked = 0
    for _ in range(200):  # four times round the ring
        both.step()
        checked += both.check()
    assert both.replay.oldest > 120
    assert checked > 4_000


@pytest.mark.parametrize("n", [1, 10])
def test_episodes_shorter_than_the_ring_was_sized_for(n: int) -> None:
    """Many last frames leave room for fewer transitions, and never for a wrong one."""
    both = Both(0, capacity=60, n=n, longest=2)
    for _ in range(250):
        both.step()
        both.check()
    assert 25 < len(both.replay) < 60


def test_one_long_episode_outlasts_the_ring() -> None:
    both = Both(1, capacity=32, n=10, longest=1)
    both.step()
    both.left, episode = 150, Episode([both.next_frame()])
    both.lists.episodes.append(episode)
    both.replay.begin(episode.frames[0])
    for _ in range(140):
        both.step()
        both.check()
    assert len(both.replay) == 32
    assert both.replay.sampleable == 32 - 9  # the newest nine wait for their tenth reward


def test_losing_a_life_ends_the_return_and_not_the_episode() -> None:
    replay = Replay(SPEC, 20, n_step=4, discount=0.5, device=torch.device("cpu"))
    replay.begin(frame(0))
    for t, (reward, discount) in enumerate([(1, 1), (1, 0), (1, 1), (1, 1), (1, 1), (1, 1)]):
        replay.add(0, reward, discount, False, frame(t + 1))
    batch = replay.gather(torch.arange(3))
    assert batch.reward.tolist() == [1.5, 1.0, 1.875]
    assert batch.discount.tolist() == [0.0, 0.0, 0.5**4]
    # The frame before the loss is still part of the stack after it: the game was not reset.
    assert batch.obs.tensor()[2, :, 0, 0].tolist() == [0, 1, 2]


def test_a_time_limit_shortens_the_return_and_bootstraps_from_the_last_frame() -> None:
    replay = Replay(SPEC, 20, n_step=4, discount=0.5, device=torch.device("cpu"))
    replay.begin(frame(0))
    replay.add(0, 1.0, 1.0, False, frame(1))
    replay.add(0, 1.0, 1.0, True, frame(2))
    replay.begin(frame(9))
    replay.add(0, 100.0, 1.0, False, frame(10))  # belongs to nobody else's return
    batch = replay.gather(torch.arange(2))
    assert batch.reward.tolist() == [1.5, 1.0]
    assert batch.discount.tolist() == [0.25, 0.5]
    assert batch.next_obs.tensor()[:, -1, 0, 0].tolist() == [2, 2]


def test_samples_are_uniform_over_what_is_complete() -> None:
    both = Both(3, capacity=40, n=10, longest=30)
    while both.replay.sampleable > 33 or both.replay.oldest < 50:
        both.step()
    slots = both.replay.sample(20_000, torch.Generator().manual_seed(0))
    numbers = (slots - both.replay.oldest) % both.replay.capacity
    counts = torch.bincount(numbers, minlength=40).double()
    n = both.replay.sampleable
    assert int((counts > 0).sum()) == n
    assert int(numbers.max()) == n - 1
    chi_squared = float(((counts[:n] - 20_000 / n) ** 2 / (20_000 / n)).sum())
    assert chi_squared < n + 5 * (2 * n) ** 0.5
