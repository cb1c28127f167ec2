"""The paper's convolutional encoder, from the replay's frames to its features and back, as PyTorch operators.

The operators are opaque to `torch.compile` (call them inside compiled code or outside), differentiable with respect to
weights and biases, and capturable into CUDA graphs once `prepare` or a first call has compiled their kernels.
Arithmetic: bfloat16 factors, float32 sums; activations bfloat16, weights and their gradients float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import layers, runtime

MIN_IMAGE_SIZE = 20


def supported(frames: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernels apply: a GPU they run on, uint8 frames, and 3 x 3 layers of 32 channels."""
    if not _on_the_current_gpu(frames):
        return False
    if frames.dtype != torch.uint8 or frames.dim() != 4 or not frames.is_contiguous() or not weights:
        return False
    if frames.data_ptr() % 4:  # copies of four bytes must be aligned
        return False
    if any(w.device != frames.device or w.dtype != torch.float32 for w in weights):
        return False
    _, frame_channels, height, width = frames.shape
    shorter = min(height, width)
    channels = weights[0].shape[1] if weights[0].dim() == 4 else 0
    if not 0 < channels <= layers.MAX_INPUT_CHANNELS or channels % frame_channels or shorter < MIN_IMAGE_SIZE:
        return False
    inputs = [channels] + [layers.CHANNELS] * (len(weights) - 1)
    if any(w.shape != (layers.CHANNELS, c, 3, 3) for w, c in zip(weights, inputs, strict=True)):
        return False
    # Two pixels a layer are lost after the halving, and something must be left.
    if layers.out_size(shorter) <= 2 * (len(weights) - 1):
        return False
    needed = layers.shared_bytes_needed(channels, height, width, len(weights))
    return needed <= runtime.shared_bytes_per_block()


def _on_the_current_gpu(frames: Tensor) -> bool:
    """Where launches go."""
    return frames.is_cuda and runtime.available() and frames.device.index == torch.cuda.current_device()


def _contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().contiguous() for tensor in tensors]


