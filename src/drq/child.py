"""A Python process of our own that works for this one, at the other end of a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

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


def end_child(process: subprocess.Popen[bytes], pipe: Connection[Any, Any]) -> None:
    """Closes our end of the pipe, by which the child ends; one that does not is killed."""
    pipe.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
