"""Copies of run folders: sound wherever copying is cut off, and what is retried after that."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from drq.config import ReplayConfig
from drq.errors import UserError
from drq.launch import local_copy, node, stores, suite_status
from drq.launch.launcher import ATTEMPTS, Launch, SuiteRunArguments, run_suite
from drq.launch.pools import Ended, Job, LocalPool, Why, begun_with, how_it_ended
from drq.launch.process import UNLIKE
from drq.launch.ray_pool import memory_of, shipped_modules
from drq.launch.status import read_status
from drq.launch.stores import store_at
from drq.launch.suite_folder import SuiteFolder
from drq.launch.transfer import Outbox, Piece, RunStore, receive
from drq.presets import preset
from drq.suites import Run, find_suite
from drq.training.checkpoint_files import Description
from drq.training.folder import RunFolder
from drq.training.run import train
from runs import assert_same_run, drq, small
from test_launcher import GOOD, SEARCH, write_suite


def sound(folder: Path) -> bool:
    """Whether a copy has every file that its lists name, and claims no more than it has."""
    lists = [folder / "checkpoint" / name for name in ("latest.json", "previous.json")]
    for text in [each.read_text() for each in lists if each.exists()]:
        if not all((folder / "checkpoint" / name).exists() for name in Description.from_text(text).files):
            return False
    return not (folder / "finished.json").exists() or lists[0].exists()


def test_a_copy_is_sound_wherever_it_is_cut_off(whole: Path, tmp_path: Path) -> None:
    pieces = list(Outbox(whole).pieces())
    assert pieces[0][1] == "config.json"
    assert pieces[-1][1] == "finished.json"
    for number, piece in enumerate(pieces):
        receive(tmp_path / "copy", [piece])
        assert sound(tmp_path / "copy"), pieces[number][1]
    assert_same_run(tmp_path / "copy", whole)


def test_only_what_is_new_is_sent(whole: Path, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    receive(source, Outbox(whole).pieces())
    outbox = Outbox(source)
    receive(copy, outbox.pieces())
    assert list(outbox.pieces()) == []
    with open(source / "train.csv", "a") as file:
        file.write("1,2,3\n")
    (added,) = outbox.pieces()
    assert added[3] == b"1,2,3\n"
    receive(copy, [added])
    assert (copy / "train.csv").read_bytes() == (source / "train.csv").read_bytes()
    (events,) = (source / "tensorboard").iterdir()
    with open(events, "ab") as file:
        file.write(b"more")
    (added,) = outbox.pieces()
    assert added[3] == b"more"
    rows = (source / "train.csv").read_bytes()  # as where a run goes on: cut back, then longer
    (source / "train.csv").write_bytes(rows.removesuffix(b"1,2,3\n") + b"1,2,34\n5,6,7\n")
    receive(copy, outbox.pieces())
    assert (copy / "train.csv").read_bytes() == (source / "train.csv").read_bytes()

    # A run that goes on from what came from the copy: that is not sent back, and goes once no list names it any more.
    outbox = Outbox(source, arrived=True)
    before = {f"checkpoint/{path.name}" for path in (source / "checkpoint").glob("*.safetensors")}
    (source / "finished.json").unlink()
    train(dataclasses.replace(small(source), steps=160), quiet=True)
    later = list(outbox.pieces())
    assert {path for kind, path, *_ in later if kind == "remove"} & before
    assert not {path for kind, path, *_ in later if kind == "whole"} & before
    for piece in later:
        receive(copy, [piece])
        assert sound(copy)
    assert_same_run(copy, source)
    assert {path.name for path in (copy / "checkpoint").iterdir()} == {
        path.name for path in (source / "checkpoint").iterdir()
    }


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../b", ""])
def test_a_piece_that_leads_out_of_the_folder_is_refused(path: str, tmp_path: Path) -> None:
    piece: Piece = ("whole", path, 0, b"", True)
    with pytest.raises(ValueError, match="leads out"):
        receive(tmp_path, [piece])
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(ValueError, match="is a link"):
        receive(tmp_path, [("whole", "link/file", 0, b"", True)])


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_store_holds_runs(scheme: str, whole: Path, tmp_path: Path) -> None:
    url = f"memory://runs-{tmp_path.name}" if scheme == "memory" else f"file://{tmp_path}/store"
    store, outbox = RunStore(url), Outbox(whole, appends=False)
    store.take("a/run", "me")
    store.write((kind, f"a/run/{path}", *rest) for kind, path, *rest in outbox.pieces())  # type: ignore[misc]
    assert list(outbox.pieces()) == []
    again = RunStore(url)
    assert again.owner("a/run") == "me"
    again.fetch("a/run", tmp_path / "shown", checkpoints=False)
    assert (tmp_path / "shown" / "a" / "run" / "eval.csv").read_bytes() == (whole / "eval.csv").read_bytes()
    assert not (tmp_path / "shown" / "a" / "run" / "checkpoint").exists()
    again.fetch("", tmp_path / "whole", checkpoints=True)
    assert_same_run(tmp_path / "whole" / "a" / "run", whole)


class FailingPool:
    """Runs end as they are told to: by each word in turn, or finished."""

    size = 2

    def __init__(self, folder: Path, ends: dict[int, list[Why]]) -> None:
        self.folder, self.ends = folder, ends
        self.started: list[int] = []
        self.running: list[Run] = []
        self.notices: list[str] = []

    def start(self, job: Job) -> None:
        self.started.append(job.run.seed)
        self.running.append(job.run)

    def ended(self) -> list[Ended]:
        over = []
        for run in self.running:
            words = self.ends[run.seed]
            why = words.pop(0) if words else ""
            path = self.folder / run.folder
            path.mkdir(parents=True, exist_ok=True)
            if not why:
                (path / "finished.json").write_text(f'{{"steps": {run.steps}, "seconds": 1.0}}')
            elif why == "failed":  # as a run does that has a trace to leave
                (path / "error.txt").write_text("Error: its own\n")
            over.append(Ended(run, f"first line\nwhy {run.seed} {why}\n" if why else "", why))
        self.running = []
        return over

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stop(self) -> None: ...

    def kill(self) -> None: ...


def launch(tmp_path: Path, *ends: Sequence[Why]) -> tuple[int, list[int]]:
    suite = find_suite(write_suite(tmp_path, GOOD, seeds=len(ends)))
    folder = SuiteFolder(tmp_path / "out")
    folder.open(suite)
    jobs = [Job(run, suite.config(run, folder.path)) for run in suite.runs()]
    pool = FailingPool(folder.path, {seed: list(each) for seed, each in enumerate(ends, 1)})
    statuses = {run: read_status(folder, run) for run in suite.runs()}
    code = Launch(suite, folder, statuses, jobs, pool, keep_replay=True).run()
    folder.close()
    return code, pool.started


def test_what_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release, seen = SuiteFolder.release, dict[int, list[bool]]()

    def release_in_sight(self: SuiteFolder, run: Run) -> None:
        """Of other commands, to which a run with an error.txt is over."""
        seen.setdefault(run.seed, []).append(self.run_folder(run).error_file.exists())
        release(self, run)

    monkeypatch.setattr(SuiteFolder, "release", release_in_sight)
    always: list[Why] = ATTEMPTS * ["failed"]
    lost: list[Why] = 5 * ["lost"]
    code, started = launch(tmp_path, always, ["mistake"], [*lost, "unfit", "failed", "failed"], [])
    assert code == 1
    assert [started.count(seed) for seed in (1, 2, 3, 4)] == [ATTEMPTS, 1, len(lost) + 4, 1]
    assert seen[1] == [False] * (ATTEMPTS - 1) + [True]
    said = capsys.readouterr().out
    assert f"Failed, attempt 2 of {ATTEMPTS}: toy/reach, K=1 M=1, seed 1: why 1 failed" in said
    assert "Again: toy/reach, K=1 M=1, seed 3: why 3 lost. It starts elsewhere from its last checkpoint." in said
    assert "2 finished, 2 failed" in said
    log = tmp_path / "out" / "logs" / "toy-reach_k1-m1_seed-1.log"
    assert f"error.txt, {log})" in said
    assert (tmp_path / "out" / "toy-reach" / "k1-m1" / "seed-2" / "error.txt").read_text() == (
        "first line\nwhy 2 mistake\n"
    )


def test_a_start_costs_as_much_in_a_large_suite_as_in_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many runs only those are looked at that somebody has."""
    named: list[str] = []
    monkeypatch.setattr("drq.suites.suite.slug", lambda text: named.append(text) or text)

    def names_asked_for(seeds: int) -> int:
        suite = find_suite(write_suite(tmp_path, GOOD, seeds=seeds))
        folder = SuiteFolder(tmp_path / str(seeds))
        folder.open(suite)
        jobs = [Job(run, suite.config(run, folder.path)) for run in suite.runs()]
        launch = Launch(suite, folder, {}, jobs, FailingPool(folder.path, {}), keep_replay=True)
        named.clear()
        launch._next()
        folder.close()
        return len(named)

    assert names_asked_for(2) == names_asked_for(100)


