"""A 3 x 3 convolution of 64 or 128 channels within a margin of zeros, with what stands around it in a residual block,
in one launch: there and back. For Hopper.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import runtime
from .activation import _pixels

THREADS, TILE, DEPTH = 128, 64, 64
"""Of a block; pixels that it multiplies at once; input channels whose weights it fetches at a time."""
_FEW_PIXELS = 200
_MOST_SHARED = 115_700
"""Bytes, so that two blocks find room on a multiprocessor in data centres."""


class Weights(NamedTuple):
    """Of a convolution."""

    weight: Tensor
    """In bfloat16: [O, C, 3, 3], or packed."""
    bias: Tensor | None
    """[O] in float32."""


class BlockSize(NamedTuple):
    """What a block makes."""

    tiles: int
    """Of 64 pixels."""
    channels: int
    stages: int
    """Parts of the weights that are there or under way."""


def block_size(channels: int, outputs: int, height: int, width: int) -> BlockSize:
    """What was fastest on an H200."""
    if height * width <= _FEW_PIXELS:  # small blocks, so that there are enough of them
        return BlockSize(1, 64, 4)
    if outputs % 128:
        return BlockSize(4 if channels == 64 else 2, 64, 4)
    return BlockSize(2, 128, 3) if channels == 64 else BlockSize(1, 128, 4)


def conv_same_suits(channels: int, outputs: int, height: int, width: int) -> bool:
    """Whether the kernel can do it with so many channels, and images of this size, on this GPU."""
    if channels not in (64, 128) or outputs % TILE:
        return False
    shared = _shared_bytes(block_size(channels, outputs, height, width), channels, height, width)
    return shared <= min(_MOST_SHARED, runtime.shared_bytes_per_block())


def convolve(
    x: Tensor,
    out: Tensor,
    weights: Weights,
    second: Weights | None = None,
    first_images: int | None = None,
    *,
    plus: Tensor | None = None,
    gate: Tensor | None = None,
    relu_first: bool = False,
    relu: bool = False,
    sums: bool = False,
) -> Tensor | None:
    """Writes to `out` [B, O, H, W] the convolution of `x` [B, C, H, W], in bfloat16, channels last, with packed
    weights: of relu(x) with `relu_first`, with the bias if there is one, its ReLU, zero where `gate` is not above it,
    and the sum with `plus`. Each is rounded as when it is written out. Images from `first_images` on go through the
    second weights.

    With `sums`, gives those by channel of what comes out, a row for each block: the sums of all rows are those of all
    pixels."""
    images, channels, height, width = x.shape
    outputs = out.shape[1]
    first_images = images if first_images is None else first_images
    tiles = block_size(channels, outputs, height, width)
    switches = {
        "relu_first": relu_first,
        "bias": weights.bias is not None,
        "relu": relu,
        "gate": gate is not None,
        "plus": plus is not None,
        "sums": sums,
    }
    kernel = _kernel(tiles, channels, outputs, height, width, **switches)
    of_a_block = tiles.tiles * TILE
    blocks = sum(-(-count * height * width // of_a_block) for count in (first_images, images - first_images))
    found = torch.empty(blocks, outputs, device=x.device) if sums else None
    given = [part for each in (weights, second or weights) for part in each]
    around = [None if each is None else _pixels(each) for each in (gate, plus)]
    if images:
        grid = blocks, outputs // tiles.channels
        kernel.launch(grid, _pixels(x), *given, *around, _pixels(out), found, images, first_images)
    return found


def _kernel(
    tiles: BlockSize, channels: int, outputs: int, height: int, width: int, **switches: bool
) -> runtime.Launchable:
    """Compiled, unless that is done."""
    defines = {
        "CHANNELS": channels,
        "OUT_CHANNELS": outputs,
        "HEIGHT": height,
        "WIDTH": width,
        "TILES": tiles.tiles,
        "BLOCK_CHANNELS": tiles.channels,
        "STAGES": tiles.stages,
        "VIEW_PIXELS": _view_pixels(tiles.tiles * TILE, height, width),
        **{name.upper(): int(on) for name, on in switches.items()},
    }
    shared = _shared_bytes(tiles, channels, height, width)
    return runtime.kernel("conv_same", ("primitives.cuh", "conv_same.cu"), defines, THREADS, shared)


def _view_pixels(pixels: int, height: int, width: int) -> int:
    """Held for the pixels of a block: these, a zero for each row that ends among them, a row of zeros for each image
    that does, and a row and a pixel more on either side."""
    rows, images = (-(-(pixels - 1) // size) for size in (width, height * width))
    return pixels + rows + images * (width + 1) + 2 * (width + 2)


def _shared_bytes(tiles: BlockSize, channels: int, height: int, width: int) -> int:
    weights, barriers = tiles.stages * DEPTH * tiles.channels * 2, -(-tiles.stages * 8 // 128) * 128
    view = _view_pixels(tiles.tiles * TILE, height, width) * (channels * 2 + 16)
    sums = THREADS // 4 * tiles.channels * 4
    return weights + barriers + max(view, sums)
