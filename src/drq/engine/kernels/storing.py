"""What is new into the replay's rings, in one launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from torch import Tensor

from drq.backend import Rings

from . import runtime

THREADS = 128
_PIECES = {16: "Vec4", 8: "i64", 4: "u32", 2: "u16", 1: "u8"}
"""Types of these many bytes."""


class Store:
    """Copies a staged frame, row, place and window into the rings by a kernel, which reads them where they are: in the
    host's memory.

    All that the host does is to change a few numbers and to launch: an agent's step on a GPU waits for its host.
    """

    def __init__(self, staging: Sequence[Tensor], rings: Rings) -> None:
        """`staging`: a frame, a row, a place and a window."""
        self._kernel = store_kernel(rings)
        size, pieces = _pieces(rings)
        self._staged_frame = staging[0].data_ptr()
        assert self._staged_frame % size == 0
        self._grid = 1 + -(-pieces // THREADS), 1
        self._frame = ctypes.c_void_p()
        self._slot, self._frame_slot, self._stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._tensors = *staging[1:], *rings  # held, so that they live as long as the pointers to them
        self._frame_held = staging[0]
        self._arguments = runtime.argument_array(
            (self._frame, *self._tensors, self._slot, self._frame_slot, self._stream)
        )

    def __call__(self, stream: int, frame_slot: int, slot: int | None, frame: Tensor | None = None) -> None:
        """`frame`: one on the device, instead of the one that is staged."""
        self._frame.value = self._staged_frame if frame is None else frame.contiguous().data_ptr()
        self._slot.value = -1 if slot is None else slot
        self._frame_slot.value, self._stream.value = frame_slot, stream
        self._kernel.launch_prepared(self._grid, self._arguments)


def store_kernel(rings: Rings) -> runtime.Launchable:
    size, count = _pieces(rings)
    defines: dict[str, int | str] = {
        "THREADS": THREADS,
        "PIECE": _PIECES[size],
        "FRAME_PIECES": count,
        "COLUMNS": rings.rows.shape[1],
    }
    return runtime.kernel("store", ("primitives.cuh", "storing.cu"), defines, THREADS, 0)


def _pieces(rings: Rings) -> tuple[int, int]:
    """In how many bytes at a time a frame can be moved, as its size and its place in memory allow; and how often.

    Memory of PyTorch is aligned to more than that.
    """
    frame_bytes = rings.frames[0].nbytes
    size = math.gcd(max(_PIECES), frame_bytes, rings.frames.data_ptr())
    return size, frame_bytes // size
