"""Agent steps made of env steps: what the simulated families (dmc, gym, toy) have in common."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from drq.envs.protocol import Action, EnvSpec, Frame, Step
from drq.errors import UserError, what_failed

VIDEO_SIZE = 256
"""Height and width of the pictures for videos, where an environment has no size of its own."""


def close_or_say(task: str, close: Callable[[], object]) -> None:
    """Closes an environment. One that fails then has given all that was asked of it, so nothing ends by that."""
    try:
        close()
    except (Exception, SystemExit) as error:
        print(f"{task} failed in its close() {what_failed(error)}.", file=sys.stderr)


class EnvStep(NamedTuple):
    """What one env step gives back."""

    reward: float
    terminated: bool
    """The task itself ended: nothing can be earned any more."""
    truncated: bool
    """A time limit cut the episode short."""
    info: Mapping[Any, Any] | None = None
    """Whatever else there is to tell, as a Gymnasium environment does."""


class Outcome(NamedTuple):
    """What one agent step gives back but for the frame."""

    reward: float
    discount: float
    done: bool
    info: dict[str, float] | None = None

    def with_frame(self, frame: Frame) -> Step:
        """The whole of the agent step, with the frame that shows where it led."""
        return Step(frame, self.reward, self.discount, self.done, score=self.reward, info=self.info)


class Simulator(Protocol):
    """A task one env step at a time: all that a family has to provide."""

    def begin(self, seed: int) -> None:
        """Starts an episode that depends on the seed alone."""
        ...

    def advance(self, action: Action) -> EnvStep: ...

    def frame(self) -> Frame:
        """A new array with what the agent sees of the current state."""
        ...

    def picture(self) -> NDArray[np.uint8]:
        """The current state for a video: (height, width, 3)."""
        ...

    def close(self) -> None: ...


S = TypeVar("S", bound=Simulator)


class SteppedEnvironment(Generic[S]):
    """An `Environment` that plays a `Simulator`: repeats actions, keeps time, checks ins and outs."""

    def __init__(self, spec: EnvSpec, simulator: S, time_limit: int | None) -> None:
        """`time_limit` counts env steps; None leaves the simulator to end its episodes."""
        self.spec = spec
        self.simulator = simulator
        self._time_limit = time_limit
        self._env_step = 0
        self._playing = False
        self.render_seconds = 0.0

    @property
    def draws(self) -> bool:
        """Whether there are pictures of it for a video."""
        return bool(getattr(self.simulator, "draws", True))

    def reset(self, seed: int) -> Frame:
        self.begin(seed)
        return self._frame()

    def step(self, action: Action) -> Step:
        return self.advance(action).with_frame(self._frame())

    def begin(self, seed: int) -> None:
        """`reset` for a caller that draws the frame itself."""
        self._env_step = 0
        try:
            self.simulator.begin(seed)
        except (Exception, SystemExit) as error:
            raise self._failure("reset", error) from error
        self._playing = True

    def advance(self, action: Action) -> Outcome:
        """`step` for a caller that draws the frame itself."""
        if not self._playing:
            raise UserError(f"{self.spec.task} has no episode under way: call reset(seed) before step.")
        action = self._checked(action)
        reward = 0.0
        terminated = truncated = False
        for _ in range(self.spec.action_repeat):
            self._env_step += 1
            try:
                env_step = self.simulator.advance(action)
            except (Exception, SystemExit) as error:
                raise self._failure("step", error) from error
            if not math.isfinite(env_step.reward):
                raise UserError(
                    f"{self.spec.task} gave the reward {env_step.reward} in env step {self._env_step} of an episode: "
                    "make it a finite number."
                )
            reward += env_step.reward
            terminated = env_step.terminated
            truncated = env_step.truncated or self._env_step == self._time_limit
            if terminated or truncated:
                self._playing = False
                break
        done = terminated or truncated
        info = numbers_in(env_step.info) if done and env_step.info else None
        return Outcome(reward, 0.0 if terminated else 1.0, done, info)

    def render(self) -> NDArray[np.uint8]:
        return self.simulator.picture()

    def close(self) -> None:
        self._playing = False
        close_or_say(self.spec.task, self.simulator.close)

    def _frame(self) -> Frame:
        started = time.perf_counter()
        try:
            frame = self.simulator.frame()
        except (Exception, SystemExit) as error:
            raise self._failure("render", error) from error
        if self.spec.pixels:
            self.render_seconds += time.perf_counter() - started
        self._check(frame)
        return frame

    def _check(self, frame: Frame) -> None:
        """Refuses frames that are not what the environment promised, or no numbers to learn from."""
        promised = np.dtype(np.uint8 if self.spec.pixels else np.float32)
        if frame.shape != self.spec.frame_shape or frame.dtype != promised:
            raise UserError(
                f"{self.spec.task} promised frames of {promised} {self.spec.frame_shape} but gave {frame.dtype} "
                f"{frame.shape} in env step {self._env_step} of an episode: make its observation_space agree with its "
                "observations."
            )
        if not self.spec.pixels and not np.isfinite(frame).all():
            place = np.flatnonzero(~np.isfinite(frame))[0]
            raise UserError(
                f"{self.spec.task} gave the observation {frame[place]} at place {place} in env step {self._env_step} "
                "of an episode: make it a finite number."
            )

    def _failure(self, call: str, error: Exception | SystemExit) -> UserError:
        """What the environment's own code raised, in a sentence; one that we have made already stays."""
        if isinstance(error, UserError):
            return error
        where = f"env step {self._env_step} of an episode" if self._env_step else "its reset"
        return UserError(f"{self.spec.task} failed in {where} {what_failed(error)}: mend its {call}() first.")

    def _checked(self, action: Action) -> Action:
        """The action in the form simulators take: an int, or a float32 vector within [-1, 1]."""
        size = self.spec.action_size
        if self.spec.action_kind == "discrete":
            return checked_number(self.spec, action)
        vector = np.asarray(action, dtype=np.float32)
        if vector.shape != (size,):
            raise UserError(f"{self.spec.task} takes actions of shape ({size},), not {vector.shape}.")
        if not np.isfinite(vector).all():
            raise UserError(
                f"An action for {self.spec.task} is not finite, so the agent has diverged: "
                "try a smaller --agent.learning-rate."
            )
        return np.clip(vector, -1.0, 1.0)


