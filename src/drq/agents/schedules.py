"""What an agent does by the number of an update: anneal a number, reset networks. For any agent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Generator, nn
from torch.optim import Optimizer


def exponentially(initial: float, final: float, share: float) -> float:
    """From the initial to the final value, by the same factor in equal shares of the way."""
    share = min(max(share, 0.0), 1.0)
    return float(initial ** (1.0 - share) * final**share)


class Resets(NamedTuple):
    """Numbers of the updates before which networks are reset."""

    updates: tuple[int, ...]

    @staticmethod
    def at_agent_steps(every: int, last: int, seed_steps: int, updates_per_step: float) -> Resets:
        """Every so many agent steps up to the last, where the first update comes after `seed_steps`."""
        steps = range(every, last + 1, every) if every else ()
        return Resets(tuple(int((step - seed_steps) * updates_per_step) for step in steps if step > seed_steps))

    def due(self, update: int) -> bool:
        return update in self.updates

    def since(self, update: int) -> int:
        """Updates since the newest reset, or since the start."""
        return update - max((reset for reset in self.updates if reset <= update), default=0)


@torch.no_grad()
def shrink_and_perturb(
    module: nn.Module, keep: float, initialise: Callable[[nn.Module, Generator], None], seed: int
) -> None:
    """Leaves `keep` of every parameter, in place; the rest is of freshly initialised ones. At 0 all is fresh."""
    fresh = copy.deepcopy(module).cpu()  # the same numbers on every device
    initialise(fresh, Generator().manual_seed(seed))
    for old, new in zip(module.parameters(), fresh.parameters(), strict=True):
        old.lerp_(new.to(old.device), 1.0 - keep)


@torch.no_grad()
def forget(optimizers: Iterable[Optimizer]) -> None:
    """Puts optimisers back to where they began: moments and counts of steps at zero."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