def test_a_machine_that_cannot_keep_the_arithmetic_is_refused(whole: Path, tmp_path: Path) -> None:
    suite, folder = find_suite(write_suite(tmp_path, GOOD)), SuiteFolder(tmp_path / "out")
    there = folder.run_folder(suite.runs()[0]).path
    receive(there, Outbox(whole).pieces())
    (there / "checkpoint" / "latest.json").unlink()  # the one before will do
    assert begun_with(RunFolder(there))["device"] == "cpu"
    described = json.loads((there / "config.json").read_text())
    described["computed_with"]["precision"] = "tf32"
    (there / "config.json").write_text(json.dumps(described))
    pool = LocalPool(folder, [{}])
    pool.start(Job(suite.runs()[0], dataclasses.replace(small(there), steps=160)))
    deadline = time.monotonic() + 120
    while not (over := pool.ended()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert over[0].why == "mistake"  # on a cluster, another node would be looked for
    assert "was begun in tf32 and" in over[0].error
    assert how_it_ended(suite.runs()[0], UNLIKE, "").why == "unfit"


def test_what_killed_runs_left_on_a_node_is_swept_away(tmp_path: Path) -> None:
    gone, here = 2**22 + 1, os.getpid()  # no process has such a number
    names = {f"{node._prefix()}{gone}-a": False, f"{node._prefix()}{gone}-b": True, f"{node._prefix()}{here}-c": True}
    names |= {f"drq-run-elsewhere-{gone}-d": True, "something": True}  # of another machine; somebody else's
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / f"{node._prefix()}{gone}-b" / ".worker").write_text(str(here))  # which writes its last checkpoint
    node.sweep(tmp_path)
    assert {name: (tmp_path / name).exists() for name in names} == names


