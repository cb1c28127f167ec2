"""The gradients of `conv_pool`'s weights and biases straight from that of its output, where the input has none.

Each of the output's gradients belongs to one pixel of what was convolved, which has four times as many: a library needs
them all written out, and reads them anew for the weights and for the biases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import runtime
from .activation import _new, _pixels, _readable

WARPS, BLOCKS, OUTPUTS = 16, 1, 32
"""Of a block; blocks of a multiprocessor that the registers must suffice for; output channels of a warp, where there
are as many."""
_SUM_WARPS = 16
_CHANNELS, _SPAN, _REGISTERS = 4, 5, 20
"""Of the input; pixels across that a window and what is next to it have; of a lane for the sums of 16 output
channels."""
_MOST_ROWS = 16
"""Of the output that a block takes at a time: more would be for larger batches than are common."""
_MOST_SHARED = 100_000
"""Bytes, so that two blocks find room on every multiprocessor with bfloat16 in data centres."""


def conv_pool_weight_suits(channels: int, out: int, height: int, width: int) -> bool:
    """Whether the kernel can do it for so many channels and images of this size."""
    return channels == _CHANNELS and out % 16 == 0 and _rows(out, height, width) > 0


def conv_pool_weight_kernels(out: int, height: int, width: int) -> tuple[runtime.Launchable, runtime.Launchable]:
    """Compiled, unless that is done: the one that multiplies, and the one that adds what its blocks have."""
    shared = _shared_bytes(_rows(out, height, width), out, height, width)
    of_each = (0, WARPS, shared), (1, _SUM_WARPS, _SUM_WARPS * 32 * 4)
    multiplying, adding = (
        runtime.kernel(
            "conv_pool_weight_sum" if adds else "conv_pool_weight",
            ("primitives.cuh", "conv_pool_weight.cu"),
            {
                "WARPS": warps,
                "BLOCKS": BLOCKS,
                "OUTPUTS": _of_a_warp(out),
                "OUT_CHANNELS": out,
                "HEIGHT": height,
                "WIDTH": width,
                "PITCH": _pitch(width),
                "SUM": adds,
            },
            warps * 32,
            bytes_,
        )
        for adds, warps, bytes_ in of_each
    )
    return multiplying, adding


def _of_a_warp(out: int) -> int:
    return 16 if out % OUTPUTS else OUTPUTS


def _pitch(width: int) -> int:
    """Words that a channel has for a row: four times an odd number."""
    pairs = ((width + 1) // 2 + 1) // 2
    return (-(-pairs // 4) | 1) * 4


def _shared_bytes(rows: int, out: int, height: int, width: int) -> int:
    """For the input that so many rows of the output see, wherever images end between them, and then for the sums."""
    of_an_image = (height + 1) // 2
    seen = 2 * rows + 3 + 3 * -(-(rows - 1) // of_an_image)
    return max(seen * _SPAN * _CHANNELS * _pitch(width) * 4, WARPS * _of_a_warp(out) // 16 * _REGISTERS * 32 * 4)


def _rows(out: int, height: int, width: int) -> int:
    """Of the output: the most that a block can take at a time."""
    fitting = (rows for rows in range(_MOST_ROWS, 0, -1) if _shared_bytes(rows, out, height, width) <= _MOST_SHARED)
    return next(fitting, 0)


@torch.library.custom_op("drq::conv_pool_weight", mutates_args=())
def _conv_pool_weight(gradient: Tensor, place: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the weight, rounded once to the type of `x`, and of the bias, in float32."""
    of_weight, of_bias = _new_conv_pool_weight(gradient, place, x)
    batch, out, out_rows, _ = gradient.shape
    height, width = x.shape[2:]
    multiplying, adding = conv_pool_weight_kernels(out, height, width)
    total = batch * out_rows
    items = max(min(multiplying.resident_blocks, total), -(-total // _rows(out, height, width)))
    blocks = max(1, min(multiplying.resident_blocks, items))  # where there is no image, zeros are written all the same
    sums = out // 16 * _REGISTERS * 32
    partial = of_bias.new_empty(blocks, sums)
    pixels = (_pixels(_readable(tensor)) for tensor in (gradient, place, x))
    multiplying.launch((blocks, 1), *pixels, partial, batch, items)
    adding.launch((sums // 32, 1), partial, _pixels(of_weight), of_bias, blocks)
    return of_weight, of_bias


@_conv_pool_weight.register_fake
def _new_conv_pool_weight(gradient: Tensor, place: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    out = gradient.shape[1]
    return _new(x, (out, x.shape[1], 3, 3)), torch.empty(out, dtype=torch.float32, device=x.device)
