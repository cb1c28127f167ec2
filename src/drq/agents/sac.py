"""SAC + DrQ: soft actor-critic from pixels, with the critic's targets and losses averaged over augmented views.

The convolutions belong to the critic: its loss alone trains them, and the actor reads them. The actor's and the
critic's trunks are their own. What is called on `backend` is a few lines of PyTorch in drq/backend.py, which on a GPU
the engine does faster: `run(f, x)` is f(x), `descend` a gradient step.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from drq import regularize
from drq.agents.protocol import Metrics, Returns, UpdateResult
from drq.augment import parse
from drq.backend import Backend, Views
from drq.config import SACConfig
from drq.envs.protocol import EnvSpec
from drq.networks import Actor, Policy, TwinCritic, make_encoder
from drq.regularize import Transformations
from drq.replay import Batch


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

    def __init__(self, spec: EnvSpec, config: SACConfig, backend: Backend | None = None) -> None:
        self.config = config
        self.batch_size = config.batch_size
        self.backend = backend = backend or Backend()
        self.image_size = (spec.frame_shape[1], spec.frame_shape[2]) if spec.pixels else (0, 0)
        self.action_size = spec.action_size
        name = config.augmentation if spec.pixels else "none"
        self.f = backend.augmentation(parse(name, pad=config.pad, intensity_scale=config.intensity_scale))
        self.target_entropy = -float(spec.action_size) if config.target_entropy is None else config.target_entropy

        encoder = make_encoder(config.encoder, spec.observation_shape, backend)
        dims = config.feature_dim, config.hidden_dim, spec.action_size
        bounds = config.log_std_min, config.log_std_max
        self.critic = TwinCritic(backend, encoder, *dims).to(backend.device)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.actor = Actor(backend, encoder, *dims, bounds).to(backend.device)
        self.temperature = Temperature(config.init_temperature).to(backend.device)
        encoder.requires_grad_(not config.freeze_encoder)

        self.trained_by_critic = [p for p in self.critic.parameters() if p.requires_grad]
        self.optimizers: dict[str, Optimizer] = {
            "critic": backend.adam(self.trained_by_critic, config.learning_rate),
            "actor": backend.adam(list(self.actor.parameters()), config.learning_rate),
            "temperature": backend.adam(list(self.temperature.parameters()), config.learning_rate),
        }
        self.modules = nn.ModuleDict(
            {"critic": self.critic, "target": self.target, "actor": self.actor, "temperature": self.temperature}
        )

    def exploration(self, count: int, agent_step: int, generator: Generator) -> Tensor:
        return torch.randn(count, self.action_size, generator=generator, device=generator.device)

    def evaluation(self, count: int, generator: Generator) -> Tensor:
        # Without noise the sample tanh(μ + σ ε) is the mean action tanh(μ).
        return torch.zeros(count, self.action_size, device=generator.device)

    @torch.no_grad()
    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        policy: Policy = self.actor(self.backend.encode(self.critic.encoder, obs))
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

    def returns(self, update: int) -> Returns:
        return Returns(self.config.n_step, self.config.discount)

    def before_update(self, update: int, seed: int) -> None:
        pass

    def update(self, batch: Batch, draws: Draws, phase: Phase) -> UpdateResult:
        loss, errors, first_view, metrics = self.critic_loss(batch, draws)
        self.backend.descend(self.optimizers["critic"], loss, self.trained_by_critic)

        if phase.actor:
            self.critic.requires_grad_(False)  # the actor's loss passes through the critic and leaves it alone
            loss, entropy, more = self.backend.run(self.actor_loss, first_view, draws.actor_noise)
            self.backend.descend(self.optimizers["actor"], loss, list(self.actor.parameters()))
            for parameter in self.trained_by_critic:
                parameter.requires_grad_(True)
            # J(α) = α (H(π) - target): the temperature falls while the policy is more random than it should be.
            loss = self.temperature() * (entropy - self.target_entropy)
            self.backend.descend(self.optimizers["temperature"], loss, list(self.temperature.parameters()))
            metrics |= more | {"alpha": self.temperature().detach()}

        if phase.target:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.target.parameters()), list(self.critic.parameters()), self.config.tau)
        return UpdateResult(metrics, errors)

    def critic_loss(self, batch: Batch, draws: Draws) -> tuple[Tensor, Tensor, Views, Metrics]:
        """J_Q of Algorithm 1; each transition's error; the first view of the observations, which the actor learns
        from; metrics."""
        q1, q2, first_view = self.backend.run(self.predictions, batch, draws)
        y = self.backend.run_beside(self.targets, batch, draws)
        repeated = regularize.repeat(y, self.config.m)
        loss1, errors1 = regularize.loss(F.mse_loss(q1, repeated, reduction="none"), batch)
        loss2, errors2 = regularize.loss(F.mse_loss(q2, repeated, reduction="none"), batch)
        loss = loss1 + loss2
        metrics = {"critic_loss": loss.detach(), "target_q": y.mean(), "batch_reward": batch.reward.mean()}
        return loss, errors1 + errors2, first_view, metrics

    def predictions(self, batch: Batch, draws: Draws) -> tuple[Tensor, Tensor, Views]:
        """Both critics' Q(f(s, ν), a) of all views, and the first view."""
        views = self.backend.views(self.f, batch.obs, draws.transformations.nu)
        action = regularize.repeat(batch.action, self.config.m)
        q1, q2 = self.critic(self.backend.encode(self.critic.encoder, views), action)
        return q1, q2, views.chunk(self.config.m)[0]

    @torch.no_grad()
    def targets(self, batch: Batch, draws: Draws) -> Tensor:
        """y of Algorithm 1: the online actor on the online convolutions chooses each view's action, the target critic
        on its own rates it."""
        next_views = self.backend.views(self.f, batch.next_obs, draws.transformations.nu_next)
        online, rated = self.backend.encode_with_both(self.critic.encoder, self.target.encoder, next_views)
        policy: Policy = self.actor(online)
        action, log_prob = policy.sample(draws.target_noise)
        q1, q2 = self.target(rated, action)
        return regularize.target(batch, torch.minimum(q1, q2) - self.temperature() * log_prob)

    def actor_loss(self, obs: Views, noise: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        """J_π on one view, the policy's entropy, metrics. One pass through the convolutions serves both networks."""
        with torch.no_grad():
            convolved = self.backend.encode(self.critic.encoder, obs)
        action, log_prob = self.actor(convolved).sample(noise)
        q1, q2 = self.critic(convolved, action)
        loss = (self.temperature().detach() * log_prob - torch.minimum(q1, q2)).mean()
        entropy = -log_prob.detach().mean()
        return loss, entropy, {"actor_loss": loss.detach(), "entropy": entropy}
