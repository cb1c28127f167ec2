"""Soft actor-critic with Algorithm 1 as the paper prints them: one image, one view, one sample at a time.

Written for the tests from the equations, with nothing of the package but the names of its weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from drq.agents.sac import Draws
from drq.config import SACConfig
from drq.replay import Batch


class Paper:
    """Soft actor-critic and Algorithm 1 as they are printed, on dictionaries of weights."""

    def __init__(self, weights: dict[str, Tensor], config: SACConfig) -> None:
        self.config = config
        self.w = {name: value.clone() for name, value in weights.items()}
        convolutions = self.names("critic.encoder.")
        self.critic_names = [*([] if config.freeze_encoder else convolutions), *self.names("critic.trunk.")]
        self.critic_names += [*self.names("critic.q1."), *self.names("critic.q2.")]
        self.actor_names = self.names("actor.")
        self.optimizers = {
            "critic": self.adam(self.critic_names),
            "actor": self.adam(self.actor_names),
            "temperature": self.adam(["temperature.log_alpha"]),
        }

    def names(self, prefix: str) -> list[str]:
        return [name for name in self.w if name.startswith(prefix)]

    def adam(self, names: Iterable[str]) -> torch.optim.Adam:
        return torch.optim.Adam([self.w[name].requires_grad_() for name in names], lr=1e-3, foreach=False)

    def shifted(self, image: Tensor, nu: Tensor) -> Tensor:
        """f: pad by 4, crop at ν. State vectors have no ν."""
        if image.dim() == 1:
            return image
        padded = F.pad(image[None].double(), (4, 4, 4, 4), mode="replicate")[0]
        top, left = (4 + int(number) for number in nu)
        _, height, width = image.shape
        return padded[:, top : top + height, left : left + width]

    def convolved(self, network: str, image: Tensor) -> Tensor:
        if image.dim() == 1:
            return image
        x = image / 255
        for layer, stride in ((0, 2), (2, 1), (4, 1), (6, 1)):
            name = f"{network}.encoder.layers.{layer}"
            x = F.conv2d(x[None], self.w[f"{name}.weight"], self.w[f"{name}.bias"], stride)[0].clamp(min=0)
        return x.permute(1, 2, 0).flatten()

    def features(self, network: str, convolved: Tensor) -> Tensor:
        """Linear, LayerNorm, tanh."""
        if f"{network}.trunk.linear.weight" not in self.w:
            return convolved
        x = self.w[f"{network}.trunk.linear.weight"] @ convolved + self.w[f"{network}.trunk.linear.bias"]
        x = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()
        return (x * self.w[f"{network}.trunk.norm.weight"] + self.w[f"{network}.trunk.norm.bias"]).tanh()

    def layers(self, name: str, x: Tensor) -> Tensor:
        for number in (0, 2, 4):
            x = self.w[f"{name}.{number}.weight"] @ x + self.w[f"{name}.{number}.bias"]
            x = x if number == 4 else x.clamp(min=0)
        return x

    def act(self, image: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """a ~ π(·|s) and log π(a|s). The actor reads the critic's convolutions and gives them no gradient."""
        x = self.features("actor", self.convolved("critic", image).detach())
        mu, raw = self.layers("actor.mlp", x).chunk(2)
        low, high = self.config.log_std_min, self.config.log_std_max
        std = (low + (high - low) * (raw.tanh() + 1) / 2).exp()
        tanh = TanhTransform(cache_size=1)
        policy = Independent(TransformedDistribution(Normal(mu, std), [tanh], validate_args=False), 1)
        action = tanh(mu + std * noise)
        return action, policy.log_prob(action)

    def q(self, network: str, image: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.features(network, self.convolved(network, image)), action])
        return self.layers(f"{network}.q1", joined)[0], self.layers(f"{network}.q2", joined)[0]

    def update(self, batch: Batch, draws: Draws, number: int) -> tuple[list[float], dict[str, float]]:
        """Gives each transition's squared error, averaged over views, and what is logged."""
        config, nu = self.config, draws.transformations
        n, actions = batch.action.shape
        alpha = self.w["temperature.log_alpha"].detach().exp()
        # Line by line of Algorithm 1.
        j_q = torch.zeros((), dtype=torch.float64)
        errors, target_q = [0.0] * n, 0.0
        for i in range(n):
            with torch.no_grad():
                mean_value = torch.zeros((), dtype=torch.float64)
                for k in range(config.k):
                    s_next = self.shifted(batch.next_obs[i], nu.nu_next[k * n + i])
                    a_next, log_prob = self.act(s_next, draws.target_noise[k * n + i])
                    mean_value += (min(self.q("target", s_next, a_next)) - alpha * log_prob) / config.k
                y = batch.reward[i] + batch.discount[i] * mean_value
                target_q += float(y) / n
            for m in range(config.m):
                s = self.shifted(batch.obs[i], nu.nu[m * n + i])
                q1, q2 = self.q("critic", s, batch.action[i])
                error = (q1 - y) ** 2 + (q2 - y) ** 2
                errors[i] += float(error.detach()) / config.m
                j_q = j_q + error * (1 if batch.weights is None else batch.weights[i]) / (n * config.m)
        self.descend("critic", j_q, self.critic_names)
        mean_reward = sum(batch.reward.tolist()) / n
        metrics = {"critic_loss": float(j_q.detach()), "target_q": target_q, "batch_reward": mean_reward}

        if number % config.actor_every == 0:
            j_pi = torch.zeros((), dtype=torch.float64)
            entropy = 0.0
            for i in range(n):
                s = self.shifted(batch.obs[i], nu.nu[i])  # the first view alone
                action, log_prob = self.act(s, draws.actor_noise[i])
                j_pi = j_pi + (alpha * log_prob - min(self.q("critic", s, action))) / n
                entropy -= float(log_prob.detach()) / n
            self.descend("actor", j_pi, self.actor_names)
            j_alpha = self.w["temperature.log_alpha"].exp() * (entropy + actions)
            self.descend("temperature", j_alpha, ["temperature.log_alpha"])
            new_alpha = float(self.w["temperature.log_alpha"].detach().exp())
            metrics |= {"actor_loss": float(j_pi.detach()), "entropy": entropy, "alpha": new_alpha}

        if number % config.target_every == 0:
            for name in self.names("target."):
                online = self.w[name.replace("target.", "critic.", 1)].detach()
                self.w[name] = (1 - config.tau) * self.w[name] + config.tau * online
        return errors, metrics

    def descend(self, optimizer: str, loss: Tensor, names: list[str]) -> None:
        gradients = torch.autograd.grad(loss, [self.w[name] for name in names])
        for name, gradient in zip(names, gradients, strict=True):
            self.w[name].grad = gradient
        self.optimizers[optimizer].step()
