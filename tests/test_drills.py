"""The drills of `make drills`, a few of each: they break what they say, and nothing is lost."""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import drills
import drq
from drills.__main__ import DRILLS, by_tests
from runs import small


@pytest.fixture(scope="module")
def process() -> Iterator[Executor]:
    """Drills fork, and here a test before them may have left autograd threads, which do not survive that."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.fixture(scope="module")
def whole(process: Executor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert process.submit(drills.train, folder).result() == 0
    return folder


COUNTS = {"kills": 2, "writes": 2, "damage": 4, "mutations": 60, "strangers": 3, "races": 1, "disks": 1}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_nothing_is_lost(name: str, count: int, process: Executor, whole: Path, tmp_path: Path) -> None:
    outcome = process.submit(DRILLS[name][1], whole, tmp_path, count, random.Random(1)).result()
    if name == "disks" and not outcome.tried:
        pytest.skip("nobody may mount a disk here")
    assert outcome.tried >= count
    assert outcome.lost == []


def test_a_loss_is_noticed(whole: Path, tmp_path: Path) -> None:
    drq.train(small(tmp_path / "other", seed=2), quiet=True)
    outcome = drills.Outcome()
    drills.same_as(whole, tmp_path / "other", outcome, "another seed")
    assert len(outcome.lost) == 1


@pytest.mark.parametrize("said", ["E\nERROR test_x.py::test_a - OSError", "", ".F\nFAILED test_x.py::test_a"])
def test_tests_that_cannot_run_are_a_loss_too(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 4, said))
    assert len(by_tests("test_x.py")(Path(), Path(), 0, random.Random(1)).lost) == 1
