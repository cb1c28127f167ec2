"""scripts/keep_results.py: what is published of a suite's runs, and the published runs themselves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drq.report import report
from drq.report.results import read_results

ROOT = Path(__file__).resolve().parent.parent
FILES = {"config.json", "eval.csv", "finished.json", "train.csv"}
RESULTS = [file.parent for file in sorted((ROOT / "results").rglob("config.json"))]


def keep(folder: Path, suite: str, results: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "keep_results.py"
    return subprocess.run([sys.executable, str(script), suite, results], cwd=folder, capture_output=True, text=True)


def make_run(folder: Path, *, finished: bool, rows: int = 99) -> None:
    folder.mkdir(parents=True)
    config = {"task": "atari/pong", "preset": "atari100k-eps", "seed": 1, "agent": {"type": "dqn"}, "dir": str(folder)}
    (folder / "config.json").write_text(json.dumps({"format": 1, "label": "DrQ", "config": config}))
    (folder / "eval.csv").write_text("env_step,agent_step,return_mean\n400000,100000,-12.0\n")
    (folder / "train.csv").write_text("agent_step,loss\n" + "".join(f"{step}000,0.1\n" for step in range(1, rows + 1)))
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "latest.json").write_text("{}")
    if finished:
        (folder / "finished.json").write_text('{"steps": 100000, "seconds": 99.0}\n')


def test_finished_runs_are_kept_without_what_is_large_or_local(tmp_path: Path) -> None:
    suite = tmp_path / "runs" / "eps"
    make_run(suite / "atari-pong" / "drq" / "seed-1", finished=True)
    make_run(suite / "atari-pong" / "drq" / "seed-2", finished=False)
    (suite / "suite.json").write_text('{"runs": []}')
    done = keep(tmp_path, "runs/eps", "results/eps")
    assert (done.returncode, done.stdout) == (0, "1 runs kept in results/eps.\n")
    kept = tmp_path / "results" / "eps"
    assert sorted(path.name for path in kept.rglob("seed-*")) == ["seed-1"]
    run = kept / "atari-pong" / "drq" / "seed-1"
    assert {path.name for path in run.iterdir()} == FILES
    assert str(tmp_path) not in "".join(path.read_text() for path in kept.rglob("*") if path.is_file())
    assert json.loads((run / "config.json").read_text())["config"]["dir"] == "results/eps/atari-pong/drq/seed-1"
    heading, *rows = (run / "train.csv").read_text().splitlines()
    assert (heading, len(rows), rows[0], rows[-1]) == ("agent_step,loss", 50, "1000,0.1", "99000,0.1")
    assert json.loads((kept / "suite.json").read_text()) == {"runs": []}


def test_a_suite_of_which_no_run_has_finished_leaves_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "eps" / "atari-pong" / "drq" / "seed-1", finished=False)
    (tmp_path / "runs" / "eps" / "suite.json").write_text('{"runs": []}')
    done = keep(tmp_path, "runs/eps", "results/eps")
    sentence = "No run of runs/eps has finished: `drq suite status runs/eps` says how far they are.\n"
    assert (done.returncode, done.stderr) == (1, sentence)
    assert not (tmp_path / "results").exists()


def test_runs_kept_before_stay_in_the_suite(tmp_path: Path) -> None:
    def suite(folder: str, *seeds: int, preset: str = "atari100k-eps", label: str = "DrQ", k: int = 1) -> None:
        runs = [{"task": "atari/pong", "label": label, "seed": seed, "steps": 100_000} for seed in seeds]
        asked = {"preset": preset, "settings": {label: {"agent.k": k}}, "runs": runs}
        (tmp_path / folder / "suite.json").write_text(json.dumps(asked))

    make_run(tmp_path / "first" / "atari-pong" / "drq" / "seed-1", finished=True)
    make_run(tmp_path / "second" / "atari-pong" / "drq" / "seed-2", finished=True)
    suite("first", 1, 4)
    suite("second", 1, 2)
    for folder in ("first", "first", "second"):
        assert keep(tmp_path, folder, "kept").stderr == ""
    asked = json.loads((tmp_path / "kept" / "suite.json").read_text())["runs"]
    assert [run["seed"] for run in asked] == [1, 4, 2]
    assert sorted(path.name for path in (tmp_path / "kept").rglob("seed-*")) == ["seed-1", "seed-2"]
    for other in ({"preset": "strong"}, {"k": 2}):
        suite("second", 3, **other)  # type: ignore[arg-type]
        assert keep(tmp_path, "second", "kept").stderr.startswith("kept holds runs of other settings than second")
    suite("second", 3, label="two views", k=2)  # as `--settings` leaves those of a part
    assert keep(tmp_path, "second", "kept").returncode == 0
    kept = json.loads((tmp_path / "kept" / "suite.json").read_text())
    assert kept["settings"] == {"DrQ": {"agent.k": 1}, "two views": {"agent.k": 2}}
    assert [run["seed"] for run in kept["runs"]] == [1, 4, 2, 3]


@pytest.mark.parametrize("rows", [None, 0, 3])
def test_a_short_curve_is_kept_whole(rows: int | None, tmp_path: Path) -> None:
    run = tmp_path / "eps" / "toy-reach" / "drq" / "seed-1"
    make_run(run, finished=True, rows=rows or 0)
    if rows is None:
        (run / "train.csv").write_text("")  # as a run shorter than --log-every leaves it
    (tmp_path / "eps" / "suite.json").write_text("{}")
    keep(tmp_path, "eps", "kept")
    assert (tmp_path / "kept/toy-reach/drq/seed-1/train.csv").read_text() == (run / "train.csv").read_text()


@pytest.mark.parametrize(
    ("suite", "results", "said"),
    [(".", "results", ". holds no suite"), (".", "/elsewhere", "/elsewhere is a path of this machine")],
)
def test_mistakes_are_said(tmp_path: Path, suite: str, results: str, said: str) -> None:
    done = keep(tmp_path, suite, results)
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_the_published_runs_are_whole_and_name_their_commit() -> None:
    assert RESULTS
    for run in RESULTS:
        assert {path.name for path in run.iterdir()} == FILES, run
        described = json.loads((run / "config.json").read_text())
        assert described["config"]["dir"] == run.relative_to(ROOT).as_posix()
        assert re.fullmatch("[0-9a-f]{40}", described["git_commit"]), run
        assert not re.search(r'"/', (run / "config.json").read_text()), run
        assert (run / "train.csv").stat().st_size < 10_000
    runs, _ = read_results([ROOT / "results"])
    assert len(runs) == len(RESULTS)
    assert all(run.status == "finished" and len(run.returns) for run in runs)


def test_the_published_page_holds_the_published_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made anew by its command it has the same figures; how the page draws them may change without it."""
    monkeypatch.chdir(ROOT)
    report([Path("results")], tmp_path / "report.html")
    pages = [(folder / "report.html").read_text() for folder in (tmp_path, ROOT / "results")]
    made, kept = (
        json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
        for page in pages
    )
    assert [{**run, "config": None} for run in kept["runs"]] == [{**run, "config": None} for run in made["runs"]]
    for part in ("warnings", "systems", "tables", "standings", "atari"):
        assert kept[part] == made[part], f"drq report results --out results/report.html: {part} changed"
    assert len(pages[1]) < 2_000_000
