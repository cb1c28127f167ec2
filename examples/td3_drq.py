"""DrQ for an agent of your own: TD3 from pixels, in one file.

    python examples/td3_drq.py                              TD3 + DrQ on a toy task, minutes on one CPU core
    python examples/td3_drq.py --agent.augmentation none    TD3 as it is
    python examples/td3_drq.py --agent.k 1 --agent.m 1      one view each (RAD)

The agent is ordinary TD3 except for the lines marked DrQ. It is trained by the package: `drq.train` brings the loop,
evaluations, checkpoints and exact resume, and the backend that it is constructed with brings CUDA graphs and kernels
where there is a GPU. One row in `drq.agents.AGENTS` would make `drq train TASK --agent td3` of it:

    "td3": AgentKind(TD3Config, "td3_drq:TD3", "continuous"),
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import tyro
from torch import Generator, Tensor, nn

import drq
from drq import regularize
from drq.agents import Returns, UpdateResult
from drq.augment import parse
from drq.backend import Backend
from drq.config import AgentConfig
from drq.envs import EnvSpec
from drq.networks import make_encoder
from drq.replay import Batch


@dataclass(frozen=True)
class TD3Config(AgentConfig):
    """Twin delayed deterministic policy gradient, regularised by DrQ. The defaults are for small pictures."""

    batch_size: int = 32
    """Transitions in a mini-batch."""
    discount: float = 0.9
    """Discount factor gamma."""
    seed_steps: int = 300
    """Agent steps with uniformly random actions before the first update."""
    learning_rate: float = 1e-3
    """Adam's, for actor and critic."""
    tau: float = 0.03
    """Rate of the target networks' moving average."""
    exploration: float = 0.8
    """Standard deviation of the noise on exploring actions."""
    smoothing: float = 0.2
    """The same for actions in the target, at most `smoothing_limit`."""
    smoothing_limit: float = 0.5
    """Bound of that noise."""
    actor_every: int = 2
    """Updates between two updates of the actor and the target networks."""
    centre: float = 0.02
    """Weight of a penalty that keeps the actor's tanh out of saturation while the critic knows little."""
    encoder: str = "d4pg"
    """Convolutions."""
    pad: int = 2
    """Random shift: 2 pixels of a small picture are as much as 4 of a large one."""


class Draws(NamedTuple):
    """The random numbers of one update."""

    transformations: regularize.Transformations
    smoothing: Tensor


