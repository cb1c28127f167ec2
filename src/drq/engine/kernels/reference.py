"""What the encoder's kernels compute, in plain PyTorch: their oracle in tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def perturbed_views(frames: Tensor, slots: Tensor, shifts: Tensor) -> Tensor:
    """Stacks of frames, each shifted: [B, stack * channels, H, W], uint8.

    `frames` [F, channels, H, W]; `slots` [B, stack], oldest frame first; `shifts` [B, 2] = (dy, dx).
    out[y, x] = in[clamp(y + dy), clamp(x + dx)]: a replicate-padded random crop.
    """
    height, width = frames.shape[2:]
    rows = (torch.arange(height, device=frames.device) + shifts[:, :1]).clamp(0, height - 1)
    columns = (torch.arange(width, device=frames.device) + shifts[:, 1:]).clamp(0, width - 1)
    slot = slots.long()[:, :, None, None, None]
    channel = torch.arange(frames.shape[1], device=frames.device)[None, None, :, None, None]
    views = frames[slot, channel, rows[:, None, None, :, None], columns[:, None, None, None, :]]
    return views.flatten(1, 2)


def convolve(views: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Activations of every layer, NCHW, in the precision of the weights. The first layer has stride 2."""
    x = views.to(weights[0].dtype) / 255
    activations = []
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = F.relu(F.conv2d(x, weight, bias, stride=2 if layer == 0 else 1))
        activations.append(x)
    return activations


def encode_views(
    frames: Tensor, slots: Tensor, shifts: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """The encoder on perturbed views, [B, height * width * 32]: pixel after pixel, a pixel's channels together."""
    last = convolve(perturbed_views(frames, slots, shifts), weights, biases)[-1]
    return last.permute(0, 2, 3, 1).flatten(1)
