"""Many commands on one suite: every run has one owner, and the runs of a dead one are taken over."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drq.launch import claims
from drq.launch.claims import Claims
from drq.launch.launcher import SuiteRunArguments, run_suite
from drq.launch.status import suite_status
from drq.launch.suite_folder import SuiteFolder
from drq.suites import find_suite
from drq.training import lock
from test_launcher import GOOD, has_rows, opened, write_suite

FORK = multiprocessing.get_context("fork")
"""Processes that need not import torch again."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)


def other_machine(folder: Path, name: str) -> Path:
    """A claim as a command on another machine leaves it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.4"
    path.write_text('{"host": "elsewhere", "process": 7, "since": "2026-01-01 10:00:00"}')
    return path


@pytest.fixture
def beating(tmp_path: Path) -> Iterator[Path]:
    path, over = other_machine(tmp_path / "c", "run"), threading.Event()

    def beat() -> None:
        while not over.wait(0.02):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    yield path
    over.set()
    thread.join()


def test_one_of_many_gets_a_claim(tmp_path: Path) -> None:
    every = [Claims(tmp_path / "c") for _ in range(8)]
    barrier, got = threading.Barrier(8), []

    def take(mine: Claims) -> None:
        barrier.wait()
        got.extend(name for name in map(str, range(20)) if mine.take(name))

    threads = [threading.Thread(target=take, args=[each]) for each in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(map(str, range(20)))
    assert not Claims(tmp_path / "c").take("3")
    for each in every:
        each.release_all()
    assert Claims(tmp_path / "c").take("3")


def test_a_dead_process_of_this_machine_is_known_at_once(tmp_path: Path) -> None:
    other = FORK.Process(target=lambda: Claims(tmp_path / "c").take("run"))
    other.start()
    other.join()
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["run.1"]  # it has not released it
    mine = Claims(tmp_path / "c")
    assert mine.holders() == {}
    assert mine.take("run")
    assert mine.holders()["run"][:2] == (socket.gethostname(), os.getpid())
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["run.2"]


def test_another_machine_is_watched(beating: Path, quick: None) -> None:
    mine = Claims(beating.parent)
    assert mine.states() == {"run": "unsure"}
    deadline = time.monotonic() + 60
    while mine.states() != {"run": "taken"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not mine.take("run")
    assert mine.holders()["run"].host == "elsewhere"


def test_a_silent_machine_is_dead(tmp_path: Path, quick: None) -> None:
    other_machine(tmp_path / "c", "run")
    mine = Claims(tmp_path / "c")
    assert not mine.take("run")
    time.sleep(4 * lock.BEAT_SECONDS)
    assert mine.take("run")
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["run.5"]


def test_commands_add_to_one_suite_at_a_time(tmp_path: Path) -> None:
    suite = find_suite(write_suite(tmp_path, GOOD))
    first, second = opened(tmp_path / "out", suite), opened(tmp_path / "out", suite.narrowed(seeds=2))
    (one, two) = suite.narrowed(seeds=2).runs()
    assert first.claim(one)
    assert not second.claim(one)
    assert second.claimed() == {str(one.folder): "taken"}
    assert second.claim(two)
    second.close()
    assert list(SuiteFolder(tmp_path / "out").under_way()) == ["toy-reach/k1-m1/seed-1"]
    first.close()
    assert SuiteFolder(tmp_path / "out").under_way() == {}
    threads = [
        threading.Thread(target=opened, args=[tmp_path / "out", suite.narrowed(tasks=[task], seeds=seeds)])
        for task in ("toy/reach", "toy/catch") for seeds in (1, 3, 5)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(SuiteFolder(tmp_path / "out").read().runs) == 10


def test_three_commands_share_a_suite_and_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, out = write_suite(tmp_path, GOOD, seeds=4, steps=300), tmp_path / "out"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def command(number: int) -> None:
        with open(tmp_path / f"{number}.txt", "w") as sys.stdout:
            code = run_suite(SuiteRunArguments(suite, dir=out, jobs=1))
        os._exit(code)

    commands = [FORK.Process(target=command, args=[number]) for number in range(3)]
    for each in commands:
        each.start()
    victim = commands[0]
    runs = {str(run.folder): run for run in find_suite(suite).runs()}

    def victims() -> list[str]:
        return [name for name, holder in SuiteFolder(out).under_way().items() if holder.process == victim.pid]

    while not any(has_rows(out / name / "train.csv") for name in victims()):
        assert victim.is_alive(), "it ended too early"
        time.sleep(0.05)
    assert suite_status(out) == 0
    assert f"running: process {victim.pid} on {socket.gethostname()} since" in capsys.readouterr().out
    (lost,) = victims()
    victim.kill()
    for each in commands:
        each.join(timeout=300)
    assert [each.exitcode for each in commands] == [-signal.SIGKILL, 0, 0]
    assert all((out / name / "finished.json").exists() for name in runs)
    said = [(tmp_path / f"{number}.txt").read_text() for number in range(3)]
    begun = [line for text in said for line in text.splitlines() if line.startswith("Begun")]
    assert sorted(begun) == sorted([*(f"Begun: {run}." for run in runs.values()), f"Begun: {runs[lost]}."])
    assert "Resuming at" in SuiteFolder(out).log(runs[lost]).read_text()
    assert not list((out / ".claims").iterdir())


def test_a_folder_without_rights_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(claims.Claims, "take", refused)
    with pytest.raises(lock.UserError, match="cannot be written"):
        opened(tmp_path / "out", find_suite(write_suite(tmp_path, GOOD)))
