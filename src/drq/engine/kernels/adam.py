"""Adam in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from drq.agents.adam import Moments, Rates

from . import runtime

MAX_PARAMETERS = 64
"""In one launch: the table of them is an argument of the kernel, and those have at most 4 KiB."""
THREADS, ROUNDS = 256, 4
ELEMENTS = THREADS * 4 * ROUNDS
"""That a block descends."""


class _Parameter(ctypes.Structure):
    """As in adam.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "gradient", "mean", "square", "step")),
        *((name, ctypes.c_int) for name in ("size", "first_block", "aligned")),
    )


class _Parameters(ctypes.Structure):
    _fields_ = (("of", _Parameter * MAX_PARAMETERS), ("count", ctypes.c_int))


def adam(moments: Moments, rates: Rates) -> None:
    """`drq.agents.adam.descend`."""
    everything = list(zip(*moments, strict=True))
    for begin in range(0, len(everything), MAX_PARAMETERS):
        _launch(everything[begin : begin + MAX_PARAMETERS], rates)


def adam_kernel() -> runtime.Launchable:
    defines: dict[str, int | str] = {"MAX_PARAMETERS": MAX_PARAMETERS, "THREADS": THREADS, "ROUNDS": ROUNDS}
    return runtime.kernel("adam", ("primitives.cuh", "adam.cu"), defines, THREADS, 16)


def _launch(rows: Sequence[tuple[Tensor, ...]], rates: Rates) -> None:
    table = _Parameters(count=len(rows))
    laid_out = [_like_its_parameter(row) for row in rows]  # kept until the launch
    blocks = 0
    for entry, row in zip(table.of, laid_out, strict=False):
        pointers = [tensor.data_ptr() for tensor in row]
        entry.weight, entry.gradient, entry.mean, entry.square, entry.step = pointers
        entry.size = row[0].numel()
        entry.first_block = blocks
        entry.aligned = not any(pointer % 16 for pointer in pointers[:4])
        blocks += -(-entry.size // ELEMENTS)
    doubles = (ctypes.c_double(value) for value in (rates.learning_rate, *rates.betas, rates.eps))
    adam_kernel().launch((blocks, 1), table, *doubles)


def _like_its_parameter(row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The kernel walks through memory, so a gradient has to lie in it as its parameter does."""
    parameter, gradient, *state = row
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return parameter, gradient, *state
