"""What follows a convolution: its bias with a ReLU or a max-pool in one launch, and their gradients in another.

PyTorch takes two launches each way for bias and ReLU, and the one that sums a bias gradient is slow. Before a max-pool
it adds the bias to all the pixels, of which a fourth is left; and what its compiler makes of the pool's gradient
compares every pixel with each of its windows anew.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from . import runtime

THREADS, ROUNDS = 256, 2
"""Of a block, and pixels that a thread reads at once for the gradients."""
_ALIGNMENT = 16
"""In bytes: a thread reads four values at once."""
After = Literal["bias_relu", "bias_pool"]


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    """`relu(x + bias)` by channel, channels last, added in float32 and rounded once to the type of `x`.

    `x` [B, C, H, W]: float32 or bfloat16; it is copied first unless its channels come last. `bias` [C]: float32.
    Differentiable once.
    """
    out: Tensor = _bias_relu(x, bias)[0]
    return out


def bias_pool(x: Tensor, bias: Tensor) -> Tensor:
    """`drq.backend.same_pool(x + bias)`, otherwise as `bias_relu`."""
    out: Tensor = _bias_pool(x, bias)[0]
    return out


def bias_kernels(after: After, channels: int, dtype: torch.dtype) -> None:
    """Compiles, unless that is done, the kernels that `bias_relu` or `bias_pool` and its gradients launch."""
    for gradient in (False, True):
        _kernel(after, channels, dtype, gradient=gradient)


def _kernel(after: After, channels: int, dtype: torch.dtype, *, gradient: bool) -> runtime.Launchable:
    defines = {
        "THREADS": THREADS,
        "ROUNDS": ROUNDS,
        "CHANNELS": channels,
        "BFLOAT16": int(dtype == torch.bfloat16),
        "GRADIENT": int(gradient),
    }
    name = f"{after}_gradient" if gradient else after
    parts = "primitives.cuh", "elements.cuh", "activation.cu" if after == "bias_relu" else "pooling.cu"
    return runtime.kernel(name, parts, defines, THREADS, THREADS * 16 if name == "bias_relu_gradient" else 0)


def _columns(channels: int) -> int:
    """Of a pixel; a thread takes one. As in elements.cuh."""
    return channels if channels % 4 else channels // 4


def _grid(kernel: runtime.Launchable, size: int, of_a_block: int) -> tuple[int, int]:
    """One block at least: where there is no pixel, the counter or the bias gradient is written all the same."""
    return max(1, min(kernel.resident_blocks, -(-size // of_a_block))), 1


def _new(like: Tensor, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    shape, dtype = shape or like.shape, dtype or like.dtype
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def _pixels(x: Tensor) -> Tensor:
    """[B, H, W, C], the order in which the memory lies."""
    return x.permute(0, 2, 3, 1)


def _readable(x: Tensor) -> Tensor:
    """A copy where `x` lies otherwise than the kernels read it."""
    x = x.contiguous(memory_format=torch.channels_last)
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def _inputs(after: After, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype not in (torch.float32, torch.bfloat16) or bias.dtype != torch.float32 or bias.shape != x.shape[1:2]:
        wanted = "[B, C, H, W] in float32 or bfloat16, and a bias [C] in float32"
        raise ValueError(f"{after} wants {wanted}; got {list(x.shape)} {x.dtype}, {list(bias.shape)} {bias.dtype}")
    return _readable(x), bias.contiguous()


# Operators, so that compiled code may contain them. The gradients need a counter that is zero. It comes from the
# forward launch, which zeroes it in passing: no launch is spent on it, and no buffer is shared by streams, by learners
# that are captured one after the other and run side by side, or by a graph and what runs outside of it. The launch for
# the gradients leaves the counter at zero, so that it may be repeated, and counts as one that changes no argument.
@torch.library.custom_op("drq::bias_relu", mutates_args=())
def _bias_relu(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the counter for `_bias_relu_gradient`."""
    x, bias = _inputs("bias_relu", x, bias)
    out, counter = _new_relu(x, bias)
    channels, rows = len(bias), x.numel() // len(bias)
    kernel = _kernel("bias_relu", channels, x.dtype, gradient=False)
    blocks = _grid(kernel, rows * _columns(channels), THREADS)
    kernel.launch(blocks, _pixels(x), bias, _pixels(out), counter, rows)
    return out, counter


