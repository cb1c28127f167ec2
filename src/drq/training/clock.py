"""The time of a run: how long it has taken, what for, and how long it will take."""

from __future__ import annotations

import time
from collections import deque

WARM_UPDATES, TIMED_UPDATES = 10, 80
TIMED_SECONDS = 15.0
"""The expected time is told after the second number of updates of this process, or so long after its first one. Only
those after the first number are timed, since what comes before compiles, searches for algorithms and records graphs."""
POINTS, POINT_SECONDS = 60, 0.5
"""The pace is that of the newest so many points in time, so far apart or further."""


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
        self.evaluating = Stopwatch()
        """Runs while the loop waits for evaluations."""
        self._evaluations = 0
        self._last_evaluation: float | None = None
        self._env = self._render = self._update = 0.0
        self._first_updates: tuple[float, int] | None = None
        self._points: deque[tuple[float, int]] = deque(maxlen=POINTS)
        self._newest = (0.0, 0)
        self._warm = self._told = False

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

    def count(self, spent: int, updates: int) -> bool:
        """To be told after every agent step how much of the budget is spent, and how many updates were made.

        True once, when enough updates were timed to tell the expected time.
        """
        now = self._seconds_here - self.evaluating.seconds
        self._newest = now, spent
        if updates and not self._warm:
            self._first_updates = self._first_updates or (now, updates)
            self._warm = updates - self._first_updates[1] >= WARM_UPDATES
            if not self._warm:
                self._points.clear()  # what comes now is slower than random steps, and not yet as fast as it will be
        if not self._points or now - self._points[-1][0] >= POINT_SECONDS:
            self._points.append(self._newest)
        if self._told or not self._warm or self._first_updates is None:
            return False
        since_first, updates_here = now - self._first_updates[0], updates - self._first_updates[1]
        self._told = updates_here >= TIMED_UPDATES or since_first > TIMED_SECONDS
        return self._told

    @property
    def rate(self) -> float | None:
        """Steps of the budget in a second of the recent past, evaluations apart."""
        if not self._points:
            return None
        (then, before), (now, spent) = self._points[0], self._newest
        return (spent - before) / (now - then) if now > then and spent > before else None

    def evaluated(self, seconds: float) -> None:
        """An evaluation is over, so long after it was asked for."""
        self._evaluations += 1
        self._last_evaluation = seconds

    def left(self, to_spend: int, evaluations: int) -> tuple[float, bool] | None:
        """Seconds that the rest of the budget will take with so many evaluations, the last of which is waited for. And
        whether that counts them: how long one takes is known when one is over. None until updates are warm."""
        if not self._warm or self.rate is None:
            return None
        seconds = to_spend / self.rate
        if self._last_evaluation is None:
            return seconds, False
        waited = self.evaluating.seconds / self._evaluations
        return seconds + (evaluations - 1) * waited + self._last_evaluation, True

    @property
    def evaluation_left(self) -> float | None:
        """Seconds of the evaluation that the loop waits for, if it takes as long as the one before."""
        return None if self._last_evaluation is None else max(self._last_evaluation - self.evaluating.running, 0.0)