def checked_number(spec: EnvSpec, action: Action) -> int:
    """A discrete action, if there is one of that number."""
    if np.ndim(action) != 0 or not 0 <= int(action) < spec.action_size:
        raise UserError(f"{spec.task} takes actions from 0 to {spec.action_size - 1}, not {action!r}.")
    return int(action)


def numbers_in(info: Mapping[Any, Any]) -> dict[str, float]:
    """Those entries that can be averaged: finite numbers, and true and false."""
    found = {}
    for name, value in info.items():
        scalar = value[()] if isinstance(value, np.ndarray) else value  # a number, of an array without dimensions
        if isinstance(name, str) and isinstance(scalar, bool | int | float | np.bool_ | np.integer | np.floating):
            try:
                number = float(scalar)
            except OverflowError:  # a whole number beyond all floats
                continue
            if math.isfinite(number):
                found["_".join(name.split())] = number  # it becomes the name of a column
    return found


class ActionRange:
    """Maps [-1, 1] onto an environment's own bounds; components without bounds take the action as it is."""

    def __init__(self, low: NDArray[np.float64], high: NDArray[np.float64], unbounded: float = np.inf) -> None:
        """A component reaching `unbounded` or beyond on either side counts as having no bounds."""
        bounded = (low > -unbounded) & (high < unbounded)
        self._low, self._high = low, high
        # Written as middle + half x action so that bounds of [-1, 1] hand the action on bit for bit.
        self._middle = np.where(bounded, low / 2 + high / 2, 0.0)
        self._half = np.where(bounded, high / 2 - low / 2, 1.0)

    def __call__(self, action: NDArray[np.float32]) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = np.clip(self._middle + self._half * action, self._low, self._high)
        return scaled


def of_its_type(action: Any, dtype: DTypeLike) -> NDArray[Any]:
    """Whole numbers are the nearest: cut off, the highest would hardly ever be taken."""
    return np.asarray(np.rint(action) if np.issubdtype(dtype, np.integer) else action, dtype=dtype)


def limit_env_steps(own: int | None, configured: int | None) -> int | None:
    """The tighter of an environment's own time limit and the configured one."""
    limits = [limit for limit in (own, configured) if limit is not None]
    return min(limits, default=None)


def limit_agent_steps(env_steps: int | None, action_repeat: int) -> int | None:
    """Agent steps in an episode of so many env steps; the last one may be cut short."""
    return None if env_steps is None else math.ceil(env_steps / action_repeat)
