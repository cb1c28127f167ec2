"""Suites run for real, on tiny agents: what finishes, what fails, what is stopped, and what comes after."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drq.errors import ProcessEnded, UserError
from drq.launch import mps, pools, worker
from drq.launch.launcher import SuiteRunArguments, run_suite
from drq.launch.process import FAILED, MISTAKE, STOPPED, start_worker
from drq.launch.status import suite_status
from drq.launch.suite_folder import SuiteFolder
from drq.report.results import read_results
from drq.suites import Suite, find_suite
from drq.training.run import train
from drq.training.stopping import handled_by
from fake_mps import FakeMPS, pretend_gpu
from runs import assert_same_run

TINY = """
tasks = ["toy/reach"]
preset = "cpu"
seeds = {seeds}
steps = {steps}
[common]
device = "cpu"
log_every = 20
env.image_size = 24
agent.hidden_dim = 16
agent.feature_dim = 8
agent.batch_size = 8
agent.seed_steps = 20
replay.capacity = 2000
eval.episodes = 1
eval.video = false
"""
GOOD = '[[settings]]\nlabel = "K=1 M=1"\nagent.k = 1\nagent.m = 1\n'
# Known only once there is an environment: 24 x 24 images are too small for these convolutions.
BAD = '[[settings]]\nlabel = "too small"\nagent.encoder = "dreamer"\n'
SEARCH = "[search]\nfirst = 30\nkeep = 2\n[search.space]\nagent.learning_rate = [1e-3, 1e-4]\n"


def write_suite(folder: Path, *settings: str, seeds: int = 1, steps: int = 150, name: str = "tiny") -> str:
    path = folder / f"{name}.toml"
    path.write_text(TINY.format(seeds=seeds, steps=steps) + "".join(settings))
    return str(path)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)


def has_rows(path: Path) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") > 2


def test_a_failure_is_reported_and_the_rest_finish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite, out = write_suite(tmp_path, BAD, GOOD, seeds=2), tmp_path / "out"
    args = SuiteRunArguments(suite, dir=out, jobs=2)
    assert run_suite(args) == 1
    good = [out / "toy-reach" / "k1-m1" / f"seed-{seed}" for seed in (1, 2)]
    bad = out / "toy-reach" / "too-small" / "seed-1"
    assert all((folder / "finished.json").exists() for folder in good)
    assert not [path for folder in good for path in folder.glob("checkpoint/replay-*")]  # dropped, their weights kept
    assert not (bad / "finished.json").exists()
    assert "cannot work on images of 24x24" in (bad / "error.txt").read_text()
    said = capsys.readouterr().out
    assert said.count("Finished: toy/reach, K=1 M=1") == 2
    assert "2 finished, 2 failed" in said
    assert str(bad / "error.txt") in said

    # The report calls them what the suite calls them.
    runs, _ = read_results([out])
    assert [(run.system, run.status, run.seed) for run in runs] == [("K=1 M=1", "finished", seed) for seed in (1, 2)]

    # Status needs nothing but the folder.
    assert suite_status(out) == 1
    status = capsys.readouterr().out
    assert status.count("150 / 150") == 2
    assert "4 runs: 2 finished, 2 failed." in status

    # The expected time of what is left rests on what has been measured.
    assert run_suite(SuiteRunArguments(suite, dir=out, jobs=1, dry_run=True)) == 0
    plan = capsys.readouterr().out
    assert "4 runs: 2 finished, 2 failed. 300 env steps to go." in plan
    assert re.search(r"Expected time: about .+, from the speed of 2 runs", plan)

    # Again, with the mistake mended: what is finished is left alone, what failed is tried once more.
    before = [{path: path.stat().st_mtime_ns for path in folder.rglob("*")} for folder in good]
    write_suite(tmp_path, BAD.replace("dreamer", "d4pg"), GOOD, seeds=2)
    assert run_suite(SuiteRunArguments(suite, dir=out, jobs=2, seeds=1)) == 0
    assert [{path: path.stat().st_mtime_ns for path in folder.rglob("*")} for folder in good] == before
    assert (bad / "finished.json").exists()
    assert not (bad / "error.txt").exists()


def test_ctrl_c_loses_nothing(tmp_path: Path) -> None:
    suite, steps = write_suite(tmp_path, GOOD, steps=400), 400
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    script = (
        "import sys; from pathlib import Path; from drq.launch.launcher import SuiteRunArguments, run_suite\n"
        "sys.exit(run_suite(SuiteRunArguments(sys.argv[1], dir=Path(sys.argv[2]), jobs=1)))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script, suite, str(stopped)], stdout=subprocess.PIPE, text=True)
    run = Path("toy-reach", "k1-m1", "seed-1")
    wait_until(lambda: has_rows(stopped / run / "train.csv"), launcher)
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == STOPPED
    assert "Run the same command again to go on." in said
    assert not (stopped / run / "finished.json").exists()
    assert not (stopped / run / "error.txt").exists()
    reached = json.loads((stopped / run / "checkpoint" / "latest.json").read_text())["agent_step"]
    assert 0 < reached < steps
    assert SuiteFolder(stopped).under_way() == {}  # nothing goes on behind its back

    assert run_suite(SuiteRunArguments(suite, dir=stopped, jobs=1)) == 0
    read = find_suite(suite)
    train(read.config(read.runs()[0], whole), quiet=True)
    assert_same_run(whole / run, stopped / run)


def test_a_run_stops_cleanly_when_its_launcher_is_killed(tmp_path: Path) -> None:
    suite = find_suite(write_suite(tmp_path, GOOD, steps=100_000))
    run = suite.runs()[0]
    worker = start_worker(pools.job_to_json(suite.config(run, tmp_path), run.label), tmp_path / "log.txt", {})
    wait_until(lambda: has_rows(tmp_path / run.folder / "train.csv"), worker)
    assert worker.stdin is not None
    worker.stdin.close()  # what the end of the launcher does
    assert worker.wait(timeout=120) == STOPPED
    assert (tmp_path / run.folder / "checkpoint" / "latest.json").exists()
    assert "Stopped at" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(("error", "code"), [(UserError, MISTAKE), (ProcessEnded, FAILED)])
def test_a_run_is_tried_again_where_a_process_of_its_environment_was_killed(
    error: type[UserError], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*args: object, **kwargs: object) -> None:
        raise error("It has ended.")

    suite = find_suite(write_suite(tmp_path, GOOD))
    run = suite.runs()[0]
    monkeypatch.setattr("sys.stdin", io.StringIO(pools.job_to_json(suite.config(run, tmp_path), run.label)))
    monkeypatch.setattr(worker, "_stop_at_end_of_input", lambda alone: None)
    monkeypatch.setattr("drq.training.run.train", train)
    with handled_by(lambda number, frame: None):  # the worker sets a handler of its own
        assert worker.main() == code


def test_a_dry_run_prints_the_runs_and_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    suite = Path(write_suite(tmp_path, GOOD, seeds=5))
    tasks = "cartpole-swingup,cheetah-run"
    suite.write_text(suite.read_text().replace("toy/reach", f"dmc/{tasks}".replace(",", '", "dmc/')))
    args = SuiteRunArguments(str(suite), seeds=3, steps=100_000, tasks=tasks, dir=out, jobs=4, dry_run=True)
    assert run_suite(args) == 0
    said = capsys.readouterr().out
    for task in ("dmc-cartpole-swingup", "dmc-cheetah-run"):
        for seed in (1, 2, 3):
            assert f"{out / task / 'k1-m1' / f'seed-{seed}'}  " in said
    assert "6 runs: 6 waiting. 600,000 env steps to go." in said
    assert re.search(r"^K=1 M=1: 6 x about .*: [\d.]+ ms an agent step, .* an evaluation\.$", said, flags=re.M)
    assert re.search(r"4 at a time\. Expected time: about .*, evaluations included, from a few updates", said)
    assert not out.exists()


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_file_is_no_suites_folder(inside: bool, dry_run: bool, tmp_path: Path) -> None:
    file = Path(write_suite(tmp_path, GOOD))
    folder = file / "runs" if inside else file
    with pytest.raises(UserError, match=f"^{re.escape(str(file))} is a file: choose another --dir.$"):
        run_suite(SuiteRunArguments(str(file), dir=folder, jobs=1, dry_run=dry_run))
    with pytest.raises(UserError, match="holds no suite"):
        suite_status(folder)


def test_a_suite_is_kept_among_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """results/ is for what is published."""
    suite = write_suite(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    assert run_suite(SuiteRunArguments(suite, jobs=1, dry_run=True)) == 0
    assert f"{Path('runs', 'tiny', 'toy-reach', 'k1-m1', 'seed-1')}  " in capsys.readouterr().out


def opened(path: Path, suite: Suite) -> SuiteFolder:
    folder = SuiteFolder(path)
    folder.open(suite)
    return folder


def test_another_suite_is_refused_and_more_of_the_same_is_not(tmp_path: Path) -> None:
    suite = find_suite(write_suite(tmp_path, GOOD))
    opened(tmp_path / "out", suite).close()
    begun = tmp_path / "out" / suite.runs()[0].folder
    begun.mkdir(parents=True)
    (begun / "config.json").write_text("{}")

    def refused(said: str, other: Suite | None = None) -> None:
        before = (tmp_path / "out" / "suite.json").read_bytes()
        with pytest.raises(UserError, match=re.escape(said)):
            opened(tmp_path / "out", other or suite)
        assert (tmp_path / "out" / "suite.json").read_bytes() == before

    refused("holds the suite 'tiny' (preset cpu), not 'planet' (preset planet)", find_suite("planet"))
    refused("more than the 100 asked for: say --steps 150", suite.narrowed(steps=100))
    refused("with other values for 'K=1 M=1'", find_suite(write_suite(tmp_path, GOOD, "agent.pad = 2\n")))

    more = find_suite(write_suite(tmp_path, GOOD, BAD, seeds=2, steps=200))
    opened(tmp_path / "out", more).close()
    opened(tmp_path / "out", suite.narrowed(steps=200)).close()
    assert set(SuiteFolder(tmp_path / "out").read().runs) == set(more.runs())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (SuiteRunArguments("planet", jobs=0), "--jobs is 0: set it between 1 and 10,000, or to auto"),
        (SuiteRunArguments("planet", jobs=10**11), "--jobs is 100000000000: set it between"),  # and not tried
        (SuiteRunArguments("planet", steps=10**20), "--steps is 100000000000000000000: set it to 1,000,000,000,000"),
        (SuiteRunArguments("planet", tasks=" , "), "--tasks is empty"),
        (SuiteRunArguments("versions", settings=","), "--settings is empty: name some, as in --settings sac,k2-m2"),
        (SuiteRunArguments("planet", tasks="cheeta-run"), "Did you mean 'dmc/cheetah-run'"),
        (SuiteRunArguments("plannet"), "Did you mean 'planet'"),
    ],
)
def test_mistakes_are_said(args: SuiteRunArguments, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        run_suite(args)


TELL = """
import json, os, pathlib
names = "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
found = {name: os.environ[name] for name in names if name in os.environ}
pathlib.Path(__file__).with_name(f"{os.getpid()}.json").write_text(json.dumps(found))
"""


def write_telling_suite(folder: Path, *, seeds: int, steps: int) -> str:
    """A suite for a GPU, where there is one, whose runs write what variables they have been given."""
    modules = folder / "modules"
    modules.mkdir()
    (modules / "tell_environment.py").write_text(TELL)
    suite = Path(write_suite(folder, GOOD, seeds=seeds, steps=steps))
    text = suite.read_text().replace('device = "cpu"', 'device = "auto"')
    suite.write_text('imports = ["tell_environment"]\n' + text)
    return str(suite)


def told(folder: Path) -> list[dict[str, str]]:
    """What the runs have written; the launcher reads the suite, so it imports the module as well."""
    launchers = f"{os.getpid()}.json"
    return [json.loads(path.read_text()) for path in (folder / "modules").glob("*.json") if path.name != launchers]


def test_runs_that_share_a_gpu_do_so_under_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMPS(tmp_path)
    pretend_gpu(monkeypatch, fake, tmp_path)
    monkeypatch.setattr(pools, "this_machines_gpus", lambda: [pools.FreeGPU("0", 139 * 1024**3)])
    suite = write_telling_suite(tmp_path, seeds=2, steps=30)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "modules"), *filter(None, sys.path)]))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    arguments = SuiteRunArguments(suite, dir=tmp_path / "out", jobs=2, imports=("tell_environment",))
    assert run_suite(arguments) == 0
    daemons = {mps.PIPES: str(fake.folder / "pipe"), mps.LOGS: str(fake.folder / "log")}
    given = {"CUDA_VISIBLE_DEVICES": "0"} | daemons
    assert [call.split()[0] for call in fake.calls] == ["start", "get_server_list", "quit"]
    assert fake.gone()
    assert len(told(tmp_path)) >= 2  # on a real GPU their evaluations are processes too
    assert all(each == given for each in told(tmp_path))
    # There is nothing left to do, and nothing is started for it.
    before = fake.calls
    assert run_suite(arguments) == 0
    assert fake.calls == before


LAUNCH = """
import sys
from pathlib import Path
import pytest
from drq.training.lock import this_process
from fake_mps import FakeMPS, pretend_gpu
from drq.launch import pools
from drq.launch.launcher import SuiteRunArguments, run_suite
folder = Path(sys.argv[2])
pretend_gpu(pytest.MonkeyPatch(), FakeMPS(folder), folder)
pools.this_machines_gpus = lambda: [pools.FreeGPU("0", 139 * 1024**3)]
sys.exit(run_suite(SuiteRunArguments(sys.argv[1], dir=folder / "out", jobs=2, imports=("tell_environment",))))
"""


def test_ctrl_c_leaves_no_daemon(tmp_path: Path) -> None:
    suite = write_telling_suite(tmp_path, seeds=2, steps=100_000)
    paths = os.pathsep.join([str(tmp_path / "modules"), *filter(None, sys.path)])
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, suite, str(tmp_path)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True,
    )  # fmt: skip
    runs = [tmp_path / "out" / "toy-reach" / "k1-m1" / f"seed-{seed}" for seed in (1, 2)]
    wait_until(lambda: all(has_rows(run / "train.csv") for run in runs), launcher)
    fake = FakeMPS(tmp_path)
    assert fake.folder.exists()
    os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does: all of the group hear it
    launcher.communicate(timeout=120)
    assert launcher.returncode == STOPPED
    assert all((run / "checkpoint" / "latest.json").exists() for run in runs)
    assert fake.calls[-1] == f"quit -t {mps.QUIT_SECONDS}"  # by the launcher, once the runs had ended
    assert fake.gone()
