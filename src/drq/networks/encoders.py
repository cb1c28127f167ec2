"""The five image encoders of the paper's first figure, one more, and one for state vectors.

An encoder is the convolutional part alone: actor and critic each follow it with a trunk of their own. Sizes are
worked out from the image, so any image size and number of channels that leaves at least one pixel will do.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from drq.backend import Backend
from drq.errors import UserError, did_you_mean

PIXEL_VALUES = 255.0
"""By which pixels are divided."""


def orthogonal_init(module: nn.Module) -> None:
    """Orthogonal weights, gain √2 for convolutions (ReLU follows them) and 1 for linear layers; zero biases."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            gain = math.sqrt(2) if isinstance(part, nn.Conv2d) else 1.0
            nn.init.orthogonal_(part.weight, gain)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def xavier_init(module: nn.Module, generator: Generator | None = None) -> None:
    """Xavier's uniform weights, zero biases."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(part.weight, generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


class Convolution(nn.Conv2d):
    """A convolution as the backend computes it, with the ReLU or the pool after it if there is one."""

    def __init__(
        self,
        backend: Backend,
        channels: int,
        out: int,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
        *,
        relu: bool = False,
        pool: bool = False,
    ) -> None:
        super().__init__(channels, out, kernel, stride, padding)
        self.backend = backend
        self.relu, self.pool = relu, pool
        self.register_buffer("rounded", None, persistent=False)

    rounded: Tensor | None
    """A copy of the weight in fewer digits, where the backend keeps one up to date to multiply with."""

    def forward(
        self, x: Tensor, divisor: float | None = None, *, relu_first: bool = False, plus: Tensor | None = None
    ) -> Tensor:
        """With a divisor, what x / divisor would give; with `relu_first`, what relu(x) would. `plus` is added at the
        end."""
        weight = self.weight if self.rounded is None else self.rounded
        if divisor is not None:
            weight = weight / divisor
        assert self.bias is not None
        return self.backend.convolution(
            x,
            weight,
            self.bias,
            stride=self.stride[0],
            padding=int(self.padding[0]),
            relu_first=relu_first,
            relu=self.relu,
            pool=self.pool,
            plus=plus,
        )


def _convolutions(backend: Backend, channels: int, width: int, layers: list[tuple[int, int, int]]) -> nn.Sequential:
    """Convolutions with ReLU from rows of (output channels, kernel, stride), `width` times as many channels."""
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (out, kernel, stride) in enumerate(layers):
        # Weights have the names that they would have if ReLUs were layers of their own.
        modules[str(2 * index)] = Convolution(backend, channels, out * width, kernel, stride, relu=True)
        channels = out * width
    return nn.Sequential(modules)


class _Residual(nn.Module):
    def __init__(self, backend: Backend, channels: int, *, fused: bool) -> None:
        """With `fused`, the ReLU in the middle is part of the convolution before it: it is rounded once, not twice."""
        super().__init__()
        self.fused = fused
        first, second = (Convolution(backend, channels, channels, 3, padding=1, relu=r) for r in (fused, False))
        # Weights have the names that they would have if ReLUs were layers of their own.
        self.body = nn.ModuleDict({"1": first, "3": second})

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.body.values()
        return second(first(x, relu_first=True), relu_first=not self.fused, plus=x)  # type: ignore[no-any-return]


def _impala(backend: Backend, channels: int, width: int, *, same: bool = False) -> nn.Sequential:
    modules: list[nn.Module] = []
    for out in (16 * width, 32 * width, 32 * width):
        modules += [
            Convolution(backend, channels, out, 3, padding=1, pool=same),
            nn.Identity() if same else nn.MaxPool2d(3, stride=2, padding=1),
            _Residual(backend, out, fused=same),
            _Residual(backend, out, fused=same),
        ]
        channels = out
    return nn.Sequential(*modules, nn.ReLU())


ENCODERS: dict[str, Callable[[Backend, int, int], nn.Sequential]] = {
    "sac-ae": lambda b, c, w: _convolutions(b, c, w, [(32, 3, 2), (32, 3, 1), (32, 3, 1), (32, 3, 1)]),
    "nature": lambda b, c, w: _convolutions(b, c, w, [(32, 8, 4), (64, 4, 2), (64, 3, 1)]),
    "dreamer": lambda b, c, w: _convolutions(b, c, w, [(32, 4, 2), (64, 4, 2), (128, 4, 2), (256, 4, 2)]),
    "impala": _impala,
    "d4pg": lambda b, c, w: _convolutions(b, c, w, [(32, 3, 2), (32, 3, 1)]),
    # As its authors and those after them have it: pools that pad as TensorFlow does.
    "impala-same": functools.partial(_impala, same=True),
}
"""Name to a function from the backend, the number of input channels and the width, which multiplies the others, to the
layers, of which the first is a `Convolution`."""


def check_encoder(name: str) -> None:
    """Refuses a name that no encoder has."""
    if name not in ENCODERS:
        meant = did_you_mean(name, ENCODERS)
        raise UserError(f"There is no encoder {name!r}.{meant} Choose from {', '.join(ENCODERS)}.")


class PixelEncoder(nn.Module):
    """Images with values 0 to 255, [B, C, H, W], to a flat feature vector."""

    def __init__(self, name: str, observation_shape: tuple[int, ...], backend: Backend, width: int = 1) -> None:
        super().__init__()
        check_encoder(name)
        channels, *image_size = observation_shape
        self.name = name
        self.layers = ENCODERS[name](backend, channels, width)
        orthogonal_init(self.layers)
        try:
            with torch.no_grad():
                shape = self.layers(torch.zeros(1, *observation_shape)).shape
        except RuntimeError as error:
            raise UserError(
                f"The encoder {name!r} cannot work on images of {'x'.join(map(str, image_size))}: "
                "choose larger images (--env.image-size) or another encoder (--agent.encoder)."
            ) from error
        self.output_size = math.prod(shape[1:])

    def forward(self, images: Tensor) -> Tensor:
        first, *rest = self.layers
        # Scaling comes after augmentation, so that augmentations see the pixels as they are. The first layer is linear:
        # dividing its weights by 255 is dividing the pixels, which are many. Pixels are put into the order in which
        # convolutions read them while they are still single bytes.
        convolved: Tensor = first(images.contiguous(memory_format=torch.channels_last), divisor=PIXEL_VALUES)
        for layer in rest:
            convolved = layer(convolved)
        return flattened(convolved)


def flattened(convolved: Tensor) -> Tensor:
    """[B, C, H, W] as a feature vector. A pixel's channels stay together: the order in which convolutions are fast, so
    that nothing is turned."""
    return convolved.permute(0, 2, 3, 1).flatten(1)


class StateEncoder(nn.Module):
    """A state vector is its own feature vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.output_size = size

    def forward(self, states: Tensor) -> Tensor:
        return states


def make_encoder(
    name: str, shape: tuple[int, ...], backend: Backend | None = None, width: int = 1
) -> PixelEncoder | StateEncoder:
    """The encoder for observations of this shape: the named one for images, none for state vectors."""
    return PixelEncoder(name, shape, backend or Backend(), width) if len(shape) == 3 else StateEncoder(shape[0])
