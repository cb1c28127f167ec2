"""DrQ as a straightforward implementation is written: the yardstick of `drq speed`, and an oracle in its tests.

Stacked uint8 observations and next observations in host memory, batches by numpy indexing, one host-to-device copy
and one forward pass for every view, eager PyTorch, its default Adam. It shares no code with the rest of the package
and computes the same function (tests/test_plain_reference.py). It is written to be usual, not to be slow: nothing is
logged, nothing waits for the device except the copies, and cuDNN may search for its fastest algorithms.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

DISCOUNT = 0.99
LEARNING_RATE = 1e-3
TAU = 0.01
INIT_TEMPERATURE = 0.1
ACTOR_EVERY = TARGET_EVERY = 2
PAD = 4
LOG_STD_MIN, LOG_STD_MAX = -10.0, 2.0


class PlainEncoder(nn.Module):
    """Four convolutions of 32 channels."""

    def __init__(self, observation_shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, width = observation_shape
        self.convs = nn.ModuleList([nn.Conv2d(channels, 32, 3, stride=2), *(nn.Conv2d(32, 32, 3) for _ in range(3))])
        self.output_size = 32 * ((height - 1) // 2 - 6) * ((width - 1) // 2 - 6)

    def forward(self, obs: Tensor, detach: bool = False) -> Tensor:
        hidden = obs / 255.0
        for conv in self.convs:
            hidden = torch.relu(conv(hidden))
        features = hidden.flatten(1)
        return features.detach() if detach else features


def trunk(inputs: int, features: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, features), nn.LayerNorm(features), nn.Tanh())


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


class PlainCritic(nn.Module):
    """Two Q-functions on one encoder."""

    def __init__(self, encoder: PlainEncoder, features: int, hidden: int, action_size: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.trunk = trunk(encoder.output_size, features)
        self.q1 = mlp(features + action_size, hidden, 1)
        self.q2 = mlp(features + action_size, hidden, 1)

    def forward(self, obs: Tensor, action: Tensor, detach: bool = False) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.trunk(self.encoder(obs, detach)), action], dim=-1)
        return self.q1(joined), self.q2(joined)


class PlainActor(nn.Module):
    """A tanh-Gaussian policy on the critic's convolutions, which it does not train."""

    def __init__(self, encoder: PlainEncoder, features: int, hidden: int, action_size: int) -> None:
        super().__init__()
        self.trunk = trunk(encoder.output_size, features)
        self.policy = mlp(features, hidden, 2 * action_size)
        self._shared = [encoder]  # in a list, so that its parameters are not the actor's

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The action for this standard normal noise, and its log-probability."""
        mu, log_std = self.policy(self.trunk(self._shared[0](obs, detach=True))).chunk(2, dim=-1)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(log_std) + 1)
        before_tanh = mu + log_std.exp() * noise
        log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = log_prob - 2 * (math.log(2) - before_tanh - F.softplus(-2 * before_tanh))
        return torch.tanh(before_tanh), log_prob.sum(-1, keepdim=True)


def orthogonal_init(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.orthogonal_(part.weight, math.sqrt(2) if isinstance(part, nn.Conv2d) else 1.0)
            nn.init.zeros_(part.bias)  # type: ignore[arg-type]


def shift(images: Tensor, offsets: Tensor) -> Tensor:
    """Pads by repeating the boundary and crops every image at its own (row, column) offset of -PAD..PAD."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (PAD, PAD, PAD, PAD), mode="replicate")
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    top, left = (offsets + PAD).unbind(1)
    return windows[torch.arange(len(images), device=images.device), :, top, left]


class HostReplay:
    """Transitions in host memory, observations stacked and kept twice: as an observation and as a next one."""

    def __init__(self, observation_shape: tuple[int, int, int], action_size: int, capacity: int) -> None:
        self.obs = np.zeros((capacity, *observation_shape), dtype=np.uint8)
        self.next_obs = np.zeros_like(self.obs)
        self.action = np.zeros((capacity, action_size), dtype=np.float32)
        self.reward = np.zeros((capacity, 1), dtype=np.float32)
        self.not_done = np.ones((capacity, 1), dtype=np.float32)

    def fill(self, rng: np.random.Generator) -> None:
        """Random contents: zeros can be faster to work on than real images."""
        for images in (self.obs, self.next_obs):
            images[...] = np.frombuffer(rng.bytes(images.size), dtype=np.uint8).reshape(images.shape)
        self.action[...] = rng.uniform(-1, 1, self.action.shape)
        self.reward[...] = rng.uniform(0, 1, self.reward.shape)


class PlainDraws(NamedTuple):
    """Everything random in one update: N transitions, M views of the observation, K of the next one."""

    indices: NDArray[np.int64]
    shifts: Tensor
    """[M, N, 2]."""
    next_shifts: Tensor
    """[K, N, 2]."""
    target_noise: Tensor
    """[K, N, |A|]."""
    actor_noise: Tensor
    """[N, |A|]."""


