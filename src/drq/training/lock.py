"""One process at a time works on a run folder, and what shows that it lives."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from drq.errors import UserError
from drq.training.folder import refuse_odd

BEAT_SECONDS = 10.0
"""A holder moves the time of its file this often."""
SILENT_BEATS = 3
"""A file whose time has not moved for so many beats has no living holder."""


class Holder(NamedTuple):
    """Who works on something, as its file says."""

    host: str
    process: int
    since: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} since {self.since}"

    @property
    def gone(self) -> bool:
        """Whether it certainly lives no more: only a process of this machine can be looked for."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False  # somebody else's
        return False


def this_process() -> Holder:
    return Holder(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S"))


def read_holder(text: str) -> Holder | None:
    """None: nobody has it, or it is being written."""
    try:
        said = json.loads(text)
        holder = Holder(str(said["host"]), said["process"], str(said["since"]))
        return holder if type(holder.process) is int and holder.process > 0 else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class Heartbeat:
    """Moves the time of open files while this process lives, so that machines which cannot see it know."""

    def __init__(self) -> None:
        self._files: set[int] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, file: IO[str]) -> None:
        with self._lock:
            self._files.add(file.fileno())
            if self._thread is None or not self._thread.is_alive():  # a fork has none
                self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
                self._thread.start()

    def end(self, file: IO[str]) -> None:
        with self._lock:  # the descriptor is closed next, and may be another file's then
            self._files.discard(file.fileno())

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            with self._lock:
                for file in self._files:
                    with suppress(OSError):
                        os.utime(file)


heartbeat = Heartbeat()


def write_holder(file: IO[str]) -> None:
    """Says in an empty file that this process has it, for as long as the process lives."""
    file.write(json.dumps(this_process()._asdict()))
    file.flush()
    os.fsync(file.fileno())
    heartbeat.begin(file)


class RunLock:
    """Held from `take` to `release`, or to the end of the process, however that ends.

    The file says who holds it. Not every file system knows locks, or those of other machines: a holder on this machine
    is looked for among its processes then, and one on another is believed if the file's time moves.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def take(self) -> None:
        """UserError, naming the holder, where another process has it."""
        refuse_odd(self._path)
        file = open(self._path, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115 (held open until `release`)
        file.seek(0)
        holder = read_holder(file.read(4096))
        here = holder is not None and holder.host == socket.gethostname()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A lock that another machine took may not be seen here.
            taken = holder is not None and not here and _beats(file)
        except BlockingIOError:
            taken = True
        except OSError:  # there are no locks
            others = holder is not None and not holder.gone and holder.process != os.getpid()
            taken = others if here else holder is not None and _beats(file)
        if taken:
            file.close()
            raise UserError(
                f"{self._path.parent} is being worked on by {holder or 'an unknown process'}: wait for it, or stop it. "
                f"Should that process be long gone, delete {self._path}."
            )
        file.truncate(0)  # in append mode the next write is at the beginning
        write_holder(file)
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            heartbeat.end(self._file)
            self._file.truncate(0)
            self._file.close()
            self._file = None


def locked(path: Path) -> bool:
    """Whether a process has the lock, as far as that can be told at once."""
    if not path.is_file():  # nor may it be a pipe, which would be waited for
        return False
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            holder = read_holder(file.read(4096))
            if holder is None or holder.gone:
                return False
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:  # there are no locks
                return holder.host == socket.gethostname()
    except OSError:
        pass
    return False


def _beats(file: IO[str]) -> bool:
    """Whether somebody moves the file's time."""
    before, until = os.fstat(file.fileno()).st_mtime_ns, time.monotonic() + SILENT_BEATS * BEAT_SECONDS
    while time.monotonic() < until:
        time.sleep(BEAT_SECONDS / 10)
        if os.fstat(file.fileno()).st_mtime_ns != before:
            return True
    return False