def test_only_named_modules_that_are_not_installed_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "travelling.py").write_text("x = 1\n")
    (tmp_path / "stays.py").write_text("secret = 1\n")
    package = tmp_path / "travels_too"
    package.mkdir()
    (package / "__init__.py").write_text("y = 2\n")
    assert shipped_modules(["travelling", "travels_too.inner", "./travelling.py", "numpy", "json"]) == {
        "travelling.py": b"x = 1\n",
        "travels_too/__init__.py": b"y = 2\n",
        "./travelling.py": b"x = 1\n",
    }
    with pytest.raises(UserError, match="cannot travel"):
        shipped_modules([str(tmp_path / "travelling.py")])


def test_what_a_run_asks_for() -> None:
    paper = preset("planet", "dmc/walker-walk")
    assert 3e9 < memory_of(paper, on_gpu=False) < 5e9
    assert memory_of(paper, on_gpu=True) < 2e9  # the replay lies on the GPU
    assert memory_of(preset("atari100k", "atari/pong"), on_gpu=False) < 2.5e9  # grey frames, one for each agent step
    everything = dataclasses.replace(paper, replay=ReplayConfig(capacity=None))
    assert 6e9 < memory_of(everything, on_gpu=False) < 7e9  # 500k env steps are 250k agent steps


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"address": "auto"}, "add --launcher ray"),
        ({"launcher": "ray", "gpus_per_run": 1.5}, "--gpus-per-run is 1.5"),
        ({"launcher": "ray", "gpus_per_run": 0.0}, "--gpus-per-run is 0"),
    ],
)
def test_mistakes_are_said(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    arguments = SuiteRunArguments(write_suite(tmp_path, GOOD), dir=tmp_path / "out")
    with pytest.raises(UserError, match=said):
        run_suite(dataclasses.replace(arguments, **changes))  # type: ignore[arg-type]


def test_ray_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # import fails
    with pytest.raises(UserError, match=r"pip install -e '.*\[ray\]', or leave"):
        run_suite(SuiteRunArguments(write_suite(tmp_path, GOOD), dir=tmp_path / "out", launcher="ray"))


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.1:1", "There is no Ray cluster at --address 127.0.0.1:1 .*: start one"), ("here", "say auto, or host:")],
)
def test_an_address_without_a_cluster_is_said(address: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    suite = write_suite(tmp_path, GOOD)
    with pytest.raises(UserError, match=said):
        run_suite(SuiteRunArguments(suite, dir=tmp_path / "out", launcher="ray", address=address))


def test_a_path_names_a_store(tmp_path: Path) -> None:
    assert store_at(tmp_path) is None
    assert store_at(Path("runs/planet")) is None
    assert store_at(None) is None
    for url in ("memory://bucket/runs", f"file://{tmp_path}"):
        store = store_at(Path(url))  # which has lost a slash
        assert store is not None
        assert store.url == url
    with pytest.raises(UserError, match=r"s3://bucket/x needs a package \(.*s3fs"):
        store_at(Path("s3://bucket/x"))


def test_a_suite_in_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stores, "COPY_SECONDS", 0.0)
    url = f"file://{tmp_path}/shared"
    suite, at = write_suite(tmp_path, GOOD, steps=60), Path("toy-reach", "k1-m1", "seed-1")
    shared = tmp_path / "shared"
    assert drq("suite", "run", suite, "--dir", url, cwd=tmp_path).returncode == 0  # a process of its own
    assert (shared / at / "finished.json").exists()
    assert (shared / "logs" / "toy-reach_k1-m1_seed-1.log").exists()
    assert not list((shared / at / "checkpoint").glob("replay-*"))  # dropped there as well
    assert not (shared / ".owner").exists()

    # Another machine has no copy yet: it sees the same, and has nothing to do.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert suite_status(local_copy(Path(url))) == 0
    assert "60 / 60" in capsys.readouterr().out
    assert run_suite(SuiteRunArguments(suite, dir=Path(url), jobs=1)) == 0
    assert "Nothing to do" in capsys.readouterr().out

    # A search: the best of a rung is fetched from the store and goes on. The store is away for a moment.
    search, other = write_suite(tmp_path, SEARCH, steps=60, name="search"), tmp_path / "other"
    write, away = RunStore.write, [True]

    def write_later(self: RunStore, pieces: Iterable[Piece]) -> None:
        if not isinstance(pieces, list) and away:  # a run's own; commands write lists
            away.clear()
            raise OSError("away")
        write(self, pieces)

    monkeypatch.setattr(RunStore, "write", write_later)
    assert run_suite(SuiteRunArguments(search, dir=Path(f"file://{other}"), jobs=2, keep_replay=True)) == 0
    finished = {path.parent: RunFolder(path.parent).finished_steps for path in other.rglob("finished.json")}
    assert sorted(finished.values()) == [30, 60]
    assert list(max(finished, key=lambda path: finished[path]).glob("checkpoint/replay-*"))
    assert (other / "best.toml").exists()
    assert f"seed 1 was not copied to file://{other} (away). It is tried again." in capsys.readouterr().out

    # Somebody else at work is not disturbed.
    owner = {"host": "far", "process": 7, "since": "now"}
    (shared / ".owner").write_text(json.dumps(owner | {"beat": time.time()}))
    with pytest.raises(UserError, match="worked on by process 7 on far"):
        run_suite(SuiteRunArguments(suite, dir=Path(url), jobs=1, seeds=3))
    (shared / ".owner").write_text(json.dumps(owner | {"beat": time.time() - 1000}))
    assert run_suite(SuiteRunArguments(suite, dir=Path(url), jobs=1)) == 0
