"""The kernel that stores transitions against plain copies: on a GPU, and, its own text emulated, on the CPU."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from drq.engine import kernels
from drq.engine.kernels.storing import THREADS, Store
from drq.envs.protocol import EnvSpec
from drq.replay import Copies, Replay, StackedFrames, Write

CAPACITY = 20
PIXELS = EnvSpec("toy/pixels", (1, 4, 4), 3, "discrete", 4, 1, None)


def make_replay(spec: EnvSpec, device: str, *, n_step: int = 1, write: Callable[[Replay], Write] = Copies) -> Replay:
    replay = Replay(spec, CAPACITY, n_step=n_step, discount=0.9, device=torch.device(device))
    replay.write = write(replay)
    return replay


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

    def step(self, *memories: Any) -> None:
        if self.left == 0 or self.random.random() < self.abandoned:
            self.left = self.random.randint(1, self.longest)
            self.each(memories, "begin", self.frame())
        else:
            self.left -= 1
            discount = float(self.random.random() < 0.7)
            self.each(memories, "add", self.action(), self.random.gauss(0, 1), discount, not self.left, self.frame())

    @staticmethod
    def each(memories: tuple[Any, ...], what: str, *given: Any) -> None:
        for memory in memories:
            getattr(memory, what)(*given)


def assert_same(one: Replay, other: Replay) -> None:
    """To the last bit."""
    assert one.counters() == other.counters()
    assert one.sampleable == other.sampleable
    for name in ("frames", "rows", "places", "window"):
        ours, theirs = (getattr(replay, name).view(torch.uint8) for replay in (one, other))
        assert torch.equal(ours, theirs), name


def assert_same_batches(one: Replay, other: Replay) -> None:
    slots = torch.arange(CAPACITY, device=one.device)
    for ours, theirs in zip(one.gather(slots), other.gather(slots), strict=True):
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


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_frames_of_every_size(kernel_device: str, shape: tuple[int, ...]) -> None:
    spec = EnvSpec("toy/any", shape, 3 if len(shape) == 3 else 1, "continuous", 6, 1, None)
    plain, ours = make_replay(spec, kernel_device), make_replay(spec, kernel_device, write=Store)
    play = Play(1, spec)
    while plain.frames_added <= 2 * plain.frame_capacity:
        play.step(plain, ours)
        assert_same(ours, plain)
    assert_same_batches(ours, plain)


@pytest.mark.parametrize("n_step", [1, 3, 10])
@pytest.mark.parametrize(("kind", "size"), [("discrete", 4), ("continuous", 1), ("continuous", THREADS)])
@pytest.mark.parametrize(("longest", "abandoned"), [(3, 0.1), (60, 0.0)], ids=["short", "long"])
def test_transitions_of_every_kind(
    kernel_device: str, kind: Any, size: int, n_step: int, longest: int, abandoned: float
) -> None:
    """Short episodes have more last frames than there is room for, long ones fill the ring."""
    spec = EnvSpec("toy/any", (1, 4, 4), 3, kind, size, 1, None)
    plain = make_replay(spec, kernel_device, n_step=n_step)
    ours = make_replay(spec, kernel_device, n_step=n_step, write=Store)
    play, most = Play(n_step, spec, longest, abandoned), 0
    while plain.transitions_added <= 2 * CAPACITY:
        play.step(plain, ours)
        assert_same(ours, plain)
        if plain.age >= 0:
            np.testing.assert_array_equal(ours.newest_observation(), plain.newest_observation())
        most = max(most, len(ours))
    assert (most == CAPACITY) == (longest == 60)
    assert_same_batches(ours, plain)


def test_what_no_number_is_stays_so(kernel_device: str) -> None:
    """Not every float32 equals itself, and not all that are equal have the same bits."""
    plain, ours = make_replay(PIXELS, kernel_device), make_replay(PIXELS, kernel_device, write=Store)
    play = Play(0, PIXELS)
    for replay in (plain, ours):
        replay.begin(np.zeros(PIXELS.frame_shape, np.uint8))
    for reward in (float("nan"), float("-inf"), -0.0, 1e-45):
        Play.each((plain, ours), "add", 1, reward, 1.0, False, play.frame())
        assert_same(ours, plain)


def test_both_ways_of_writing_may_alternate(kernel_device: str) -> None:
    plain, ours = make_replay(PIXELS, kernel_device), make_replay(PIXELS, kernel_device)
    ways, chance, play = (Copies(ours), Store(ours)), random.Random(0), Play(2, PIXELS)
    for _ in range(80):
        ours.write = chance.choice(ways)
        play.step(plain, ours)
        assert_same(ours, plain)


def test_saved_and_put_back(kernel_device: str) -> None:
    plain, ours = make_replay(PIXELS, kernel_device), make_replay(PIXELS, kernel_device, write=Store)
    play = Play(3, PIXELS)
    for count in (3, 25, 60):
        for _ in range(count):
            play.step(plain, ours)
        part, expected = ours.written_since(0, 0), plain.written_since(0, 0)
        assert all(torch.equal(part[name], expected[name]) for name in expected)
        restored = make_replay(PIXELS, kernel_device, write=Store)
        restored.restore([(ours.transitions_added, ours.frames_added, part)], ours.counters())
        for _ in range(4):
            assert_same(restored, plain)
            play.step(plain, restored)
        ours = restored


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_frames_that_are_not_aligned(kernel_device: str, offset: int) -> None:
    plain, ours = make_replay(PIXELS, kernel_device), make_replay(PIXELS, kernel_device)
    storage = torch.zeros(ours.frames.numel() + offset, dtype=torch.uint8, device=kernel_device)
    ours.frames = storage[offset:].view(ours.frames.shape)
    ours.write = Store(ours)
    play = Play(4, PIXELS)
    for _ in range(60):
        play.step(plain, ours)
    assert_same(ours, plain)
    assert storage[:offset].count_nonzero() == 0


def test_rings_of_more_than_two_gigabytes(kernel_device: str) -> None:
    """Moved byte by byte, so that the places of the last frames are beyond the reach of an int."""
    spec = EnvSpec("toy/odd", (3, 85, 85), 3, "discrete", 4, 1, None)
    replay = make_replay(spec, kernel_device)
    shape = 2**31 // replay.staging.frame.numel() + 2, *spec.frame_shape
    if kernel_device == "cpu":
        replay.frames = torch.from_numpy(np.empty(shape, np.uint8))  # of which only what is written is ever there
    else:
        replay.frames = torch.zeros(shape, dtype=torch.uint8, device=kernel_device)
    replay.staging.frame.random_(0, 256)
    Store(replay)(None, shape[0] - 1)
    assert torch.equal(replay.frames[-1].cpu(), replay.staging.frame)


@pytest.mark.parametrize("write", [Copies, Store])
def test_the_rings_go_with_the_replay(kernel_device: str, write: Callable[[Replay], Write]) -> None:
    """At once, since they may be all the memory there is: what writes to a replay must not hold it."""
    replay = make_replay(PIXELS, kernel_device, write=write)
    frames = weakref.ref(replay.frames)
    del replay
    assert frames() is None


# The staging is overwritten only once it has been read.


class Lazy:
    """A device that writes nothing until it is waited for, and then only what an event was recorded after."""

    def __init__(self, replay: Replay) -> None:
        self._write, self._event = replay.write, replay._written
        replay.write, replay._written = self, self  # type: ignore[assignment]
        self._launched: list[tuple[int | None, int]] = []
        self._recorded = 0

    def __call__(self, slot: int | None, frame_slot: int) -> None:
        self._launched.append((slot, frame_slot))

    def record(self) -> None:
        self._recorded = len(self._launched)

    def synchronize(self) -> None:
        for slots in self._launched[: self._recorded]:
            self._write(*slots)
        del self._launched[: self._recorded]
        self._recorded = 0
        if self._event is not None:
            self._event.record()
            self._event.synchronize()


@pytest.mark.parametrize("write", [Copies, Store])
def test_nothing_is_staged_before_the_last_write_is_done(kernel_device: str, write: Callable[[Replay], Write]) -> None:
    plain, ours = make_replay(PIXELS, kernel_device), make_replay(PIXELS, kernel_device, write=write)
    lazy, play = Lazy(ours), Play(5, PIXELS)
    for _ in range(80):
        play.step(plain, ours)
    lazy.synchronize()
    assert_same(ours, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not kernels.available(), reason="needs a CUDA GPU with bfloat16")
@pytest.mark.parametrize("write", [Copies, Store])
@pytest.mark.parametrize("shape", [(1, 84, 84), (3, 84, 84), (17,)])
def test_a_busy_gpu_loses_nothing(shape: tuple[int, ...], write: Callable[[Replay], Write]) -> None:
    """Each store has to wait for work of many milliseconds, which the host does not wait for."""
    spec = EnvSpec("toy/any", shape, 3 if len(shape) == 3 else 1, "continuous", 6, 1, None)
    on_the_host, ours = make_replay(spec, "cpu"), make_replay(spec, "cuda", write=write)
    play = Play(6, spec)
    busy = torch.randn(4096, 4096, device="cuda")
    for step in range(120):
        if step % 3 == 0:  # so that some stores are waited for and some are not
            for _ in range(3):
                torch.mm(busy, busy)
        play.step(on_the_host, ours)
    assert ours.counters() == on_the_host.counters()
    for name in ("frames", "rows", "places", "window"):
        assert torch.equal(getattr(ours, name).cpu(), getattr(on_the_host, name)), name
