"""DrQ for an agent of your own: TD3 from pixels, on a toy task, in one file.

    python examples/td3_drq.py                          TD3 + DrQ, under a minute on one CPU core
    python examples/td3_drq.py --augmentation none      TD3 as it is
    python examples/td3_drq.py --k 1 --m 1              one view each (RAD)

Everything below is ordinary TD3 except for the lines marked DrQ.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
import tyro
from torch import Generator, Tensor, nn

from drq import augment, envs, regularize
from drq.config import EnvConfig
from drq.envs import Environment, EnvSpec
from drq.replay import Batch, Replay

DISCOUNT, BATCH, TAU, LEARNING_RATE = 0.9, 32, 0.03, 1e-3
EXPLORATION, SMOOTHING, SMOOTHING_LIMIT = 0.8, 0.2, 0.5
ACTOR_EVERY = 2
CENTRE = 0.02
"""Weight of a penalty that keeps the actor's tanh out of saturation while the critic knows little."""
SEED_STEPS = 300
"""Agent steps with random actions before the first update."""


class Networks(nn.Module):
    """The convolutions, an actor and a twin critic on their features."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        channels, height, width = spec.observation_shape
        convolutions = nn.Sequential(
            nn.Conv2d(channels, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten()
        )
        size = convolutions(torch.zeros(1, channels, height, width)).shape[1]
        self.encoder = nn.Sequential(convolutions, nn.Linear(size, 50), nn.LayerNorm(50), nn.Tanh())
        self.actor = nn.Sequential(*hidden_layers(50), nn.Linear(128, spec.action_size))
        self.q1, self.q2 = (
            nn.Sequential(*hidden_layers(50 + spec.action_size), nn.Linear(128, 1)) for _ in range(2)
        )

    def encode(self, images: Tensor) -> Tensor:
        features: Tensor = self.encoder(images.float() / 255)
        return features

    def policy(self, features: Tensor) -> Tensor:
        return torch.tanh(self.actor(features))

    def q(self, features: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([features, action], dim=1)
        return self.q1(joined).squeeze(1), self.q2(joined).squeeze(1)


def hidden_layers(inputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]


class TD3:
    """Twin delayed deterministic policy gradient. The critic's loss alone trains the convolutions."""

    def __init__(self, spec: EnvSpec, augmentation: str, k: int, m: int) -> None:
        self.online = Networks(spec)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        online = self.online
        self.critic_parameters = [*online.encoder.parameters(), *online.q1.parameters(), *online.q2.parameters()]
        self.actor_parameters = list(online.actor.parameters())
        self.critic_optimizer = torch.optim.Adam(self.critic_parameters, LEARNING_RATE)
        self.actor_optimizer = torch.optim.Adam(self.actor_parameters, LEARNING_RATE)
        self.image_size = spec.frame_shape[1], spec.frame_shape[2]
        # 2 pixels of a small picture are as much as 4 of a large one.
        self.f = augment.parse(augmentation, pad=2)  # DrQ
        self.k, self.m = k, m  # DrQ
        self.updates = 0

    @torch.no_grad()
    def act(self, observation: np.ndarray) -> np.ndarray:
        features = self.online.encode(torch.from_numpy(observation)[None])
        action: np.ndarray = self.online.policy(features)[0].numpy()
        return action

    def update(self, batch: Batch, generator: Generator) -> None:
        drawn = regularize.draw(self.f, BATCH, self.k, self.m, self.image_size, generator)  # DrQ
        next_views = regularize.views(self.f, batch.next_obs, drawn.nu_next)  # DrQ: not batch.next_obs
        views = regularize.views(self.f, batch.obs, drawn.nu)  # DrQ: not batch.obs

        def value(next_obs: Tensor) -> Tensor:
            features = self.target.encode(next_obs)
            noise = SMOOTHING * torch.randn(len(next_obs), batch.action.shape[1], generator=generator)
            action = self.target.policy(features) + noise.clamp(-SMOOTHING_LIMIT, SMOOTHING_LIMIT)
            return torch.minimum(*self.target.q(features, action.clamp(-1, 1)))

        def squared_error(q: Tensor, y: Tensor) -> Tensor:
            return (q - y) ** 2

        y = regularize.target(batch, next_views, value)  # DrQ: r + γ value(s'), averaged over K views
        action = regularize.repeat(batch.action, self.m)  # DrQ: one for each view, not batch.action
        q1, q2 = self.online.q(self.online.encode(views), action)
        loss = regularize.loss(q1, y, squared_error) + regularize.loss(q2, y, squared_error)  # DrQ: over M views
        descend(self.critic_optimizer, loss, self.critic_parameters)

        if self.updates % ACTOR_EVERY == 0:
            features = self.online.encode(views[:BATCH]).detach()
            before_tanh = self.online.actor(features)
            q1, _ = self.online.q(features, torch.tanh(before_tanh))
            loss = CENTRE * before_tanh.square().mean() - q1.mean()
            descend(self.actor_optimizer, loss, self.actor_parameters)
            with torch.no_grad():
                for averaged, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    averaged.lerp_(new, TAU)
        self.updates += 1


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, parameters: list[nn.Parameter]) -> None:
    optimizer.zero_grad()
    loss.backward(inputs=parameters)
    optimizer.step()


def evaluate(agent: TD3, env: Environment, episodes: int) -> float:
    """Mean return without exploration."""
    total = 0.0
    for episode in range(episodes):
        frame, done = env.reset(seed=10_000 + episode), False
        while not done:
            frame, _, _, done, score = env.step(agent.act(frame))
            total += score
    return total / episodes


def train(
    steps: int = 3000, seed: int = 1, augmentation: str = "shift", k: int = 2, m: int = 2, episodes: int = 20
) -> float:
    """Trains TD3 with DrQ on toy/reach and evaluates it.

    Args:
        steps: agent steps to train for.
        seed: everything random follows from it.
        augmentation: shift, cutout, hflip, vflip, rotate, intensity, none, or several joined by `+`.
        k: views of the next observation averaged in the target.
        m: views of the observation averaged in the loss.
        episodes: episodes of the evaluation at the end.
    """
    torch.manual_seed(seed)
    generator = Generator().manual_seed(seed)
    env = envs.make("toy/reach", EnvConfig(image_size=24, frame_stack=1), action_repeat=1)
    agent = TD3(env.spec, augmentation, k, m)
    replay = Replay(env.spec, capacity=steps, discount=DISCOUNT, device=torch.device("cpu"))
    random = np.random.default_rng(seed)

    episode, frame = 0, env.reset(seed)
    replay.begin(frame)
    for agent_step in range(steps):
        if agent_step < SEED_STEPS:
            action = random.uniform(-1, 1, env.spec.action_size).astype(np.float32)
        else:
            noise = EXPLORATION * random.standard_normal(env.spec.action_size)
            action = np.clip(agent.act(frame) + noise, -1, 1).astype(np.float32)
            agent.update(replay.gather(replay.sample(BATCH, generator)), generator)
        frame, reward, discount, done, _ = env.step(action)
        replay.add(action, reward, discount, done, frame)
        if done:
            episode += 1
            frame = env.reset(seed + episode)
            replay.begin(frame)

    mean = evaluate(agent, env, episodes)
    spec = env.spec
    print(f"return {mean:.1f} after {steps:,} agent steps (random {spec.random_return}, perfect {spec.perfect_return})")
    return mean


if __name__ == "__main__":
    tyro.cli(train)