def _inputs(frames: Tensor, slots: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return frames, slots.contiguous(), shifts.to(torch.int32).contiguous()


def _forward(
    frames: Tensor,
    slots: Tensor,
    shifts: Tensor,
    weights: Sequence[Sequence[Tensor]],
    biases: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """Activations of every layer, [networks, B, H, W, 32] each."""
    frames, slots, shifts = _inputs(frames, slots, shifts)
    layer_weights = [tuple(_contiguous(layer)) for layer in zip(*weights, strict=True)]
    layer_biases = [tuple(_contiguous(layer)) for layer in zip(*biases, strict=True)]
    activations = [layers.first_forward(frames, slots, shifts, layer_weights[0], layer_biases[0])]
    for weight, bias in zip(layer_weights[1:], layer_biases[1:], strict=True):
        activations.append(layers.conv_forward(activations[-1], weight, bias))
    return activations


def _fake_activations(frames: Tensor, slots: Tensor, count: int, networks: int) -> list[Tensor]:
    height, width = map(layers.out_size, frames.shape[2:])
    return [
        frames.new_empty(
            (networks, slots.shape[0], height - 2 * i, width - 2 * i, layers.CHANNELS), dtype=torch.bfloat16
        )
        for i in range(count)
    ]


@torch.library.custom_op("drq::encode", mutates_args=())
def _encode(frames: Tensor, slots: Tensor, shifts: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """Activations of every layer: what the backward pass needs."""
    return [activation[0] for activation in _forward(frames, slots, shifts, [weights], [biases])]


@_encode.register_fake
def _(frames: Tensor, slots: Tensor, shifts: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    return [activation[0] for activation in _fake_activations(frames, slots, len(weights), 1)]


@torch.library.custom_op("drq::encode_inference", mutates_args=())
def _encode_inference(
    frames: Tensor, slots: Tensor, shifts: Tensor, weights: list[Tensor], biases: list[Tensor], networks: int
) -> Tensor:
    """Last activation of one or two networks whose weights lie behind each other, [networks, B, H, W, 32]."""
    depth = len(weights) // networks
    both = [[tensors[i * depth : (i + 1) * depth] for i in range(networks)] for tensors in (weights, biases)]
    return _forward(frames, slots, shifts, *both)[-1]


@_encode_inference.register_fake
def _(
    frames: Tensor, slots: Tensor, shifts: Tensor, weights: list[Tensor], biases: list[Tensor], networks: int
) -> Tensor:
    return _fake_activations(frames, slots, len(weights) // networks, networks)[-1]


def _backward(
    gradient: Tensor, frames: Tensor, slots: Tensor, shifts: Tensor, weights: list[Tensor], activations: list[Tensor]
) -> list[Tensor]:
    """Gradients of the weights, then of the biases; `gradient`: of the last activation, before its ReLU."""
    frames, slots, shifts = _inputs(frames, slots, shifts)
    weights = _contiguous(weights)
    gradient = gradient.to(torch.bfloat16).contiguous()
    of_weights, of_biases = [], []
    for layer in reversed(range(1, len(weights))):
        x = activations[layer - 1]
        of_weight, of_bias = layers.conv_weight_gradient(gradient, x, weights[layer])
        gradient = layers.conv_input_gradient(gradient, weights[layer], x)
        of_weights.append(of_weight)
        of_biases.append(of_bias)
    of_weight, of_bias = layers.first_weight_gradient(gradient, frames, slots, shifts, weights[0])
    return [of_weight, *reversed(of_weights), of_bias, *reversed(of_biases)]


_encode_backward = torch.library.custom_op("drq::encode_backward", _backward, mutates_args=())


@_encode_backward.register_fake
def _(
    gradient: Tensor, frames: Tensor, slots: Tensor, shifts: Tensor, weights: list[Tensor], activations: list[Tensor]
) -> list[Tensor]:
    return [torch.empty_like(w) for w in weights] + [w.new_empty(layers.CHANNELS) for w in weights]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    frames, slots, shifts, weights, _ = inputs
    ctx.save_for_backward(frames, slots, shifts, *weights, *output)
    ctx.depth = len(weights)
    ctx.set_materialize_grads(False)  # or zeros, as large as the activations, would be written to be ignored


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    # Only the last activation leaves `encode_views`, so the others have no gradients.
    frames, slots, shifts, *saved = ctx.saved_tensors
    weights, activations = saved[: ctx.depth], saved[ctx.depth :]
    # The last ReLU's mask joins the pass that writes the gradient; inside the kernels it costs twice as much.
    gradient = torch.ops.aten.threshold_backward(gradients[-1], activations[-1], 0)
    found = _encode_backward(gradient, frames, slots, shifts, weights, activations)
    return None, None, None, found[: ctx.depth], found[ctx.depth :]


_encode.register_autograd(_differentiate, setup_context=_save)


def encode_views(
    frames: Tensor, slots: Tensor, shifts: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """Features of perturbed observations, [B, height * width * 32] bfloat16, differentiable in weights and biases.

    `frames` [F, channels, H, W] uint8: single frames, each kept once; `slots` [B, stack] int32 or int64: the frames of
    each observation, oldest first; `shifts` [B, 2] int32: (dy, dx), out[y, x] = in[clamp(y + dy), clamp(x + dx)].
    Features lie pixel after pixel, a pixel's channels together, as those of `PixelEncoder` do.
    """
    if torch.is_grad_enabled() and any(p.requires_grad for p in (*weights, *biases)):
        last: Tensor = _encode(frames, slots, shifts, list(weights), list(biases))[-1]
    else:
        last = _encode_inference(frames, slots, shifts, list(weights), list(biases), 1)[0]
    return last.flatten(1)


def encode_views_two(
    frames: Tensor,
    slots: Tensor,
    shifts: Tensor,
    weights_a: Sequence[Tensor],
    biases_a: Sequence[Tensor],
    weights_b: Sequence[Tensor],
    biases_b: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Features of the same views from two networks, without gradient: the views are gathered once."""
    weights, biases = [*weights_a, *weights_b], [*biases_a, *biases_b]
    both: Tensor = _encode_inference(frames, slots, shifts, weights, biases, 2)
    return both[0].flatten(1), both[1].flatten(1)


def prepare(frames: Tensor, slots: Tensor, weights: Sequence[Tensor]) -> None:
    """Compiles, side by side, every kernel that these shapes will need. Without it, first calls compile one by one."""

    def every_call() -> None:
        meta_frames = torch.empty((1, *frames.shape[1:]), dtype=torch.uint8, device="meta")
        meta_slots = torch.empty((1, slots.shape[1]), dtype=slots.dtype, device="meta")
        shifts = torch.empty((1, 2), dtype=torch.int32, device="meta")
        meta_weights = [w.detach().to("meta") for w in weights]
        biases = [w.new_empty(layers.CHANNELS) for w in meta_weights]
        activations = _forward(meta_frames, meta_slots, shifts, [meta_weights], [biases])
        _forward(meta_frames, meta_slots, shifts, [meta_weights] * 2, [biases] * 2)
        single = [a[0] for a in activations]
        _backward(single[-1], meta_frames, meta_slots, shifts, meta_weights, single)

    runtime.compile_together(every_call)
