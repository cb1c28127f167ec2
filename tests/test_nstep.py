"""n-step returns and stacks of the replay against a slow one that keeps everything in lists, for each stream.

Fetched plainly, and by the kernel: on a GPU, and, its own text emulated, on the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from drq.backend import Backend
from drq.engine import kernels
from drq.envs.protocol import EnvSpec
from drq.replay import Batch, Choice, Replay, UniformSampler

GAMMA = 0.9
STACK = 3
SPEC = EnvSpec("toy/lists", (1, 2, 2), STACK, "discrete", 4, 1, None)


Fetch = Callable[[Replay, torch.Tensor], Batch]
"""The transitions in these slots."""


def plainly(replay: Replay, slots: torch.Tensor) -> Batch:
    return replay.gather(Choice(slots))


def by_kernel(replay: Replay, slots: torch.Tensor) -> Batch:
    return kernels.transitions(replay, Choice(slots))


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

    def expected(self, episode: Episode, t: int, n: int, gamma: float) -> tuple[float, float, np.ndarray]:
        """The return, what multiplies the bootstrap, and the state to bootstrap from."""
        total, weight = 0.0, 1.0
        for at in range(t, t + n):
            _, reward, discount, done = episode.steps[at]
            total += weight * reward
            weight *= gamma
            if discount == 0.0:
                return total, 0.0, self.stack(episode, at + 1)  # nothing is bootstrapped
            if done:
                break
        return total, weight, self.stack(episode, at + 1)


class Both:
    """A stream of a replay and the lists, fed with the same random play."""

    def __init__(
        self, seed: int, capacity: int, n: int, longest: int, replay: Replay | None = None, stream: int = 0
    ) -> None:
        self.random = random.Random(seed)
        self.replay = Replay(SPEC, capacity, n_step=n, discount=GAMMA) if replay is None else replay
        self.number = stream
        self.stream = self.replay.streams[stream]
        self.lists = Lists()
        self.n, self.longest = n, longest
        self.frames = 100_000 * stream
        self.left = 0

    def next_frame(self) -> np.ndarray:
        self.frames += 1
        return frame(self.frames)

    def begin(self, left: int) -> None:
        self.left = left
        episode = Episode([self.next_frame()])
        self.lists.episodes.append(episode)
        self.replay.begin(episode.frames[0], self.number)

    def step(self) -> None:
        if self.left == 0:
            self.begin(self.random.randint(1, self.longest))
        episode = self.lists.episodes[-1]
        self.left -= 1
        done = self.left == 0
        # A third of the ends are time limits; now and then a life is lost on the way.
        discount = float(self.random.random() < 1 / 3) if done else float(self.random.random() > 0.15)
        step = (self.random.randrange(4), self.random.uniform(-1, 1), discount, done)
        episode.steps.append(step)
        episode.frames.append(self.next_frame())
        self.replay.add(*step, episode.frames[-1], self.number)

    def sampleable(self) -> list[tuple[Episode, int]]:
        """Those kept whose return is complete, the oldest first."""
        kept = self.lists.transitions()[self.stream.oldest :]
        assert len(kept) == len(self.stream) <= self.replay.stream_capacity
        complete = [self.lists.complete(episode, t, self.n) for episode, t in kept]
        assert sorted(complete, reverse=True) == complete
        return kept[: complete.count(True)]

    def slots(self) -> list[int]:
        """Of those."""
        first, capacity = self.stream.oldest, self.replay.stream_capacity
        return [self.number * capacity + (first + at) % capacity for at in range(len(self.sampleable()))]

    def assert_same(self, batch: Batch, n: int | None = None, gamma: float = GAMMA) -> None:
        """The batch of all that may be sampled."""
        obs, next_obs = batch.obs.tensor().cpu().numpy(), batch.next_obs.tensor().cpu().numpy()
        assert len(batch.reward) == len(self.sampleable())
        for row, (episode, t) in enumerate(self.sampleable()):
            total, weight, bootstrap_from = self.lists.expected(episode, t, n or self.n, gamma)
            assert int(batch.action[row]) == episode.steps[t][0]
            assert float(batch.reward[row]) == pytest.approx(total, abs=1e-5)
            assert float(batch.discount[row]) == pytest.approx(weight, abs=1e-6)
            np.testing.assert_array_equal(obs[row], self.lists.stack(episode, t))
            if weight:
                np.testing.assert_array_equal(next_obs[row], bootstrap_from)

    def check(self, fetch: Fetch = plainly, n: int | None = None, gamma: float = GAMMA) -> int:
        """Compares every transition that may be sampled; gives how many."""
        slots = self.slots()
        assert self.replay.rings.window[self.number].tolist() == [
            self.stream.oldest % self.replay.stream_capacity,
            len(slots),
        ]
        if slots:
            self.assert_same(fetch(self.replay, torch.tensor(slots, device=self.replay.device)), n, gamma)
        return len(slots)


def side_by_side(n: int, device: str, longest: Sequence[int], capacity: int) -> list[Both]:
    """Streams of one replay."""
    backend = Backend(device)
    streams = len(longest)
    replay = Replay(SPEC, streams * capacity, n_step=n, discount=GAMMA, streams=streams, backend=backend)
    return [Both(number, capacity, n, most, replay, number) for number, most in enumerate(longest)]


@pytest.mark.parametrize("n", [1, 2, 3, 10])
@pytest.mark.parametrize("seed", range(3))
def test_returns_and_stacks_at_every_edge(n: int, seed: int) -> None:
    both = Both(seed, capacity=45 + seed, n=n, longest=25)
    checked = 0
    for _ in range(200):  # four times round the ring
        both.step()
        checked += both.check()
        assert both.replay.sampleable == len(both.slots())
    assert both.stream.oldest > 120
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
    both.begin(150)
    for _ in range(140):
        both.step()
        both.check()
    assert len(both.replay) == 32
    assert both.replay.sampleable == 32 - 9  # the newest nine wait for their tenth reward


FETCHED = pytest.mark.parametrize("fetch", [plainly, by_kernel])


@FETCHED
@pytest.mark.parametrize("n", [1, 3, 10])
def test_streams_of_one_replay(kernel_device: str, n: int, fetch: Fetch) -> None:
    """Returns and stacks follow their own stream, wherever in its ring each of them is."""
    streams = side_by_side(n, kernel_device, longest=(2, 30, 12), capacity=31)
    replay, chance, checked = streams[0].replay, random.Random(n), 0
    for step in range(300):
        chance.choice(streams).step()
        if step % 3 == 0:
            checked += sum(stream.check(fetch) for stream in streams)
            assert replay.sampleable == sum(len(stream.slots()) for stream in streams)
    assert min(stream.stream.oldest for stream in streams) > 31
    assert checked > 5_000


@pytest.mark.parametrize("n", [1, 3, 10])
@pytest.mark.parametrize("longest", [(9,), (2, 30, 12)], ids=["one stream", "three streams"])
def test_random_bits_choose_among_all_streams(kernel_device: str, n: int, longest: tuple[int, ...]) -> None:
    """With as many bits as count through all that may be sampled, each is chosen once: by the plain sampler, and by the
    kernel that fetches it at the same time. A stream of which nothing may be sampled is passed over."""
    streams = side_by_side(n, kernel_device, longest, capacity=31)
    replay = streams[0].replay
    for played in range(1, 40 * len(streams)):
        streams[max(played % (len(streams) + 1) - 1, 0)].step()
        slots = [slot for stream in streams for slot in stream.slots()]
        if not slots or played % 3:
            continue
        for rounds in (0, 5, 2**61 // len(slots)):
            random_bits = torch.arange(len(slots), device=kernel_device) + rounds * len(slots)
            assert UniformSampler().choose(replay, random_bits).slots.tolist() == slots
            batch = kernels.transitions(replay, random_bits)
            assert batch.slots is not None
            assert batch.slots.tolist() == slots
            begin = 0
            for stream in streams:
                end = begin + len(stream.slots())
                stream.assert_same(_part(batch, begin, end))
                begin = end


def _part(batch: Batch, begin: int, end: int) -> Batch:
    return Batch(
        batch.obs._replace(slots=batch.obs.slots[begin:end]),
        batch.action[begin:end],
        batch.reward[begin:end],
        batch.discount[begin:end],
        batch.next_obs._replace(slots=batch.next_obs.slots[begin:end]),
    )


@FETCHED
def test_returns_may_become_shorter_and_discounted_otherwise(kernel_device: str, fetch: Fetch) -> None:
    """And longer again. What may be sampled is what is complete for the longest."""
    streams = side_by_side(10, kernel_device, longest=(25, 8), capacity=40)
    replay = streams[0].replay
    for returns in [(10, GAMMA), (3, GAMMA), (3, 0.5), (1, 0.97), (7, 0.97), (10, 0.997), (10, GAMMA)]:
        replay.set_returns(*returns)
        for _ in range(15):
            for stream in streams:
                stream.step()
        assert sum(stream.check(fetch, *returns) for stream in streams) > 15


def test_no_return_is_longer_than_the_replay_was_made_for() -> None:
    replay = Replay(SPEC, 20, n_step=3)
    for wrong in (0, 4):
        with pytest.raises(ValueError, match=f"returns of {wrong} steps from a replay made for 1 to 3"):
            replay.set_returns(wrong, 0.9)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("longest", [(2,), (40,), (3, 9, 40)], ids=str)
def test_may_sample_says_of_every_slot_whether_it_may_be_chosen(n: int, longest: tuple[int, ...]) -> None:
    streams = side_by_side(n, "cpu", longest, capacity=23)
    replay, chance = streams[0].replay, random.Random(0)
    assert not replay.may_sample().any()
    for _ in range(120 * len(streams)):
        chance.choice(streams).step()
        allowed = {slot for stream in streams for slot in stream.slots()}
        assert replay.may_sample().tolist() == [slot in allowed for slot in range(replay.capacity)]


def test_weights_of_a_choice_stay_with_it(kernel_device: str) -> None:
    streams = side_by_side(3, kernel_device, longest=(9, 9), capacity=20)
    for _ in range(15):
        for stream in streams:
            stream.step()
    choice = Choice(torch.tensor([25, 3, 3], device=kernel_device), torch.tensor([0.5, 1.0, 2.0], device=kernel_device))
    for batch in (streams[0].replay.gather(choice), kernels.transitions(streams[0].replay, choice)):
        assert batch.slots is not None
        assert batch.weights is not None
        assert batch.slots.tolist() == [25, 3, 3]
        assert batch.weights.tolist() == [0.5, 1.0, 2.0]


def test_losing_a_life_ends_the_return_and_not_the_episode() -> None:
    replay = Replay(SPEC, 20, n_step=4, discount=0.5)
    replay.begin(frame(0))
    for t, (reward, discount) in enumerate([(1, 1), (1, 0), (1, 1), (1, 1), (1, 1), (1, 1)]):
        replay.add(0, reward, discount, False, frame(t + 1))
    batch = plainly(replay, torch.arange(3))
    assert batch.reward.tolist() == [1.5, 1.0, 1.875]
    assert batch.discount.tolist() == [0.0, 0.0, 0.5**4]
    # The frame before the loss is still part of the stack after it: the game was not reset.
    assert batch.obs.tensor()[2, :, 0, 0].tolist() == [0, 1, 2]


def test_a_time_limit_shortens_the_return_and_bootstraps_from_the_last_frame() -> None:
    replay = Replay(SPEC, 20, n_step=4, discount=0.5)
    replay.begin(frame(0))
    replay.add(0, 1.0, 1.0, False, frame(1))
    replay.add(0, 1.0, 1.0, True, frame(2))
    replay.begin(frame(9))
    replay.add(0, 100.0, 1.0, False, frame(10))  # belongs to nobody else's return
    batch = plainly(replay, torch.arange(2))
    assert batch.reward.tolist() == [1.5, 1.0]
    assert batch.discount.tolist() == [0.25, 0.5]
    assert batch.next_obs.tensor()[:, -1, 0, 0].tolist() == [2, 2]


def test_samples_are_uniform_over_what_is_complete() -> None:
    both = Both(3, capacity=40, n=10, longest=30)
    while both.replay.sampleable > 33 or both.stream.oldest < 50:
        both.step()
    random_bits = both.replay.draw(20_000, torch.Generator().manual_seed(0))
    slots = UniformSampler().choose(both.replay, random_bits).slots
    numbers = (slots - both.stream.oldest) % both.replay.capacity
    counts = torch.bincount(numbers, minlength=40).double()
    n = both.replay.sampleable
    assert int((counts > 0).sum()) == n
    assert int(numbers.max()) == n - 1
    chi_squared = float(((counts[:n] - 20_000 / n) ** 2 / (20_000 / n)).sum())
    assert chi_squared < n + 5 * (2 * n) ** 0.5


@pytest.mark.parametrize("n_step", [1, 3, 4])
def test_bootstrapping_one_step_early(n_step: int) -> None:
    """As Rainbow was published."""
    spec = EnvSpec("toy/state", (1,), 1, "discrete", 3, 1, 50)
    replay = Replay(spec, 40, n_step=4, early_bootstrap=True)
    replay.set_returns(n_step, 0.9)
    rng = np.random.default_rng(0)
    frames, rows = [], []
    number = 0.0
    for length, terminal in ((5, True), (1, True), (9, False), (7, True)):
        replay.begin(np.array([number], np.float32))
        frames.append(number)
        for age in range(length):
            number += 1.0
            done = age == length - 1
            reward, discount = float(np.float32(rng.normal())), 0.0 if done and terminal else 1.0
            replay.add(0, reward, discount, done, np.array([number], np.float32))
            rows.append((frames[-1] if age == 0 else number - 1.0, reward, discount, done))
        number += 1.0
    batch = replay.gather(Choice(torch.arange(replay.sampleable)))
    assert not isinstance(batch.next_obs, torch.Tensor)
    next_obs = batch.next_obs.tensor()[:, 0]
    for at in range(replay.sampleable):
        expected, factor, first = 0.0, 1.0, rows[at][0]
        for ahead in range(n_step):
            _, reward, discount, done = rows[at + ahead]
            expected += factor * reward
            last = ahead == n_step - 1
            factor *= 0.9 * (1.0 if last else discount)
            if done and not last:
                break
        assert float(batch.reward[at]) == pytest.approx(expected, abs=1e-5)
        assert float(batch.discount[at]) == pytest.approx(factor, rel=1e-5)
        if factor:  # a whole return: the state that the last action was taken in; one cut short: its last state
            assert float(next_obs[at]) == first + (n_step - 1 if ahead == n_step - 1 else ahead + 1)
