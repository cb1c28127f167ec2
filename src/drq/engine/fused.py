"""An agent and its replay through the kernels, as far as they apply.

At best frames go from the replay to features and no view is ever written out; where the encoder is another, or the
precision, views are written in one launch and PyTorch convolves them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drq.agents.adam import FusedAdam
from drq.agents.encoding import PlainEncoding
from drq.agents.protocol import Agent
from drq.augment import Augmentation, Compose, Intensity, NoAugmentation, RandomShift
from drq.engine import kernels
from drq.networks.encoders import ConvReLU, Encoder, PixelEncoder
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

    def __init__(self, frame_shape: tuple[int, ...]) -> None:
        self._frame_shape = frame_shape

    def seen(self, encoder: Encoder, obs: Tensor) -> Tensor:
        # Frames that happen to lie in the order in which they are stacked.
        frames = obs.contiguous().view(-1, *self._frame_shape)
        slots = torch.arange(len(frames), device=obs.device).view(len(obs), -1)
        unshifted = torch.zeros(len(obs), 2, dtype=torch.int32, device=obs.device)
        return self.one(encoder, FrameViews(frames, slots, unshifted))

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


class StackedEncoding(PlainEncoding):
    """`PlainEncoding` whose views are stacked, shifted and, if that comes next, multiplied by an intensity in one
    launch; what else an augmentation does comes after."""

    def __init__(self, f: Augmentation) -> None:
        first, *rest = f.parts if isinstance(f, Compose) else (f,)
        self.shifted = first.columns > 0
        """Or only stacked."""
        self.intensity: float | None = None
        self._columns = first.columns
        if rest and type(rest[0]) is Intensity:  # one derived from it may do something else
            self.intensity = rest[0].scale
            self._columns += rest[0].columns
            del rest[0]
        self._rest = Compose(tuple(rest))

    def views(self, f: Augmentation, states: Tensor | StackedFrames, nu: Tensor) -> Tensor:
        assert isinstance(states, StackedFrames)
        begun = kernels.stacked_views(states, nu, shifted=self.shifted, intensity=self.intensity)
        return self._rest(begun, nu[:, self._columns :])


def begins_with_a_shift(f: Augmentation | None) -> bool:
    """Or with nothing, which is a shift by nothing."""
    return isinstance(f.parts[0] if isinstance(f, Compose) else f, RandomShift | NoAugmentation)


def use_kernels(agent: Agent, replay: Replay, *, convolve: bool) -> bool:
    """Gives the replay the one-launch store, and the agent the Adam, the encoding and what follows a convolution that
    its augmentation, its encoder and this GPU allow.

    Returns whether convolutions go through the kernels too, which `convolve` permits. That an agent has an `encoding`
    and an augmentation `f` is no part of the protocol: one that does not runs plainly. Everything is compiled first:
    where that fails, KernelError leaves agent and replay as they were.
    """
    kernels.transitions_kernel(replay)
    store = kernels.Store(replay)
    optimizers = [optimizer for optimizer in agent.optimizers.values() if isinstance(optimizer, FusedAdam)]
    descents = [kernels.Adam(replay.device) for _ in optimizers]
    f: Any = getattr(agent, "f", None)
    applicable = hasattr(agent, "encoding") and replay.spec.pixels and begins_with_a_shift(f)
    fused = applicable and convolve and not isinstance(f, Compose) and fuse(agent, replay)
    if not fused:
        convolutions = [module for module in agent.modules.modules() if isinstance(module, ConvReLU)]
        for channels in {module.out_channels for module in convolutions}:
            kernels.bias_relu_kernels(channels, torch.bfloat16 if convolve else torch.float32)
        if applicable:
            agent.encoding = _stacked(f, replay)  # type: ignore[attr-defined]
        for module in convolutions:
            module.bias_relu = kernels.bias_relu
    replay.write = store
    for optimizer, descend in zip(optimizers, descents, strict=True):
        optimizer.descend = descend
    return fused


def _stacked(f: Augmentation, replay: Replay) -> StackedEncoding:
    """With its kernel compiled."""
    encoding = StackedEncoding(f)
    multiplied = encoding.intensity is not None
    kernels.stacked_kernel(replay.frames, replay.spec.frame_stack, shifted=encoding.shifted, multiplied=multiplied)
    return encoding


def fuse(agent: Agent, replay: Replay) -> bool:
    """Gives the agent the fused encoding if its encoder is a `critic`'s and made of the layers that there are kernels
    for."""
    encoder = getattr(getattr(agent, "critic", None), "encoder", None)
    if not (isinstance(encoder, PixelEncoder) and encoder.name in ("sac-ae", "d4pg")):
        return False
    weights, _ = _parameters(encoder)
    if not kernels.supported(replay.frames, weights):
        return False
    slots = torch.zeros(1, replay.spec.frame_stack, dtype=torch.int64, device=replay.device)
    kernels.prepare(replay.frames, slots, weights)
    agent.encoding = FusedEncoding(replay.spec.frame_shape)  # type: ignore[attr-defined]
    return True


def _parameters(encoder: Encoder) -> tuple[list[Tensor], list[Tensor]]:
    assert isinstance(encoder, PixelEncoder)
    convolutions = [layer for layer in encoder.layers if isinstance(layer, nn.Conv2d)]
    return [layer.weight for layer in convolutions], [layer.bias for layer in convolutions if layer.bias is not None]
