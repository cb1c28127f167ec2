"""The time of a run: how long it has taken, what for, and how long it will take."""

from __future__ import annotations

import time

WARM_UPDATES, TIMED_UPDATES = 10, 80
TIMED_SECONDS = 15.0
"""The expected time is told after the second number of updates of this process, or so long after its first one. Only
those after the first number are timed, since what comes before compiles, searches for algorithms and records graphs."""


class Stopwatch:
    """Adds up the seconds inside its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0
        self._running = False

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._running = True

    def __exit__(self, *error: object) -> None:
        self._running = False
        self.seconds += time.perf_counter() - self._started

    @property
    def running(self) -> float:
        """Seconds in the `with` block that is under way, if one is."""
        return time.perf_counter() - self._started if self._running else 0.0


class Clock:
    """The clock of one run in this process."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.seconds_before = 0.0
        """Of the same run, in earlier processes."""
        self.waiting = Stopwatch()
        """Runs while the loop waits for the environment."""
        self._env = self._render = self._update = 0.0
        self._first_updates: tuple[float, int] | None = None
        self._warm: tuple[float, int] | None = None
        self._told = False

    @property
    def seconds(self) -> float:
        """Of the run until now, over all processes."""
        return self.seconds_before + self._seconds_here

    @property
    def _seconds_here(self) -> float:
        return time.perf_counter() - self._started

    def begin_step(self, render_seconds: float) -> None:
        """An agent step begins. Given is how long the environment has drawn frames so far, here and at its end."""
        self._step_started = time.perf_counter()
        self._rendered_before = render_seconds
        self.waiting.seconds = 0.0

    def end_step(self, render_seconds: float) -> None:
        """The agent step is over. What of it was not waiting is taken to have been acting and updating."""
        waited, rendered = self.waiting.seconds, render_seconds - self._rendered_before
        self._update += time.perf_counter() - self._step_started - waited
        self._render += min(rendered, waited)
        self._env += max(waited - rendered, 0.0)

    def shares(self) -> str:
        """What the loop's time in this process went to, in words."""
        parts = ("env", self._env), ("render", self._render), ("update", self._update)
        wall = max(self._seconds_here, 1e-9)
        return "  ".join(f"{name} {100 * max(seconds, 0.0) / wall:.0f}%" for name, seconds in parts)

    def expected(self, updates: int, spent: int, budget: int) -> float | None:
        """Seconds that the rest of the budget will take: once, when enough updates were timed, else None.

        To be asked after every agent step that learns, with the updates made and the budget spent by then.
        """
        if self._told:
            return None
        now = time.perf_counter()
        self._first_updates = self._first_updates or (now, updates)
        since_first, updates_here = now - self._first_updates[0], updates - self._first_updates[1]
        if self._warm is None or updates_here < WARM_UPDATES:
            self._warm = now, spent
            return None
        if updates_here < TIMED_UPDATES and since_first <= TIMED_SECONDS:
            return None
        self._told = True
        since_warm, spent_warm = now - self._warm[0], spent - self._warm[1]
        return since_warm / max(spent_warm, 1) * (budget - spent)
