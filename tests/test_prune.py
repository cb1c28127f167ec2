"""Disk space: finished runs of a suite keep their weights and lose their replay, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import drq
import runs
from drq.cli import main
from drq.errors import UserError
from drq.launch.suite_folder import SuiteFolder
from drq.report.results import read_results
from drq.suites import Suite, find_suite
from test_launcher import GOOD, opened, write_suite


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Suite, Path]:
    """A suite of one finished run and one that has not begun, with the replay that a run leaves."""
    folder = tmp_path_factory.mktemp("prune")
    suite = find_suite(write_suite(folder, GOOD, seeds=2))
    opened(folder / "out", suite).close()
    run = suite.runs()[0]
    drq.train(suite.config(run, folder / "out"), quiet=True, label=run.label)
    return suite, folder / "out"


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("builtins.input", lambda question: text)


def test_a_run_that_goes_on_while_somebody_thinks_about_it_is_left_alone(
    trained: tuple[Suite, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, out = trained[0], tmp_path / "out"
    shutil.copytree(trained[1], out)

    def asked_for_more(question: str) -> str:
        opened(out, suite.narrowed(steps=200)).close()
        return "y"

    monkeypatch.setattr("builtins.input", asked_for_more)
    prune(str(out))
    assert list((out / suite.runs()[0].folder).glob("checkpoint/replay-*"))


def test_pruning_asks_and_leaves_all_but_the_replay(
    trained: tuple[Suite, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, out = trained
    run = suite.runs()[0]
    folder = out / run.folder
    strangers = folder / "checkpoint" / "replay-9999999999.safetensors"
    strangers.write_text("not in the run's lists")
    replay = {path for path in folder.glob("checkpoint/replay-*") if path != strangers}
    size = sum(path.stat().st_size for path in replay)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path not in replay}
    assert size

    answer(monkeypatch, "")
    assert prune(str(out)) == 1
    said = capsys.readouterr().out
    assert f"The replays of 1 finished runs in {out} take {size / 1e9:.2f} GB." in said
    assert "Nothing was removed" in said
    assert all(path.exists() for path in replay)

    answer(monkeypatch, "y")
    assert prune(str(out)) == 0
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after.keys() == before.keys()
    changed = {path.name for path in before if before[path] != after[path]}
    assert changed == {"latest.json", "previous.json"}
    assert prune(str(out), "--yes") == 0
    assert "Nothing to do." in capsys.readouterr().out

    # What a finished run is for still works; going on does not, and says so.
    assert len(drq.evaluate(folder, episodes=1).episodes) == 1
    drq.export(folder, out / "policy.drq")
    assert [(each.system, each.status) for each in read_results([out])[0]] == [("K=1 M=1", "finished")]
    config = suite.config(run, out)
    assert drq.train(config, quiet=True).evaluations
    with pytest.raises(UserError, match=r"replay of .* was dropped when it had finished, so it cannot go on"):
        drq.train(dataclasses.replace(config, steps=200), quiet=True)
    with pytest.raises(UserError, match="has finished 150 steps and its replay was dropped: it cannot go on to 200"):
        SuiteFolder(out).joined(suite.narrowed(steps=200))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == after


def prune(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["suite", "prune", *args])
    return int(ended.value.code or 0)


def test_a_run_that_was_stopped_in_the_middle_of_pruning_is_pruned_again(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "toy-reach" / "k1-m1" / "seed-1"
    opened(tmp_path / "out", find_suite(write_suite(tmp_path, GOOD))).close()
    drq.train(runs.small(folder, steps=150, replay=drq.config.ReplayConfig(capacity=2000)), quiet=True)
    latest = folder / "checkpoint" / "latest.json"
    runs.edit_checkpoint(folder, dropped=True)  # and no file removed yet
    assert prune(str(tmp_path / "out"), "--yes") == 0
    assert not list(folder.glob("checkpoint/replay-*"))
    assert json.loads(latest.read_text())["dropped"] is True


def test_a_store_is_not_pruned(capsys: pytest.CaptureFixture[str]) -> None:
    assert prune("memory://runs") == 2
    assert "is a store, and only folders on a disk can be pruned: name one." in capsys.readouterr().err


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "toy-reach" / "k1-m1" / "seed-1"
    opened(tmp_path / "out", find_suite(write_suite(tmp_path, GOOD))).close()
    folder.mkdir(parents=True)
    (folder / "finished.json").write_text('{"steps": 150, "seconds": 1.0}')
    (tmp_path / "elsewhere").mkdir()
    (folder / "checkpoint").symlink_to(tmp_path / "elsewhere")
    assert prune(str(tmp_path / "out"), "--yes") == 2
