"""Adam in one launch; with the clipping of its gradients, in two."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from drq.backend import decays
from drq.engine.adam import Moments, Rates

from . import runtime

MAX_PARAMETERS, MAX_AVERAGED = 64, 48
"""In one launch: the table of them is an argument of the kernel, and those have at most 4 KiB. Fewer have averages."""
THREADS, ROUNDS = 256, 4
ELEMENTS = THREADS * 4 * ROUNDS
"""That a block works on."""


Row = tuple[Tensor | None, ...]
"""Of a parameter, by column of `Moments`."""
Table = tuple[Any, int]
"""What a launch works on, and its number of blocks."""
POINTERS = ("weight", "gradient", "mean", "square", "step", "average", "rounded", "rounded_average")


@functools.cache
def _parameters(average: bool) -> type[ctypes.Structure]:
    """As in parameters.cuh."""

    class Parameter(ctypes.Structure):
        _fields_ = (
            *((name, ctypes.c_void_p) for name in (POINTERS if average else POINTERS[:5])),
            *((name, ctypes.c_int) for name in ("size", "first_block", "aligned", "decays")),
        )

    class Parameters(ctypes.Structure):
        _fields_ = (("of", Parameter * (MAX_AVERAGED if average else MAX_PARAMETERS)), ("count", ctypes.c_int))

    return Parameters


def _kernel(name: str, shared_bytes: int, *, average: bool, **further: int) -> runtime.Launchable:
    defines: dict[str, int | str] = {
        "MAX_PARAMETERS": MAX_AVERAGED if average else MAX_PARAMETERS,
        "AVERAGE": int(average),
        "THREADS": THREADS,
        "ROUNDS": ROUNDS,
        **further,
    }
    return runtime.kernel(name, ("primitives.cuh", "parameters.cuh", f"{name}.cu"), defines, THREADS, shared_bytes)


def adam_kernels(*, decay: bool = False, average: bool = False) -> tuple[runtime.Launchable, runtime.Launchable]:
    """The step, of weights that decay or do not and have averages or not, and the norm of the gradients; compiled,
    unless that is done."""
    step = _kernel("adam", 8, average=average, DECAY=int(decay))
    return step, _kernel("gradient_norm", THREADS * 4, average=average)


class Adam:
    """`drq.engine.adam.descend` for one optimiser."""

    def __init__(self, device: torch.device, *, decay: bool = False, average: bool = False) -> None:
        self._decay, self._average = decay, average
        self._adam, self._gradient_norm = adam_kernels(decay=decay, average=average)
        # The kernels find it, and leave it, at zero.
        self._finished_blocks = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, moments: Moments, rates: Rates) -> Tensor | None:
        rows = [_like_its_parameter(row) for row in zip(*moments, strict=True)]  # kept until they are launched
        tables = list(self._tables(rows))
        norm, coefficient = (None, None) if rates.max_norm is None else self._clip(tables, rates.max_norm)
        assert self._decay or not rates.weight_decay
        numbers = rates.learning_rate, *rates.betas, rates.eps, rates.weight_decay
        doubles = [ctypes.c_double(value) for value in numbers]
        for table, blocks in tables:
            self._adam.launch((blocks, 1), table, coefficient, self._finished_blocks, *doubles, float(rates.tau))
        return norm

    def _clip(self, tables: Sequence[Table], max_norm: float) -> tuple[Tensor, Tensor]:
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

    def _tables(self, rows: Sequence[Row]) -> Iterator[Table]:
        most = MAX_AVERAGED if self._average else MAX_PARAMETERS
        for begin in range(0, len(rows), most):
            table, blocks = _parameters(self._average)(), 0
            for entry, row in zip(table.of, rows[begin : begin + most], strict=False):
                pointers = [0 if tensor is None else tensor.data_ptr() for tensor in row]
                for name, pointer in zip(POINTERS, pointers, strict=True):
                    if pointer:  # there is no place for an average where none has one
                        setattr(entry, name, pointer)
                weight = row[0]
                assert weight is not None
                entry.size, entry.first_block, entry.decays = weight.numel(), blocks, decays(weight)
                entry.aligned = not any(pointer % 16 for pointer in pointers[:4] + pointers[5:])
                blocks += -(-entry.size // ELEMENTS)
                table.count += 1
            yield table, blocks


def _like_its_parameter(row: Row) -> Row:
    """The kernel walks through memory, so a gradient has to lie in it as its parameter does."""
    parameter, gradient, *state = row
    assert parameter is not None
    assert gradient is not None
    average = state[3]
    assert average is None or average.stride() == parameter.stride()
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    return parameter, gradient, *state
