"""One process at a time works on a run folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO

from drq.errors import UserError
from drq.training.folder import refuse_link


class RunLock:
    """Held from `take` to `release`, or to the end of the process, however that ends.

    The file says who holds it. Where a file system knows no locks, that is all there is: a holder on this machine is
    looked for among its processes, and one on another is believed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def take(self) -> None:
        """UserError, naming the holder, where another process has it."""
        refuse_link(self._path)
        file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115 (held open until `release`)
        file.seek(0)
        holder = _read(file.read(4096))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = False
        except BlockingIOError:
            taken = True
        except OSError:
            taken = _lives(holder)
        if taken:
            file.close()
            raise UserError(
                f"{self._path.parent} is being worked on by process {holder['process']} on {holder['host']} since "
                f"{holder['since']}: wait for it, or stop it. Should that process be long gone, delete {self._path}."
            )
        now = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        file.truncate(0)  # in append mode the next write is at the beginning
        file.write(json.dumps(now))
        file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def _read(text: str) -> dict[str, object]:
    unknown: dict[str, object] = {"host": "an unknown machine", "process": "?", "since": "an unknown time"}
    try:
        said: dict[str, object] = json.loads(text)
        return unknown | said
    except (ValueError, TypeError):  # nobody has it, or it is being written
        return unknown


def _lives(holder: dict[str, object]) -> bool:
    process = holder["process"]
    if not isinstance(process, int) or process <= 0:
        return False
    if holder["host"] != socket.gethostname():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    return process != os.getpid()
