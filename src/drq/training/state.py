"""Where a run is: what a checkpoint keeps of it besides the agent and its replay."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from drq.envs.protocol import Action
from drq.training.policy_file import PolicyFile


@dataclass(frozen=True)
class Best:
    """The evaluation with the highest mean return so far; of equal ones the last."""

    agent_step: int
    return_mean: float
    policy: PolicyFile | None = None
    """What acted in it. None: it is in the checkpoint already."""


@dataclass
class UnderWay:
    """The episode that one environment plays."""

    number: int
    """Its seed follows from it."""
    score: float = 0.0
    """What it has scored so far."""
    actions: list[Action] = field(default_factory=list)
    """With the seed they lead an environment back to its state."""


@dataclass
class RunState:
    """Everything that the loop itself must find again when a run is resumed."""

    agent_step: int = 0
    """Agent steps taken."""
    episode: int = 0
    """Episodes that are over."""
    under_way: list[UnderWay] = field(default_factory=lambda: [UnderWay(0)])
    """The episode of each environment."""
    last_return: float | None = None
    """Of the newest episode that is over."""
    evaluated: int = 0
    """Agent step of the newest evaluation."""
    seconds: float = 0.0
    """Wall-clock seconds of the run until its newest checkpoint, over all processes."""
    log_sizes: dict[str, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    """Bytes of each CSV at the newest checkpoint: a resumed run cuts off what was written after it."""
    eval_rows: int | None = None
    """Rows of eval.csv then. None: written by an earlier version."""
    inherited: int = 0
    """Transitions that the replay had before the first agent step."""
    best: Best | None = None
    """None before the first evaluation."""
    pending: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Evaluations under way: the agent step of each, and the weights to play it with."""
