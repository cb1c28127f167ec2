"""What stages and stores transitions for a GPU, by its kernel and by copies, against plain assignments: on a GPU, and,
the kernel's own text emulated, on the CPU."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from drq.backend import Backend, Entry, Rings, StackedFrames
from drq.engine import kernels
from drq.engine.kernels.storing import THREADS
from drq.engine.staging import StagedStore
from drq.envs.protocol import EnvSpec
from drq.replay import Choice, Replay
from emulation import needs_bfloat16, two_gigabytes

CAPACITY = 20
PIXELS = EnvSpec("toy/pixels", (1, 4, 4), 3, "discrete", 4, 1, None)

Store = Callable[[Rings], Callable[[Entry], None]]


def by_kernel(rings: Rings) -> StagedStore:
    return StagedStore(rings, lambda: True)


def by_copies(rings: Rings) -> StagedStore:
    return StagedStore(rings, lambda: False)


STAGED = pytest.mark.parametrize("store", [by_copies, by_kernel])


class StoredBy(Backend):
    """The plain backend, but for how it stores."""

    def __init__(self, device: str, store: Store) -> None:
        super().__init__(device)
        self._how = store

    def store(self, rings: Rings) -> Callable[[Entry], None]:
        return self._how(rings)


def make_replay(spec: EnvSpec, device: str, *, n_step: int = 1, streams: int = 1, store: Store | None = None) -> Replay:
    """Plain, unless another way to store is given."""
    backend = Backend(device) if store is None else StoredBy(device, store)
    return Replay(spec, streams * CAPACITY, n_step=n_step, discount=0.9, streams=streams, backend=backend)


GivenAs = Callable[[Replay, int, np.ndarray], Any]
"""What stands for a frame."""


class Play:
    """Random episodes, written to any number of memories alike. Some may be abandoned, even before their first step."""

    def __init__(self, seed: int, spec: EnvSpec, longest: int = 9, abandoned: float = 0.1) -> None:
        self.random, self.numpy = random.Random(seed), np.random.default_rng(seed)
        self.spec, self.longest, self.abandoned = spec, longest, abandoned
        self.left = 0

    def frame(self) -> np.ndarray:
        if self.spec.pixels:
            return self.numpy.integers(0, 256, self.spec.frame_shape, dtype=np.uint8)
        return self.numpy.normal(size=self.spec.frame_shape).astype(np.float32)

    def action(self) -> Any:
        if self.spec.action_kind == "discrete":
            return self.numpy.integers(self.spec.action_size)
        return self.numpy.uniform(-1, 1, self.spec.action_size).astype(np.float32)

    def step(self, *memories: Replay, stream: int = 0, given_as: GivenAs | None = None) -> None:
        """`given_as`: how the last of the memories gets its frame, unless as the others do."""
        if self.left == 0 or self.random.random() < self.abandoned:
            self.left = self.random.randint(1, self.longest)
            step: tuple[Any, ...] = ()
        else:
            self.left -= 1
            discount = float(self.random.random() < 0.7)
            step = self.action(), self.random.gauss(0, 1), discount, not self.left
        frame: Any = self.frame()
        for memory in memories:
            if given_as is not None and memory is memories[-1]:
                frame = given_as(memory, stream, frame)
            (memory.add if step else memory.begin)(*step, frame, stream)


def assert_same(one: Replay, other: Replay) -> None:
    """To the last bit."""
    assert one.counters() == other.counters()
    assert one.sampleable == other.sampleable
    for name, ours, theirs in zip(Rings._fields, one.rings, other.rings, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name


def assert_same_batches(one: Replay, other: Replay) -> None:
    choice = Choice(torch.arange(one.capacity, device=one.device))
    for ours, theirs in zip(one.gather(choice)[:5], other.gather(choice)[:5], strict=True):
        if isinstance(ours, StackedFrames):
            ours, theirs = ours.tensor(), theirs.tensor()
        assert torch.equal(ours, theirs)


SHAPES = {
    "a game's": (1, 84, 84),
    "control's": (3, 84, 84),
    "odd, many blocks": (3, 29, 27),
    "odd, one block": (1, 5, 3),
    "one byte": (1, 1, 1),
    "one piece": (1, 4, 4),
    "a full block": (1, 4, 4 * THREADS),
    "in eights": (3, 2, 4),
    "in fours": (3, 2, 2),
    "in twos": (1, 2, 3),
    "a state": (17,),
    "a state in sixteens": (8,),
    "one number": (1,),
}


@STAGED
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_frames_of_every_size(kernel_device: str, shape: tuple[int, ...], store: Store) -> None:
    spec = EnvSpec("toy/any", shape, 3 if len(shape) == 3 else 1, "continuous", 6, 1, None)
    plain, ours = make_replay(spec, kernel_device), make_replay(spec, kernel_device, store=store)
    play = Play(1, spec)
    while plain.streams[0].frames_added <= 2 * plain.stream_frames:
        play.step(plain, ours)
        assert_same(ours, plain)
    assert_same_batches(ours, plain)


@pytest.mark.parametrize("n_step", [1, 3, 10])
@pytest.mark.parametrize(("kind", "size"), [("discrete", 4), ("continuous", 1), ("continuous", THREADS)])
@pytest.mark.parametrize(("longest", "abandoned"), [(3, 0.1), (60, 0.0)], ids=["short", "long"])
@STAGED
def test_transitions_of_every_kind(
    kernel_device: str, store: Store, kind: Any, size: int, n_step: int, longest: int, abandoned: float
) -> None:
    """Short episodes have more last frames than there is room for, long ones fill the ring."""
    spec = EnvSpec("toy/any", (1, 4, 4), 3, kind, size, 1, None)
    plain = make_replay(spec, kernel_device, n_step=n_step)
    ours = make_replay(spec, kernel_device, n_step=n_step, store=store)
    play, most = Play(n_step, spec, longest, abandoned), 0
    while plain.streams[0].transitions_added <= 2 * CAPACITY:
        play.step(plain, ours)
        assert_same(ours, plain)
        if plain.streams[0].age >= 0:
            np.testing.assert_array_equal(ours.newest_observation(), plain.newest_observation())
        most = max(most, len(ours))
    assert (most == CAPACITY) == (longest == 60)
    assert_same_batches(ours, plain)


@STAGED
def test_what_no_number_is_stays_so(kernel_device: str, store: Store) -> None:
    """Not every float32 equals itself, and not all that are equal have the same bits."""
    plain, ours = make_replay(PIXELS, kernel_device), make_replay(PIXELS, kernel_device, store=store)
    play = Play(0, PIXELS)
    for replay in (plain, ours):
        replay.begin(np.zeros(PIXELS.frame_shape, np.uint8))
    for reward in (float("nan"), float("-inf"), -0.0, 1e-45):
        frame = play.frame()
        for replay in (plain, ours):
            replay.add(1, reward, 1.0, False, frame)
        assert_same(ours, plain)


def test_both_ways_of_writing_may_alternate(kernel_device: str) -> None:
    chance, play = random.Random(0), Play(2, PIXELS)

    def store(rings: Rings) -> StagedStore:
        return StagedStore(rings, lambda: chance.random() < 0.5)

    plain, ours = make_replay(PIXELS, kernel_device), make_replay(PIXELS, kernel_device, store=store)
    for _ in range(80):
        play.step(plain, ours)
        assert_same(ours, plain)


@STAGED
def test_streams(kernel_device: str, store: Store) -> None:
    """Each has its own part of the rings, and its own window."""
    plain = make_replay(PIXELS, kernel_device, n_step=3, streams=3)
    ours = make_replay(PIXELS, kernel_device, n_step=3, streams=3, store=store)
    chance, plays = random.Random(0), [Play(seed, PIXELS, longest) for seed, longest in enumerate((3, 9, 60))]
    for _ in range(200):
        stream = chance.choice([0, 1, 2, 2])
        plays[stream].step(plain, ours, stream=stream)
        assert_same(ours, plain)
    assert all(stream.transitions_added > CAPACITY for stream in ours.streams)
    assert_same_batches(ours, plain)


def on_the_device(replay: Replay, stream: int, frame: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frame).to(replay.device)


def turned(replay: Replay, stream: int, frame: np.ndarray) -> torch.Tensor:
    """In another order in memory."""
    return torch.from_numpy(np.ascontiguousarray(frame.T)).to(replay.device).permute(*range(frame.ndim)[::-1])


def not_aligned(replay: Replay, stream: int, frame: np.ndarray) -> torch.Tensor:
    """As one of many pictures may lie in a buffer."""
    storage = torch.empty(frame.size + 1, dtype=replay.rings.frames.dtype, device=replay.device)
    return storage[1:].view(frame.shape).copy_(torch.from_numpy(frame))


def of_another_type(replay: Replay, stream: int, frame: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frame).to(replay.device).double()


def on_the_host(replay: Replay, stream: int, frame: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frame)


def now_this_now_that(replay: Replay, stream: int, frame: np.ndarray) -> Any:
    return frame if frame.flat[0] > 0.5 else on_the_device(replay, stream, frame)


@STAGED
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 5, 3), (17,)], ids=str)
@pytest.mark.parametrize(
    "given_as",
    [on_the_device, turned, not_aligned, of_another_type, on_the_host, now_this_now_that],
)
def test_frames_that_are_tensors(kernel_device: str, given_as: GivenAs, shape: tuple[int, ...], store: Store) -> None:
    """As good as those of numpy, wherever and however they lie."""
    spec = EnvSpec("toy/any", shape, 3 if len(shape) == 3 else 1, "continuous", 2, 1, None)
    plain = make_replay(spec, kernel_device, streams=2)
    ours = make_replay(spec, kernel_device, streams=2, store=store)
    plays = [Play(seed, spec) for seed in range(2)]
    for step in range(100):
        plays[step % 2].step(plain, ours, stream=step % 2, given_as=given_as)
        assert_same(ours, plain)
    assert_same_batches(ours, plain)


@STAGED
def test_saved_and_put_back(kernel_device: str, store: Store) -> None:
    plain = make_replay(PIXELS, kernel_device, streams=2)
    ours = make_replay(PIXELS, kernel_device, streams=2, store=store)
    plays, chance = [Play(3, PIXELS), Play(4, PIXELS, longest=60)], random.Random(0)

    def step(replay: Replay) -> None:
        stream = chance.randrange(2)
        plays[stream].step(plain, replay, stream=stream)

    for count in (5, 50, 120):
        for _ in range(count):
            step(ours)
        nothing = [(0, 0), (0, 0)]
        part, expected = ours.written_since(nothing), plain.written_since(nothing)
        assert part.keys() == expected.keys()
        assert all(torch.equal(part[name], expected[name]) for name in expected)
        restored = make_replay(PIXELS, kernel_device, streams=2, store=store)
        restored.restore([(ours.marks(), part)], ours.counters())
        for _ in range(8):
            assert_same(restored, plain)
            step(restored)
        ours = restored


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_frames_that_are_not_aligned(kernel_device: str, offset: int) -> None:
    plain, ours = make_replay(PIXELS, kernel_device), make_replay(PIXELS, kernel_device)
    frames = ours.rings.frames
    storage = torch.zeros(frames.numel() + offset, dtype=torch.uint8, device=kernel_device)
    ours.rings = ours.rings._replace(frames=storage[offset:].view(frames.shape))
    ours._store = by_kernel(ours.rings)
    play = Play(4, PIXELS)
    for _ in range(60):
        play.step(plain, ours)
    assert_same(ours, plain)
    assert storage[:offset].count_nonzero() == 0


def test_rings_of_more_than_two_gigabytes(kernel_device: str) -> None:
    """Moved byte by byte, so that the places of the last frames are beyond the reach of an int."""
    spec = EnvSpec("toy/odd", (3, 85, 85), 3, "discrete", 4, 1, None)
    frame = Play(0, spec).frame()
    frames = two_gigabytes(kernel_device, spec.frame_shape)
    rings = make_replay(spec, kernel_device).rings._replace(frames=frames)
    by_kernel(rings)(Entry(0, len(frames) - 1, frame, (0, 0), None, (0, 0), None))
    np.testing.assert_array_equal(frames[-1].cpu().numpy(), frame)


@pytest.mark.parametrize("store", [None, by_copies, by_kernel])
def test_the_rings_go_with_the_replay(kernel_device: str, store: Store | None) -> None:
    """At once, since they may be all the memory there is: what writes to a replay must not hold it."""
    replay = make_replay(PIXELS, kernel_device, store=store)
    Play(0, PIXELS).step(replay)
    frames = weakref.ref(replay.rings.frames)
    del replay
    assert frames() is None


# The staging is overwritten only once it has been read.


class Lazy:
    """A device that writes nothing until it is waited for, and then only what an event was recorded after."""

    def __init__(self, store: StagedStore) -> None:
        kernel, copy = kernels.Store(store._staging, store._rings), store._copy
        store._kernel = lambda *given: self._launched.append((kernel, given))  # type: ignore[assignment]
        store._copy = lambda *given: self._launched.append((copy, given))  # type: ignore[method-assign]
        self._event, store._written = store._written, self  # type: ignore[assignment]
        self._launched: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._recorded = 0
        self.most_at_once = 0

    def record(self) -> None:
        self._recorded = len(self._launched)

    def synchronize(self) -> None:
        self.most_at_once = max(self.most_at_once, len(self._launched))
        for write, given in self._launched[: self._recorded]:
            write(*given)
        del self._launched[: self._recorded]
        self._recorded = 0
        if self._event is not None:
            self._event.record()
            self._event.synchronize()


@STAGED
def test_nothing_is_staged_before_the_last_write_is_done(kernel_device: str, store: Store) -> None:
    plain, ours = make_replay(PIXELS, kernel_device), make_replay(PIXELS, kernel_device, store=store)
    assert isinstance(ours._store, StagedStore)
    # None is abandoned: what the replay then writes by itself is in a GPU's order, and this device has no order.
    lazy, play = Lazy(ours._store), Play(5, PIXELS, abandoned=0.0)
    for _ in range(80):
        play.step(plain, ours)
    lazy.synchronize()
    assert lazy.most_at_once == 1
    assert_same(ours, plain)


@pytest.mark.gpu
@needs_bfloat16
@STAGED
@pytest.mark.parametrize("given_as", [None, on_the_device])
@pytest.mark.parametrize("shape", [(1, 84, 84), (3, 84, 84), (17,)])
def test_a_busy_gpu_loses_nothing(shape: tuple[int, ...], given_as: GivenAs | None, store: Store) -> None:
    """Each store has to wait for work of many milliseconds, which the host does not wait for."""
    spec = EnvSpec("toy/any", shape, 3 if len(shape) == 3 else 1, "continuous", 6, 1, None)
    plain, ours = make_replay(spec, "cpu"), make_replay(spec, "cuda", store=store)
    play = Play(6, spec)
    busy = torch.randn(4096, 4096, device="cuda")
    for step in range(120):
        if step % 3 == 0:  # so that some stores are waited for and some are not
            for _ in range(3):
                torch.mm(busy, busy)
        play.step(plain, ours, given_as=given_as)
    assert ours.counters() == plain.counters()
    for name, found, expected in zip(Rings._fields, ours.rings, plain.rings, strict=True):
        assert torch.equal(found.cpu(), expected), name
