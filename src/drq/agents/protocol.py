"""What an agent is to the rooms after it.

An agent is plain PyTorch: networks, losses, what to update when. It draws nothing itself (random numbers are handed
in), and knows no device, no file and no logger.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from drq.replay import Batch

Metrics = dict[str, Tensor]
"""Scalars by name, left on the device until somebody looks."""

Beside = Callable[[], AbstractContextManager[None]]
"""Makes a context for a part of an update that needs nothing but the batch, the random numbers and the weights as they
were when the update began: a GPU may compute it beside what the update has done so far. An agent that has an attribute
`beside`, at first `nullcontext`, is given another by the engine."""


class Agent(Protocol):
    """SAC, DQN, or one of your own."""

    @property
    def modules(self) -> nn.ModuleDict:
        """All parameters and buffers, target networks included: what is saved."""
        ...

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """By name."""
        ...

    @property
    def batch_size(self) -> int:
        """Transitions in the batch of an update."""
        ...

    @property
    def compiled(self) -> tuple[str, ...]:
        """Names of the methods that are pure functions of tensors, which the engine may compile."""
        ...

    def exploration(self, count: int, agent_step: int, generator: Generator) -> Tensor:
        """Random numbers with which `act` explores at this point of the run."""
        ...

    def evaluation(self, count: int, generator: Generator) -> Tensor:
        """Random numbers with which `act` gives the action of an evaluation."""
        ...

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions for stacked observations [B, ...]."""
        ...

    def draw(self, generator: Generator) -> Any:
        """All random numbers of one update, apart from the choice of transitions."""
        ...

    def phase(self, update: int) -> Hashable:
        """What update number `update` (from 0) consists of: equal phases run equal code."""
        ...

    def update(self, batch: Batch, draws: Any, phase: Any) -> Metrics:
        """One gradient step of everything the phase names."""
        ...
