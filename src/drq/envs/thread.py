"""A thread for an environment to live in: rendering contexts belong to the thread that made them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class EnvThread:
    """Makes calls one after the other. Unlike an executor's, a call that never returns keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._newest: Future[Any] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()
        self._newest = future
        self._calls.put((future, lambda: call(*args)))
        return future

    def close(self, last: Callable[[], None]) -> None:
        """Makes a last call and ends the thread; one that is still in a call is left alone."""
        stuck = self._newest is not None and not self._newest.done()
        if not stuck:
            self.submit(last).result()
        self._calls.put(None)
        if not stuck:
            self._thread.join()

    def _work(self) -> None:
        while (work := self._calls.get()) is not None:
            future, call = work
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del work, future, call  # what they hold must not live until the next call
