"""Adam in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

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


def adam(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One step of `drq.agents.adam.FusedAdam`. `steps` count this one already."""
    everything = list(zip(parameters, gradients, means, squares, steps, strict=True))
    for begin in range(0, len(everything), MAX_PARAMETERS):
        _launch(everything[begin : begin + MAX_PARAMETERS], learning_rate, betas, eps)


def adam_kernel() -> runtime.Launchable:
    defines: dict[str, int | str] = {"MAX_PARAMETERS": MAX_PARAMETERS, "THREADS": THREADS, "ROUNDS": ROUNDS}
    return runtime.kernel("adam", ("primitives.cuh", "adam.cu"), defines, THREADS, 16)


def _launch(rows: Sequence[tuple[Tensor, ...]], learning_rate: float, betas: tuple[float, float], eps: float) -> None:
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
    doubles = (ctypes.c_double(value) for value in (learning_rate, *betas, eps))
    adam_kernel().launch((blocks, 1), table, *doubles)


def _like_its_parameter(row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The kernel walks through memory, so a gradient has to lie in it as its parameter does."""
    parameter, gradient, *state = row
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return parameter, gradient, *state
