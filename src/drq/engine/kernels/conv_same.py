"""A 3 x 3 convolution of 64 channels within a margin of zeros, with what stands around it in a residual block, in one
launch: where no gradient is asked for, nothing but the block's middle and its end has to be written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import runtime
from .activation import _new, _pixels, _readable

CHANNELS, BLOCK_PIXELS, BLOCK_CHANNELS, STAGES, THREADS = 64, 224, 64, 3, 128
"""Of the input; then of a block, as the kernel has them."""
LEAST_PIXELS = 1000
"""Smaller images the library convolves faster, with the passes around it: blocks are too few to fill an H200."""
_MOST_SHARED = 100_000
"""Bytes, so that two blocks find room on a multiprocessor in data centres, and one on any with bfloat16."""


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
    `plus` that are asked for. `x` [B, 64, H, W], `weight` [O, 64, 3, 3] and `plus` in bfloat16, O a
    multiple of 64; `bias` [O] in float32. Rounded as when all is written out. Not differentiable."""
    out: Tensor = _conv_same(x, weight, bias, plus, relu_first, relu)
    return out


def conv_same_suits(weight: Tensor, height: int, width: int) -> bool:
    """Whether the kernel can do it with such a weight, and is the faster one for images of this size."""
    return height * width >= LEAST_PIXELS and _possible(weight, height, width)


def _possible(weight: Tensor, height: int, width: int) -> bool:
    out, *rest = weight.shape
    fits = out % BLOCK_CHANNELS == 0 and _shared_bytes(height, width) <= _MOST_SHARED
    return weight.dtype == torch.bfloat16 and rest == [CHANNELS, 3, 3] and fits


def _kernel(
    weight: Tensor, height: int, width: int, *, relu_first: bool, bias: bool, relu: bool, plus: bool
) -> runtime.Launchable:
    """Compiled, unless that is done."""
    defines = {
        "OUT_CHANNELS": len(weight),
        "HEIGHT": height,
        "WIDTH": width,
        "VIEW_PIXELS": _view_pixels(height, width),
        "RELU_FIRST": int(relu_first),
        "BIAS": int(bias),
        "RELU": int(relu),
        "PLUS": int(plus),
    }
    shared = _shared_bytes(height, width)
    return runtime.kernel("conv_same", ("primitives.cuh", "conv_same.cu"), defines, THREADS, shared)


def _view_pixels(height: int, width: int) -> int:
    """Held for the pixels of a block: these, a zero for each row that ends among them, a row of zeros for each image
    that does, and a row and a pixel more on either side."""
    rows, images = (-(-(BLOCK_PIXELS - 1) // size) for size in (width, height * width))
    return BLOCK_PIXELS + rows + images * (width + 1) + 2 * (width + 2)


def _shared_bytes(height: int, width: int) -> int:
    return (_view_pixels(height, width) + STAGES * BLOCK_CHANNELS) * (CHANNELS * 2 + 16)


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
    if not (shapes and types and biased and _possible(weight, height, width)):
        raise ValueError(f"conv_same does not suit {list(x.shape)} {x.dtype}, {list(weight.shape)} {weight.dtype}")
    switches = {"relu_first": relu_first, "bias": bias is not None, "relu": relu, "plus": plus is not None}
    kernel = _kernel(weight, height, width, **switches)
    blocks = -(-images * height * width // BLOCK_PIXELS), len(weight) // BLOCK_CHANNELS
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
