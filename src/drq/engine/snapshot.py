"""Tensors as they are now, on the host later: training goes on while they are fetched."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

FETCHING = threading.Lock()
"""Held while a thread fetches. A CUDA graph is recorded while nobody does: what one thread waits for would break it."""


class Snapshot:
    """Copies, on whatever device, that nobody writes to. Any thread may fetch them, once what made them is launched."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        self.copies = dict(copies)
        self._made: torch.cuda.Event | None = None
        if any(copy.is_cuda for copy in self.copies.values()):
            self._made = torch.cuda.Event()
            self._made.record()

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Snapshot:
        """Copies them where they are, which a GPU does in less than a millisecond when it comes to it."""
        return Snapshot({name: tensor.detach().clone() for name, tensor in tensors.items()})

    def on_host(self) -> dict[str, Tensor]:
        """Waits for the copies and for the bus, on a stream of its own: nothing that was launched waits for them."""
        if self._made is None:
            return self.copies
        with FETCHING, torch.cuda.stream(_stream()):
            self._made.wait()
            return {name: copy.cpu() for name, copy in self.copies.items()}


@cache
def _stream() -> torch.cuda.Stream:
    """One for all: streams are lent out by turns, and another's work might meet a large copy on a new one."""
    return torch.cuda.Stream()
