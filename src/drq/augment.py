"""Image transformations f(s, ν): the paper's "optimality invariant" perturbations.

An augmentation is two things: `sample` draws its parameters ν, one row for every image, and calling it applies f.
Drawing apart from applying keeps every update a pure function of its random numbers. Images are [B, C, H, W] with
values 0 to 255 (the encoder divides by 255 after augmentation); all stacked frames of an image share one row of ν.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from drq.envs.tasks import named_object
from drq.errors import UserError, did_you_mean, what_failed


class Augmentation(Protocol):
    """f and the distribution of its parameters ν."""

    @property
    def columns(self) -> int:
        """Numbers that ν has for each image."""
        ...

    def sample(self, count: int, image_size: tuple[int, int], generator: Generator) -> Tensor:
        """Draws ν for `count` images of (height, width): float32 [count, columns] on the generator's device."""
        ...

    def __call__(self, images: Tensor, nu: Tensor) -> Tensor:
        """f(images, ν). Gives uint8 back where the result is exact in it, float32 otherwise."""
        ...


def _uniform(low: float, high: float, count: int, generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=generator, device=generator.device)


@dataclass(frozen=True)
class NoAugmentation:
    """f(s, ν) = s: the unregularised algorithm."""

    columns = 0

    def sample(self, count: int, image_size: tuple[int, int], generator: Generator) -> Tensor:
        return torch.empty(count, 0, device=generator.device)

    def __call__(self, images: Tensor, nu: Tensor) -> Tensor:
        return images


@dataclass(frozen=True)
class RandomShift:
    """Pads each side by repeating the boundary, then crops back at random: a shift by -pad..+pad pixels.

    Padding and cropping by whole pixels is a gather with clamped indices, so that is what is done. Bilinear
    resampling, as in other implementations, blurs and is not the same thing.
    """

    pad: int = 4

    columns = 2

    def sample(self, count: int, image_size: tuple[int, int], generator: Generator) -> Tensor:
        offsets = torch.randint(-self.pad, self.pad + 1, (count, 2), generator=generator, device=generator.device)
        return offsets.float()

    def __call__(self, images: Tensor, nu: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        device = images.device
        dy, dx = nu.long().unbind(1)
        rows = (torch.arange(height, device=device) + dy[:, None]).clamp(0, height - 1)
        columns = (torch.arange(width, device=device) + dx[:, None]).clamp(0, width - 1)
        # Rows first, as whole rows, then columns: on a CPU four to five times faster than both at once.
        shifted = images[
            torch.arange(batch, device=device)[:, None, None],
            torch.arange(channels, device=device)[None, :, None],
            rows[:, None, :],
        ]
        return shifted.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))


@dataclass(frozen=True)
class Cutout:
    """With probability p blackens a rectangle: 2% to 33% of the image, side ratio 0.3 to 3.3 (kornia's defaults)."""

    p: float = 0.5
    area: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)

    columns = 4

    def sample(self, count: int, image_size: tuple[int, int], generator: Generator) -> Tensor:
        height, width = image_size
        area = _uniform(*self.area, count, generator) * height * width
        # Half of the rectangles are lying and half are standing, whatever the bounds of the ratio.
        low, high = self.ratio
        lying = _uniform(low, 1.0, count, generator)
        standing = _uniform(1.0, high, count, generator)
        ratio = torch.where(_uniform(0.0, 1.0, count, generator) < 0.5, lying, standing)
        h = (area * ratio).sqrt().round().clamp(1, height)
        w = (area / ratio).sqrt().round().clamp(1, width)
        top = (_uniform(0.0, 1.0, count, generator) * (height - h + 1)).floor()
        left = (_uniform(0.0, 1.0, count, generator) * (width - w + 1)).floor()
        used = _uniform(0.0, 1.0, count, generator) < self.p
        return torch.stack([top, left, h * used, w * used], dim=1)

    def __call__(self, images: Tensor, nu: Tensor) -> Tensor:
        top, left, h, w = (column[:, None, None] for column in nu.unbind(1))
        y = torch.arange(images.shape[-2], device=images.device)[None, :, None]
        x = torch.arange(images.shape[-1], device=images.device)[None, None, :]
        inside = (y >= top) & (y < top + h) & (x >= left) & (x < left + w)
        return images.masked_fill(inside[:, None], 0)


@dataclass(frozen=True)
class Flip:
    """Mirrors the image with probability p: along its width (horizontal) or its height (vertical)."""

    vertical: bool
    p: float = 0.1

    columns = 1

    def sample(self, count: int, image_size: tuple[int, int], generator: Generator) -> Tensor:
        return (_uniform(0.0, 1.0, count, generator) < self.p).float()[:, None]

    def __call__(self, images: Tensor, nu: Tensor) -> Tensor:
        mirrored = images.flip(-2 if self.vertical else -1)
        return torch.where(nu[:, :, None, None] > 0, mirrored, images)


