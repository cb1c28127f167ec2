"""The command line as a stranger meets it: what it says, and what it says of mistakes."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import tyro

from drq import cli
from drq.config import TrainConfig
from drq.envs import EnvSpec
from drq.errors import UserError
from drq.presets import preset
from drq.training import folder as folder_module
from drq.training.folder import RunFolder
from runs import FLAGS, drq, fails, rows, small


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("trian",), "There is no command 'trian'. Did you mean 'train'?"),
        (("train",), "Name the task first, such as: drq train dmc/walker-walk --preset planet"),
        (("train", "--seed", "1"), "Name the task first"),
        (("train", "dmc/walker-wlak"), "Did you mean 'dmc/walker-walk'"),
        (("train", "walker-walk"), "Did you mean 'dmc/walker-walk'"),
        (("train", "dcm/walker-walk"), "dmc/walker-walk"),
        (("train", "toy/reach", "--preset", "plannet"), "Did you mean 'planet'?"),
        (("train", "toy/reach", "--preset"), "--preset needs a value"),
        (("train", "toy/reach", "--agent", "ppo"), "There is no agent 'ppo': choose from sac, dqn, rainbow."),
        (("train", "toy/reach", "--agent", "dqn"), "toy/reach has continuous actions and DQN needs discrete ones"),
        (("train", "toy/catch", "--agent", "sac"), "toy/catch has discrete actions and SAC needs continuous ones"),
        (("train", "toy/reach", "--agent.augmentation", "shft"), "Did you mean 'shift'?"),
        (("train", "toy/reach", "--import", "no_such_module"), "There is no module 'no_such_module'"),
        (("train", "gym/NoSuch-v0"), "--import my_module"),
        (("train", "toy/reach", "--agent.k", "0"), "--agent.k is 0: set it to 1 or more."),
        (("train", "toy/reach", "--agent.discount", "1.5"), "--agent.discount is 1.5: set it between 0 and 1."),
        (("train", "toy/reach", "--agent.learning-rate", "0"), "--agent.learning-rate is 0.0: set it above 0."),
        (("train", "toy/reach", "--steps", "0"), "--steps is 0: set it to 1 or more."),
        (("train", "toy/reach", "--agent.log-std-max", "-20"), "log-std-max is -20.0: set it to -10.0 or more."),
        (("train", "toy/catch", "--agent.adam-beta2", "1"), "--agent.adam-beta2 is 1.0: set it from 0 to below 1."),
        (("train", "toy/reach", "--eval.episodes", "0"), "--eval.episodes is 0: set it to 1 or more."),
        (("train", "toy/reach", "--env.image-size", "4"), "image"),
        (("train", "toy/reach", "--engine.precision", "tf32"), "tf32 is a GPU's arithmetic"),
        (("train", "toy/reach", "--engine.cuda-graphs", "on"), "CUDA graphs need a GPU"),
        (("train", "toy/reach", "--engine.kernels", "on"), "The kernels need a GPU"),
        (("train", "toy/reach", "--wandb"), "[wandb]'"),
        (("train", "toy/reach", "--dir", __file__), "test_cli.py is a file: choose another --dir."),
        (("eval", "no/such/run"), "is no run folder (there is nothing of that name)"),
        (("eval", "no/such/run", "--episodes", "0"), "--episodes is 0: set it between 1 and 10,000,000"),
        (("tasks", "foo"), "There is no family of tasks 'foo'"),
        (("suite",), "Say what to do with suites"),
        (("report",), "Name at least one folder"),
        (("report", "no/such/folder"), "no/such/folder"),
    ],
)
def test_a_mistake_gets_one_sentence(
    args: tuple[str, ...],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in fails(capsys, *args)
    assert list(tmp_path.rglob("config.json")) == []  # nothing is left behind


def test_cuda_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "sees no CUDA device" in fails(capsys, "train", "toy/reach", "--device", "cuda")


@pytest.mark.parametrize(
    ("flag", "value", "suggested"),
    [
        ("--agent.encodr", "impala", "--agent.encoder"),
        ("--steps", "1e4", "'1e4' is no whole number: write its digits"),
        ("--eval.video", "False", "--eval.video takes no value: write --eval.video, or --eval.no-video to"),
        ("--wandb=true", "--agent.k=1", "--wandb takes no value: write --wandb, or --no-wandb to switch it off."),
    ],
)
def test_a_misspelt_flag_gets_a_suggestion(
    flag: str, value: str, suggested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "toy/reach", flag, value])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert suggested in said.out + said.err


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    assert f"drq {command}" in capsys.readouterr().out


def test_help_without_dashes_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["help"])
    assert capsys.readouterr().out == cli.USAGE


@pytest.mark.parametrize("task", ["dmc/walker-walk", "atari/pong"])
def test_train_help_breaks_no_sentence(task: str) -> None:
    """tyro keeps the line breaks of docstrings."""
    default = preset("strong" if task == "atari/pong" else "planet", task)
    parser = tyro.extras.get_parser(TrainConfig, default=default, config=(tyro.conf.AvoidSubcommands,))
    texts = [str(action.help) for action in parser._actions]
    assert len(texts) > 40
    assert [text for text in texts if re.search(r"[^.]\n", text)] == []


def test_train_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag, words in {
        "--agent.k": "averaged in the target (K)",
        "--env.render": "smaller shadow map",
        "--observation": "SAC State",
        "--import": "registers your environment",
        "--engine.precision": "Arithmetic of convolutions",
        "--eval.episodes": "Episodes in an evaluation",
    }.items():
        assert flag in text
        assert words in text


def test_tasks_lists_everything(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["tasks"])
    text = capsys.readouterr().out
    for name in ("dmc/walker-walk", "toy/reach", "toy/catch", "atari/pong"):
        assert name in text
    (line,) = (line for line in text.splitlines() if line.startswith("dmc/cartpole-swingup "))
    assert line.split(maxsplit=1)[1] == "8 (planet, ablation, cpu), 2 (dreamer)"


def test_train_eval_and_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way of a user, training and playing in processes of their own."""
    folder = tmp_path / "run"
    arguments = ["train", "toy/reach", "--dir", str(folder), *FLAGS[:-1]]  # with videos
    first = drq(*arguments)
    assert first.returncode == 0, first.stderr
    assert "replay of 60 transitions: 0.1 MB" in first.stderr
    assert "Expected: about" in first.stderr
    assert "Done in" in first.stderr

    described = json.loads((folder / "config.json").read_text())
    assert described["config"]["seed"] == 1
    assert described["config"]["agent"]["type"] == "sac"
    assert described["versions"]["torch"]
    assert list(rows(folder / "eval.csv")[0]) == ["env_step", "agent_step", "return_mean", "return_std", "episodes"]
    assert [row["env_step"] for row in rows(folder / "eval.csv")] == ["40", "80", "120"]
    assert {"critic_loss", "actor_loss", "alpha", "episode_return"} <= rows(folder / "train.csv")[-1].keys()
    assert len(list((folder / "videos").glob("*.mp4"))) == 3
    assert list((folder / "tensorboard").iterdir())

    cli.main(arguments)
    assert "is finished" in capsys.readouterr().err
    assert "holds a run with other settings (agent.k: 2 there, 3 now)" in fails(capsys, *arguments, "--agent.k", "3")

    played = drq("eval", str(folder), "--episodes", "3", "--video", str(tmp_path / "play.mp4"))
    assert played.returncode == 0, played.stderr
    assert "over 3 episodes" in played.stdout
    assert (tmp_path / "play.mp4").stat().st_size > 1000


