"""What is new into the replay's rings, in one launch."""

from __future__ import annotations

import ctypes
import math

from drq.replay import Replay

from . import runtime

THREADS = 128
_PIECES = {16: "Vec4", 8: "i64", 4: "u32", 2: "u16", 1: "u8"}
"""Types of these many bytes."""


class Store:
    """`drq.replay.Copies` as a kernel, which reads the staging where it is: in the host's memory.

    All that the host does is to change two numbers and to launch: an agent's step on a GPU waits for its host.
    """

    def __init__(self, replay: Replay) -> None:
        self._kernel = store_kernel(replay)
        self._grid = 1 + -(-_pieces(replay)[1] // THREADS), 1
        self._slot, self._frame_slot = ctypes.c_int(), ctypes.c_int()
        # Held here, so that they live as long as the pointers to them.
        self._tensors = *replay.staging, replay.frames, replay.rows, replay.places, replay.window
        self._arguments = runtime.argument_array((*self._tensors, self._slot, self._frame_slot))

    def __call__(self, slot: int | None, frame_slot: int) -> None:
        self._slot.value = -1 if slot is None else slot
        self._frame_slot.value = frame_slot
        self._kernel.launch_prepared(self._grid, self._arguments)


def store_kernel(replay: Replay) -> runtime.Launchable:
    size, count = _pieces(replay)
    defines: dict[str, int | str] = {
        "THREADS": THREADS,
        "PIECE": _PIECES[size],
        "FRAME_PIECES": count,
        "COLUMNS": replay.rows.shape[1],
    }
    return runtime.kernel("store", ("primitives.cuh", "storing.cu"), defines, THREADS, 0)


def _pieces(replay: Replay) -> tuple[int, int]:
    """In how many bytes at a time a frame can be moved, as its size and its places in memory allow; and how often."""
    frame = replay.staging.frame
    size = math.gcd(max(_PIECES), frame.nbytes, frame.data_ptr(), replay.frames.data_ptr())
    return size, frame.nbytes // size
