"""Two processes on one run folder: the second is refused, and a dead one is no hindrance."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drq.errors import UserError
from drq.training import lock
from drq.training.lock import RunLock, locked
from runs import FLAGS, fails


def test_the_second_process_is_refused_and_a_dead_one_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    command = ["train", "toy/reach", "--dir", str(folder), *FLAGS]
    command[command.index("120")] = "100000"
    first = subprocess.Popen([sys.executable, "-m", "drq", *command], stderr=subprocess.DEVNULL)
    try:
        while first.poll() is None and not (folder / "train.csv").exists():
            time.sleep(0.02)
        said = fails(capsys, *command)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert f"is being worked on by process {first.pid} on {socket.gethostname()} since 20" in said
    lock = RunLock(folder / ".lock")
    lock.take()  # though the file still names the dead one
    lock.release()


def no_locks(*args: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize(
    ("holder", "refused"),
    [
        ({"host": socket.gethostname(), "process": os.getppid(), "since": "now"}, True),
        ({"host": socket.gethostname(), "process": 2**22 + 1, "since": "now"}, False),
        ({"host": "elsewhere", "process": 7, "since": "now"}, False),  # silent
        ({}, False),
    ],
)
def test_without_locks_of_the_file_system_the_holder_is_looked_for(
    holder: dict[str, object], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    (tmp_path / ".lock").write_text(json.dumps(holder))
    if refused:
        with pytest.raises(UserError, match=f"process {holder['process']} on {holder['host']}"):
            RunLock(tmp_path / ".lock").take()
    else:
        taken = RunLock(tmp_path / ".lock")
        taken.take()
        taken.release()  # else the heartbeat would move whatever file has its descriptor next


@pytest.mark.parametrize("locks", [True, False])
def test_another_machine_is_believed_if_its_file_moves(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locks:  # else those of other machines are not seen here
        monkeypatch.setattr(fcntl, "flock", no_locks)
    path, over = tmp_path / ".lock", threading.Event()
    path.write_text(json.dumps({"host": "elsewhere", "process": 7, "since": "now"}))

    def beat() -> None:
        while not over.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(UserError, match="process 7 on elsewhere"):
        RunLock(path).take()
    over.set()
    thread.join()


def test_a_holder_moves_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "heartbeat", lock.Heartbeat())
    mine = RunLock(tmp_path / ".lock")
    mine.take()
    assert locked(tmp_path / ".lock")
    os.utime(tmp_path / ".lock", (0, 0))
    while not (tmp_path / ".lock").stat().st_mtime:
        time.sleep(0.01)
    mine.release()
    assert not locked(tmp_path / ".lock")
