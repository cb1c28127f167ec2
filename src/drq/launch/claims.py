"""Which command works on which run of a suite: commands on many machines may share a suite's folder.

    .claims/<run>.<n>       who has the run; its time moves while that command lives

A claim is a file that nobody else can have made: that holds on every file system, also where there are no locks. The
claim of a dead owner is taken over by making the next number, which again only one can.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

from drq.training import lock
from drq.training.lock import Holder, heartbeat, read_holder, write_holder

State = Literal["free", "taken", "unsure"]
"""unsure: of another machine, and not watched for long enough."""


class Claims:
    """The claims in one suite's folder, and those of this command among them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine: dict[str, IO[str]] = {}
        self._seen: dict[Path, tuple[int, float, bool]] = {}
        """Of each claim: its time, since when that has not moved, and whether it ever did."""

    def take(self, name: str) -> bool:
        """Whether it is this command's now."""
        if name in self._mine:
            return True
        found = self._all().get(name, [])
        if any(self._state(path) != "free" for path in found):
            return False
        self._folder.mkdir(exist_ok=True)
        mine = self._folder / f"{name}.{max(map(_number, found), default=0) + 1}"
        try:
            file = open(mine, "x", encoding="utf-8")  # noqa: SIM115 (held open until `release`)
        except FileExistsError:
            return False
        write_holder(file)
        self._mine[name] = file
        for path in found:
            path.unlink(missing_ok=True)
        # Somebody who looked long before and was slow to act may have begun to count anew.
        if any(path != mine and self._state(path) != "free" for path in self._all().get(name, [])):
            self.release(name)
            return False
        return True

    def release(self, name: str) -> None:
        file = self._mine.pop(name, None)
        if file is not None:
            heartbeat.end(file)
            file.close()
            Path(file.name).unlink(missing_ok=True)

    def release_all(self) -> None:
        for name in list(self._mine):
            self.release(name)

    def states(self) -> dict[str, State]:
        """Of all that others have, or may have."""
        theirs = {name: paths for name, paths in self._all().items() if name not in self._mine}
        states = {name: {self._state(path) for path in paths} for name, paths in theirs.items()}
        return {name: "taken" if "taken" in each else "unsure" for name, each in states.items() if each != {"free"}}

    def holders(self) -> dict[str, Holder]:
        """Who has what; the certainly dead left out, and of other machines those that have been silent for long."""
        holders = {}
        for name, paths in self._all().items():
            for path in paths:
                holder, moved = _read(path)
                silent = time.time() - moved / 1e9 > 60 * lock.BEAT_SECONDS  # their clock may be another
                if holder is not None and not holder.gone and not silent:
                    holders[name] = holder
        return holders

    def _all(self) -> dict[str, list[Path]]:
        claims: dict[str, list[Path]] = {}
        with suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                name, _, number = path.name.rpartition(".")
                if number.isdigit():
                    claims.setdefault(name, []).append(path)
        return claims

    def _state(self, path: Path) -> State:
        holder, moved = _read(path)
        if not moved or (holder is not None and holder.gone):
            return "free"
        now = time.monotonic()
        before, since, beats = self._seen.get(path, (moved, now, False))
        if moved != before:
            since, beats = now, True
        self._seen[path] = moved, since, beats
        if now - since > lock.SILENT_BEATS * lock.BEAT_SECONDS:
            return "free"
        here = holder is not None and holder.host == socket.gethostname()
        return "taken" if beats or here else "unsure"


def _number(path: Path) -> int:
    return int(path.name.rpartition(".")[2])


def _read(path: Path) -> tuple[Holder | None, int]:
    """The holder, and when its file's time last moved; 0: it is gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return read_holder(file.read(4096)), path.stat().st_mtime_ns
    except OSError:
        return None, 0
