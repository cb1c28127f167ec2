"""How far a suite's runs are, how long they will take, and why one has ended."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from drq.errors import UserError
from drq.launch.probe import Cost, cost_of, costs_as
from drq.launch.process import error_of
from drq.launch.status import RunStatus, read_status, seconds_left, seconds_needed, suite_status, what_is_counted
from drq.launch.suite_folder import SuiteFolder
from drq.presets import preset
from drq.suites import Run, find_suite
from drq.training.lock import this_process
from test_launcher import GOOD, opened, write_suite


def test_a_folder_without_a_suite_has_no_status(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no suite"):
        suite_status(tmp_path)
    (tmp_path / "suite.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        suite_status(tmp_path)


def test_the_status_of_many_runs_shows_what_matters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = find_suite(write_suite(tmp_path, GOOD)).narrowed(seeds=600)
    opened(tmp_path / "out", suite).close()
    failed = tmp_path / "out" / suite.runs()[-1].folder
    failed.mkdir(parents=True)
    (failed / "error.txt").write_text("RuntimeError: a reason\n")
    assert suite_status(tmp_path / "out") == 1
    said = capsys.readouterr().out
    assert "failed: RuntimeError: a reason" in said
    assert "and 100 more" in said
    assert "600 runs: 1 failed, 599 waiting." in said


def status(label: str, left: int, rate: float | None) -> RunStatus:
    return RunStatus(Run("dmc/walker-walk", label, 1, 1000), "stopped", 1000 - left, rate)


def test_the_expected_time() -> None:
    assert seconds_left([status("a", 1000, None)], 1) is None
    # 500 steps at 10 a second; a run with the same setting at the same speed; one with another at the mean of both.
    statuses = [status("a", 500, 10.0), status("a", 1000, None), status("b", 0, 5.0), status("c", 1000, None)]
    assert seconds_left(statuses, 1) == (pytest.approx(50 + 100 + 150), 2)
    assert seconds_left(statuses, 2) == (pytest.approx(150), 2)
    assert seconds_left(statuses, 100) == (pytest.approx(150), 2)  # no sooner than the longest


def test_the_expected_time_counts_the_last_evaluation_once_one_is_known() -> None:
    done = RunStatus(Run("dmc/walker-walk", "a", 1, 1000), "finished", 1000, 5.0, seconds=200.0)
    evaluating = RunStatus(Run("dmc/walker-walk", "a", 2, 1000), "running", 1000, 10.0, seconds=120.0)
    half = RunStatus(Run("dmc/walker-walk", "a", 3, 1000), "running", 500, 10.0, seconds=50.0)
    waiting = RunStatus(Run("dmc/walker-walk", "a", 4, 1000), "waiting")
    assert seconds_needed([done, evaluating, half, waiting]) == [0.0, 80.0, 150.0, 200.0]
    assert what_is_counted([done, half]) == "evaluations included"
    assert what_is_counted([evaluating, half]) == "the last evaluations not counted"


def test_a_runs_cost_counts_its_evaluations() -> None:
    config = preset("toy", "toy/reach")  # 3,500 steps, 14 evaluations
    assert Cost(0.1, 20.0, beside=False, assumed="").of_run(config) == pytest.approx(350 + 14 * 20)
    assert Cost(0.1, 20.0, beside=True, assumed="").of_run(config) == pytest.approx(350 + 20)
    assert Cost(0.1, 30.0, beside=True, assumed="").of_run(config) == pytest.approx(13 * 30 + 30)
    measured = cost_of(replace(config, device="cpu"))
    assert measured.agent_step > 0
    assert measured.evaluation > 0
    faster = replace(config, seed=7, agent=replace(config.agent, learning_rate=0.5))
    assert costs_as(faster) == costs_as(config)
    assert costs_as(replace(config, agent=replace(config.agent, batch_size=9))) != costs_as(config)


def test_progress_is_read_while_files_are_being_written(tmp_path: Path) -> None:
    folder, run = SuiteFolder(tmp_path), Run("atari/pong", "DrQ", 1, 1000)
    assert read_status(folder, run) == RunStatus(run, "waiting")
    path = tmp_path / run.folder
    path.mkdir(parents=True)
    many = "".join(f"{4 * at},{at},,{at / 50}\n" for at in range(100, 801))
    (path / "train.csv").write_text(f"env_step,agent_step,episode_return,seconds\n{many}3204,80")
    seen = read_status(folder, run, this_process())
    assert (seen.state, seen.done, seen.last_return, seen.left) == ("running", 800, None, 200)
    assert seen.rate == pytest.approx(50)
    (path / "eval.csv").write_text("env_step,agent_step,return_mean,seconds\n3400,850,-12.5,17.0\n")
    seen = read_status(folder, run)
    assert (seen.state, seen.done, seen.last_return) == ("stopped", 850, -12.5)
    (path / "finished.json").write_text('{"steps": 900, "seconds": 20.0}')
    assert read_status(folder, run).state == "stopped"  # it has been asked for more since
    (path / "finished.json").write_text('{"steps": 1000, "seconds": 20.0}')
    seen = read_status(folder, run)
    assert (seen.state, seen.rate, seen.left) == ("finished", 50.0, 0)


def test_why_a_run_ended(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert error_of(0, log) == ""
    assert error_of(1, log).splitlines()[-1] == "line 99"
    assert len(error_of(1, log).splitlines()) < 50
    assert "smaller --jobs" in error_of(-signal.SIGKILL, log).splitlines()[-1]
    assert "SIGSEGV" in error_of(-signal.SIGSEGV, log).splitlines()[-1]
    log.unlink()  # somebody has tidied up
    assert "exit code 3" in error_of(3, log)
