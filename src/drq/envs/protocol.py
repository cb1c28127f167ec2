"""What an environment is to the rest of the package.

An environment hands over *single* frames. Stacks are rebuilt by index where they are needed (replay, acting), so
that a frame is kept once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

Frame = NDArray[np.uint8] | NDArray[np.float32]
"""Pixels, or a state. An environment that was told to hands over a `Scene` in its place, which a GPU draws."""
Action = NDArray[np.float32] | int
_Kind = Literal["continuous", "discrete"]


@dataclass(frozen=True)
class EnvSpec:
    """The shape of a task: all an agent, a replay and a loop need to know of it."""

    task: str
    """Full name, such as `dmc/walker-walk`."""
    frame_shape: tuple[int, ...]
    """Shape of one frame: (channels, height, width) for pixels, (size,) for state."""
    frame_stack: int
    """How many consecutive frames make an observation (1 for state)."""
    action_kind: _Kind
    """Continuous actions are vectors in [-1, 1]; discrete ones are integers from 0."""
    action_size: int
    """Length of the action vector, or number of discrete actions."""
    action_repeat: int
    """Env steps (Atari: frames) that one agent step takes."""
    max_episode_agent_steps: int | None
    """The time limit in agent steps, if there is one."""
    random_return: float | None = None
    """Mean return of uniformly random actions, where it is known."""
    perfect_return: float | None = None
    """Mean return of a perfect (Atari: human) player, where it is known."""
    action_low: tuple[float, ...] = ()
    """What -1 is to the environment itself, in each component of an action. Empty: -1."""
    action_high: tuple[float, ...] = ()
    """What 1 is to it. Empty: 1."""
    action_shape: tuple[int, ...] | None = None
    """Shape of the environment's own actions. None: a vector."""
    action_dtype: str = "float32"
    """Their type, where they are continuous. Components of a type of whole numbers are rounded."""
    action_start: int = 0
    """The environment's own number of the discrete action 0."""
    zero_stack: bool = False
    """Whether zeros stand for the frames that an observation lacks, after a lost life too. Otherwise an episode's first
    frame does."""
    sees: str = ""
    """Which pixels the agent sees, in words, where a task leaves that open."""

    @property
    def pixels(self) -> bool:
        return len(self.frame_shape) == 3

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of a stacked observation: frames concatenated along the first axis, oldest first."""
        return (self.frame_shape[0] * self.frame_stack, *self.frame_shape[1:])

    def stacks_anew(self, discount: float) -> bool:
        """Whether the frame after a step is the first of its stack: after a lost life, where zeros go before it."""
        return self.zero_stack and discount == 0.0


def spec_from_json(plain: Mapping[str, Any]) -> EnvSpec:
    """The spec that `dataclasses.asdict` and JSON made plain. What an older version did not write has its default.

    ValueError or TypeError for what no task has.
    """
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    values.pop("budget_counts", None)  # of an older version: it is the family's
    spec = EnvSpec(**values)
    sizes = (*spec.frame_shape, spec.frame_stack, spec.action_size, spec.action_repeat)
    if not all(type(size) is int and 0 < size <= 10**6 for size in sizes) or len(spec.frame_shape) not in (1, 3):
        raise ValueError(f"its sizes are {sizes}")
    if math.prod(spec.observation_shape) > 10**8:
        raise ValueError(f"an observation of {spec.observation_shape} would be too large")
    if spec.action_kind not in get_args(_Kind) or not isinstance(spec.task, str) or not isinstance(spec.sees, str):
        raise ValueError("a name in it is none")
    if type(spec.action_start) is not int:
        raise ValueError(f"its first action is {spec.action_start!r}")
    if not re.fullmatch(r"(u?int|float)(8|16|32|64)", spec.action_dtype):
        raise ValueError(f"its actions are of {spec.action_dtype!r}")
    numbers = (*spec.action_low, *spec.action_high, spec.random_return or 0, spec.perfect_return or 0)
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError("it has a number that is not finite")
    if not {len(spec.action_low), len(spec.action_high)} <= {0, spec.action_size}:
        raise ValueError("its actions have other ranges than components")
    shaped = spec.action_kind == "continuous" and spec.action_shape is not None  # a discrete action has the shape ()
    if shaped and math.prod(spec.action_shape or ()) != spec.action_size:
        raise ValueError(f"its actions have the shape {spec.action_shape} and {spec.action_size} components")
    if spec.max_episode_agent_steps is not None and not spec.max_episode_agent_steps > 0:
        raise ValueError(f"its episodes have {spec.max_episode_agent_steps} steps")
    return spec


class Step(NamedTuple):
    """What one agent step gives back."""

    frame: Frame
    """The newest single frame."""
    reward: float
    """What the agent learns from, summed over the action repeat (Atari: clipped)."""
    discount: float
    """0.0 where the return ends (a terminal state, a lost life), 1.0 elsewhere. A time limit does not end it."""
    done: bool
    """The episode is over, by termination or by a time limit: `reset` comes next."""
    score: float
    """What counts in a reported return (Atari: unclipped)."""
    info: dict[str, float] | None = None
    """Numbers that the environment tells at the end of an episode beside all that, by their names."""


class Environment(Protocol):
    """One task. Everything an episode draws at random follows from the seed given to `reset`, so that an episode
    can be played again from its seed and its actions: that is how a run resumes in the middle of one."""

    @property
    def spec(self) -> EnvSpec: ...

    @property
    def render_seconds(self) -> float:
        """Seconds spent so far on drawing frames, for the progress line's shares of time."""
        ...

    def reset(self, seed: int) -> Frame:
        """Begins an episode and returns its first frame."""
        ...

    def step(self, action: Action) -> Step: ...

    def render(self) -> NDArray[np.uint8]:
        """An RGB image of the current state for videos: (height, width, 3)."""
        ...

    def close(self) -> None: ...