@dataclass(frozen=True)
class Rotate:
    """Rotates by an angle uniform in [-degrees, degrees]; bilinear, black outside (the paper's printed "[-5, -5]")."""

    degrees: float = 5.0

    columns = 1

    def sample(self, count: int, image_size: tuple[int, int], generator: Generator) -> Tensor:
        return _uniform(-self.degrees, self.degrees, count, generator)[:, None]

    def __call__(self, images: Tensor, nu: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        angle = nu[:, 0] * (math.pi / 180)
        cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
        # affine_grid works in coordinates of [-1, 1]: a side's share keeps the rotation rigid in pixels.
        aspect = max(height - 1, 1) / max(width - 1, 1)
        theta = torch.stack([torch.stack([cos, -sin * aspect, zero], 1), torch.stack([sin / aspect, cos, zero], 1)], 1)
        grid = F.affine_grid(theta, list(images.shape), align_corners=True)
        return F.grid_sample(images.float(), grid, padding_mode="zeros", align_corners=True)


@dataclass(frozen=True)
class Intensity:
    """Multiplies the whole image by 1 + scale * clip(r, -2, 2), r ~ N(0, 1); the result is not clamped."""

    scale: float = 0.1

    columns = 1

    def sample(self, count: int, image_size: tuple[int, int], generator: Generator) -> Tensor:
        r = torch.randn(count, 1, generator=generator, device=generator.device)
        return r.clamp(-2.0, 2.0)

    def __call__(self, images: Tensor, nu: Tensor) -> Tensor:
        return images * (1.0 + self.scale * nu)[:, :, None, None]


@dataclass(frozen=True)
class Compose:
    """Several augmentations, the leftmost first."""

    parts: tuple[Augmentation, ...]

    @property
    def columns(self) -> int:
        return sum(part.columns for part in self.parts)

    def sample(self, count: int, image_size: tuple[int, int], generator: Generator) -> Tensor:
        return torch.cat([part.sample(count, image_size, generator) for part in self.parts], dim=1)

    def __call__(self, images: Tensor, nu: Tensor) -> Tensor:
        for part, own in zip(self.parts, nu.split([part.columns for part in self.parts], dim=1), strict=True):
            images = part(images, own)
        return images


def parse(name: str, *, pad: int = 4, intensity_scale: float = 0.1) -> Augmentation:
    """Makes the augmentation that a name such as `shift` or `shift+intensity` stands for.

    `my_module:my_augmentation` names an object or class of your own (docs/extending.md).
    """
    known: dict[str, Callable[[], Augmentation]] = {
        "none": NoAugmentation,
        "shift": lambda: RandomShift(pad),
        "cutout": Cutout,
        "hflip": lambda: Flip(vertical=False),
        "vflip": lambda: Flip(vertical=True),
        "rotate": Rotate,
        "intensity": lambda: Intensity(intensity_scale),
    }
    parts = []
    for part in name.split("+"):
        if ":" in part:
            parts.append(_imported(part))
        elif part in known:
            parts.append(known[part]())
        else:
            meant = did_you_mean(part, known)
            raise UserError(f"There is no augmentation {part!r}.{meant} Choose from {', '.join(known)}, joined by '+'.")
    return parts[0] if len(parts) == 1 else Compose(tuple(parts))


def try_out(name: str, shape: tuple[int, ...]) -> None:
    """Refuses an augmentation of the user's own that fails on images of this shape, before training has begun."""
    f, images = parse(name), torch.zeros(2, *shape, dtype=torch.uint8)
    try:
        nu = f.sample(2, (shape[1], shape[2]), Generator())
        drawn, given = tuple(nu.shape), tuple(f(images, nu).shape)
    except Exception as error:  # whatever its own code may raise
        raise UserError(f"The augmentation {name!r} failed {what_failed(error)}: mend that first.") from error
    if drawn != (2, f.columns) or given != tuple(images.shape):
        raise UserError(
            f"The augmentation {name!r} draws {drawn} and gives {given} for two images: "
            f"make it draw (2, {f.columns}) and give {tuple(images.shape)}, as docs/extending.md shows."
        )


def _imported(reference: str) -> Augmentation:
    made = named_object(reference, "augmentation", made=True)
    if not (callable(made) and callable(getattr(made, "sample", None)) and hasattr(made, "columns")):
        raise UserError(
            f"{reference!r} is not an augmentation: give it columns, sample and __call__ as docs/extending.md shows."
        )
    return cast(Augmentation, made)