@_bias_relu.register_fake
def _new_relu(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return _new(x), torch.empty(1, dtype=torch.int32, device=x.device)


@torch.library.custom_op("drq::bias_relu_gradient", mutates_args=())
def _bias_relu_gradient(gradient: Tensor, out: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and of the bias. Where the output is zero, none passes."""
    gradient, out = _readable(gradient), _readable(out)
    of_x, of_bias = _new_relu_gradients(gradient, out, counter)
    channels, rows = out.shape[1], out.numel() // out.shape[1]
    kernel = _kernel("bias_relu", channels, out.dtype, gradient=True)
    blocks = _grid(kernel, rows, max(1, THREADS // _columns(channels)) * ROUNDS)
    partial = of_bias.new_empty(blocks[0], channels)
    kernel.launch(blocks, _pixels(gradient), _pixels(out), _pixels(of_x), of_bias, partial, counter, rows)
    return of_x, of_bias


@_bias_relu_gradient.register_fake
def _new_relu_gradients(gradient: Tensor, out: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    return _new(out), torch.empty(out.shape[1], dtype=torch.float32, device=out.device)


@torch.library.custom_op("drq::bias_pool", mutates_args=())
def _bias_pool(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and where in its window each of it was."""
    x, bias = _inputs("bias_pool", x, bias)
    out, place = _new_pool(x, bias)
    bias_pool_into(out, place, x, bias)
    return out, place


def bias_pool_into(out: Tensor, place: Tensor, x: Tensor, bias: Tensor) -> None:
    """Writes the output, and where in its window each of it was."""
    batch, channels, height, width = x.shape
    kernel = _kernel("bias_pool", channels, x.dtype, gradient=False)
    blocks = _grid(kernel, out.numel() // channels * _columns(channels), THREADS)
    kernel.launch(blocks, _pixels(x), bias, _pixels(out), _pixels(place), batch, height, width)


@_bias_pool.register_fake
def _new_pool(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = x.shape
    shape = batch, channels, (height + 1) // 2, (width + 1) // 2
    return _new(x, shape), _new(x, shape, torch.uint8)


@torch.library.custom_op("drq::bias_pool_gradient", mutates_args=())
def _bias_pool_gradient(gradient: Tensor, place: Tensor, height: int, width: int) -> Tensor:
    """The gradient of `x`."""
    gradient = _readable(gradient)
    of_x: Tensor = _new_pool_gradient(gradient, place, height, width)
    batch, channels = place.shape[:2]
    kernel = _kernel("bias_pool", channels, gradient.dtype, gradient=True)
    blocks = _grid(kernel, place.numel() // channels * _columns(channels), THREADS)
    kernel.launch(blocks, _pixels(gradient), _pixels(place), _pixels(of_x), batch, height, width)
    return of_x


@_bias_pool_gradient.register_fake
def _new_pool_gradient(gradient: Tensor, place: Tensor, height: int, width: int) -> Tensor:
    return _new(gradient, (*place.shape[:2], height, width))


def _save_relu(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _save_pool(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.size = inputs[0].shape[2:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate_relu(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None]:
    if gradient is None:
        return None, None
    of_x, of_bias = _bias_relu_gradient(gradient, *ctx.saved_tensors)
    return of_x, of_bias


def _differentiate_pool(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None]:
    if gradient is None:
        return None, None
    # Each of the output's gradients goes to one pixel, so that their sum is that of all pixels.
    of_x = _bias_pool_gradient(gradient, *ctx.saved_tensors, *ctx.size)
    return of_x, gradient.sum((0, 2, 3), dtype=torch.float32)


_bias_relu.register_autograd(_differentiate_relu, setup_context=_save_relu)
_bias_pool.register_autograd(_differentiate_pool, setup_context=_save_pool)
