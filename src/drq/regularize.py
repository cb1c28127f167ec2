"""Algorithm 1: data-regularised Q, for any critic.

    y_i    = 1/K Σ_k target(f(s'_i, ν'_ik))                        one target for every view of s_i
    J_Q(θ) = 1/NM Σ_i Σ_m error(Q_θ(f(s_i, ν_im), a_i), y_i)

A view f(s, ν) is the image s transformed, as shifted by a few pixels; ν are the random parameters, here the offsets.
An agent makes views of a batch, computes a target for each view of s' and an error for each view of s, and this file
averages them. A target is a number, r + γ Q_θ'(s', a') with a' ~ π(·|s') (SAC: Q_θ' minus α log π(a'|s')), or a
distribution over returns. K = M = 1 is the plain algorithm on perturbed images (RAD); without augmentation it is the
plain algorithm.

Views of N states lie behind each other, [views * N, ...]: every state's first view, then every state's second.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from drq.augment import Augmentation
from drq.replay import Batch


class Transformations(NamedTuple):
    """The parameters of one update's augmentations, drawn independently of each other."""

    nu: Tensor
    """ν_im: [M * N, columns]."""
    nu_next: Tensor
    """ν'_ik: [K * N, columns]."""


def draw(f: Augmentation, n: int, k: int, m: int, image_size: tuple[int, int], generator: Generator) -> Transformations:
    """Draws ν and ν' for a mini-batch of n transitions."""
    return Transformations(nu=f.sample(m * n, image_size, generator), nu_next=f.sample(k * n, image_size, generator))


def repeat(per_transition: Tensor, views: int) -> Tensor:
    """Lays [N, ...] out beside the views: [views * N, ...]."""
    return per_transition.repeat(views, *(1 for _ in per_transition.shape[1:]))


@torch.no_grad()
def mean_over_views(per_view: Tensor, n: int) -> Tensor:
    """Of each of n transitions, whose views have numbers [views * N] or distributions [views * N, atoms]."""
    return per_view.view(-1, n, *per_view.shape[1:]).mean(0)


@torch.no_grad()
def target(batch: Batch, values: Tensor) -> Tensor:
    """y for numbers: the reward and the discounted mean over K views of the next state's value, [K * N].

    `batch.discount` is γ (γⁿ of a return of n steps), and 0 where the return ended.
    """
    return batch.reward + batch.discount * mean_over_views(values, batch.reward.shape[0])


def loss(errors: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """J_Q, the mean over N transitions and M views of the errors [M * N], and each transition's own: [N].

    Where transitions have weights, each counts as much as its weight says. Two critics have two losses; add them up.
    """
    per_transition = mean_over_views(errors, batch.reward.shape[0])
    if batch.weights is None:
        return errors.mean(), per_transition
    return (errors * repeat(batch.weights, errors.shape[0] // batch.weights.shape[0])).mean(), per_transition