class PlainDrQ:
    """SAC + DrQ with the paper's settings.

    Args:
        replay: where batches come from.
        tf32: let convolutions and matrix products round to TF32 on a GPU; otherwise whole float32.
        copy_per_view: copy an observation to the device once for each of its views, as the published
            implementations do. False: once.
    """

    def __init__(
        self,
        replay: HostReplay,
        device: torch.device,
        *,
        batch_size: int = 512,
        k: int = 2,
        m: int = 2,
        feature_dim: int = 50,
        hidden_dim: int = 1024,
        tf32: bool = False,
        copy_per_view: bool = True,
        seed: int = 1,
    ) -> None:
        self.replay = replay
        self.device = device
        self.batch_size, self.k, self.m = batch_size, k, m
        self.tf32 = tf32
        self.copy_per_view = copy_per_view
        self.rng = np.random.default_rng(seed)
        self.action_size = replay.action.shape[1]
        encoder = PlainEncoder(replay.obs.shape[1:])
        self.critic = PlainCritic(encoder, feature_dim, hidden_dim, self.action_size)
        self.actor = PlainActor(encoder, feature_dim, hidden_dim, self.action_size)
        orthogonal_init(self.critic)
        orthogonal_init(self.actor)
        self.critic.to(device)
        self.actor.to(device)
        self.target = copy.deepcopy(self.critic)
        self.log_alpha = torch.tensor(math.log(INIT_TEMPERATURE), device=device, requires_grad=True)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=LEARNING_RATE)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=LEARNING_RATE)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=LEARNING_RATE)
        self.updates = 0

    def apply_globally(self) -> None:
        """Sets PyTorch's process-wide switches, which whoever ran before may have set otherwise."""
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.deterministic = False

    def draw(self) -> PlainDraws:
        n, device = self.batch_size, self.device
        return PlainDraws(
            self.rng.integers(len(self.replay.obs), size=n),
            torch.randint(-PAD, PAD + 1, (self.m, n, 2), device=device),
            torch.randint(-PAD, PAD + 1, (self.k, n, 2), device=device),
            torch.randn(self.k, n, self.action_size, device=device),
            torch.randn(n, self.action_size, device=device),
        )

    def update(self, draws: PlainDraws | None = None) -> dict[str, Tensor]:
        """One update; the losses stay on the device."""
        draws = draws or self.draw()
        indices = draws.indices
        obs_views = self._views(self.replay.obs[indices], draws.shifts)
        next_views = self._views(self.replay.next_obs[indices], draws.next_shifts)
        action = torch.as_tensor(self.replay.action[indices], device=self.device)
        reward = torch.as_tensor(self.replay.reward[indices], device=self.device)
        not_done = torch.as_tensor(self.replay.not_done[indices], device=self.device)

        losses = {"critic_loss": self._update_critic(obs_views, action, reward, not_done, next_views, draws)}
        if self.updates % ACTOR_EVERY == 0:
            losses["actor_loss"] = self._update_actor(obs_views[0], draws.actor_noise)
        if self.updates % TARGET_EVERY == 0:
            with torch.no_grad():
                for slow, fast in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                    slow.lerp_(fast, TAU)
        self.updates += 1
        return losses

    def _views(self, images: NDArray[np.uint8], shifts: Tensor) -> list[Tensor]:
        """One perturbed copy for each row of shifts."""
        if self.copy_per_view:
            return [shift(self._to_device(images), offsets) for offsets in shifts]
        copied = self._to_device(images)
        return [shift(copied, offsets) for offsets in shifts]

    def _to_device(self, images: NDArray[np.uint8]) -> Tensor:
        return torch.as_tensor(images, device=self.device).float()

    def _update_critic(
        self,
        obs_views: Iterable[Tensor],
        action: Tensor,
        reward: Tensor,
        not_done: Tensor,
        next_views: Iterable[Tensor],
        draws: PlainDraws,
    ) -> Tensor:
        with torch.no_grad():
            values = []
            for next_obs, noise in zip(next_views, draws.target_noise, strict=True):
                next_action, log_prob = self.actor(next_obs, noise)
                q1, q2 = self.target(next_obs, next_action)
                values.append(torch.min(q1, q2) - self.log_alpha.exp() * log_prob)
            y = reward + not_done * DISCOUNT * sum(values) / self.k
        loss = torch.zeros((), device=self.device)
        for obs in obs_views:
            q1, q2 = self.critic(obs, action)
            loss = loss + (F.mse_loss(q1, y) + F.mse_loss(q2, y)) / self.m
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        return loss.detach()

    def _update_actor(self, obs: Tensor, noise: Tensor) -> Tensor:
        action, log_prob = self.actor(obs, noise)
        q1, q2 = self.critic(obs, action, detach=True)
        loss: Tensor = (self.log_alpha.exp().detach() * log_prob - torch.min(q1, q2)).mean()
        self.actor_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()

        alpha_loss = self.log_alpha.exp() * (-log_prob.detach().mean() + self.action_size)
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()
        return loss.detach()
