"""What follows the convolutions: trunks, the actor, the twin critic.

Only a trunk's first layer is the backend's, which may compute it with fewer digits, as it does convolutions. What comes
after it is float32: in bfloat16 a Q-value near 200 would move in steps of 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drq.backend import Backend
from drq.networks.encoders import PixelEncoder, StateEncoder, orthogonal_init


class WideLinear(nn.Linear):
    """A linear layer after convolutions, as the backend computes it."""

    def __init__(self, backend: Backend, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.backend = backend
        self.register_buffer("rounded", None, persistent=False)

    rounded: Tensor | None
    """As that of a `Convolution`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.wide_linear(x, self.weight if self.rounded is None else self.rounded, self.bias)


class Trunk(nn.Module):
    """Linear, LayerNorm, tanh: the 50 features that actor and critic each compute from the shared convolutions.

    State vectors pass unchanged.
    """

    def __init__(self, backend: Backend, encoder: PixelEncoder | StateEncoder, feature_dim: int) -> None:
        super().__init__()
        self.output_size = feature_dim if isinstance(encoder, PixelEncoder) else encoder.output_size
        self.linear: WideLinear | None = None
        if isinstance(encoder, PixelEncoder):
            self.linear = WideLinear(backend, encoder.output_size, feature_dim)
            self.norm = nn.LayerNorm(feature_dim)

    def forward(self, convolved: Tensor) -> Tensor:
        if self.linear is None:
            return convolved
        return torch.tanh(self.norm(self.linear(convolved)))


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Three linear layers with ReLU between them."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


class Policy(NamedTuple):
    """A tanh-Gaussian for each state."""

    mu: Tensor
    log_std: Tensor

    def sample(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The action tanh(μ + σ ε) for the given ε ~ N(0, 1), and its log-probability."""
        before_tanh = self.mu + self.log_std.exp() * noise
        gaussian = -0.5 * noise.square() - self.log_std - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(x)^2) in a form that does not lose its digits for large |x|.
        squash = 2.0 * (math.log(2.0) - before_tanh - F.softplus(-2.0 * before_tanh))
        return torch.tanh(before_tanh), (gaussian - squash).sum(-1)


class Actor(nn.Module):
    """Convolved observations to the policy."""

    def __init__(
        self,
        backend: Backend,
        encoder: PixelEncoder | StateEncoder,
        feature_dim: int,
        hidden_dim: int,
        action_size: int,
        log_std: tuple[float, float],
    ) -> None:
        super().__init__()
        self.log_std = log_std
        self.trunk = Trunk(backend, encoder, feature_dim)
        self.mlp = mlp(self.trunk.output_size, hidden_dim, 2 * action_size)
        orthogonal_init(self)

    def forward(self, convolved: Tensor) -> Policy:
        mu, raw = self.mlp(self.trunk(convolved)).chunk(2, dim=-1)
        low, high = self.log_std
        return Policy(mu, low + 0.5 * (high - low) * (torch.tanh(raw) + 1.0))


class TwinCritic(nn.Module):
    """Two Q-functions on one trunk."""

    def __init__(
        self,
        backend: Backend,
        encoder: PixelEncoder | StateEncoder,
        feature_dim: int,
        hidden_dim: int,
        action_size: int,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.trunk = Trunk(backend, encoder, feature_dim)
        self.q1 = mlp(self.trunk.output_size + action_size, hidden_dim, 1)
        self.q2 = mlp(self.trunk.output_size + action_size, hidden_dim, 1)
        for part in (self.trunk, self.q1, self.q2):
            orthogonal_init(part)

    def forward(self, convolved: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.trunk(convolved), action], dim=-1)
        return self.q1(joined).squeeze(-1), self.q2(joined).squeeze(-1)
