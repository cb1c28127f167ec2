"""Ctrl-C, a scheduler's SIGTERM, and environments that never answer."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from drq.training.clock import Stopwatch

SAID_AFTER = 60.0
"""Seconds without an answer of the environment, before that is said."""
SAME_SECONDS = 10.0
"""A SIGTERM so soon after the first is the same request: a scheduler tells a launcher and its runs alike, and the
launcher tells them again."""
STOPPED_AFTER = 5.0
"""Seconds without an answer, after which somebody who asks the run to stop need not wait for one."""


@contextmanager
def handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Has Ctrl-C and SIGTERM handled so. Only a main thread is sent signals: others have no say in them."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {each: signal.signal(each, handler) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, previous in before.items():
            signal.signal(each, previous)


class StopSignal:
    """Turns a first Ctrl-C or SIGTERM inside its `with` block into a request, which the loop answers between two steps.

    A second one ends the process as if there were no such block.
    """

    def __init__(self) -> None:
        self.requested = False
        self._handling = ExitStack()

    def __enter__(self) -> None:
        self._handling.enter_context(handled_by(self._request))

    def __exit__(self, *error: object) -> None:
        self._handling.close()

    def _request(self, number: int, frame: object) -> None:
        self.requested = True
        self._handling.close()
        before, until = signal.getsignal(signal.SIGTERM), time.monotonic() + SAME_SECONDS

        def again(number: int, frame: object) -> None:
            if time.monotonic() > until:
                signal.signal(signal.SIGTERM, before)
                signal.raise_signal(signal.SIGTERM)

        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, again)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # As in the background of a shell script: there a hanging environment could not be left any more.
            signal.signal(signal.SIGINT, signal.default_int_handler)


class Watch:
    """Watches over an environment while the loop waits for it: a hang is said, and a stop does not wait for its end."""

    def __init__(self, stop: StopSignal, waiting: Stopwatch, say: Callable[[str], None]) -> None:
        self._stop = stop
        self._waiting = waiting
        self._say = say
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._evaluated: float | None = None

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def stopping(self) -> bool:
        """Whether the run shall stop. An evaluation asks before each of its steps, and so tells that it goes on."""
        if self._evaluated is not None:
            self._evaluated = time.perf_counter()
        return self._stop.requested

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around an evaluation in this thread."""
        self._evaluated = time.perf_counter()
        try:
            yield
        finally:
            self._evaluated = None

    def _watch(self) -> None:
        said = False
        while not self._over.wait(min(1.0, SAID_AFTER)):
            began = self._evaluated
            waited = max(self._waiting.running, 0.0 if began is None else time.perf_counter() - began)
            if waited < SAID_AFTER:
                said = False
            elif not said:
                said = True
                self._say(f"has not answered for {SAID_AFTER:.0f} seconds. Ctrl-C ends the run at its last checkpoint.")
            if self._stop.requested and waited > STOPPED_AFTER:
                # The handlers are those from before again: this is a second Ctrl-C.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return
