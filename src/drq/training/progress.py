"""What a run says on the terminal: sentences, and a live line."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from drq.envs import EnvSpec, family_of
from drq.training.clock import Clock


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`, `3 d 04 h`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 48 * 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600:02d} h"


def return_text(mean: float, std: float | None = None) -> str:
    """`43.8 ± 2.1`; of returns below 1, as where a success is worth 1, with another place: `0.95 ± 0.01`."""
    places = 1 if abs(mean) >= 1 else 2
    return " ± ".join(f"{number:.{places}f}" for number in (mean, std) if number is not None)


def fitted(parts: Sequence[str], width: int) -> str:
    """The parts as one line: those at the end left out that a terminal of this width has no room for."""
    kept = list(parts)
    while len(kept) > 1 and len(" | ".join(kept)) > width:
        kept.pop()
    line = Text(" | ".join(kept))
    line.truncate(width, overflow="ellipsis")
    return line.plain


def info_text(info: Mapping[str, float]) -> str:
    """`, is_success 0.8`: what an evaluation found in `info`, three numbers at most; eval.csv has all."""
    return "".join(f", {name} {value:.3g}" for name, value in list(info.items())[:3])


def normalised_text(score: float, spec: EnvSpec) -> str:
    """`, human-normalised 0.312`: of an Atari game whose human and random scores are known; else nothing."""
    low, high = spec.random_return, spec.perfect_return
    if not family_of(spec.task).scores or low is None or high is None:
        return ""
    return f", human-normalised {(score - low) / (high - low):.3f}"


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
        self._console = Console(file=self.stream)
        self._clock = clock
        self._every = 0.5 if self.live else 30.0
        self._next = 0.0
        self._line_open = False

    def say(self, text: str) -> None:
        """Prints a line of its own."""
        if not self.quiet:
            self._end_line()
            print(text, file=self.stream, flush=True)

    def show(self, done: int, evaluations: int, last_return: float | None) -> None:
        """Shows where the run is, if it is time to. So many evaluations are still to come."""
        if not self._due():
            return
        parts = [f"{done:,} / {self.budget:,} {self.unit}"]
        if left := self._clock.left(self.budget - done, evaluations):
            parts.append(f"{duration(left[0])} left" if left[1] else f"{duration(left[0])} + evaluation left")
        if last_return is not None:
            parts.append(f"return {return_text(last_return)}")
        if rate := self._clock.rate:
            parts += [f"{rate:,.0f} steps/s" if rate >= 10 else f"{rate:.1f} steps/s", self._clock.shares()]
        self._write(parts)

    def show_evaluation(self, done: int, of: int, unit: str) -> None:
        """Shows how far the evaluation is that the loop waits for, if it does (others are played beside training) and
        it is time to."""
        if not self._clock.evaluating.running or not self._due():
            return
        left, waited = self._clock.evaluation_left, self._clock.evaluating.running
        if left is None and 10 * done >= of:  # the first one: what is left takes as long as what was
            left = waited * (of / done - 1)
        parts = [f"evaluation: {done:,} / {of:,} {unit}"]
        self._write([*parts, f"{duration(waited)} so far" if left is None else f"{duration(left)} left"])

    def _due(self) -> bool:
        now = time.perf_counter()
        if self.quiet or now < self._next:
            return False
        self._next = now + self._every
        return True

    def _write(self, parts: Sequence[str]) -> None:
        if self.live:
            # The last column stays free: some terminals begin a new line once it is written.
            self.stream.write(f"\r\x1b[2K{fitted(parts, self._console.width - 1)}")
            self._line_open = True
        else:
            self.stream.write(" | ".join(parts) + "\n")
        self.stream.flush()

    def _end_line(self) -> None:
        if self._line_open:
            self.stream.write("\n")
            self._line_open = False

    def close(self) -> None:
        self._end_line()
        self.stream.flush()
