"""No bit of a result changes: short runs end as those of an earlier commit did, and its folders are still good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import drq
from runs import drq as command
from runs import rows, script

ROOT = Path(__file__).parent.parent


trace = script("trace")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    path, runs = trace.recorded()
    if runs is None:
        pytest.skip(f"no trace is recorded for {path.stem}; `python scripts/trace.py --compare 22060d7 HEAD` makes two")
    return runs  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def made_anew(recorded: dict[str, Any]) -> dict[str, Any]:
    return trace.trace_of(ROOT / "src")  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", trace.RUNS)
def test_a_run_ends_as_it_did(run: str, recorded: dict[str, Any], made_anew: dict[str, Any]) -> None:
    assert made_anew[run] == recorded[run]


def test_the_runs_of_a_trace_are_different_runs(recorded: dict[str, Any]) -> None:
    """But for the one that was interrupted, which must end as the one that was not."""
    assert recorded.keys() == trace.RUNS.keys()
    assert recorded[trace.INTERRUPTED] == recorded["sac"]
    assert len({run["weights"] for run in recorded.values()}) == len(recorded) - 1
    for run in recorded.values():
        assert len(run["eval"]) == 4  # a header, and evaluations at 40, 80 and 100
        assert len(run["train"]) >= 6


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run that an earlier commit began and left at agent step 69."""
    trace.unpack_begun(tmp_path / "begun")
    return tmp_path / "begun"


def test_a_run_of_an_earlier_commit_evaluates_reports_and_goes_on(begun: Path, tmp_path: Path) -> None:
    assert drq.load(begun).agent_step == 69
    assert len(drq.evaluate(begun, episodes=2).episodes) == 2
    page = tmp_path / "report.html"
    reported = command("report", str(begun), "--out", str(page))
    assert reported.returncode == 0, reported.stderr
    assert "toy/reach" in page.read_text()
    resumed = command("train", *trace.RUNS[trace.BEGUN_RUN], "--dir", str(begun))
    assert resumed.returncode == 0, resumed.stderr
    assert "Resuming at 69 env steps." in resumed.stderr
    assert [row["env_step"] for row in rows(begun / "eval.csv")] == ["40", "80", "100"]
    assert drq.load(begun).agent_step == 100


def test_it_ends_with_the_recorded_bits(begun: Path, recorded: dict[str, Any]) -> None:
    """Also where a learner and its folder are in the process of the tests, whatever ran there before."""
    expected = dict(recorded[trace.BEGUN_RUN])
    assert trace.evaluation_of(begun) == expected.pop("evaluation")
    assert trace.train(trace.BEGUN_RUN, begun) == 0
    assert trace.ended_with(begun) == expected


def test_a_difference_is_named() -> None:
    one = {"sac": {"weights": "1", "eval": ["a,b", "1,2"], "train": ["a"]}}
    other = {"sac": {"weights": "2", "eval": ["a,b", "1,3"], "train": ["a", "4"]}, "dqn": {}}
    assert trace.differences(one, one) == []
    assert trace.differences(one, other) == [
        "dqn: only in one of them",
        "sac: eval.csv from row 1: 1,2 / 1,3",
        "sac: train.csv has 1 / 2 rows",
        "sac: weights",
    ]
