"""A run that was interrupted ends as one that was not."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import drq
from drq.config import DQNConfig, EngineConfig, EnvConfig, RainbowConfig, ReplayConfig, SACConfig
from drq.engine import Learner
from drq.envs.protocol import Action, Step
from drq.envs.toy import Reach
from drq.errors import UserError
from drq.launch import job_to_json, start_worker
from drq.replay import Replay
from drq.training import checkpoint as checkpoint_module
from drq.training import run as run_module
from drq.training.env_worker import ThreadedEnv
from drq.training.evaluate import Evaluator
from drq.training.loop import Loop
from drq.training.run import Trainer
from runs import FLAGS, assert_same_run, edit_checkpoint, rows, small, state


class Crash(BaseException):
    """Stands for the power going out: nothing catches it."""


def train_with_crash_at(folder: Path, agent_step: int, monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    with monkeypatch.context() as patch:
        original = Replay.add

        def add(self: Replay, *args: object) -> None:
            original(self, *args)  # type: ignore[arg-type]
            if self.streams[0].transitions_added == agent_step:
                raise Crash

        patch.setattr(Replay, "add", add)
        with pytest.raises(Crash):
            drq.train(small(folder, **changes), quiet=True)


@pytest.mark.parametrize("crashes", [[3], [18], [41, 60], [35, 85, 119]])
def test_crashes_at_any_step(crashes: list[int], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for agent_step in crashes:
        train_with_crash_at(tmp_path / "run", agent_step, monkeypatch)
    drq.train(small(tmp_path / "run"), quiet=True)
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("write", range(6))
def test_crashes_in_the_middle_of_a_checkpoint(
    write: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file was being written when it happened, the previous checkpoint is whole."""
    written = [0]

    def crash_sometimes(original):  # type: ignore[no-untyped-def]
        def wrapped(*args, **kwargs):  # type: ignore[no-untyped-def]
            written[0] += 1
            if written[0] == 4 + write:
                target = next(a for a in args if isinstance(a, Path))
                target.with_name(target.name + ".unfinished").write_bytes(b"half")
                raise Crash
            return original(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("_save_durably", "write_atomically"):
            patch.setattr(checkpoint_module, name, crash_sometimes(getattr(checkpoint_module, name)))
        with pytest.raises(Crash):
            drq.train(small(tmp_path / "run"), quiet=True)
    drq.train(small(tmp_path / "run"), quiet=True)
    assert_same_run(whole, tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoint").glob("*.safetensors.unfinished"))


def test_sigkill(whole: Path, tmp_path: Path) -> None:
    """The command itself, killed twice at whatever it was doing, then left alone."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "drq", "train", "toy/reach", "--dir", str(folder), *FLAGS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    latest = folder / "checkpoint" / "latest.json"
    for wait in (0.0, 0.31):
        before = latest.stat().st_mtime_ns if latest.exists() else 0
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (latest.exists() and latest.stat().st_mtime_ns > before):
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert_same_run(whole, folder)


def test_with_as_many_threads_as_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "usable_cores", lambda: 2)
    now, used = torch.get_num_threads(), []
    update = Learner.update

    def counted(self: Learner) -> None:
        used.append(torch.get_num_threads())
        update(self)

    class Stop(drq.Callback):
        def on_step(self, run: drq.RunView) -> bool:
            return not used

    try:
        torch.set_num_threads(2)
        train_with_crash_at(tmp_path / "run", 20, monkeypatch)
        torch.set_num_threads(1)
        monkeypatch.setattr(Learner, "update", counted)
        drq.train(small(tmp_path / "run"), callbacks=[Stop()])  # two threads on a busy core mostly wait for each other
        assert set(used) == {2}
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(now)
    assert "Going on with 2 threads, as it began: with 1 it would round otherwise." in capsys.readouterr().err


@pytest.mark.parametrize("task", ["dmc/cartpole-swingup", "dmc/reacher-easy"])
def test_a_control_task_resumes_in_the_middle_of_an_episode(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path / "x", task)
    changes = {
        "task": task,
        "env": dataclasses.replace(config.env, observation="state", frame_stack=1, action_repeat=2),
        "steps": 240,
        "eval": dataclasses.replace(config.eval, every=0, episodes=1),
    }
    drq.train(small(tmp_path / "whole", **changes), quiet=True)
    train_with_crash_at(tmp_path / "run", 75, monkeypatch, **changes)
    drq.train(small(tmp_path / "run", **changes), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize(
    ("signals", "kept", "said"),
    [
        ([signal.SIGINT], 48, "Stopped at 48 env steps. Run the same command again to go on."),
        ([signal.SIGTERM] * 2, 48, "Stopped at 48 env steps. Run the same command again to go on."),
        ([signal.SIGINT] * 2, 34, "Stopped at 47 env steps, back to the checkpoint of 34 env steps. Run the same"),
    ],
)
def test_ctrl_c_saves_where_it_is(
    signals: list[signal.Signals],
    kept: int,
    said: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And so does a scheduler that tells all processes of a suite, of which the launcher tells its runs again."""
    folder = tmp_path / "run"
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as a run of a suite has it
    trainer = Trainer(small(folder))
    original = ThreadedEnv.step

    def step(self: ThreadedEnv, action: Action) -> Callable[[], Step]:
        for number in signals if trainer.loop.state.agent_step == 47 else ():
            os.kill(os.getpid(), number)
        return original(self, action)

    with monkeypatch.context() as patch:
        patch.setattr(ThreadedEnv, "step", step)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    signal.signal(signal.SIGTERM, before)
    assert said in capfd.readouterr().err
    assert json.loads((folder / "checkpoint" / "latest.json").read_text())["agent_step"] == kept
    drq.train(small(folder), quiet=True)
    assert_same_run(whole, folder)


@pytest.mark.parametrize(("where", "at"), [("here", 40), ("here", 120), ("beside", 40)])
def test_a_stop_during_an_evaluation_saves_at_once(
    where: str, at: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation is played again with the weights of its own time, also in the other kind of process."""
    folder, engine = tmp_path / "run", EngineConfig(eval_process="on" if where == "beside" else "off")
    endless = dataclasses.replace(small(folder).eval, episodes=10**6)
    trainer = Trainer(small(folder, eval=endless if at == 40 else small(folder).eval, engine=engine), quiet=True)
    original = Loop._evaluate

    def evaluate(self: Loop) -> None:
        if self.state.agent_step == at:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            if at == 120:  # the last: it would be over before the signal
                monkeypatch.setattr(Evaluator, "stopping", property(lambda _: stopping, lambda *_: None), raising=False)
        original(self)

    def stopping() -> bool:
        while not trainer.stop.requested:
            time.sleep(0.01)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_evaluate", evaluate)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    monkeypatch.undo()
    described = json.loads((folder / "checkpoint" / "latest.json").read_text())
    assert described["progress"]["pending"][0] == at
    assert described["agent_step"] <= (at + 1 if where == "here" else 120)
    assert not (folder / "finished.json").exists()
    config = folder / "config.json"
    config.write_text(config.read_text().replace(str(10**6), "2"))
    resumed, waited = Trainer(small(folder, engine=engine), quiet=True), list[float]()
    resumed.progress.show_evaluation = lambda *_: waited.append(resumed.clock.evaluating.running)  # type: ignore[method-assign]
    resumed.run()
    assert where == "beside" or all(waited)  # else nothing of it would be shown
    assert_same_run(whole, folder)


def test_a_longer_budget_goes_on(whole: Path, tmp_path: Path) -> None:
    drq.train(small(tmp_path / "run", steps=80), quiet=True)
    drq.train(small(tmp_path / "run", steps=120), quiet=True)
    assert_same_run(whole, tmp_path / "run")


def test_a_finished_run_says_so(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = (whole / "eval.csv").read_bytes()
    result = drq.train(small(whole))
    assert "is finished: 120 env steps" in capfd.readouterr().err
    assert len(result.evaluations) == 3
    assert (whole / "eval.csv").read_bytes() == before


def test_a_checkpoint_costs_what_is_new(tmp_path: Path) -> None:
    """Replay files hold what was added between checkpoints, and those that the ring has overwritten go."""
    drq.train(small(tmp_path / "run", checkpoint_every=10, replay=ReplayConfig(capacity=25)), quiet=True)
    files = sorted((tmp_path / "run" / "checkpoint").glob("replay-*"))
    sizes = [file.stat().st_size for file in files]
    frame = 3 * 24 * 24
    assert max(sizes) < 12 * frame + 4096  # 10 agent steps, perhaps an episode's first frame, a header
    assert len(files) <= 5  # 25 transitions and the frames of their stacks, not the 120 of the run


def test_nothing_is_pickled(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled something")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    assert drq.load(whole).agent_step == 120


def test_an_environment_that_forgets_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A state that seed and actions do not lead back to: the run goes on, and says what that means."""
    train_with_crash_at(tmp_path / "run", 40, monkeypatch)
    original = Reach.draw
    monkeypatch.setattr(Reach, "draw", lambda self, size: 255 - original(self, size))
    drq.train(small(tmp_path / "run"))
    assert "did not come back to the state it was left in" in capfd.readouterr().err
    assert len(rows(tmp_path / "run" / "eval.csv")) == 3


def test_an_environment_that_ends_sooner_the_second_time_has_forgotten_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No step is asked of an episode that is over, as would lead back to an older one."""
    train_with_crash_at(tmp_path / "run", 40, monkeypatch)
    original = Reach.advance
    monkeypatch.setattr(Reach, "advance", lambda self, action: original(self, action)._replace(terminated=True))
    drq.train(small(tmp_path / "run"))
    assert "did not come back to the state it was left in" in capfd.readouterr().err
    assert len(rows(tmp_path / "run" / "eval.csv")) == 3


def test_another_device_is_refused(whole: Path, tmp_path: Path) -> None:
    folder = unfinished_copy(whole, tmp_path / "copy")
    edit_checkpoint(folder, device="cuda")
    with pytest.raises(UserError, match=r"The run was begun on cuda .* add --device cuda"):
        drq.train(small(folder), quiet=True)


def unfinished_copy(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder)
    (folder / "finished.json").unlink()
    return folder


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    file.write_bytes(content)


def exchange_weights(file: Path) -> None:
    """Those of a smaller agent."""
    tensors = load_file(file)
    save_file({name: value[:3] if name.endswith("weight") else value for name, value in tensors.items()}, file)


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a byte of the weights": ("state-*", flip_a_byte),
    "a byte of the replay": ("replay-*", flip_a_byte),
    "a byte of the description": ("latest.json", flip_a_byte),
    "no tensor": ("state-*", lambda file: file.write_bytes(b"not a tensor")),
    "half a state": ("state-*", cut_short),
    "other weights": ("state-*", exchange_weights),
    "no state": ("state-*", Path.unlink),
    "half a segment": ("replay-*", cut_short),
    "no segment": ("replay-*", Path.unlink),
    "half a description": ("latest.json", cut_short),
    "an empty description": ("latest.json", lambda file: file.write_text("{}")),
    "a description of no segment": ("latest.json", lambda file: file.write_text('{"segments": [7]}')),
    "no text": ("latest.json", lambda file: file.write_bytes(b"\xff\xfe")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    damage: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = unfinished_copy(whole, tmp_path / "copy")
    pattern, do = DAMAGE[damage]
    do(sorted((folder / "checkpoint").glob(pattern))[-1])
    drq.load(folder)
    of_replay = pattern == "replay-*"  # which acting does without
    assert ("is damaged (" in (said := capfd.readouterr().err)) != of_replay
    assert ("the one before has the weights, of agent step" in said) != of_replay
    drq.train(small(folder))
    assert "the run goes on from the one before, of agent step" in capfd.readouterr().err
    assert_same_run(whole, folder)


def test_damage_to_both_checkpoints_is_named(whole: Path, tmp_path: Path) -> None:
    folder = unfinished_copy(whole, tmp_path / "copy")
    for file in (folder / "checkpoint").glob("state-*"):
        flip_a_byte(file)
    with pytest.raises(UserError, match=r"cannot be read .*checksum.* delete the folder to begin the run again"):
        drq.train(small(folder), quiet=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"agent_step": 600},
        {"updates": 10**9},
        {"serial": -1},
        {"state": "../state.safetensors"},
        {"state": "/etc/passwd"},
        {"replay": [{"transitions_added": 10**12, "frames_added": 1, "oldest": 0, "age": 0}]},
        {"progress": {}},
    ],
)
def test_a_checkpoint_past_the_limits_of_its_run_is_refused(
    changes: dict[str, object], whole: Path, tmp_path: Path
) -> None:
    folder = unfinished_copy(whole, tmp_path / "copy")
    edit_checkpoint(folder, **changes)
    with pytest.raises(UserError, match="cannot be read"):
        drq.train(small(folder), quiet=True)


def test_folders_of_others_behind_links_are_left_alone(whole: Path, tmp_path: Path) -> None:
    """A run folder may be reached through a link; what is in it may not lead elsewhere."""
    models = tmp_path / "models"
    shutil.copytree(whole / "checkpoint", models)
    (models / "mine.safetensors").write_bytes(b"precious")
    before = {file.name: file.read_bytes() for file in models.iterdir()}
    for name in ("checkpoint", "checkpoint/latest.json", "eval.csv", "train.csv", "finished.json", "config.json"):
        folder = unfinished_copy(whole, tmp_path / f"copy-{name.replace('/', '-')}")
        target = models / "latest.json"
        if name == "checkpoint":
            shutil.rmtree(folder / name)
            target = models
        else:
            (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        with pytest.raises(UserError, match="is a link"):
            drq.train(small(folder), quiet=True)
        assert {file.name: file.read_bytes() for file in models.iterdir()} == before
    (tmp_path / "link").symlink_to(unfinished_copy(whole, tmp_path / "real"))
    (tmp_path / "real" / "checkpoint" / "mine.safetensors").write_bytes(b"precious")
    drq.train(small(tmp_path / "link"), quiet=True)
    assert_same_run(whole, tmp_path / "real")
    assert (tmp_path / "real" / "checkpoint" / "mine.safetensors").read_bytes() == b"precious"


@pytest.mark.parametrize("error", [KeyError("rows"), RuntimeError("shapes"), ValueError("dtype"), OSError("device")])
@pytest.mark.parametrize("part", ["replay", "learner"])
def test_a_bug_in_restoring_is_no_damaged_file(
    part: str, error: Exception, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error

    if part == "replay":
        monkeypatch.setattr(Replay, "restore", fail)
    else:
        monkeypatch.setattr(Learner, "restore", fail)
    folder = unfinished_copy(whole, tmp_path / "copy")
    with pytest.raises(type(error)) as raised:
        drq.train(small(folder), quiet=True)
    assert raised.value is error


def test_a_full_disk_keeps_the_previous_checkpoint(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]
    original = checkpoint_module.save_file

    def full(tensors: object, path: Path, metadata: object) -> None:
        calls[0] += 1
        if calls[0] > 4:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        original(tensors, path, metadata)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save_file", full)
        with pytest.raises(UserError, match=r"No space left on device.*the previous checkpoint is intact"):
            drq.train(small(tmp_path / "run"), quiet=True)
        calls[0] = 4
        with pytest.raises(UserError, match=r"No space left on device.*run the same command again, which begins anew"):
            drq.train(small(tmp_path / "first"), quiet=True)
    left = tmp_path / "run/checkpoint/.tmpAb12Cd"  # as safetensors leaves it where a run is killed
    left.touch()
    drq.train(small(tmp_path / "run"), quiet=True)
    assert_same_run(whole, tmp_path / "run")
    assert not left.exists()


def test_the_policy_of_a_checkpoint_acts_as_the_trained_one(whole: Path) -> None:
    policy = drq.load(whole)
    trained = state(whole)
    for name, value in policy.agent.modules.state_dict().items():
        assert np.array_equal(value.numpy(), trained[f"agent.{name}"].numpy()), name


RAINBOW = RainbowConfig(
    batch_size=8, hidden_dim=64, seed_steps=20, n_step=3, reset_every=30, last_reset=60, anneal_updates=20
)
GPU_RUNS = {
    "control": {"agent": SACConfig(batch_size=32, seed_steps=20)},
    "control in float32": {"agent": SACConfig(batch_size=32, seed_steps=20), "precision": "float32"},
    "game": {"task": "toy/catch", "agent": DQNConfig(batch_size=32, seed_steps=20)},
    "game, past a reset": {"task": "toy/catch", "agent": RAINBOW},
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GPU_RUNS)
def test_on_a_gpu(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs and kernels, in the precision of each by itself or in float32; resumed by another process, in which
    libraries choose anew among their algorithms."""
    changes = dict(GPU_RUNS[kind])
    precision = changes.pop("precision", "auto")
    changes |= {
        "device": "cuda",
        "env": EnvConfig(image_size=84),
        "engine": EngineConfig(precision=precision, compile="off", eval_process="off"),
    }
    drq.train(small(tmp_path / "whole", **changes), quiet=True)
    train_with_crash_at(tmp_path / "run", 75, monkeypatch, **changes)
    log = tmp_path / "log.txt"
    process = start_worker(job_to_json(small(tmp_path / "run", **changes), None), log, {})
    assert process.wait(300) == 0, log.read_text()
    assert_same_run(tmp_path / "whole", tmp_path / "run")
