"""The paper's encoder through the kernels: frames go from the replay to features, and no view is ever written out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from drq.agents.protocol import Agent
from drq.augment import Augmentation, NoAugmentation, RandomShift
from drq.engine import kernels
from drq.networks.encoders import Encoder, PixelEncoder
from drq.replay import Replay, StackedFrames


class FrameViews(NamedTuple):
    """Shifted observations as references into the ring of frames."""

    frames: Tensor
    slots: Tensor
    shifts: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.slots.shape


class FusedEncoding:
    """`drq.agents.encoding.Encoding` for random shifts (or none) and encoders of 3 x 3 layers with 32 channels."""

    def views(self, f: Augmentation, states: Tensor | StackedFrames, nu: Tensor) -> FrameViews:
        assert isinstance(states, StackedFrames)
        slots = states.slots.repeat(nu.shape[0] // states.slots.shape[0], 1)
        shifts = nu.int() if nu.shape[1] else torch.zeros(len(nu), 2, dtype=torch.int32, device=nu.device)
        return FrameViews(states.frames, slots, shifts)

    def first(self, views: FrameViews, n: int) -> FrameViews:
        return FrameViews(views.frames, views.slots[:n], views.shifts[:n])

    def one(self, encoder: Encoder, views: FrameViews) -> Tensor:
        return kernels.encode_views(*views, *_parameters(encoder))

    def two(self, encoder: Encoder, other: Encoder, views: FrameViews) -> tuple[Tensor, Tensor]:
        return kernels.encode_views_two(*views, *_parameters(encoder), *_parameters(other))


def fuse(agent: Agent, replay: Replay) -> bool:
    """Gives the agent the fused encoding if its encoder, its augmentation and this GPU allow it.

    That an agent has an `encoding`, an augmentation `f` and a `critic` with an encoder is no part of the protocol:
    SAC has them, and an agent that does not runs plainly.
    """
    encoder = getattr(getattr(agent, "critic", None), "encoder", None)
    f = getattr(agent, "f", None)
    if not (hasattr(agent, "encoding") and isinstance(encoder, PixelEncoder)):
        return False
    if not isinstance(f, RandomShift | NoAugmentation) or encoder.name not in ("sac-ae", "d4pg"):
        return False
    weights, _ = _parameters(encoder)
    if not kernels.supported(replay.frames, weights):
        return False
    slots = torch.zeros(1, replay.spec.frame_stack, dtype=torch.int64, device=replay.device)
    kernels.prepare(replay.frames, slots, weights)
    agent.encoding = FusedEncoding()
    return True


def _parameters(encoder: Encoder) -> tuple[list[Tensor], list[Tensor]]:
    assert isinstance(encoder, PixelEncoder)
    convolutions = [layer for layer in encoder.layers if isinstance(layer, nn.Conv2d)]
    return [layer.weight for layer in convolutions], [layer.bias for layer in convolutions if layer.bias is not None]
