"""Rainbow + DrQ: the strongest agent for 100,000 steps of Atari that augmentation alone regularises.

Deep Q-learning of distributions over returns (C51), its targets and losses averaged over augmented views. Beside what
DQN has, each part a setting: prioritised replay (drq.priorities), a moving-average target that also acts, annealed
returns, a wide residual encoder, AdamW and resets. docs/atari.md says where each comes from.
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
from drq.agents.schedules import Resets, exponentially, forget, shrink_and_perturb
from drq.augment import parse
from drq.backend import Average, Backend, Pass
from drq.config import RainbowConfig
from drq.envs.protocol import EnvSpec
from drq.networks import PixelEncoder, StateEncoder, WideLinear, make_encoder, xavier_init
from drq.regularize import Transformations
from drq.replay import Batch


class DistributionalNetwork(nn.Module):
    """Encoded observations to logits of the return of every action: [B, actions, atoms].

    With one atom it is the value itself. Dueling: value and advantage read the same hidden units.
    """

    def __init__(
        self, backend: Backend, encoder: PixelEncoder | StateEncoder, actions: int, config: RainbowConfig
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.rescales = config.rescale_features and isinstance(encoder, PixelEncoder)
        self.shape = actions, config.atoms
        self.head = nn.ModuleDict(
            {
                "hidden": WideLinear(backend, encoder.output_size, config.hidden_dim),
                "advantage": nn.Linear(config.hidden_dim, actions * config.atoms),
            }
        )
        if config.dueling:
            self.head["value"] = nn.Linear(config.hidden_dim, config.atoms)
        xavier_init(self)

    def forward(self, convolved: Tensor) -> Tensor:
        if self.rescales:
            convolved = rescale(convolved)
        hidden = F.relu(self.head["hidden"](convolved))
        advantage: Tensor = self.head["advantage"](hidden).unflatten(1, self.shape)
        if "value" not in self.head:
            return advantage
        value: Tensor = self.head["value"](hidden)
        return value[:, None] + advantage - advantage.mean(1, keepdim=True)


def rescale(features: Tensor) -> Tensor:
    """Brings each image's features to [0, 1], by their own least and greatest."""
    features = features.float()
    least, greatest = features.amin(1, keepdim=True), features.amax(1, keepdim=True)
    return (features - least) / (greatest - least + 1e-5)


def project(reward: Tensor, discount: Tensor, probabilities: Tensor, atoms: Tensor) -> Tensor:
    """The distribution of reward + discount * return, on the atoms of the return: [B, atoms].

    Each probability moves to where its atom has moved, and is shared out between the two neighbours there in inverse
    proportion to their distances; beyond the ends it stays at the end.
    """
    moved = (reward[:, None] + discount[:, None] * atoms).clamp(atoms[0], atoms[-1])
    distance = (moved[:, None, :] - atoms[:, None]).abs() / (atoms[1] - atoms[0])
    return ((1.0 - distance).clamp(min=0.0) * probabilities[:, None, :]).sum(2)


