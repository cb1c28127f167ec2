"""What follows a convolution: its bias and a max-pool in one launch, and the gradient of the pool in another.

PyTorch adds the bias to all the pixels first, of which a fourth is left; and what its compiler makes of the gradient
compares every pixel with each of its windows anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import runtime
from .activation import THREADS, columns, grid, new, pixels, readable


def bias_pool(x: Tensor, bias: Tensor) -> Tensor:
    """`drq.backend.same_pool(x + bias)`, channels last, added in float32 and rounded once to the type of `x`.

    `x` [B, C, H, W]: float32 or bfloat16; it is copied first unless its channels come last. `bias` [C]: float32.
    Differentiable once.
    """
    out: Tensor = _bias_pool(x, bias)[0]
    return out


def bias_pool_kernels(channels: int, dtype: torch.dtype) -> None:
    """Compiles, unless that is done, the kernels that `bias_pool` and its gradient launch."""
    for gradient in (False, True):
        _kernel(channels, dtype, gradient=gradient)


def _kernel(channels: int, dtype: torch.dtype, *, gradient: bool) -> runtime.Launchable:
    defines: dict[str, int | str] = {
        "THREADS": THREADS,
        "CHANNELS": channels,
        "BFLOAT16": int(dtype == torch.bfloat16),
        "GRADIENT": int(gradient),
    }
    name = "bias_pool_gradient" if gradient else "bias_pool"
    return runtime.kernel(name, ("primitives.cuh", "elements.cuh", "pooling.cu"), defines, THREADS, 0)


@torch.library.custom_op("drq::bias_pool", mutates_args=())
def _bias_pool(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and where in its window each of it was."""
    if x.dtype not in (torch.float32, torch.bfloat16) or bias.dtype != torch.float32 or bias.shape != x.shape[1:2]:
        wanted = "[B, C, H, W] in float32 or bfloat16, and a bias [C] in float32"
        raise ValueError(f"bias_pool wants {wanted}; got {list(x.shape)} {x.dtype}, {list(bias.shape)} {bias.dtype}")
    x, bias = readable(x), bias.contiguous()
    out, place = _new_results(x, bias)
    batch, channels, height, width = x.shape
    kernel = _kernel(channels, x.dtype, gradient=False)
    blocks = grid(kernel, out.numel() // channels * columns(channels), THREADS)
    kernel.launch(blocks, pixels(x), bias, pixels(out), pixels(place), batch, height, width)
    return out, place


@_bias_pool.register_fake
def _new_results(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = x.shape
    shape = batch, channels, (height + 1) // 2, (width + 1) // 2
    return new(x, shape), new(x, shape, torch.uint8)


@torch.library.custom_op("drq::bias_pool_gradient", mutates_args=())
def _bias_pool_gradient(gradient: Tensor, place: Tensor, height: int, width: int) -> Tensor:
    """The gradient of `x`."""
    gradient = readable(gradient)
    of_x: Tensor = _new_gradient(gradient, place, height, width)
    batch, channels = place.shape[:2]
    kernel = _kernel(channels, gradient.dtype, gradient=True)
    blocks = grid(kernel, place.numel() // channels * columns(channels), THREADS)
    kernel.launch(blocks, pixels(gradient), pixels(place), pixels(of_x), batch, height, width)
    return of_x


@_bias_pool_gradient.register_fake
def _new_gradient(gradient: Tensor, place: Tensor, height: int, width: int) -> Tensor:
    return new(gradient, (*place.shape[:2], height, width))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.size = inputs[0].shape[2:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None]:
    if gradient is None:
        return None, None
    # Each of the output's gradients goes to one pixel, so that their sum is that of all pixels.
    return _bias_pool_gradient(gradient, *ctx.saved_tensors, *ctx.size), gradient.sum((0, 2, 3), dtype=torch.float32)


_bias_pool.register_autograd(_differentiate, setup_context=_save)
