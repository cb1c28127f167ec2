"""What is new in a replay on its way to the GPU, through page-locked memory, so that a store need not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from drq.backend import Entry, Rings
from drq.engine import kernels


class Staging(NamedTuple):
    """A frame, a row, a place and a window on the host."""

    frame: Tensor
    row: Tensor
    place: Tensor
    window: Tensor

    @staticmethod
    def like(rings: Rings, *, pin: bool) -> Staging:
        return Staging(*(torch.zeros(ring.shape[1:], dtype=ring.dtype, pin_memory=pin) for ring in rings))


class StagedStore:
    """Writes entries into the rings of a replay on a GPU: by one kernel, or by four copies."""

    def __init__(self, rings: Rings, use_kernel: Callable[[], bool]) -> None:
        self._rings = rings
        on_gpu = rings.frames.is_cuda
        self._staging = Staging.like(rings, pin=on_gpu)
        # Through numpy: setting one element of a tensor takes twenty times as long.
        self._frame, self._row, self._place, self._window = (part.numpy() for part in self._staging)
        self._use_kernel = use_kernel
        self._kernel: kernels.Store | None = None
        self._written = torch.cuda.Event() if on_gpu else None
        """When what was staged last has been written, and the staging may be overwritten."""

    def __call__(self, new: Entry) -> None:
        if self._written is not None:
            self._written.synchronize()
        # Into its slot first, unless it is there: it may be of any layout, and the kernel reads aligned pieces.
        on_device = self._rings.frames[new.frame_slot].copy_(new.frame) if isinstance(new.frame, Tensor) else None
        if not isinstance(new.frame, Tensor):
            self._frame[...] = new.frame
        if new.slot is not None:
            self._row[...] = new.row
            self._place[...] = new.place
        self._window[...] = new.window
        if self._use_kernel():
            self._kernel = self._kernel or kernels.Store(self._staging, self._rings)
            self._kernel(new.stream, new.frame_slot, new.slot, on_device)
        else:
            self._copy(new, self._staging.frame if on_device is None else on_device)
        if self._written is not None:
            self._written.record()

    def _copy(self, new: Entry, frame: Tensor) -> None:
        frames, rows, places, windows = self._rings
        frames[new.frame_slot].copy_(frame, non_blocking=True)
        if new.slot is not None:
            rows[new.slot].copy_(self._staging.row, non_blocking=True)
            places[new.slot].copy_(self._staging.place, non_blocking=True)
        windows[new.stream].copy_(self._staging.window, non_blocking=True)
