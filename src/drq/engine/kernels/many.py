"""What is small and there for every layer of an encoder, in one launch for all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from . import runtime

MOST = 48
"""Layers: the table of them is an argument of the kernel, and those have at most 4 KiB."""
_SIDE, _TAPS = 32, 9
"""Of what a block packs, and of a window."""


class Packing(NamedTuple):
    """What is asked of `packed`."""

    weight: Tensor
    """[O, C, 3, 3] in bfloat16, channels last, O and C multiples of 64."""
    block_channels: int
    """That a block of the kernel which multiplies with it makes."""
    turned: bool = False
    """Whether it is for the gradient of the input: as `weight.flip(2, 3).transpose(0, 1)`."""


class _Layer(ctypes.Structure):
    """As in many.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "to")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "block_channels", "turned")),
    )


class _Layers(ctypes.Structure):
    _fields_ = (("of", _Layer * MOST),)


def packed(asked: Sequence[Packing]) -> list[Tensor]:
    """Weights as conv_same.cu multiplies with them."""
    found = [weight.new_empty(weight.numel()) for weight, *_ in asked]
    tiles = max(weight.shape[0] * weight.shape[1] // _SIDE**2 for weight, *_ in asked)
    pairs = zip(asked, found, strict=True)
    _launch("pack", [(each.weight, to, *each.weight.shape[:2], *each[1:]) for each, to in pairs], _TAPS * tiles)
    return found


def sums_of_rows(parts: Sequence[Tensor]) -> list[Tensor]:
    """The sums of all rows of float32 matrices."""
    found = [part.new_empty(part.shape[1]) for part in parts]
    groups = max(-(-len(sums) // 32) for sums in found)
    _launch("add_rows", [(*pair, *pair[0].shape, 0, 0) for pair in zip(parts, found, strict=True)], groups)
    return found


def _launch(name: str, layers: Sequence[tuple[Tensor, Tensor, int, int, int, int]], blocks: int) -> None:
    assert len(layers) <= MOST
    table = _Layers()
    for place, (source, to, *sizes) in enumerate(layers):
        table.of[place] = _Layer(source.data_ptr(), to.data_ptr(), *sizes)
    threads, shared_bytes = {"pack": (128, _SIDE * (_SIDE + 2) * 2), "add_rows": (1024, 1024 * 4)}[name]
    defines = {"MOST": MOST, "THREADS": threads, "PACKING": int(name == "pack")}
    kernel = runtime.kernel(name, ("primitives.cuh", "many.cu"), defines, threads, shared_bytes)
    kernel.launch((blocks, len(layers)), table)
