"""Linear layers of a width that tensor cores' fast kernels do not take, such as the paper's 50 features."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from drq.agents.protocol import Agent

ALIGNED = 8
"""Outputs in 16 bytes, which those kernels read and write at a time: any multiple will do for them."""
TILE = 64
"""Outputs that they compute together. On an H200, 1,024 x 39,200 inputs and 64 outputs take 33 us, 50 outputs 76 us."""
WIDE_INPUT = 4096
"""Inputs from which the layer's time is worth a copy of its weights."""


def align(agent: Agent) -> None:
    """Has such layers compute a few outputs more, of zero weights, and drop them. The function stays the same."""
    for layer in agent.modules.modules():
        if isinstance(layer, nn.Linear) and layer.out_features % ALIGNED and layer.in_features >= WIDE_INPUT:
            layer.forward = partial(padded, layer)  # type: ignore[method-assign]


def padded(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """`layer(inputs)`, by a matrix product whose width is a multiple of `TILE`."""
    missing = -layer.out_features % TILE
    weight = F.pad(layer.weight.to(inputs.dtype), (0, 0, 0, missing))
    bias = None if layer.bias is None else F.pad(layer.bias.to(inputs.dtype), (0, missing))
    return F.linear(inputs, weight, bias)[:, : layer.out_features]