class Rainbow:
    """The agent of the presets `strong` and `strong8`."""

    def __init__(self, spec: EnvSpec, config: RainbowConfig, backend: Backend | None = None) -> None:
        self.config = config
        self.batch_size = config.batch_size
        self.backend = backend = backend or Backend()
        self.image_size = (spec.frame_shape[1], spec.frame_shape[2]) if spec.pixels else (0, 0)
        self.epsilon = EpsilonGreedy(config, spec.action_size)
        self.exploration, self.evaluation = self.epsilon.exploration, self.epsilon.evaluation
        name = config.augmentation if spec.pixels else "none"
        self.f = backend.augmentation(parse(name, pad=config.pad, intensity_scale=config.intensity_scale))
        encoder = make_encoder(config.encoder, spec.observation_shape, backend, config.encoder_width)
        self.online = DistributionalNetwork(backend, encoder, spec.action_size, config).to(backend.device)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.acting = self.target if config.target_acts else self.online
        self.atoms = torch.linspace(-config.value_limit, config.value_limit, config.atoms, device=backend.device)
        """The returns that a distribution is over. Of one alone there is no distribution."""
        self.distributional = config.atoms > 1

        self.trained = list(self.online.parameters())
        rates = config.learning_rate, (config.adam_beta1, config.adam_beta2), config.adam_eps, config.weight_decay
        average = Average(list(self.target.parameters()), config.tau)
        self.optimizers: dict[str, Optimizer] = {"online": backend.adam(self.trained, *rates, average)}
        self.modules = nn.ModuleDict({"online": self.online, "target": self.target})
        self.resets = Resets.at_agent_steps(
            config.reset_every, config.last_reset, config.seed_steps, config.updates_per_step
        )

    @torch.no_grad()
    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        features = self.backend.encode(self.acting.encoder, obs)
        return self.epsilon.choose(self._values(self.acting(features)), noise)

    def draw(self, generator: Generator) -> Transformations:
        c = self.config
        return regularize.draw(self.f, c.batch_size, c.k, c.m, self.image_size, generator)

    def phase(self, update: int) -> None:
        return None

    def returns(self, update: int) -> Returns:
        """Long returns over a near horizon at first and after each reset, short ones over a far horizon later."""
        c = self.config
        share = self.resets.since(update) / c.anneal_updates if c.anneal_updates else 1.0
        n_step = round(exponentially(c.n_step, c.n_step_final, share))
        # Of γ it is the distance from 1, and with it the horizon, that is annealed.
        return Returns(n_step, 1.0 - exponentially(1.0 - c.discount, 1.0 - c.discount_final, share))

    def before_update(self, update: int, seed: int) -> None:
        if self.resets.due(update):
            for number, network in enumerate((self.online, self.target)):  # each with fresh weights of its own
                own = 2 * seed + number
                shrink_and_perturb(network.encoder, self.config.reset_keep, xavier_init, own)
                shrink_and_perturb(network.head, 0.0, xavier_init, own)
            forget(self.optimizers.values())

    def update(self, batch: Batch, draws: Transformations, phase: None) -> UpdateResult:
        loss, errors, metrics = self.loss(batch, draws)
        self.backend.descend(self.optimizers["online"], loss, self.trained)
        return UpdateResult(metrics, errors)

    def loss(self, batch: Batch, draws: Transformations) -> tuple[Tensor, Tensor, Metrics]:
        """J_Q of Algorithm 1, each transition's error, and metrics."""
        seen, *next_seen = self.features(batch, draws)
        predicted = self.backend.run(self.predictions, batch, seen)
        y = self.targets(batch, *next_seen)
        errors = self.backend.run(self.errors, predicted, y)
        loss, per_transition = regularize.loss(errors, batch)
        target_q = (y @ self.atoms if self.distributional else y).mean()
        return loss, per_transition, {"loss": loss.detach(), "target_q": target_q}

    def features(self, batch: Batch, draws: Transformations) -> list[Tensor]:
        """The online network's of f(s, ν), the target network's of f(s', ν'), and the online network's of the same,
        which in double Q-learning chooses the next action: of M, K and K views."""
        views, next_views = (
            self.backend.run(self.backend.views, self.f, states, nu)
            for states, nu in ((batch.obs, draws.nu), (batch.next_obs, draws.nu_next))
        )
        passes = [Pass(self.online.encoder, views, True), Pass(self.target.encoder, next_views, False)]
        if self.config.double:
            passes.append(Pass(self.online.encoder, next_views, False))
        return self.backend.encode_each(passes)

    def predictions(self, batch: Batch, features: Tensor) -> Tensor:
        """Logits of the return of f(s, ν), a of all views, [M * N, atoms]; or its value, [M * N]."""
        return self._at(self.online(features), regularize.repeat(batch.action, self.config.m))

    def targets(self, batch: Batch, rated: Tensor, chosen_by: Tensor | None = None) -> Tensor:
        """y of Algorithm 1, the mean over K views: what the target network makes of its features, of the best next
        action by the online network's, or else by its own."""
        # Two parts, so that neither network waits for the other.
        values = None if chosen_by is None else self.backend.run_beside(self.choosing_values, chosen_by)
        return self.backend.run(self.target_of, batch, self.backend.run_beside(self.ratings, rated), values)

    @torch.no_grad()
    def choosing_values(self, features: Tensor) -> Tensor:
        """Of the next actions in all views, [K * N, actions], by which double Q-learning chooses: the online
        network's."""
        return self._values(self.online(features))

    @torch.no_grad()
    def ratings(self, features: Tensor) -> Tensor:
        """The target network's logits of the next actions in all views, [K * N, actions, atoms]."""
        logits: Tensor = self.target(features)
        return logits

    @torch.no_grad()
    def target_of(self, batch: Batch, rated: Tensor, chosen_by: Tensor | None) -> Tensor:
        """The mean over K views of the projected distribution of the best next action, by these values or else by the
        ratings themselves."""
        best = (self._values(rated) if chosen_by is None else chosen_by).argmax(1)
        next_return = self._at(rated, best)
        if not self.distributional:
            return regularize.target(batch, next_return)
        reward, discount = (regularize.repeat(part, self.config.k) for part in (batch.reward, batch.discount))
        projected = project(reward, discount, next_return.softmax(1), self.atoms)
        return regularize.mean_over_views(projected, len(batch.reward))

    def errors(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Of every view: the cross-entropy to its target, or Huber's of values."""
        repeated = regularize.repeat(y, self.config.m)
        if not self.distributional:
            return F.huber_loss(predicted, repeated, reduction="none")
        return F.cross_entropy(predicted, repeated, reduction="none")

    def _values(self, logits: Tensor) -> Tensor:
        """Mean returns of all actions."""
        return logits.softmax(2) @ self.atoms if self.distributional else logits.squeeze(2)

    def _at(self, logits: Tensor, action: Tensor) -> Tensor:
        """Of one action in each row."""
        chosen = logits.gather(1, action[:, None, None].expand(-1, 1, logits.shape[2])).squeeze(1)
        return chosen if self.distributional else chosen.squeeze(1)
