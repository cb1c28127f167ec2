"""A Python process of our own that works for this one, at the other end of a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

from drq.errors import ProcessEnded, UserError

T = TypeVar("T")
END_SECONDS = 5.0
"""For a process whose pipe is closed."""


def start_child(
    module: str, variables: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    """Runs `python -m module N`, where N is the file descriptor of its end of the pipe; returns it and our end.

    A current folder that happens to hold a `torch.py` is not where it looks for modules (-P).
    The pipe ends with this process, however that ends: a child that reads from it notices.
    """
    ours, theirs = Pipe()
    descriptor = theirs.fileno()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(variables or {})},
        # Ctrl-C in the terminal is for this process, which then ends the other.
        start_new_session=True,
    )
    theirs.close()
    return process, ours


class RemoteError(Exception):
    """What failed in the other process: its whole trace."""


class ServedObject:
    """An object that a process of its own has made, and whose methods are called there: see `serve`."""

    def __init__(self, module: str, name: str, *arguments: Any) -> None:
        """`python -m module` makes it of these arguments. Waits for nothing: the first question does. `name` is what is
        said to have ended if that process has."""
        self._name = name
        self.process, self._pipe = start_child(module, {"OMP_NUM_THREADS": "1"})
        self._pipe.send(arguments)

    @cached_property
    def told(self) -> Any:
        """What it tells of itself once it is made."""
        return self._answer()

    def ask(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Calls a method; calling the result waits for what it gives, and has to come before anything else is asked."""
        _ = self.told  # which is the first answer
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise self._ended() from error
        return self._answer

    def close(self) -> None:
        """Closes our end of the pipe, by which the process ends; one that does not is killed."""
        self._pipe.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answer(self) -> Any:
        try:
            answer, failed = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if failed is not None:
            raise UserError(answer) from RemoteError(failed)
        return answer

    def _ended(self) -> ProcessEnded:
        return ProcessEnded(f"A process of {self._name} has ended: see what it said, and run the same command again.")


def serve(make: Callable[..., T], tell: Callable[[T], Any]) -> None:
    """What the module of a `ServedObject` does: makes the object, tells of it, and calls its methods until nobody asks
    any more."""
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with suppress(EOFError, ConnectionError):
        made, failed = _outcome(make, *pipe.recv())
        pipe.send((made if failed else tell(made), failed))
        while not failed:
            method, arguments = pipe.recv()
            pipe.send(_outcome(getattr(made, method), *arguments))


def _outcome(call: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """What a call gives; where it fails, the sentence about that and the trace."""
    try:
        return call(*arguments), None
    except UserError as error:
        return str(error), "".join(traceback.format_exception(error.__cause__ or error))
