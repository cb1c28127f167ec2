"""Runs that are killed, meet each other, or have no room on the disk."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import drq
from drills import REFUSED, Outcome, ended, forked, same_as, train
from drq.errors import UserError
from runs import small


def kills_at_random(whole: Path, work: Path, count: int, chance: random.Random) -> Outcome:
    """SIGKILL at random moments of a run, again and again."""
    outcome = Outcome()
    folder = work / "killed"
    while outcome.tried < count:
        child = forked(lambda: drq.train(small(folder), quiet=True))
        time.sleep(chance.uniform(0.0, 2.0))
        os.kill(child, signal.SIGKILL)
        if ended(child) == 0:  # it was over before
            same_as(whole, folder, outcome, f"after {outcome.tried} kills")
            shutil.rmtree(folder)
            continue
        outcome.tried += 1
    if train(folder) != 0:
        outcome.lost.append("the run does not go on")
    else:
        same_as(whole, folder, outcome, "after the last kill")
    return outcome


def kills_at_writes(whole: Path, work: Path, count: int, chance: random.Random, skip: int = 0) -> Outcome:
    """SIGKILL at the first, second, ... time that a file is synced to the disk, moved to its place or removed."""
    outcome = Outcome()
    for number in range(skip + 1, skip + count + 1):
        folder = work / f"write-{number}"

        def killed(number: int = number, folder: Path = folder) -> None:
            calls = [0]

            def deadly(original: Callable[..., Any]) -> Callable[..., Any]:
                def call(*args: Any, **kwargs: Any) -> Any:
                    calls[0] += 1
                    if calls[0] == number:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return original(*args, **kwargs)

                return call

            os.replace, os.fsync, os.unlink = deadly(os.replace), deadly(os.fsync), deadly(os.unlink)
            drq.train(small(folder), quiet=True)

        if ended(forked(killed)) == 0:
            break  # there are no more writes
        outcome.tried += 1
        if train(folder) != 0:
            outcome.lost.append(f"write {number}: the run does not go on")
        else:
            same_as(whole, folder, outcome, f"write {number}")
        shutil.rmtree(folder)
    return outcome


def races(whole: Path, work: Path, count: int, chance: random.Random) -> Outcome:
    """Two processes begin one run, or go on with it, at once: one of them does, the other is refused."""
    outcome = Outcome()
    for number in range(count):
        folder = work / f"race-{number}"
        if number % 2:  # there is something to go on with
            child = forked(lambda folder=folder: drq.train(small(folder), quiet=True))  # type: ignore[misc]
            time.sleep(chance.uniform(0.5, 1.5))
            os.kill(child, signal.SIGKILL)
            ended(child)
        first = forked(lambda folder=folder: drq.train(small(folder), quiet=True))  # type: ignore[misc]
        time.sleep(chance.choice([0.0, 0.0, chance.uniform(0.0, 0.5)]))
        second = forked(lambda folder=folder: drq.train(small(folder), quiet=True))  # type: ignore[misc]
        codes = sorted([ended(first), ended(second)])
        outcome.tried += 1
        outcome.refused += REFUSED in codes
        if codes not in ([0, REFUSED], [0, 0]):  # both: one came when the other was through
            outcome.lost.append(f"race {number}: exit codes {codes}")
        same_as(whole, folder, outcome, f"race {number}")
        shutil.rmtree(folder)
    return outcome


CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
"""Of Linux's sched.h: what this process mounts then, nobody else sees."""


def full_disks(whole: Path, work: Path, count: int, chance: random.Random) -> Outcome:
    """A run on a small disk of its own, real but for lying in memory: full at some moment, and then larger."""
    said = work / "full.json"

    def fill() -> None:
        outcome = Outcome()
        user, group = os.getuid(), os.getgid()
        if ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNS):
            raise UserError("This machine lets nobody mount a disk of their own.")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        disk = work / "disk"
        disk.mkdir()
        needed = sum(file.stat().st_size for file in whole.rglob("*") if file.is_file()) // 1024
        for number in range(count):
            size = chance.randrange(8, needed)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)], check=True)
            outcome.tried += 1
            code = train(disk / "run")
            outcome.refused += code == REFUSED
            if code not in (0, REFUSED):
                outcome.lost.append(f"disk {number} of {size} kB: a traceback")
            subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True)
            if train(disk / "run") != 0:
                outcome.lost.append(f"disk {number} of {size} kB: the run does not go on")
            else:
                same_as(whole, disk / "run", outcome, f"disk {number} of {size} kB")
            subprocess.run(["umount", str(disk)], check=True)
        said.write_text(json.dumps(asdict(outcome)))

    code = ended(forked(fill))
    if code == REFUSED:
        return Outcome()
    return Outcome(**json.loads(said.read_text())) if said.exists() else Outcome(0, 0, [f"the drill ended with {code}"])
