"""A 3 x 3 convolution of few channels with its bias and the max-pool after it, in one launch.

A library writes what it convolves to memory, of which the pool leaves a fourth, and pads few channels to eight first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import runtime
from .activation import _bias_pool_gradient, _new, _pixels, _readable
from .conv_pool_weight import _conv_pool_weight, conv_pool_weight_kernels, conv_pool_weight_suits

WARPS, BLOCKS, ROWS = 8, 2, 2
"""Of a block; blocks of a multiprocessor that the registers must suffice for; output rows that a block makes at a
time."""
_MOST_IN, _MOST_OUT = 16, 64
_MOST_WEIGHTS = 80
"""Registers of a thread that hold weights; with more of them, others have to be kept in memory."""
_MOST_SHARED = 100_000
"""Bytes, so that two blocks find room on every multiprocessor with bfloat16 in data centres."""


def conv_pool(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`bias_pool(F.conv2d(x, weight, padding=1), bias)`: `x` [B, C, H, W] and `weight` [O, C, 3, 3] in bfloat16, for
    which `conv_pool_suits`. Differentiable once."""
    out: Tensor = _conv_pool(x, weight, bias)[0]
    return out


def conv_pool_suits(weight: Tensor, height: int, width: int) -> bool:
    """Whether the kernel can do it with such a weight, and images of this size."""
    out, channels, *window = weight.shape
    few = channels % 2 == 0 and channels <= _MOST_IN and out % 8 == 0 and out <= _MOST_OUT
    few = few and out // 8 * -(-9 * channels // 16) * 2 <= _MOST_WEIGHTS
    fits = _shared_bytes(channels, out, width) <= _MOST_SHARED
    return weight.dtype == torch.bfloat16 and window == [3, 3] and few and fits


def conv_pool_kernel(weight: Tensor, height: int, width: int) -> runtime.Launchable:
    """Compiled, unless that is done."""
    out, channels = weight.shape[:2]
    defines = {
        "WARPS": WARPS,
        "BLOCKS": BLOCKS,
        "ROWS": ROWS,
        "IN_CHANNELS": channels,
        "OUT_CHANNELS": out,
        "HEIGHT": height,
        "WIDTH": width,
    }
    shared = _shared_bytes(channels, out, width)
    return runtime.kernel("conv_pool", ("primitives.cuh", "conv_pool.cu"), defines, WARPS * 32, shared)


def conv_pool_gradient_kernels(weight: Tensor, height: int, width: int) -> None:
    """Compiles, unless that is done, those that differentiate `conv_pool` where `x` wants no gradient."""
    out, channels = weight.shape[:2]
    if conv_pool_suits(weight, height, width) and conv_pool_weight_suits(channels, out, height, width):
        conv_pool_weight_kernels(out, height, width)


def _shared_bytes(channels: int, out: int, width: int) -> int:
    view = (2 * ROWS + 3) * (width + 2) * channels * 2
    pixels = (2 * ROWS + 1) * width
    return -(-view // 16) * 16 + -(-pixels // 16) * 16 * (out * 2 + 16)


@torch.library.custom_op("drq::conv_pool", mutates_args=())
def _conv_pool(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and where in its window each of it was."""
    _, channels, height, width = x.shape
    shapes = channels == weight.shape[1] and bias.shape == weight.shape[:1]
    types = x.dtype == weight.dtype and bias.dtype == torch.float32
    if not (shapes and types and conv_pool_suits(weight, height, width)):
        raise ValueError(f"conv_pool does not suit {list(x.shape)} {x.dtype}, {list(weight.shape)} {weight.dtype}")
    out, place = _new_conv_pool(x, weight, bias)
    conv_pool_into(out, place, _readable(x), _readable(weight), bias.contiguous())
    return out, place


def conv_pool_into(out: Tensor, place: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Writes the output, and where in its window each of it was."""
    batch, _, height, width = x.shape
    kernel = conv_pool_kernel(weight, height, width)
    blocks = max(1, min(kernel.resident_blocks, batch * -(-out.shape[2] // ROWS))), 1
    kernel.launch(blocks, _pixels(x), _pixels(weight), bias, _pixels(out), _pixels(place), batch)


@_conv_pool.register_fake
def _new_conv_pool(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    shape = len(x), len(weight), (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2
    return _new(x, shape), _new(x, shape, torch.uint8)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return None, None, None
    x, weight, place = ctx.saved_tensors
    if not ctx.needs_input_grad[0] and conv_pool_weight_suits(x.shape[1], gradient.shape[1], *x.shape[2:]):
        return None, *_conv_pool_weight(gradient, place, x)
    of_convolved = _bias_pool_gradient(gradient, place, *x.shape[2:])
    once, wanted = [1, 1], [*ctx.needs_input_grad[:2], False]
    of_x, of_weight, _ = torch.ops.aten.convolution_backward(
        of_convolved, x, weight, None, once, once, once, False, [0, 0], 1, wanted
    )
    return of_x, of_weight, gradient.sum((0, 2, 3), dtype=torch.float32)


_conv_pool.register_autograd(_differentiate, setup_context=_save)
