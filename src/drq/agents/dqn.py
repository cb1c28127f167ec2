"""Efficient DQN + DrQ: deep Q-learning for discrete actions, its targets and losses averaged over augmented views.

Double, dueling, with n-step returns (the replay builds those). Without augmentation it is the paper's "Efficient DQN".
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from drq import regularize
from drq.agents.exploration import EpsilonGreedy
from drq.agents.protocol import Metrics, Returns, UpdateResult
from drq.augment import parse
from drq.backend import Backend, Views
from drq.config import DQNConfig
from drq.envs.protocol import EnvSpec
from drq.networks import PixelEncoder, StateEncoder, WideLinear, make_encoder, orthogonal_init
from drq.regularize import Transformations
from drq.replay import Batch


class QNetwork(nn.Module):
    """Encoded observations to the values of all actions.

    The dueling head is Q(s, a) = V(s) + A(s, a) - mean over a' of A(s, a'). V and A each have hidden units of their
    own; with `shared_hidden` they read the same ones.

    Weights start orthogonal, with zero biases, as in the rest of the package: the paper names no initialisation for
    Atari, and this is its authors' for control.
    """

    def __init__(self, backend: Backend, encoder: PixelEncoder | StateEncoder, actions: int, config: DQNConfig) -> None:
        super().__init__()
        self.encoder = encoder
        streams = 2 if config.dueling and not config.shared_hidden else 1
        self.hidden = nn.ModuleList(WideLinear(backend, encoder.output_size, config.hidden_dim) for _ in range(streams))
        self.advantage = nn.Linear(config.hidden_dim, actions)
        self.value = nn.Linear(config.hidden_dim, 1) if config.dueling else None
        for part in (self.hidden, self.advantage, self.value):
            if part is not None:
                orthogonal_init(part)

    def forward(self, convolved: Tensor) -> Tensor:
        hidden = [F.relu(layer(convolved)) for layer in self.hidden]
        advantage: Tensor = self.advantage(hidden[0])
        if self.value is None:
            return advantage
        value: Tensor = self.value(hidden[-1])
        return value + advantage - advantage.mean(1, keepdim=True)


class DQN:
    """The agent of the paper's Atari experiments."""

    def __init__(self, spec: EnvSpec, config: DQNConfig, backend: Backend | None = None) -> None:
        self.config = config
        self.batch_size = config.batch_size
        self.backend = backend = backend or Backend()
        self.image_size = (spec.frame_shape[1], spec.frame_shape[2]) if spec.pixels else (0, 0)
        self.epsilon = EpsilonGreedy(config, spec.action_size)
        self.exploration, self.evaluation = self.epsilon.exploration, self.epsilon.evaluation
        name = config.augmentation if spec.pixels else "none"
        self.f = backend.augmentation(parse(name, pad=config.pad, intensity_scale=config.intensity_scale))
        encoder = make_encoder(config.encoder, spec.observation_shape, backend)
        self.online = QNetwork(backend, encoder, spec.action_size, config).to(backend.device)
        # Copied after every update, the target network is the online network at every update: one will do.
        self.copies_target = config.target_every > 1
        self.target = copy.deepcopy(self.online).requires_grad_(False) if self.copies_target else self.online
        encoder.requires_grad_(not config.freeze_encoder)

        self.trained = [p for p in self.online.parameters() if p.requires_grad]
        betas = config.adam_beta1, config.adam_beta2
        self.optimizers: dict[str, Optimizer] = {
            "online": backend.adam(self.trained, config.learning_rate, betas, config.adam_eps)
        }
        self.modules = nn.ModuleDict({"online": self.online})
        if self.copies_target:
            self.modules["target"] = self.target

    @torch.no_grad()
    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        return self.epsilon.choose(self._values(self.online, obs), noise)

    def draw(self, generator: Generator) -> Transformations:
        c = self.config
        return regularize.draw(self.f, c.batch_size, c.k, c.m, self.image_size, generator)

    def phase(self, update: int) -> bool:
        """Whether this update ends with a copy into the target network."""
        return self.copies_target and (update + 1) % self.config.target_every == 0

    def returns(self, update: int) -> Returns:
        return Returns(self.config.n_step, self.config.discount)

    def before_update(self, update: int, seed: int) -> None:
        pass

    def update(self, batch: Batch, draws: Transformations, phase: bool) -> UpdateResult:
        loss, errors, metrics = self.loss(batch, draws)
        norm = self.backend.descend(self.optimizers["online"], loss, self.trained, self.config.max_grad_norm)
        assert norm is not None
        if phase:
            with torch.no_grad():
                torch._foreach_copy_(list(self.target.parameters()), list(self.online.parameters()))
        return UpdateResult(metrics | {"grad_norm": norm}, errors)

    def loss(self, batch: Batch, draws: Transformations) -> tuple[Tensor, Tensor, Metrics]:
        """J_Q of Algorithm 1, each transition's error, and metrics."""
        q = self.backend.run(self.predictions, batch, draws)
        y = self.backend.run_beside(self.targets, batch, draws)
        error = F.huber_loss if self.config.loss == "huber" else F.mse_loss
        loss, errors = regularize.loss(error(q, regularize.repeat(y, self.config.m), reduction="none"), batch)
        return loss, errors, {"q": q.detach().mean(), "loss": loss.detach(), "target_q": y.mean()}

    def predictions(self, batch: Batch, draws: Transformations) -> Tensor:
        """Q(f(s, ν), a) of all views."""
        views = self.backend.views(self.f, batch.obs, draws.nu)
        return _at(self._values(self.online, views), regularize.repeat(batch.action, self.config.m))

    @torch.no_grad()
    def targets(self, batch: Batch, draws: Transformations) -> Tensor:
        """y of Algorithm 1: the target network rates each view's action; double Q-learning lets the online network
        choose it."""
        next_views = self.backend.views(self.f, batch.next_obs, draws.nu_next)
        rated = self._values(self.target, next_views)
        chooser = self.online if self.config.double else self.target
        best = rated if chooser is self.target else self._values(chooser, next_views)
        return regularize.target(batch, _at(rated, best.argmax(1)))

    def _values(self, network: QNetwork, observations: Views) -> Tensor:
        values: Tensor = network(self.backend.encode(network.encoder, observations))
        return values


def _at(q: Tensor, action: Tensor) -> Tensor:
    """The value of one action in each row."""
    return q.gather(1, action[:, None]).squeeze(1)
