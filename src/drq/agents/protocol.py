"""What an agent is to the rooms after it.

An agent is plain PyTorch: networks, losses, what to update when. It draws nothing itself (random numbers are handed
in), knows no file and no logger, and leaves the device and how to compute fast on it to the backend that it is
constructed with.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from drq.backend import Backend
from drq.replay import Batch

Metrics = dict[str, Tensor]
"""Scalars by name, left on the device until somebody looks."""


class Returns(NamedTuple):
    """Length and discount of the returns that an update learns from."""

    n_step: int
    discount: float


class UpdateResult(NamedTuple):
    """What an update found."""

    metrics: Metrics
    errors: Tensor | None = None
    """Each transition's error, [N]: what priorities are made of."""


class Agent(Protocol):
    """SAC, DQN, or one of your own."""

    @property
    def backend(self) -> Backend: ...

    @property
    def modules(self) -> nn.ModuleDict:
        """All parameters and buffers, target networks included: what is saved."""
        ...

    @property
    def optimizers(self) -> dict[str, Optimizer]: ...

    @property
    def batch_size(self) -> int: ...

    def exploration(self, count: int, agent_step: int, generator: Generator) -> Tensor:
        """Random numbers with which `act` explores at this point of the run."""
        ...

    def evaluation(self, count: int, generator: Generator) -> Tensor:
        """Random numbers with which `act` gives the action of an evaluation."""
        ...

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions for stacked observations [B, ...], by whichever of its networks acts."""
        ...

    def draw(self, generator: Generator) -> Any:
        """All random numbers of one update, apart from the choice of transitions."""
        ...

    def phase(self, update: int) -> Hashable:
        """What update number `update` (from 0) consists of: equal phases run equal code."""
        ...

    def returns(self, update: int) -> Returns:
        """Of which returns update number `update` learns."""
        ...

    def before_update(self, update: int, seed: int) -> None:
        """The place between two updates: to reset networks, or to set numbers that follow a schedule.

        What changes is tensors, in place, since updates may be captured. It is called before every update, also the
        first after a resume; whatever it does must follow from the two arguments, of which the seed is another for
        every update of a run.
        """
        ...

    def update(self, batch: Batch, draws: Any, phase: Any) -> UpdateResult:
        """One gradient step of everything the phase names."""
        ...
