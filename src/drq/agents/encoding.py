"""How observations are encoded, and views of a batch made: by default, plainly. The engine may put a faster way in its
place."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from drq import regularize
from drq.augment import Augmentation
from drq.networks.encoders import Encoder
from drq.replay import StackedFrames

Views = Any
"""Perturbed observations, a tensor [copies * N, ...] or whatever stands for one; `shape[0]` counts them."""


class Encoding(Protocol):
    """The passes through the convolutions that acting and an update consist of."""

    def seen(self, encoder: Encoder, obs: Tensor) -> Tensor:
        """The features of observations as they are, without gradient."""
        ...

    def views(self, f: Augmentation, states: Tensor | StackedFrames, nu: Tensor) -> Views:
        """All perturbed copies of the states, f(s, ν)."""
        ...

    def first(self, views: Views, n: int) -> Views:
        """The first n views."""
        ...

    def one(self, encoder: Encoder, views: Views) -> Tensor:
        """The features of the views."""
        ...

    def two(self, encoder: Encoder, other: Encoder, views: Views) -> tuple[Tensor, Tensor]:
        """The features of the same views by two encoders, without gradient."""
        ...


class PlainEncoding:
    """Augment, then convolve."""

    def seen(self, encoder: Encoder, obs: Tensor) -> Tensor:
        features: Tensor = encoder(obs)
        return features

    def views(self, f: Augmentation, states: Tensor | StackedFrames, nu: Tensor) -> Tensor:
        return regularize.views(f, states, nu)

    def first(self, views: Tensor, n: int) -> Tensor:
        return views[:n]

    def one(self, encoder: Encoder, views: Tensor) -> Tensor:
        features: Tensor = encoder(views)
        return features

    def two(self, encoder: Encoder, other: Encoder, views: Tensor) -> tuple[Tensor, Tensor]:
        return encoder(views), other(views)
