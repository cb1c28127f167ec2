"""Algorithm 1: data-regularised Q, for any critic.

An agent brings two functions that it would have anyway, and this file does the rest:

    value(s')   a sample of the next state's value, Q_θ'(s', a') with a' ~ π(·|s')  (SAC: minus α log π(a'|s'))
    error(q, y) the error of a prediction against its target, e.g. (q - y)², one number for every pair

    y_i    = r_i + γ 1/K Σ_k value(f(s'_i, ν'_ik))            the same target for every view of s_i
    J_Q(θ) = 1/NM Σ_i Σ_m error(Q_θ(f(s_i, ν_im), a_i), y_i)

K = M = 1 is the plain algorithm on perturbed images (RAD); without augmentation it is the plain algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from drq.augment import Augmentation
from drq.replay import Batch, StackedFrames


class Transformations(NamedTuple):
    """The parameters of one update's augmentations, drawn independently of each other."""

    nu: Tensor
    """ν_im: [M * N, columns]."""
    nu_next: Tensor
    """ν'_ik: [K * N, columns]."""


def draw(
    f: Augmentation, n: int, k: int, m: int, image_size: tuple[int, int], generator: Generator
) -> Transformations:
    """Draws ν and ν' for a mini-batch of n transitions."""
    return Transformations(
        nu=f.sample(m * n, image_size, generator), nu_next=f.sample(k * n, image_size, generator)
    )


def views(f: Augmentation, states: Tensor | StackedFrames, nu: Tensor) -> Tensor:
    """All perturbed copies of the states, as one batch: [N, ...] and ν of [copies * N] give [copies * N, ...].

    The first N are every state's first view, the next N its second.
    """
    states = states.tensor() if isinstance(states, StackedFrames) else states
    return f(repeat(states, nu.shape[0] // states.shape[0]), nu)


def repeat(per_transition: Tensor, copies: int) -> Tensor:
    """Lays [N, ...] out beside the views: [copies * N, ...]."""
    return per_transition.repeat(copies, *(1 for _ in per_transition.shape[1:]))


@torch.no_grad()
def target(batch: Batch, next_views: Any, value: Callable[[Any], Tensor]) -> Tensor:
    """y: the reward and the discounted mean over K views of the next state's value, each with its own action."""
    values = value(next_views)
    return batch.reward + batch.discount * values.view(-1, batch.reward.shape[0]).mean(0)


def loss(q: Tensor, y: Tensor, error: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """J_Q: the mean over N transitions and M views of the error against one target per transition.

    q is Q_θ(f(s, ν), a) of all views: [M * N]. Two critics have two losses; add them up.
    """
    return error(q, repeat(y, q.shape[0] // y.shape[0])).mean()
