"""The five image encoders of the paper's first figure, and one for state vectors.

An encoder is the convolutional part alone: actor and critic each follow it with a trunk of their own. Sizes are
worked out from the image, so any image size and number of channels that leaves at least one pixel will do.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from difflib import get_close_matches
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drq.errors import UserError


def orthogonal_init(module: nn.Module) -> None:
    """Orthogonal weights, gain √2 for convolutions (ReLU follows them) and 1 for linear layers; zero biases."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            gain = math.sqrt(2) if isinstance(part, nn.Conv2d) else 1.0
            nn.init.orthogonal_(part.weight, gain)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


class ConvReLU(nn.Conv2d):
    """An unpadded convolution and the ReLU after it."""

    bias_relu: Callable[[Tensor, Tensor], Tensor] | None = None
    """relu(x + bias) in one pass over x, where the engine has one. None: the convolution adds the bias itself."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.bias_relu is None or bias is None:
            return F.relu(super()._conv_forward(input, weight, bias))
        return self.bias_relu(super()._conv_forward(input, weight, None), bias)


def _convolutions(channels: int, layers: list[tuple[int, int, int]]) -> nn.Sequential:
    """Convolutions with ReLU from rows of (output channels, kernel, stride)."""
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (out, kernel, stride) in enumerate(layers):
        # Weights have the names that they would have if ReLUs were layers of their own.
        modules[str(2 * index)] = ConvReLU(channels, out, kernel, stride)
        channels = out
    return nn.Sequential(modules)


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


def _impala(channels: int) -> nn.Sequential:
    modules: list[nn.Module] = []
    for out in (16, 32, 32):
        modules += [
            nn.Conv2d(channels, out, 3, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
            _Residual(out),
            _Residual(out),
        ]
        channels = out
    return nn.Sequential(*modules, nn.ReLU())


ENCODERS: dict[str, Callable[[int], nn.Sequential]] = {
    "sac-ae": lambda c: _convolutions(c, [(32, 3, 2), (32, 3, 1), (32, 3, 1), (32, 3, 1)]),
    "nature": lambda c: _convolutions(c, [(32, 8, 4), (64, 4, 2), (64, 3, 1)]),
    "dreamer": lambda c: _convolutions(c, [(32, 4, 2), (64, 4, 2), (128, 4, 2), (256, 4, 2)]),
    "impala": _impala,
    "d4pg": lambda c: _convolutions(c, [(32, 3, 2), (32, 3, 1)]),
}
"""Name to a function from the number of input channels to the layers."""


def _as_factors(images: Tensor, weight: Tensor) -> Tensor:
    """Pixels as what convolutions with this weight multiply. Whole numbers up to 255 are exact in each precision.

    They are put in the order in which convolutions read them while they are still single bytes.
    """
    kind = images.device.type
    precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return images.contiguous(memory_format=torch.channels_last).to(precision)


class PixelEncoder(nn.Module):
    """Images with values 0 to 255, [B, C, H, W], to a flat feature vector."""

    def __init__(self, name: str, observation_shape: tuple[int, ...]) -> None:
        super().__init__()
        if name not in ENCODERS:
            near = get_close_matches(name, ENCODERS, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"There is no encoder {name!r}.{meant} Choose from {', '.join(ENCODERS)}.")
        channels, height, width = observation_shape
        self.name = name
        self.layers = ENCODERS[name](channels)
        orthogonal_init(self.layers)
        try:
            with torch.no_grad():
                shape = self.layers(torch.zeros(1, *observation_shape)).shape
        except RuntimeError as error:
            raise UserError(
                f"The encoder {name!r} cannot work on images of {height}x{width}: "
                "choose larger images (--env.image-size) or another encoder (--agent.encoder)."
            ) from error
        self.output_size = math.prod(shape[1:])

    def forward(self, images: Tensor) -> Tensor:
        first, *rest = self.layers
        assert isinstance(first, nn.Conv2d)
        # Scaling comes after augmentation, so that augmentations see the pixels as they are. The first layer is linear:
        # dividing its weights by 255 is dividing the pixels, which are many.
        convolved: Tensor = first._conv_forward(_as_factors(images, first.weight), first.weight / 255.0, first.bias)
        for layer in rest:
            convolved = layer(convolved)
        # A pixel's channels stay together: the order in which convolutions are fast, so that nothing is turned.
        return convolved.permute(0, 2, 3, 1).flatten(1)


class StateEncoder(nn.Module):
    """A state vector is its own feature vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.output_size = size

    def forward(self, states: Tensor) -> Tensor:
        return states


Encoder = PixelEncoder | StateEncoder


def make_encoder(name: Literal["sac-ae", "nature", "dreamer", "impala", "d4pg"], shape: tuple[int, ...]) -> Encoder:
    """The encoder for observations of this shape: the named one for images, none for state vectors."""
    return PixelEncoder(name, shape) if len(shape) == 3 else StateEncoder(shape[0])
