"""What a run says on the terminal: sentences, and a live line."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from drq.training.clock import Clock


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


class Progress:
    """One line, rewritten in place on a terminal, printed now and then elsewhere."""

    def __init__(
        self, *, budget: int, unit: str, clock: Clock, quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.budget = budget
        self.unit = unit
        self.quiet = quiet
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self._clock = clock
        self._every = 0.5 if self.live else 30.0
        self._next = 0.0
        self._recent: list[tuple[float, int]] = []
        self._line_open = False

    def say(self, text: str) -> None:
        """Prints a line of its own."""
        if not self.quiet:
            self._end_line()
            print(text, file=self.stream, flush=True)

    def show(self, done: int, last_return: float | None) -> None:
        """Shows where the run is, if it is time to."""
        now = time.perf_counter()
        if self.quiet or now < self._next:
            return
        self._next = now + self._every
        self._recent = [*self._recent[-40:], (now, done)]
        rate = self.rate()
        parts = [f"{done:,} / {self.budget:,} {self.unit}"]
        if rate:
            parts.append(f"{rate:,.0f} steps/s")
        if last_return is not None:
            parts.append(f"last return {last_return:.1f}")
        if rate:
            parts.append(f"{duration((self.budget - done) / rate)} left")
        parts.append(self._clock.shares())
        line = "  |  ".join(parts)
        if self.live:
            self.stream.write(f"\r\x1b[2K{line}")
            self._line_open = True
        else:
            self.stream.write(line + "\n")
        self.stream.flush()

    def rate(self) -> float | None:
        """Steps a second over the recent past, if there is one."""
        if len(self._recent) < 2:
            return None
        (then, before), (now, done) = self._recent[0], self._recent[-1]
        return (done - before) / (now - then) if now > then and done > before else None

    def _end_line(self) -> None:
        if self._line_open:
            self.stream.write("\n")
            self._line_open = False

    def close(self) -> None:
        self._end_line()
        self.stream.flush()
