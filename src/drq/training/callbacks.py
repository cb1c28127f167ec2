"""What code of the user's hears of a run, and how it stops one: `drq.train(config, callbacks=[...])`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from drq.config import TrainConfig
from drq.errors import UserError, what_failed
from drq.training.policy import TrainedPolicy

Event = Literal["on_step", "on_episode", "on_evaluation"]


@dataclass(frozen=True)
class RunView:
    """A run as its callbacks see it. These names stay; more may come."""

    config: TrainConfig
    """All settings."""
    dir: Path
    """The run folder."""
    agent_step: int
    """Agent steps taken: decisions, stored transitions."""
    env_step: int
    """agent_step x action repeat."""
    updates: int
    """Updates made."""
    episodes: int
    """Training episodes that are over."""
    episode_return: float | None
    """Of the newest of them."""
    evaluation: Mapping[str, float] | None
    """The newest row of eval.csv: return_mean, return_std, episodes, and the env_step and agent_step it is of."""
    policy: Callable[[], TrainedPolicy]
    """Called, it gives the policy as it is now, with weights of its own: what `drq.load` would give."""


class Callback:
    """A callback has one of these methods, or several. `return False` stops the run with a checkpoint, from which the
    same command goes on; anything else lets it go on."""

    def on_step(self, run: RunView) -> bool | None:
        """After every agent step; with `num_envs`, after those that were taken together."""

    def on_episode(self, run: RunView) -> bool | None:
        """After the last step of a training episode."""

    def on_evaluation(self, run: RunView) -> bool | None:
        """When an evaluation has its row in eval.csv."""


class Callbacks:
    """Those of one run."""

    def __init__(self, callbacks: Iterable[object]) -> None:
        self.stopped_by: str | None = None
        """The callback that has stopped the run, if one has."""
        self._methods: dict[Event, list[tuple[str, Callable[[RunView], Any]]]] = {
            event: [] for event in get_args(Event)
        }
        for callback in callbacks:
            name = type(callback).__name__
            own = {event: getattr(callback, event, None) for event in self._methods}
            if isinstance(callback, type) or not any(map(callable, own.values())):
                shown = f"{callback.__name__}, a class," if isinstance(callback, type) else f"{callback!r}"
                raise UserError(f"{shown} is no callback: give an object with {', '.join(own)}, or one of them.")
            for event, method in own.items():
                # Those that a subclass leaves as they are need not be called.
                if callable(method) and getattr(type(callback), event, None) is not getattr(Callback, event):
                    self._methods[event].append((name, method))

    def hear(self, event: Event) -> bool:
        """Whether any of them is to be told."""
        return bool(self._methods[event])

    def tell(self, event: Event, run: RunView) -> None:
        """Tells all of them. An error of theirs is a UserError that names the callback and the place."""
        for name, method in self._methods[event]:
            try:
                if method(run) is False:
                    self.stopped_by = name
            except Exception as error:
                raise UserError(
                    f"The callback {name} failed in {event} {what_failed(error)}: mend it, and run the same command "
                    "again to go on."
                ) from error