def test_a_gpu_preset_on_a_cpu_names_the_one_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag.replace("cpu", "planet") if flag == "cpu" else flag for flag in FLAGS[:2]] + FLAGS[2:]
    cli.main(["train", "toy/reach", "--dir", str(tmp_path / "run"), *flags])
    said = capsys.readouterr().err
    assert "The preset 'planet' is made for a GPU; --preset cpu is the one for this machine." in said


def test_your_own_environment(tmp_path: Path) -> None:
    """gym/<id> registered by a module of the user's, in the folder they stand in."""
    (tmp_path / "my_envs.py").write_text(
        """
import gymnasium as gym
import numpy as np


class Light(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (30, 40, 3), np.uint8)
    action_space = gym.spaces.Box(0.0, 4.0, (1,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.level, self.t = self.np_random.integers(50, 200), 0
        return self.picture(), {}

    def picture(self):
        return np.full((30, 40, 3), self.level, np.uint8)

    def step(self, action):
        assert 0 <= action[0] <= 4
        self.t += 1
        return self.picture(), -float(abs(action[0] - self.level / 50)), self.t == 7, False, {}


gym.register("Light-v0", Light)
"""
    )
    done = drq("train", "gym/Light-v0", "--import", "my_envs", "--dir", "run", *FLAGS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "run" / "eval.csv")) == 3


def test_an_occupied_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    sentence = fails(capsys, "train", "toy/reach", "--dir", str(tmp_path), *FLAGS)
    assert "has something in it and is no run folder" in sentence
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_other_simulator_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels differ between versions of the simulator: a run does not go on across them."""
    config = small(tmp_path / "run", "dmc/cartpole-swingup")
    run = RunFolder(tmp_path / "run")
    run.open(config, EnvSpec(config.task, (3, 24, 24), 3, "continuous", 1, 8, 125))
    run.check(config)
    newer = folder_module.versions() | {"mujoco": "3.12.0"}
    monkeypatch.setattr(folder_module, "versions", lambda: newer)
    with pytest.raises(UserError, match=r"begun with mujoco .* and 3.12.0 is installed.*pip install mujoco=="):
        run.check(config)


def test_a_copy_without_history_is_told_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is copied to GPU machines without .git, and a run there shall still name its commit."""
    monkeypatch.setattr(folder_module, "__file__", str(tmp_path / "src" / "drq" / "training" / "folder.py"))
    monkeypatch.delenv("DRQ_COMMIT", raising=False)
    assert folder_module.git_commit() is None
    monkeypatch.setenv("DRQ_COMMIT", "1f6a1d7")
    assert folder_module.git_commit() == "1f6a1d7"


def test_an_output_without_the_sign_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a locale that is neither UTF-8 nor Latin-1."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setitem(cli.COMMANDS, "tasks", lambda args: print("return 3.0 ± 1.0"))
    cli.main(["tasks"])
    output.flush()
    assert output.buffer.getvalue() == b"return 3.0 \\xb1 1.0\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("missing", ["torch", "PIL"])
def test_a_missing_package_is_one_sentence(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(args: list[str]) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setitem(cli.COMMANDS, "train", train)
    monkeypatch.setattr(sys, "argv", ["drq", "train", "toy/reach"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("drq", run_name="__main__", alter_sys=True)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"drq: {missing} is not installed: `python -m drq.doctor` says what to type.\n"


def test_ctrl_c_is_quiet_from_the_first_import_on() -> None:
    """But for two small ones of Python's."""
    pressed = """
import importlib, sys, typing
class Keyboard:
    def find_spec(self, name, *_):
        if name not in ("drq", "drq.__main__"):
            raise KeyboardInterrupt
sys.meta_path.insert(0, Keyboard())
from drq.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", pressed], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_version_is_the_installed_one() -> None:
    assert drq("--version").stdout == f"{metadata.version('drq')}\n"
