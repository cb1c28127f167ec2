"""Epsilon-greedy play, for agents that value every action."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from drq.config import DiscreteConfig


class EpsilonGreedy:
    """The best action, or now and then any."""

    def __init__(self, config: DiscreteConfig, actions: int) -> None:
        self.config = config
        self.actions = actions

    def __call__(self, agent_step: int) -> float:
        """ε, the share of random actions: 1 until learning begins, then linearly down to its final value."""
        c = self.config
        learning = agent_step - c.seed_steps
        if learning < 0:
            return 1.0
        left = 1.0 - learning / c.epsilon_decay_steps if learning < c.epsilon_decay_steps else 0.0
        return c.epsilon_final + (1.0 - c.epsilon_final) * left

    def exploration(self, count: int, agent_step: int, generator: Generator) -> Tensor:
        """Numbers for `choose` in training."""
        return self._noise(count, self(agent_step), generator)

    def evaluation(self, count: int, generator: Generator) -> Tensor:
        """Numbers for `choose` in an evaluation."""
        return self._noise(count, self.config.epsilon_eval, generator)

    def _noise(self, count: int, epsilon: float, generator: Generator) -> Tensor:
        """Columns: a uniform number that decides below ε for a random action, another that chooses it, and ε."""
        noise = torch.rand(count, 3, generator=generator, device=generator.device)
        noise[:, 2] = epsilon
        return noise

    def choose(self, values: Tensor, noise: Tensor) -> Tensor:
        """Actions, from the values of all of them."""
        decides, chooses, epsilon = noise.unbind(1)
        random_action = (chooses * self.actions).long().clamp(max=self.actions - 1)
        return torch.where(decides < epsilon, random_action, values.argmax(1))
