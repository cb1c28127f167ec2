"""SAC + DrQ: soft actor-critic from pixels, with the critic's targets and losses averaged over augmented views.

The convolutions belong to the critic: its loss alone trains them, and the actor reads them. The actor's and the
critic's trunks are their own.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from drq import regularize
from drq.agents.adam import FusedAdam
from drq.agents.encoding import Encoding, PlainEncoding, Views
from drq.agents.protocol import Beside, Metrics
from drq.augment import Augmentation, parse
from drq.config import SACConfig
from drq.envs.protocol import EnvSpec
from drq.networks.encoders import make_encoder
from drq.networks.heads import Actor, Policy, TwinCritic
from drq.regularize import Transformations
from drq.replay import Batch

squared_error = partial(F.mse_loss, reduction="none")


class Draws(NamedTuple):
    """The random numbers of one update."""

    transformations: Transformations
    target_noise: Tensor
    """ε of the next actions: [K * N, |A|]."""
    actor_noise: Tensor
    """ε of the actor's actions: [N, |A|]."""


class Phase(NamedTuple):
    """What an update does beside the critic."""

    actor: bool
    target: bool


class Temperature(nn.Module):
    """The weight α of the policy's entropy."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial)))

    def forward(self) -> Tensor:
        return self.log_alpha.exp()


class SAC:
    """The agent of the paper's control experiments."""

    compiled = ("predictions", "targets", "actor_loss")

    def __init__(
        self,
        spec: EnvSpec,
        config: SACConfig,
        device: torch.device,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.config = config
        self.batch_size = config.batch_size
        self.encoding: Encoding = PlainEncoding()
        self.beside: Beside = nullcontext
        self.image_size = (spec.frame_shape[1], spec.frame_shape[2]) if spec.pixels else (0, 0)
        self.action_size = spec.action_size
        self.f = augmentation or parse(
            config.augmentation if spec.pixels else "none",
            pad=config.pad,
            intensity_scale=config.intensity_scale,
        )
        self.target_entropy = -float(spec.action_size) if config.target_entropy is None else config.target_entropy

        encoder = make_encoder(config.encoder, spec.observation_shape)
        dims = config.feature_dim, config.hidden_dim, spec.action_size
        bounds = config.log_std_min, config.log_std_max
        self.critic = TwinCritic(encoder, *dims).to(device)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.actor = Actor(encoder, *dims, bounds).to(device)
        self.temperature = Temperature(config.init_temperature).to(device)
        encoder.requires_grad_(not config.freeze_encoder)

        self.trained_by_critic = [p for p in self.critic.parameters() if p.requires_grad]
        self.optimizers: dict[str, Optimizer] = {
            "critic": FusedAdam(self.trained_by_critic, config.learning_rate),
            "actor": FusedAdam(list(self.actor.parameters()), config.learning_rate),
            "temperature": FusedAdam(list(self.temperature.parameters()), config.learning_rate),
        }
        self.modules = nn.ModuleDict(
            {
                "critic": self.critic,
                "target": self.target,
                "actor": self.actor,
                "temperature": self.temperature,
            }
        )

    def exploration(self, count: int, agent_step: int, generator: Generator) -> Tensor:
        return torch.randn(count, self.action_size, generator=generator, device=generator.device)

    def evaluation(self, count: int, generator: Generator) -> Tensor:
        # Without noise the sample tanh(μ + σ ε) is the mean action tanh(μ).
        return torch.zeros(count, self.action_size, device=generator.device)

    @torch.no_grad()
    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        policy: Policy = self.actor(self.encoding.seen(self.critic.encoder, obs))
        return policy.sample(noise)[0]

    def draw(self, generator: Generator) -> Draws:
        c, device = self.config, generator.device
        return Draws(
            regularize.draw(self.f, c.batch_size, c.k, c.m, self.image_size, generator),
            torch.randn(c.k * c.batch_size, self.action_size, generator=generator, device=device),
            torch.randn(c.batch_size, self.action_size, generator=generator, device=device),
        )

    def phase(self, update: int) -> Phase:
        return Phase(update % self.config.actor_every == 0, update % self.config.target_every == 0)

    def update(self, batch: Batch, draws: Draws, phase: Phase) -> Metrics:
        loss, first_view, metrics = self.critic_loss(batch, draws)
        self._descend("critic", loss, self.trained_by_critic)

        if phase.actor:
            self.critic.requires_grad_(False)  # the actor's loss passes through the critic and leaves it alone
            loss, entropy, more = self.actor_loss(first_view, draws.actor_noise)
            self._descend("actor", loss, list(self.actor.parameters()))
            for parameter in self.trained_by_critic:
                parameter.requires_grad_(True)
            # J(α) = α (H(π) - target): the temperature falls while the policy is more random than it should be.
            loss = self.temperature() * (entropy - self.target_entropy)
            self._descend("temperature", loss, list(self.temperature.parameters()))
            metrics |= more | {"alpha": self.temperature().detach()}

        if phase.target:
            with torch.no_grad():
                torch._foreach_lerp_(
                    list(self.target.parameters()), list(self.critic.parameters()), self.config.tau
                )
        return metrics

    def critic_loss(self, batch: Batch, draws: Draws) -> tuple[Tensor, Views, Metrics]:
        """J_Q of Algorithm 1; the first view of the observations, which the actor learns from; metrics."""
        q1, q2, first_view = self.predictions(batch, draws)
        with self.beside():
            y = self.targets(batch, draws)
        loss = regularize.loss(q1, y, squared_error) + regularize.loss(q2, y, squared_error)
        metrics = {"critic_loss": loss.detach(), "target_q": y.mean(), "batch_reward": batch.reward.mean()}
        return loss, first_view, metrics

    def predictions(self, batch: Batch, draws: Draws) -> tuple[Tensor, Tensor, Views]:
        """Both critics' Q(f(s, ν), a) of all views, and the first view."""
        obs_views = self.encoding.views(self.f, batch.obs, draws.transformations.nu)
        action = regularize.repeat(batch.action, self.config.m)
        q1, q2 = self.critic(self.encoding.one(self.critic.encoder, obs_views), action)
        return q1, q2, self.encoding.first(obs_views, self.config.batch_size)

    def targets(self, batch: Batch, draws: Draws) -> Tensor:
        """y of Algorithm 1."""

        def soft_value(next_views: Views) -> Tensor:
            # The online actor on the online convolutions chooses; the target critic on its own rates.
            online, rated = self.encoding.two(self.critic.encoder, self.target.encoder, next_views)
            policy: Policy = self.actor(online)
            action, log_prob = policy.sample(draws.target_noise)
            q1, q2 = self.target(rated, action)
            alpha: Tensor = self.temperature()
            return torch.minimum(q1, q2) - alpha * log_prob

        next_views = self.encoding.views(self.f, batch.next_obs, draws.transformations.nu_next)
        return regularize.target(batch, next_views, soft_value)

    def actor_loss(self, obs: Views, noise: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        """J_π on one view, the policy's entropy, metrics. One pass through the convolutions serves both networks."""
        with torch.no_grad():
            convolved = self.encoding.one(self.critic.encoder, obs)
        action, log_prob = self.actor(convolved).sample(noise)
        q1, q2 = self.critic(convolved, action)
        loss = (self.temperature().detach() * log_prob - torch.minimum(q1, q2)).mean()
        entropy = -log_prob.detach().mean()
        return loss, entropy, {"actor_loss": loss.detach(), "entropy": entropy}

    def _descend(self, name: str, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        optimizer = self.optimizers[name]
        optimizer.zero_grad(set_to_none=True)
        loss.backward(inputs=parameters)
        optimizer.step()
