"""The replay memory, one-step returns, against one that keeps every transition whole in a list, for each stream."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from drq.envs.protocol import EnvSpec
from drq.presets import PLANET_ACTION_REPEAT
from drq.replay import Batch, Choice, Replay, UniformSampler
from replay_lists import GAMMA, SPEC, Lists, OneStream, Play, Transition, picture

PIXELS = EnvSpec("dmc/any", (3, 84, 84), 3, "continuous", 6, 2, 500)


def all_kept(replay: Replay, stream: int = 0) -> Batch:
    """What sampling can give of a stream, the oldest first."""
    oldest, count = replay.rings.window[stream].tolist()
    places = (oldest + torch.arange(count)) % replay.stream_capacity
    return replay.gather(Choice(stream * replay.stream_capacity + places))


def sample(replay: Replay, count: int, seed: int = 0) -> Tensor:
    """Slots."""
    return UniformSampler().choose(replay, replay.draw(count, Generator().manual_seed(seed))).slots


def assert_holds(replay: Replay, *expected_of: list[Transition]) -> None:
    """Of each stream."""
    assert len(replay) == replay.sampleable == sum(map(len, expected_of))
    assert len(replay.streams) == len(expected_of)
    for stream, expected in enumerate(expected_of):
        assert len(replay.streams[stream]) == len(expected)
        if expected:
            assert_same(all_kept(replay, stream), expected)


def assert_same(batch: Batch, expected: list[Transition]) -> None:
    obs, action, reward, discount, next_obs = (np.stack(column) for column in zip(*expected, strict=True))
    np.testing.assert_array_equal(batch.obs.tensor().numpy(), obs)
    np.testing.assert_array_equal(batch.action.numpy(), action)
    np.testing.assert_array_equal(batch.reward.numpy(), reward.astype(np.float32))
    np.testing.assert_allclose(batch.discount.numpy(), discount, rtol=1e-6)
    np.testing.assert_array_equal(batch.next_obs.tensor().numpy(), next_obs)


# What comes back is what was put in.


@pytest.mark.parametrize("stack", [1, 3, 4])
@pytest.mark.parametrize(("capacity", "longest"), [(50, 20), (37, 60), (200, 30)])
def test_every_transition_comes_back(stack: int, capacity: int, longest: int) -> None:
    spec = replace(SPEC, frame_stack=stack)
    replay, lists, play = Replay(spec, capacity, discount=GAMMA), Lists(stack), Play(1, longest)
    for _ in range(4 * capacity):
        play.step(replay, lists)
        assert_holds(replay, lists.kept(capacity, replay.stream_frames))
    assert replay.streams[0].transitions_added > 3 * capacity
    np.testing.assert_array_equal(replay.newest_observation(), lists.observation())


@pytest.mark.parametrize("limit", [None, 1, 2, 3])
def test_very_short_episodes_cost_room_and_never_truth(limit: int | None) -> None:
    """One last frame for every one to three transitions: more than the ring was sized for."""
    spec = replace(SPEC, max_episode_agent_steps=limit)
    replay, lists, play = Replay(spec, 64, discount=GAMMA), Lists(3), Play(2, limit or 3)
    fewest = 64
    for step in range(500):
        play.step(replay, lists)
        assert_holds(replay, lists.kept(64, replay.stream_frames))
        if step > 200:
            fewest = min(fewest, len(replay))
    assert 30 <= fewest < 64


def test_the_first_frame_is_repeated_and_the_last_one_kept() -> None:
    frames = [np.full((1, 1, 1), number, dtype=np.uint8) for number in range(10)]
    spec = replace(SPEC, frame_shape=(1, 1, 1))
    replay = Replay(spec, 20)
    replay.begin(frames[0])
    for number in range(1, 5):
        replay.add(np.zeros(2, np.float32), 0.0, 1.0, number == 4, frames[number])
    replay.begin(frames[7])
    replay.add(np.zeros(2, np.float32), 0.0, 1.0, False, frames[8])
    batch = all_kept(replay)
    assert batch.obs.tensor()[:, :, 0, 0].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [7, 7, 7]]
    assert batch.next_obs.tensor()[:, :, 0, 0].tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [7, 7, 8]]


def test_zeros_for_missing_frames_also_after_a_lost_life() -> None:
    frames = [np.full((1, 1, 1), number, dtype=np.uint8) for number in range(10)]
    replay = Replay(replace(SPEC, frame_shape=(1, 1, 1), zero_stack=True), 20, n_step=2)
    replay.begin(frames[1])
    for number in range(2, 7):  # the life is lost in frame 4
        replay.add(np.zeros(2, np.float32), float(number), 0.0 if number == 4 else 1.0, False, frames[number])
        assert replay.sampleable == (0, 1, 3, 3, 4)[number - 2]  # all returns up to the loss are complete
    assert replay.newest_observation()[:, 0, 0].tolist() == [4, 5, 6]
    replay.begin(frames[7])
    assert replay.newest_observation()[:, 0, 0].tolist() == [0, 0, 7]
    batch = all_kept(replay)
    assert batch.obs.tensor()[:, :, 0, 0].tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 4], [0, 4, 5]]
    assert (batch.discount > 0).tolist() == [True, False, False, True, True]
    next_obs = batch.next_obs.tensor()[:, :, 0, 0].tolist()
    assert [next_obs[0], *next_obs[3:]] == [[1, 2, 3], [4, 5, 6], [4, 5, 6]]  # of those that a return goes on with
    assert batch.reward.tolist() == pytest.approx([2 + 0.99 * 3, 3 + 0.99 * 4, 4, 5 + 0.99 * 6, 6])
    for _ in range(replay.stream_frames):  # once round the ring: the zeros are not part of it
        replay.add(np.zeros(2, np.float32), 0.0, 1.0, False, frames[9])
    replay.begin(frames[8])
    assert replay.newest_observation()[:, 0, 0].tolist() == [0, 0, 8]


@pytest.mark.parametrize("steps_before", [0, 13, 14, 15, 16, 29])
def test_only_a_terminal_state_stops_the_bootstrap(steps_before: int) -> None:
    """Wherever in the ring of 15 the ends of the two episodes fall."""
    replay = Replay(SPEC, 15, discount=0.9)
    play = Play(3, 1)
    replay.begin(play.frame())
    for _ in range(steps_before):
        replay.add(np.zeros(2, np.float32), 0.0, 1.0, False, play.frame())
    replay.add(np.zeros(2, np.float32), 1.0, 0.0, True, terminal := play.frame())
    replay.begin(play.frame())
    replay.add(np.zeros(2, np.float32), 2.0, 1.0, True, cut_off := play.frame())
    replay.begin(play.frame())
    replay.add(np.zeros(2, np.float32), 3.0, 1.0, False, play.frame())
    batch = all_kept(replay)
    assert batch.reward[-3:].tolist() == [1.0, 2.0, 3.0]
    assert batch.discount[-3:].tolist() == pytest.approx([0.0, 0.9, 0.9])
    newest_frames = batch.next_obs.tensor()[-3:, -2:].numpy()
    np.testing.assert_array_equal(newest_frames[0], terminal)
    np.testing.assert_array_equal(newest_frames[1], cut_off)


@pytest.mark.parametrize("steps", [1, 2])
def test_an_abandoned_episode_ends_as_at_a_time_limit(steps: int) -> None:
    """Begun again in the middle: no return reaches from one episode into the next, nor after another resume."""
    spec = replace(SPEC, frame_shape=(1, 1, 1))
    frames = [np.full((1, 1, 1), number, dtype=np.uint8) for number in range(10)]
    replay = Replay(spec, 20, n_step=3, discount=0.5)
    replay.begin(frames[0])
    for number in range(1, steps + 1):
        replay.add(np.zeros(2, np.float32), 1.0, 1.0, False, frames[number])
    before = replay.marks(), replay.written_since([(0, 0)])
    replay.begin(frames[5])
    for number in (6, 7, 8):
        replay.add(np.zeros(2, np.float32), 100.0, 1.0, False, frames[number])
    restored = Replay(spec, 20, n_step=3, discount=0.5)
    restored.restore([before, (replay.marks(), replay.written_since(before[0]))], replay.counters())
    for each in (replay, restored):
        batch = all_kept(each)
        assert batch.reward.tolist() == [*[1.5, 1.0][-steps:], 175.0]
        assert batch.discount.tolist() == [*[0.25, 0.5][-steps:], 0.125]
        assert batch.next_obs.tensor()[:, -1, 0, 0].tolist() == [*[steps] * steps, 8]


def test_discrete_actions_and_state_vectors() -> None:
    spec = EnvSpec("toy/catch", (3,), 1, "discrete", 4, 1, 7)
    replay = Replay(spec, 10)
    states = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    replay.begin(states[0])
    for number in range(3):
        replay.add(3 - number, 0.0, 1.0, False, states[number + 1])
    batch = all_kept(replay)
    assert batch.action.dtype == torch.int64
    assert batch.action.tolist() == [3, 2, 1]
    np.testing.assert_array_equal(batch.obs.tensor().numpy(), states[:3])
    np.testing.assert_array_equal(batch.next_obs.tensor().numpy(), states[1:])


def test_what_is_given_is_copied() -> None:
    replay = Replay(SPEC, 10)
    first, second, action = picture(0), picture(1), np.ones(2, np.float32)
    replay.begin(first)
    replay.add(action, 1.0, 1.0, False, second)
    first[...] = second[...] = 0
    action[...] = 0
    batch = all_kept(replay)
    np.testing.assert_array_equal(batch.next_obs.tensor()[0, -2:].numpy(), picture(1))
    np.testing.assert_array_equal(batch.obs.tensor()[0, -2:].numpy(), picture(0))
    assert batch.action.tolist() == [[1.0, 1.0]]


def test_nothing_is_added_before_an_episode() -> None:
    replay = Replay(SPEC, 10)
    with pytest.raises(RuntimeError, match="begin an episode"):
        replay.add(np.zeros(2, np.float32), 0.0, 1.0, False, picture(0))
    replay.begin(picture(0))
    replay.add(np.zeros(2, np.float32), 0.0, 1.0, True, picture(1))
    with pytest.raises(RuntimeError, match="begin an episode"):
        replay.add(np.zeros(2, np.float32), 0.0, 1.0, False, picture(2))


# Streams.


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize(("capacity", "longest"), [(25, (2, 12, 60)), (40, (9, 9, 9))])
def test_streams_do_not_mix(capacity: int, longest: tuple[int, int, int], stack: int) -> None:
    """Side by side, in any order, each as far as it happens to be."""
    spec, chance = replace(SPEC, frame_stack=stack), random.Random(0)
    replay = Replay(spec, 3 * capacity, discount=GAMMA, streams=3)
    assert replay.capacity == 3 * capacity
    lists, plays = [Lists(stack) for _ in longest], [Play(seed, most) for seed, most in enumerate(longest)]
    for _ in range(12 * capacity):
        stream = chance.choice([0, 0, 1, 2, 2, 2])
        plays[stream].step(OneStream(replay, stream), lists[stream])
        assert_holds(replay, *(own.kept(capacity, replay.stream_frames) for own in lists))
        if replay.streams[stream].age >= 0:
            np.testing.assert_array_equal(replay.newest_observation(stream), lists[stream].observation())
    assert all(stream.transitions_added > capacity for stream in replay.streams)


def test_a_capacity_that_streams_do_not_divide_is_rounded_down() -> None:
    replay = Replay(SPEC, 32, streams=3)
    assert (replay.capacity, replay.stream_capacity) == (30, 10)
    assert len(replay.rings.rows) == 30
    assert len(replay.rings.frames) == 3 * replay.stream_frames


# Frames that are tensors already.


def test_frames_may_be_tensors() -> None:
    class Given(OneStream):
        def begin(self, frame: np.ndarray) -> None:
            self.replay.begin(torch.from_numpy(frame), self.stream)

        def add(self, action: np.ndarray, reward: float, discount: float, done: bool, frame: np.ndarray) -> None:
            self.replay.add(action, reward, discount, done, torch.from_numpy(frame), self.stream)

    replay = Replay(SPEC, 60, discount=GAMMA, streams=2)
    lists, plays = [Lists(3), Lists(3)], [Play(0, 3), Play(1, 40)]
    for step in range(300):
        stream = step % 2
        plays[stream].step(Given(replay, stream), lists[stream])
        assert_holds(replay, *(own.kept(30, replay.stream_frames) for own in lists))


def test_a_tensor_is_copied() -> None:
    replay = Replay(SPEC, 10)
    first = torch.from_numpy(picture(0))
    replay.begin(first)
    first.zero_()
    np.testing.assert_array_equal(replay.newest_observation()[-2:], picture(0))


# Sampling.


@pytest.mark.parametrize("steps", [5, 40, 137])
def test_sampling_is_uniform_over_everything_kept(steps: int) -> None:
    replay, play = Replay(SPEC, 40), Play(4, 6)
    while replay.streams[0].transitions_added < steps:
        play.step(replay)
    slots = sample(replay, 40_000)
    position = (slots - replay.rings.window[0, 0]) % replay.capacity
    kept = len(replay)
    counts = torch.bincount(position, minlength=40).double()
    assert int(counts[:kept].min()) > 0
    assert int(counts[kept:].sum()) == 0
    each = 40_000 / kept
    assert float(((counts[:kept] - each) ** 2 / each).sum()) < kept + 5 * (2 * kept) ** 0.5
    assert torch.equal(slots, sample(replay, 40_000))


def test_sampling_is_uniform_over_all_streams() -> None:
    """One stream has been round its ring, one has a few transitions, one has none yet."""
    replay = Replay(SPEC, 90, streams=3)
    for stream, steps in ((0, 75), (2, 7)):
        play = Play(stream, 6)
        while replay.streams[stream].transitions_added < steps:
            play.step(OneStream(replay, stream))
    replay.begin(picture(0), stream=1)
    counts = torch.bincount(sample(replay, 60_000), minlength=90).double()
    kept = [len(stream) for stream in replay.streams]
    assert kept[1:] == [0, 7]
    assert kept[0] > 20
    oldest = replay.streams[0].oldest
    slots = [number % 30 for number in range(oldest, oldest + kept[0])] + [60 + number for number in range(7)]
    assert counts.nonzero().flatten().tolist() == sorted(slots)
    each = 60_000 / len(slots)
    assert float(((counts[slots] - each) ** 2 / each).sum()) < len(slots) + 5 * (2 * len(slots)) ** 0.5


# Saved and put back.


class Saved:
    """Parts as checkpoints keep them: what is new since the last, and what is still of use."""

    def __init__(self) -> None:
        self.parts: list[tuple[list[tuple[int, int]], dict[str, Tensor]]] = []
        self.forgotten = 0

    def save(self, replay: Replay) -> None:
        marks = self.parts[-1][0] if self.parts else [(0, 0) for _ in replay.streams]
        part = replay.written_since(marks)
        for number, (stream, (transitions, frames)) in enumerate(zip(replay.streams, marks, strict=True)):
            end = f".{number}" if number else ""
            added = stream.transitions_added - max(transitions - 1, 0)
            assert len(part[f"rows{end}"]) == min(added, replay.stream_capacity)
            assert len(part[f"frames{end}"]) == min(stream.frames_added - frames, replay.stream_frames)
        self.parts.append((replay.marks(), part))
        before = len(self.parts)
        self.parts = [(marks, kept) for marks, kept in self.parts if self.still_needed(replay, marks)]
        self.forgotten += before - len(self.parts)

    @staticmethod
    def still_needed(replay: Replay, marks: list[tuple[int, int]]) -> bool:
        """Whether the last transition or frame before the marks of any stream has not been overwritten."""
        needed = False
        for stream, (transitions, frames) in zip(replay.streams, marks, strict=True):
            needed |= transitions - 1 >= max(0, stream.transitions_added - replay.stream_capacity)
            needed |= frames - 1 >= max(0, stream.frames_added - replay.stream_frames)
        if any(max(mark) for mark in marks):  # where nothing was written there is nothing to ask about
            assert replay.keeps(marks) == needed
        return needed


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_a_restored_memory_goes_on_like_the_original(seed: int, streams: int) -> None:
    chance = random.Random(seed)
    capacity, longest = chance.choice([20, 45, 90]), chance.choice([1, 2, 8, 40])
    replay = Replay(SPEC, streams * capacity, discount=GAMMA, streams=streams)
    lists, saved = [Lists(3) for _ in range(streams)], Saved()
    plays = [Play(10 * stream + seed, longest) for stream in range(streams)]

    def step(*replays: Replay) -> None:
        stream = chance.randrange(streams)
        plays[stream].step(*(OneStream(each, stream) for each in replays), lists[stream])

    def kept() -> list[list[Transition]]:
        return [own.kept(capacity, replay.stream_frames) for own in lists]

    for _ in range(12):
        for _ in range(chance.choice([0, 1, 3, 20, 2 * streams * capacity])):
            step(replay)
        saved.save(replay)
        restored = Replay(SPEC, streams * capacity, discount=GAMMA, streams=streams)
        restored.restore(saved.parts, replay.counters())
        assert restored.counters() == replay.counters()
        assert_holds(restored, *kept())
        for number, stream in enumerate(replay.streams):
            if stream.frames_added and stream.age >= 0:
                np.testing.assert_array_equal(restored.newest_observation(number), replay.newest_observation(number))
        # From here on the restored one is the one in use, as in a run that was interrupted.
        for _ in range(chance.choice([1, 5, streams * capacity])):
            step(replay, restored)
            if len(replay):
                assert torch.equal(sample(replay, 50, seed=1), sample(restored, 50, seed=1))
        assert restored.counters() == replay.counters()
        assert_holds(restored, *kept())
        replay = restored
    assert all(stream.transitions_added > capacity for stream in replay.streams)
    assert saved.forgotten


@pytest.mark.parametrize("streams", [1, 3])
def test_a_larger_memory_takes_over_what_a_smaller_one_held(streams: int) -> None:
    """As when a finished run is given more steps; its episodes were so short that frames had gone round the ring."""
    small, large = (Replay(SPEC, streams * size, discount=GAMMA, streams=streams) for size in (45, 90))
    lists, saved = [Lists(3) for _ in range(streams)], Saved()
    for stream, own in enumerate(lists):
        play = Play(stream, longest=2)
        while small.streams[stream].transitions_added < 45:
            play.step(OneStream(small, stream), own)
    assert all(stream.frames_added > small.stream_frames for stream in small.streams)
    saved.save(small)
    large.restore(saved.parts, small.counters())
    assert_holds(large, *(own.kept(45, small.stream_frames) for own in lists))


def test_what_was_written_is_kept_until_every_stream_has_gone_round() -> None:
    replay, frame = Replay(replace(SPEC, frame_shape=(1, 1, 1)), 20, streams=2), np.zeros((1, 1, 1), np.uint8)

    def play(stream: int, steps: int) -> None:
        for _ in range(steps):
            replay.add(np.zeros(2, np.float32), 0.0, 1.0, False, frame, stream)

    for stream in (0, 1):
        replay.begin(frame, stream)
        play(stream, 1)
    marks = replay.marks()
    play(0, 100)
    assert replay.keeps(marks)
    play(1, replay.stream_frames - 1)  # the transition is gone, its last frame is not
    assert replay.stream_frames - 1 > replay.stream_capacity
    assert replay.keeps(marks)
    play(1, 1)
    assert not replay.keeps(marks)


# Memory.


@pytest.mark.parametrize("limit", [*(1000 // repeat for repeat in PLANET_ACTION_REPEAT.values()), 1000, None])
def test_a_hundred_thousand_transitions_fit_in_what_was_promised(limit: int | None) -> None:
    spec = replace(PIXELS, max_episode_agent_steps=limit, action_size=38)  # the suite's longest action
    assert 100_000 * 84 * 84 * 3 < Replay.bytes_needed(spec, 100_000) <= 2.3e9
    shortest, short = (replace(spec, max_episode_agent_steps=steps) for steps in (1, 8))
    assert Replay.bytes_needed(shortest, 100_000) == Replay.bytes_needed(short, 100_000)  # an eighth more at most


@pytest.mark.parametrize("spec", [PIXELS, SPEC, EnvSpec("toy/catch", (3,), 1, "discrete", 4, 1, 7)])
def test_the_figure_told_beforehand_is_what_is_allocated(spec: EnvSpec) -> None:
    def allocated(capacity: int) -> int:
        replay = Replay(spec, capacity)
        tensors = [part for part in (*vars(replay).values(), *replay.rings) if isinstance(part, Tensor)]
        return sum(part.numel() * part.element_size() for part in tensors)

    # Beside the rings there is a little that does not depend on the capacity.
    assert allocated(700) - allocated(100) == Replay.bytes_needed(spec, 700) - Replay.bytes_needed(spec, 100)
    replay = Replay(spec, 100)
    frames, rows, places, _ = replay.rings
    assert frames.nbytes + rows.nbytes + places.nbytes == Replay.bytes_needed(spec, 100)


@pytest.mark.parametrize("agent_steps", [8, 50, 125, 250, 500, 1000])
def test_the_whole_capacity_is_used_for_episodes_of_the_length_promised(agent_steps: int) -> None:
    spec = replace(SPEC, frame_shape=(1, 1, 1), max_episode_agent_steps=agent_steps)
    replay = Replay(spec, 1_500)
    action, frame = np.zeros(2, np.float32), np.zeros((1, 1, 1), np.uint8)
    for agent_step in range(4_000):
        if agent_step % agent_steps == 0:
            replay.begin(frame)
        replay.add(action, 0.0, 1.0, (agent_step + 1) % agent_steps == 0, frame)
    assert len(replay) == 1_500