class Networks(nn.Module):
    """The convolutions, an actor and a twin critic on their features."""

    def __init__(self, backend: Backend, spec: EnvSpec, encoder: str) -> None:
        super().__init__()
        self.encoder = make_encoder(encoder, spec.observation_shape, backend)
        self.trunk = nn.Sequential(nn.Linear(self.encoder.output_size, 50), nn.LayerNorm(50), nn.Tanh())
        self.actor = nn.Sequential(*hidden_layers(50), nn.Linear(128, spec.action_size))
        self.q1, self.q2 = (nn.Sequential(*hidden_layers(50 + spec.action_size), nn.Linear(128, 1)) for _ in range(2))

    def q(self, features: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([features, action], dim=1)
        return self.q1(joined).squeeze(1), self.q2(joined).squeeze(1)


def hidden_layers(inputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]


class TD3:
    """An agent as `drq.agents.Agent` describes it. The critic's loss alone trains the convolutions."""

    def __init__(self, spec: EnvSpec, config: TD3Config, backend: Backend) -> None:
        self.config, self.backend = config, backend
        self.batch_size, self.action_size = config.batch_size, spec.action_size
        self.image_size = spec.frame_shape[1], spec.frame_shape[2]
        self.f = backend.augmentation(parse(config.augmentation, pad=config.pad))  # DrQ
        self.online = Networks(backend, spec, config.encoder).to(backend.device)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.modules = nn.ModuleDict({"online": self.online, "target": self.target})
        self.actor_parameters = list(self.online.actor.parameters())
        theirs = set(self.actor_parameters)
        self.critic_parameters = [p for p in self.online.parameters() if p not in theirs]
        self.optimizers = {
            "critic": backend.adam(self.critic_parameters, config.learning_rate),
            "actor": backend.adam(self.actor_parameters, config.learning_rate),
        }

    def exploration(self, count: int, agent_step: int, generator: Generator) -> Tensor:
        return self.config.exploration * torch.randn(count, self.action_size, generator=generator)

    def evaluation(self, count: int, generator: Generator) -> Tensor:
        return torch.zeros(count, self.action_size)

    @torch.no_grad()
    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        features = self.features(self.online, obs)
        return (torch.tanh(self.online.actor(features)) + noise).clamp(-1, 1)

    def draw(self, generator: Generator) -> Draws:
        c = self.config
        size = c.k * c.batch_size, self.action_size
        noise = c.smoothing * torch.randn(size, generator=generator, device=generator.device)
        return Draws(
            regularize.draw(self.f, c.batch_size, c.k, c.m, self.image_size, generator),  # DrQ
            noise.clamp(-c.smoothing_limit, c.smoothing_limit),
        )

    def phase(self, update: int) -> bool:
        return update % self.config.actor_every == 0

    def returns(self, update: int) -> Returns:
        return Returns(self.config.n_step, self.config.discount)

    def before_update(self, update: int, seed: int) -> None:
        pass

    def update(self, batch: Batch, draws: Draws, phase: bool) -> UpdateResult:
        c, online = self.config, self.online
        views = self.backend.views(self.f, batch.obs, draws.transformations.nu)  # DrQ: not batch.obs
        action = regularize.repeat(batch.action, c.m)  # DrQ: one for each view, not batch.action
        q1, q2 = online.q(self.features(online, views), action)
        y = regularize.repeat(self.backend.run_beside(self.targets, batch, draws), c.m)  # DrQ: the same for each view
        loss1, errors = regularize.loss((q1 - y) ** 2, batch)  # DrQ: the mean over M views
        loss2, _ = regularize.loss((q2 - y) ** 2, batch)  # DrQ
        self.backend.descend(self.optimizers["critic"], loss1 + loss2, self.critic_parameters)

        if phase:
            with torch.no_grad():
                features = self.features(online, views.chunk(c.m)[0])
            before_tanh = online.actor(features)
            q1, _ = online.q(features, torch.tanh(before_tanh))
            loss = c.centre * before_tanh.square().mean() - q1.mean()
            self.backend.descend(self.optimizers["actor"], loss, self.actor_parameters)
            with torch.no_grad():
                torch._foreach_lerp_(list(self.target.parameters()), list(online.parameters()), c.tau)
        return UpdateResult({"critic_loss": (loss1 + loss2).detach(), "target_q": y.mean()}, errors)

    @torch.no_grad()
    def targets(self, batch: Batch, draws: Draws) -> Tensor:
        next_views = self.backend.views(self.f, batch.next_obs, draws.transformations.nu_next)  # DrQ
        features = self.features(self.target, next_views)
        action = (torch.tanh(self.target.actor(features)) + draws.smoothing).clamp(-1, 1)
        value = torch.minimum(*self.target.q(features, action))
        return regularize.target(batch, value)  # DrQ: r + γ value(s'), averaged over K views

    def features(self, networks: Networks, observations: drq.Views) -> Tensor:
        # The trunk is ordinary PyTorch, in float32; the encoder may give fewer digits.
        features: Tensor = networks.trunk(self.backend.encode(networks.encoder, observations).float())
        return features


SETTINGS = replace(
    drq.preset("cpu", "toy/reach"),
    agent=TD3Config(),
    steps=3_000,
    dir="runs/td3",
    env=drq.EnvConfig(image_size=24, frame_stack=1),
    eval=drq.EvalConfig(every=0, episodes=20, video=False),
)


def train(config: drq.TrainConfig = SETTINGS) -> float:
    """Trains TD3 with DrQ through the package's own loop; gives the mean return of the last evaluation."""
    spec, backend = drq.describe(config)
    torch.manual_seed(config.seed)
    assert isinstance(config.agent, TD3Config)
    return drq.train(config, agent=TD3(spec, config.agent, backend)).final_return


if __name__ == "__main__":
    train(tyro.cli(drq.TrainConfig, default=SETTINGS, config=(tyro.conf.AvoidSubcommands,)))
