"""A 3 x 3 convolution of many channels within a margin of zeros, with what stands around it in a residual block, in one
launch: where no gradient is asked for, nothing but the block's middle and its end has to be written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import runtime
from .activation import _new, _pixels, _readable

_MOST_SHARED = 100_000
"""Bytes, so that two blocks find room on a multiprocessor in data centres, and one on any with bfloat16."""


@dataclass(frozen=True)
class Cut:
    """How the kernel cuts its work."""

    pixel_warps: int
    """Of a block, side by side along the pixels."""
    channel_warps: int
    """And along the output channels."""
    tiles: int
    """16-pixel tiles a warp works on at once."""
    channels: int
    """Output channels a warp works on at once: 32 or 64."""
    part: int
    """Input channels held at once: 32 or 64."""
    stages: int
    """Chunks of weights that are there or under way: at least 2."""
    blocks: int
    """Blocks of a multiprocessor the registers must suffice for."""

    @property
    def pixels(self) -> int:
        """Of a block."""
        return self.pixel_warps * self.tiles * 16

    @property
    def block_channels(self) -> int:
        return self.channel_warps * self.channels


LARGE = Cut(pixel_warps=2, channel_warps=2, tiles=7, channels=32, part=64, stages=3, blocks=2)
MIDDLE = Cut(pixel_warps=4, channel_warps=1, tiles=2, channels=64, part=32, stages=4, blocks=3)
SMALL = Cut(pixel_warps=2, channel_warps=2, tiles=2, channels=32, part=64, stages=4, blocks=3)


def cut_for(height: int, width: int) -> Cut:
    """For images of this size, about 32 of them: a large tile reads shared memory less often, and a small one leaves no
    multiprocessor of an H200 without."""
    if height * width >= 1000:
        return LARGE
    return MIDDLE if height * width >= 200 else SMALL


def conv_same(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    plus: Tensor | None = None,
    *,
    relu_first: bool = False,
    relu: bool = False,
) -> Tensor:
    """`F.conv2d(x, weight, padding=1)`, of `relu(x)` with `relu_first`; then with the bias, the ReLU and the sum with
    `plus` that are asked for. `x` [B, C, H, W], `weight` [O, C, 3, 3] and `plus` in bfloat16, for which
    `conv_same_suits`; `bias` [O] in float32. Rounded as when all is written out. Not differentiable."""
    out: Tensor = _conv_same(x, weight, bias, plus, relu_first, relu)
    return out


def conv_same_suits(weight: Tensor, height: int, width: int) -> bool:
    """Whether the kernel can do it with such a weight, and images of this size."""
    out, channels, *window = weight.shape
    many = channels > 0 and channels % 64 == 0 and out % cut_for(height, width).block_channels == 0
    fits = _shared_bytes(channels, height, width) <= _MOST_SHARED
    return weight.dtype == torch.bfloat16 and window == [3, 3] and many and fits


def conv_same_kernel(
    weight: Tensor, height: int, width: int, *, relu_first: bool, bias: bool, relu: bool, plus: bool
) -> runtime.Launchable:
    """Compiled, unless that is done."""
    out, channels = weight.shape[:2]
    cut = cut_for(height, width)
    defines = {
        "PIXEL_WARPS": cut.pixel_warps,
        "CHANNEL_WARPS": cut.channel_warps,
        "TILES": cut.tiles,
        "WARP_CHANNELS": cut.channels,
        "PART": cut.part,
        "STAGES": cut.stages,
        "BLOCKS": cut.blocks,
        "IN_CHANNELS": channels,
        "OUT_CHANNELS": out,
        "HEIGHT": height,
        "WIDTH": width,
        "VIEW_PIXELS": _view_pixels(height, width),
        "RELU_FIRST": int(relu_first),
        "BIAS": int(bias),
        "RELU": int(relu),
        "PLUS": int(plus),
    }
    threads, shared = cut.pixel_warps * cut.channel_warps * 32, _shared_bytes(channels, height, width)
    return runtime.kernel("conv_same", ("primitives.cuh", "conv_same.cu"), defines, threads, shared)


def _view_pixels(height: int, width: int) -> int:
    """Held for the pixels of a block: these, a zero for each row that ends among them, a row of zeros for each image
    that does, and a row and a pixel more on either side."""
    pixels = cut_for(height, width).pixels
    ends = (pixels + width - 2) // width + (width + 1) * ((pixels + height * width - 2) // (height * width))
    return pixels + ends + 2 * (width + 2)


def _shared_bytes(channels: int, height: int, width: int) -> int:
    cut = cut_for(height, width)
    views = min(channels // cut.part, 2)  # while one part of the channels is multiplied, the next is fetched
    return (views * _view_pixels(height, width) + cut.stages * cut.block_channels) * (cut.part * 2 + 16)


# An operator, so that compiled code may contain it.
@torch.library.custom_op("drq::conv_same", mutates_args=())
def _conv_same(
    x: Tensor, weight: Tensor, bias: Tensor | None, plus: Tensor | None, relu_first: bool, relu: bool
) -> Tensor:
    images, channels, height, width = x.shape
    out: Tensor = _new_conv_same(x, weight, bias, plus, relu_first, relu)
    shapes = channels == weight.shape[1] and (plus is None or plus.shape == out.shape)
    types = x.dtype == weight.dtype and (plus is None or plus.dtype == x.dtype)
    biased = bias is None or (bias.dtype == torch.float32 and bias.shape == weight.shape[:1])
    if not (shapes and types and biased and conv_same_suits(weight, height, width)):
        raise ValueError(f"conv_same does not suit {list(x.shape)} {x.dtype}, {list(weight.shape)} {weight.dtype}")
    switches = {"relu_first": relu_first, "bias": bias is not None, "relu": relu, "plus": plus is not None}
    kernel = conv_same_kernel(weight, height, width, **switches)
    cut = cut_for(height, width)
    blocks = -(-images * height * width // cut.pixels), len(weight) // cut.block_channels
    added = None if plus is None else _pixels(_readable(plus))
    read = _pixels(_readable(x)), _pixels(_readable(weight)), None if bias is None else bias.contiguous(), added
    if images:
        kernel.launch(blocks, *read, _pixels(out), images)
    return out


@_conv_same.register_fake
def _new_conv_same(
    x: Tensor, weight: Tensor, bias: Tensor | None, plus: Tensor | None, relu_first: bool, relu: bool
) -> Tensor:
    return _new(x, (len(x), len(weight), *x.shape[2:]))
