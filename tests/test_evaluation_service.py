"""Evaluations beside training are those that training would have made itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import drq
from drq.config import EngineConfig
from drq.training.evaluation_service import EvaluationBeside, Request
from runs import assert_same_run, rows, small

BESIDE = EngineConfig(eval_process="on")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "alone"
    drq.train(small(folder), quiet=True)
    return folder


def test_a_process_of_its_own_changes_nothing(alone: Path, tmp_path: Path) -> None:
    drq.train(small(tmp_path / "run", engine=BESIDE), quiet=True)
    assert_same_run(alone, tmp_path / "run")


def test_a_dead_process_is_replaced_by_this_one(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = EvaluationBeside.submit

    def submit(self: EvaluationBeside, request: Request) -> None:
        if request.agent_step == 80:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        original(self, request)

    monkeypatch.setattr(EvaluationBeside, "submit", submit)
    drq.train(small(tmp_path / "run", engine=BESIDE), quiet=True)
    assert rows(alone / "eval.csv") == rows(tmp_path / "run" / "eval.csv")
    assert "The evaluation process has ended; this process evaluates instead." in capfd.readouterr().err


def test_it_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services: list[EvaluationBeside] = []
    original = EvaluationBeside.__init__

    def remember(self: EvaluationBeside, *args: object) -> None:
        original(self, *args)  # type: ignore[arg-type]
        services.append(self)

    monkeypatch.setattr(EvaluationBeside, "__init__", remember)
    drq.train(small(tmp_path / "run", engine=BESIDE, steps=40), quiet=True)
    assert services[0]._process.poll() is not None
    assert len(rows(tmp_path / "run" / "eval.csv")) == 1
