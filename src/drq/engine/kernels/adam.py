"""Adam in one launch; with the clipping of its gradients, in two."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from drq.backend import decays
from drq.engine.adam import Moments, Rates

from . import runtime

MAX_PARAMETERS = 64
"""In one launch: the table of them is an argument of the kernel, and those have at most 4 KiB."""
THREADS, ROUNDS = 256, 4
ELEMENTS = THREADS * 4 * ROUNDS
"""That a block works on."""


class _Parameter(ctypes.Structure):
    """As in parameters.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "gradient", "mean", "square", "step")),
        *((name, ctypes.c_int) for name in ("size", "first_block", "aligned", "decays")),
    )


class _Parameters(ctypes.Structure):
    _fields_ = (("of", _Parameter * MAX_PARAMETERS), ("count", ctypes.c_int))


def _kernel(name: str, shared_bytes: int, **further: int) -> runtime.Launchable:
    defines: dict[str, int | str] = {
        "MAX_PARAMETERS": MAX_PARAMETERS,
        "THREADS": THREADS,
        "ROUNDS": ROUNDS,
        **further,
    }
    return runtime.kernel(name, ("primitives.cuh", "parameters.cuh", f"{name}.cu"), defines, THREADS, shared_bytes)


def adam_kernels(*, decay: bool = False) -> tuple[runtime.Launchable, runtime.Launchable]:
    """The step, of weights that decay or do not, and the norm of the gradients; compiled, unless that is done."""
    return _kernel("adam", 8, DECAY=int(decay)), _kernel("gradient_norm", THREADS * 4)


class Adam:
    """`drq.engine.adam.descend` for one optimiser."""

    def __init__(self, device: torch.device, *, decay: bool = False) -> None:
        self._decay = decay
        self._adam, self._gradient_norm = adam_kernels(decay=decay)
        # The kernels find it, and leave it, at zero.
        self._finished_blocks = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, moments: Moments, rates: Rates) -> Tensor | None:
        rows = [_like_its_parameter(row) for row in zip(*moments, strict=True)]  # kept until they are launched
        tables = [_table(rows[begin : begin + MAX_PARAMETERS]) for begin in range(0, len(rows), MAX_PARAMETERS)]
        norm, coefficient = (None, None) if rates.max_norm is None else self._clip(tables, rates.max_norm)
        assert self._decay or not rates.weight_decay
        numbers = rates.learning_rate, *rates.betas, rates.eps, rates.weight_decay
        doubles = [ctypes.c_double(value) for value in numbers]
        for table, blocks in tables:
            self._adam.launch((blocks, 1), table, coefficient, self._finished_blocks, *doubles)
        return norm

    def _clip(self, tables: Sequence[tuple[_Parameters, int]], max_norm: float) -> tuple[Tensor, Tensor]:
        """The norm of all gradients, and what to multiply them by."""
        device = self._finished_blocks.device
        sums = torch.empty(sum(blocks for _, blocks in tables), device=device)
        found = torch.empty(2, device=device)
        done = 0
        for table, blocks in tables:
            last = found if table is tables[-1][0] else None
            self._gradient_norm.launch((blocks, 1), table, sums, done, last, float(max_norm), self._finished_blocks)
            done += blocks
        return found[0], found[1]


def _table(rows: Sequence[tuple[Tensor, ...]]) -> tuple[_Parameters, int]:
    """What a launch works on, and its number of blocks."""
    table = _Parameters(count=len(rows))
    blocks = 0
    for entry, row in zip(table.of, rows, strict=False):
        pointers = [tensor.data_ptr() for tensor in row]
        entry.weight, entry.gradient, entry.mean, entry.square, entry.step = pointers
        entry.size = row[0].numel()
        entry.first_block = blocks
        entry.decays = decays(row[0])
        entry.aligned = not any(pointer % 16 for pointer in pointers[:4])
        blocks += -(-entry.size // ELEMENTS)
    return table, blocks


def _like_its_parameter(row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The kernel walks through memory, so a gradient has to lie in it as its parameter does."""
    parameter, gradient, *state = row
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return parameter, gradient, *state
