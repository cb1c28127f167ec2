"""Ctrl-C, and a scheduler's SIGTERM."""

from __future__ import annotations

import signal
import threading
from typing import Any


class StopSignal:
    """Turns a first Ctrl-C or SIGTERM inside its `with` block into a request, which the loop answers between two steps.

    A second one ends the process as if there were no such block. Only a main thread is sent signals: in others there
    is never a request.
    """

    def __init__(self) -> None:
        self.requested = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {each: signal.signal(each, self._request) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for each, handler in self._handlers.items():
            signal.signal(each, handler)

    def _request(self, number: int, frame: object) -> None:
        self.requested = True
        self.__exit__()
