"""What an environment puts into `info` becomes columns of eval.csv."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import drq
import own_env
from drq.config import EngineConfig, TrainConfig
from drq.envs.episode import numbers_in
from drq.report.results import read_results
from drq.training.folder import RunFolder
from drq.training.logs import CsvLog
from runs import OWN_ENV, assert_same_run, rows, small
from runs import drq as command

COLUMNS = ["info_is_success", "info_miss", "info_level"]


def told(folder: Path, **changes: Any) -> TrainConfig:
    return small(folder, "gym/Told-v0", imports=(OWN_ENV,), checkpoint_every=60, **changes)


class ComesLate(drq.Callback):
    """Has the environment tell of more from the second evaluation on."""

    def on_evaluation(self, run: drq.RunView) -> None:
        own_env.Told.late = True


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own_env.Told.late = False
    folder = tmp_path_factory.mktemp("runs") / "whole"
    drq.train(told(folder), callbacks=[ComesLate()], quiet=True)
    return folder


@pytest.fixture(autouse=True)
def early() -> Iterator[None]:
    own_env.Told.late = False
    yield
    own_env.Told.late = False


def test_the_last_steps_numbers_are_averaged_over_the_episodes(whole: Path) -> None:
    first, second, third = rows(whole / "eval.csv")
    assert list(first)[-4:] == [*COLUMNS, "info_came_late"]
    assert first["info_came_late"] == ""
    assert second["info_came_late"] == third["info_came_late"] == "14.0"
    assert {row["info_miss"] for row in (first, second, third)} == {"14.0"}
    assert float(third["info_is_success"]) in (0.0, 0.5, 1.0)
    assert 50 <= float(third["info_level"]) < 200


def test_numbers_of_every_type_are_taken() -> None:
    told = [1, 0.5, True, np.int8(1), np.float32(0.5), np.bool_(True), np.array(2), np.ones(1), "1"]
    found = numbers_in({f"info {at}": each for at, each in enumerate(told)})
    assert found == {f"info_{at}": number for at, number in enumerate([1.0, 0.5, 1.0, 1.0, 0.5, 1.0, 2.0])}
    assert {type(number) for number in found.values()} == {float}


def test_readers_and_the_report_take_them(whole: Path) -> None:
    evaluations = RunFolder(whole).evaluations(problems := [])
    assert ["info_came_late" in row for row in evaluations] == [False, True, True]
    runs, warnings = read_results([whole])
    assert ([run.last_step for run in runs], problems, warnings) == ([120], [], [])


def test_a_crash_after_a_new_column_resumes_exactly(whole: Path, tmp_path: Path) -> None:
    class Crash(BaseException):
        """The power goes out."""

    class AfterTheSecond(ComesLate):
        def on_step(self, run: drq.RunView) -> None:
            if run.agent_step == 90:
                raise Crash

    with pytest.raises(Crash):
        drq.train(told(tmp_path / "run"), callbacks=[AfterTheSecond()], quiet=True)
    assert len(rows(tmp_path / "run" / "eval.csv")) == 2
    assert drq.load(tmp_path / "run").agent_step == 60
    drq.train(told(tmp_path / "run"), quiet=True)
    assert_same_run(whole, tmp_path / "run")


def test_another_process_tells_the_same(whole: Path, tmp_path: Path) -> None:
    beside = told(tmp_path / "run", steps=40, engine=EngineConfig(eval_process="on"))
    drq.train(beside, quiet=True)
    (row,) = rows(tmp_path / "run" / "eval.csv")
    assert row == {name: value for name, value in rows(whole / "eval.csv")[0].items() if name != "info_came_late"}


def test_eval_tells_them_too(whole: Path) -> None:
    shown = command("eval", str(whole), "--import", OWN_ENV, "--episodes", "2", "--json")
    played = json.loads(shown.stdout)
    assert list(played["info"]) == ["is_success", "miss", "level"]
    assert [episode["info"]["miss"] for episode in played["episodes"]] == [14.0, 14.0]
    assert drq.evaluate(whole, episodes=2, imports=[OWN_ENV]).info == played["info"]


def test_columns_of_other_logs_stay_as_the_first_row_has_them(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "log.csv", 0)
    log.write({"env_step": 1, "b": 2})
    log.write({"env_step": 2, "c": 3, "info_a,b": 4})
    log.write({"env_step": 3, "b": 4})
    log.close()
    assert rows(tmp_path / "log.csv") == [
        {"env_step": "1", "b": "2", "info_a,b": ""},
        {"env_step": "2", "b": "", "info_a,b": "4"},
        {"env_step": "3", "b": "4", "info_a,b": ""},
    ]
    again = CsvLog(tmp_path / "log.csv", 0, rows=2)
    again.close()
    assert (again.rows, len(rows(tmp_path / "log.csv")), again.notice) == (2, 2, None)
    assert "1 rows shorter" in str(CsvLog(tmp_path / "log.csv", 0, rows=3).notice)
