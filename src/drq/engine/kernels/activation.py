"""What follows a convolution: its bias and ReLU in one launch, and both of their gradients in another.

PyTorch takes two launches each way, and the one that sums a bias gradient is slow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import runtime

THREADS, ROUNDS = 256, 2
"""Of a block, and pixels that a thread reads at once for the gradients."""
_ALIGNMENT = 16
"""In bytes: a thread reads four values at once."""


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    """`relu(x + bias)` by channel, channels last, added in float32 and rounded once to the type of `x`.

    `x` [B, C, H, W]: float32 or bfloat16; it is copied first unless its channels come last. `bias` [C]: float32.
    Differentiable once.
    """
    out: Tensor = _bias_relu(x, bias)[0]
    return out


def bias_relu_kernels(channels: int, dtype: torch.dtype) -> None:
    """Compiles, unless that is done, the kernels that `bias_relu` and its gradients launch."""
    for gradient in (False, True):
        _kernel(channels, dtype, gradient=gradient)


def _kernel(channels: int, dtype: torch.dtype, *, gradient: bool) -> runtime.Launchable:
    defines: dict[str, int | str] = {
        "THREADS": THREADS,
        "ROUNDS": ROUNDS,
        "CHANNELS": channels,
        "BFLOAT16": int(dtype == torch.bfloat16),
        "GRADIENT": int(gradient),
    }
    name = "bias_relu_gradient" if gradient else "bias_relu"
    parts = "primitives.cuh", "elements.cuh", "activation.cu"
    return runtime.kernel(name, parts, defines, THREADS, THREADS * 16 if gradient else 0)


def columns(channels: int) -> int:
    """Of a pixel; a thread takes one. As in elements.cuh."""
    return channels if channels % 4 else channels // 4


def grid(kernel: runtime.Launchable, size: int, of_a_block: int) -> tuple[int, int]:
    """One block at least: where there is no pixel, the counter or the bias gradient is written all the same."""
    return max(1, min(kernel.resident_blocks, -(-size // of_a_block))), 1


def new(like: Tensor, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    shape, dtype = shape or like.shape, dtype or like.dtype
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def pixels(x: Tensor) -> Tensor:
    """[B, H, W, C], the order in which the memory lies."""
    return x.permute(0, 2, 3, 1)


def readable(x: Tensor) -> Tensor:
    """A copy where `x` lies otherwise than the kernels read it."""
    x = x.contiguous(memory_format=torch.channels_last)
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


# Operators, so that compiled code may contain them. The gradients need a counter that is zero. It comes from the
# forward launch, which zeroes it in passing: no launch is spent on it, and no buffer is shared by streams, by learners
# that are captured one after the other and run side by side, or by a graph and what runs outside of it. The launch for
# the gradients leaves the counter at zero, so that it may be repeated, and counts as one that changes no argument.
@torch.library.custom_op("drq::bias_relu", mutates_args=())
def _bias_relu(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the counter for `_bias_relu_gradient`."""
    if x.dtype not in (torch.float32, torch.bfloat16) or bias.dtype != torch.float32 or bias.shape != x.shape[1:2]:
        wanted = "[B, C, H, W] in float32 or bfloat16, and a bias [C] in float32"
        raise ValueError(f"bias_relu wants {wanted}; got {list(x.shape)} {x.dtype}, {list(bias.shape)} {bias.dtype}")
    x, bias = readable(x), bias.contiguous()
    out, counter = _new_results(x, bias)
    channels, rows = len(bias), x.numel() // len(bias)
    kernel = _kernel(channels, x.dtype, gradient=False)
    blocks = grid(kernel, rows * columns(channels), THREADS)
    kernel.launch(blocks, pixels(x), bias, pixels(out), counter, rows)
    return out, counter


@_bias_relu.register_fake
def _new_results(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return new(x), torch.empty(1, dtype=torch.int32, device=x.device)


@torch.library.custom_op("drq::bias_relu_gradient", mutates_args=())
def _bias_relu_gradient(gradient: Tensor, out: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and of the bias. Where the output is zero, none passes."""
    gradient, out = readable(gradient), readable(out)
    of_x, of_bias = _new_gradients(gradient, out, counter)
    channels, rows = out.shape[1], out.numel() // out.shape[1]
    kernel = _kernel(channels, out.dtype, gradient=True)
    blocks = grid(kernel, rows, max(1, THREADS // columns(channels)) * ROUNDS)
    partial = of_bias.new_empty(blocks[0], channels)
    kernel.launch(blocks, pixels(gradient), pixels(out), pixels(of_x), of_bias, partial, counter, rows)
    return of_x, of_bias


@_bias_relu_gradient.register_fake
def _new_gradients(gradient: Tensor, out: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    return new(out), torch.empty(out.shape[1], dtype=torch.float32, device=out.device)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None]:
    if gradient is None:
        return None, None
    of_x, of_bias = _bias_relu_gradient(gradient, *ctx.saved_tensors)
    return of_x, of_bias


_bias_relu.register_autograd(_differentiate, setup_context=_save)
