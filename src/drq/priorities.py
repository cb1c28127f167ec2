"""Prioritised replay: transitions with a large error are chosen more often.

Sampling, weights and new priorities are a running sum and a search on the replay's device: no tree, and nothing that
the host takes part in, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drq.backend import Backend
from drq.replay import Choice, Replay

UNIT = 2.0**24
"""Of priorities, which are kept as whole numbers: their sums are exact, whatever order a device adds them in."""
LARGEST = 2.0**18
"""Priorities beyond are taken for this, as is what is not a number: a million of them still have a sum."""


class PrioritisedSampler:
    """Chooses transitions in proportion to their priorities, one from each of N equal parts of their sum.

    A priority is (error + floor) to the power of `exponent`, of the newest update that learnt from the transition. A
    new transition gets the largest priority that there has been, which starts at 1. A chosen one counts in the loss as
    1 / probability to the power of `correction`, over the largest such weight of its batch.
    """

    def __init__(
        self,
        capacity: int,
        backend: Backend | None = None,
        *,
        exponent: float = 0.5,
        correction: float = 0.5,
        floor: float = 1e-10,
    ) -> None:
        """`capacity` is the replay's, all streams together."""
        self.backend = backend or Backend()
        device = self.backend.device
        self.exponent, self.correction, self.floor = exponent, correction, floor
        self.priorities = torch.zeros(capacity, dtype=torch.int64, device=device)
        """Of every slot, in 1 / UNIT."""
        self.largest = torch.full((), int(UNIT), dtype=torch.int64, device=device)
        """That there has been."""

    def choose(self, replay: Replay, random: Tensor) -> Choice:
        return Choice(*self.backend.run(self._choose, replay, random))

    def _choose(self, replay: Replay, random: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.priorities * replay.may_sample()
        ends = shares.cumsum(0)
        n, total = len(random), ends[-1]
        places = (torch.arange(n, device=random.device) + random.double() / 2**62) / n  # in [0, 1), each in its part
        slots = torch.searchsorted(ends, (places * total).long().clamp(max=total - 1), right=True)
        priorities = shares[slots].float()
        return slots, (priorities.min() / priorities) ** self.correction

    def stored(self, replay: Replay, slot: int) -> None:
        self.priorities[slot].copy_(self.largest)

    def learnt(self, slots: Tensor, errors: Tensor) -> None:
        units = self.backend.run(self._units, errors.detach())
        # A transition that was chosen twice keeps the larger: any order of writing gives the same.
        self.priorities.scatter_reduce_(0, slots, units, "amax", include_self=False)
        torch.maximum(self.largest, units.max(), out=self.largest)

    def _units(self, errors: Tensor) -> Tensor:
        """The priorities of these errors."""
        priorities = (errors.float() + self.floor) ** self.exponent
        priorities = torch.where(priorities < LARGEST, priorities, LARGEST)  # false where it is not a number
        return (priorities * UNIT).long().clamp(min=1)

    def state(self) -> dict[str, Tensor]:
        return {"priorities": self.priorities, "largest": self.largest}
