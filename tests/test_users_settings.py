"""Python says what the command line says; settings from files; what an environment of one's own can be given."""

from __future__ import annotations

import datetime
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import PendulumEnv

import drq
from drq import cli
from drq.config import DQNConfig, EnvConfig, SACConfig, TrainConfig
from drq.envs import EnvSpec, import_modules, make
from drq.envs.gym import construct, keyword_arguments
from drq.errors import UserError
from drq.presets import configure
from drq.settings import flat, override
from drq.training.folder import RunFolder
from runs import OWN_ENV, fails, small


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The runs that commands describe; they are not trained."""
    runs: list[TrainConfig] = []
    monkeypatch.setattr("drq.training.run.train", runs.append)
    return runs


def test_a_preset_takes_the_agent_that_suits() -> None:
    assert isinstance(drq.preset("cpu", "toy/reach").agent, SACConfig)
    assert isinstance(drq.preset("cpu", "toy/catch").agent, DQNConfig)
    assert isinstance(drq.preset("toy", "dmc/walker-walk").agent, SACConfig)
    assert drq.preset("atari100k", "dmc/walker-walk").agent == SACConfig()


@pytest.mark.parametrize("task", ["toy/reach", "toy/catch"])
def test_a_toy_task_has_settings_of_its_own(task: str, tmp_path: Path) -> None:
    """By which it learns in minutes: here an update and two evaluations, the first of random play."""
    result = drq.train(task, dir=str(tmp_path), steps=502, device="cpu", quiet=True, eval={"video": False})
    assert [row["env_step"] for row in result.evaluations] == [250, 500, 502]
    written = RunFolder(tmp_path).config
    assert (written.preset, written.env.image_size) == ("toy", 24)


def test_python_describes_the_run_of_the_command_line(described: list[TrainConfig]) -> None:
    cli.main(["train", "toy/reach", "--steps", "2000", "--agent.k", "1", "--env.image-size", "32", "--agent", "sac"])
    by_name = {"steps": 2000, "agent": {"type": "sac", "k": 1}, "env.image_size": 32}
    assert described == [configure("toy/reach", by_name)]
    assert described[0].agent == SACConfig(k=1, batch_size=64, hidden_dim=256, seed_steps=500)  # as the preset has it


def test_training_by_a_tasks_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny: dict[str, Any] = {"hidden_dim": 16, "batch_size": 4, "seed_steps": 60}
    result = drq.train(
        "toy/catch", steps=40, dir=str(tmp_path), agent=tiny, eval={"episodes": 1, "video": False}, device="cpu"
    )
    assert drq.load(result.dir).config.agent == replace(drq.preset("toy", "toy/catch").agent, **tiny)
    said = capsys.readouterr().err
    assert "This run will make no update: --steps 40 gives 40 agent steps, and the first 60 are random" in said
    with pytest.raises(drq.UserError, match=r"There is no setting 'stepps'. Did you mean 'steps'"):
        drq.train("toy/catch", stepps=3)


def test_what_python_is_given_by_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"was given a PendulumEnv: register .* \"gym/MyRobot-v0\""):
        drq.train(PendulumEnv())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"give a list of them, imports=\['my_env'\]"):
        drq.train("gym/Lamp-v0", imports="my_env")
    with pytest.raises(UserError, match="The format is 'tf': choose from drq, onnx, pt2"):
        drq.export(tmp_path, tmp_path / "x.tf", format="tf")  # type: ignore[arg-type]


def test_settings_from_a_file(tmp_path: Path, described: list[TrainConfig]) -> None:
    (tmp_path / "run.toml").write_text('task = "toy/reach"\nseed = 3\n[agent]\nk = 1\n[env]\nimage_size = 32\n')
    cli.main(["train", "--config", str(tmp_path / "run.toml"), "--steps", "700"])
    assert (described[0].task, described[0].seed, described[0].steps) == ("toy/reach", 3, 700)
    assert (described[0].agent.k, described[0].env.image_size, described[0].preset) == (1, 32, "toy")
    drq_run = small(tmp_path / "run")
    RunFolder(tmp_path / "run").open(drq_run, EnvSpec("toy/reach", (3, 24, 24), 3, "continuous", 2, 1, 50))
    cli.main(["train", "--config", str(tmp_path / "run" / "config.json"), "--seed", "9"])
    assert described[1].dir is None
    assert (described[1].seed, described[1].agent, described[1].steps) == (9, drq_run.agent, drq_run.steps)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seeds = 3", "There is no setting 'seeds'"),
        ("x", "cannot be read"),
        (f"seeds = {'[' * 10_000}", "cannot be read"),
        ("seed = 'a'", "give it a whole number"),
        ("preset = 5", "its preset is 5"),
        ("imports = 5", "asks to run code of the module 5"),
    ],
)
def test_a_file_with_mistakes(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(text)
    assert said in fails(capsys, "train", "toy/reach", "--config", str(tmp_path / "run.toml"))


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(capsys, "train", "toy/reach", "--config", "gone.toml")
    assert "--config gone.toml cannot be read (gone.toml: No such file or directory): give" in said


def test_arguments_and_wrappers_of_an_environment(described: list[TrainConfig]) -> None:
    options = ["--env.kwargs", '{"gain": 0.5}', "--env.wrap", "own_env:Dim"]
    cli.main(["train", "gym/Lamp-v0", "--import", OWN_ENV, "--preset", "cpu", *options])
    env = make("gym/Lamp-v0", described[0].env, 1)
    lamp = env.simulator.env  # type: ignore[attr-defined]
    assert lamp.unwrapped.gain == 0.5
    bright = env.reset(1).max()
    assert lamp.unwrapped.level // 2 == bright
    assert env.spec.sees == "the observation, 30x40x3, resized to 48x48"
    same = configure("gym/Lamp-v0", {"env": {"kwargs": {"gain": 0.5}, "wrap": ["own_env:Dim"]}, "preset": "cpu"})
    assert same.env == described[0].env
    inner = {"env": {"kwargs": {"gain": {"of": {"red": 1}}}}}
    assert override(same, flat(inner)).env.kwargs == '{"gain": {"of": {"red": 1}}}'
    with pytest.raises(UserError, match=r"env\.kwargs is no JSON \(.*date.*\): give it numbers"):
        flat({"env": {"kwargs": {"since": datetime.date(2026, 1, 1)}}})


def test_arguments_may_be_written_as_python_has_them() -> None:
    """JSON has no tuples, which some constructors ask for, and true in lower case alone."""
    assert keyword_arguments('{"size": (64, 48), "dim": True}') == {"size": (64, 48), "dim": True}
    for given in ({"size": (64, 48)}, {"sizes": {1: [2, 3]}}, {"size": [64, 48], "dim": True, "to": math.inf}):
        assert keyword_arguments(flat({"env": {"kwargs": given}})["env.kwargs"]) == given


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--env.kwargs", "gain=0.5"], "which is no JSON"),
        (["--env.kwargs", '{"gain": float(1)}'], "which is no JSON"),
        (["--env.kwargs", "[1]"], "give a JSON object"),
        (["--env.kwargs", '{"gian": 1}'], "does not take --env.kwargs"),
        (["--env.wrap", "own_env:Dimm"], "The wrapper 'own_env:Dimm' cannot be imported"),
    ],
)
def test_wrong_arguments_and_wrappers(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in fails(capsys, "train", "gym/Lamp-v0", "--import", OWN_ENV, *options)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("def __init__(self, track): pass", "does not take --env.kwargs '{}' (Odd.__init__() missing 1 required"),
        ("def reset(self): pass", "failed (TypeError: Odd.reset() got an unexpected keyword argument 'seed'): mend"),
    ],
)
def test_no_line_of_gymnasiums_is_the_users_to_mend(
    made: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd_env.py").write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control import PendulumEnv\n"
        f"class Odd(PendulumEnv):\n    {made}\ngymnasium.register('Odd-v0', Odd)\n"
    )
    monkeypatch.delitem(sys.modules, "odd_env", raising=False)
    with pytest.raises(SystemExit):
        cli.main(["check", "gym/Odd-v0", "--import", str(tmp_path / "odd_env.py"), "--env.observation", "state"])
    gymnasium.registry.pop("Odd-v0")
    said_of_it = capfd.readouterr().err
    assert said in said_of_it
    assert "WARN" not in said_of_it


def test_how_mujoco_draws_is_settled_before_a_module_or_an_environment_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or Gymnasium's MuJoCo tasks look for a display."""
    monkeypatch.delitem(sys.modules, "mujoco", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(os.environ, "MUJOCO_GL", "")
    (tmp_path / "draws.py").write_text("import os\nfound = os.environ['MUJOCO_GL']\n")
    import_modules([str(tmp_path / "draws.py")])
    assert sys.modules["draws"].found == "egl"
    monkeypatch.setitem(os.environ, "MUJOCO_GL", "")
    with pytest.raises(UserError, match="cannot be used"):
        construct("NoSuchTask-v0", EnvConfig())
    assert os.environ["MUJOCO_GL"] == "egl"


def test_arguments_are_for_environments_of_ones_own(tmp_path: Path) -> None:
    with pytest.raises(drq.UserError, match="are for gym tasks, not toy/reach"):
        drq.train(small(tmp_path / "run", env=EnvConfig(image_size=24, image_key="eye")), quiet=True)
    assert not list(tmp_path.iterdir())


class Showing(gymnasium.Env[Any, Any]):
    """Shows samples of whatever space it is given."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, space: spaces.Space[Any], render_mode: str | None = None) -> None:
        self.observation_space, self.render_mode = space, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.shown = self.observation_space.sample()
        return self.shown, {}

    def render(self) -> Any:
        return np.full((10, 10, 3), 7, np.uint8)


@pytest.fixture
def showing() -> Iterator[Any]:
    def register(space: spaces.Space[Any]) -> str:
        gymnasium.register("Showing-v0", Showing, kwargs={"space": space}, disable_env_checker=True)
        return "gym/Showing-v0"

    yield register
    gymnasium.registry.pop("Showing-v0")


BYTES = spaces.Box(0, 255, (20, 20, 3), np.uint8)


def test_an_image_in_a_dict(showing: Any) -> None:
    task = showing(spaces.Dict(joints=spaces.Box(-1, 1, (4,)), eye=BYTES))
    drawn = r", or what it draws with --env.wrap gymnasium.wrappers:AddRenderObservation"
    with pytest.raises(drq.UserError, match=rf"observes a Dict with the image 'eye'.*--env.image-key eye{drawn}"):
        make(task, EnvConfig(), 1)
    with pytest.raises(drq.UserError, match=r"no image 'joints' but 'eye'"):
        make(task, EnvConfig(image_key="joints"), 1)
    env = make(task, EnvConfig(image_size=20, image_key="eye"), 1)
    assert np.array_equal(env.reset(0), env.simulator.env.unwrapped.shown["eye"].transpose(2, 0, 1))  # type: ignore[attr-defined]
    assert env.spec.sees == "the observation 'eye', 20x20x3"
    other = spaces.Dict(eye=spaces.Box(0, 255, (9, 20, 3), np.uint8))
    env.simulator.env.unwrapped.observation_space = other  # type: ignore[attr-defined]
    with pytest.raises(drq.UserError, match=r"of shape \(9, 20, 3\) in env step 0 .* promised uint8"):
        env.reset(0)
    assert isinstance(configure(task, {"env.image_key": "eye"}).agent, SACConfig)


def test_floats_are_seen_as_bytes(showing: Any) -> None:
    env = make(showing(spaces.Box(0, 1, (20, 20, 3), np.float32)), EnvConfig(image_size=20), 1)
    frame = env.reset(0)
    shown = env.simulator.env.unwrapped.shown  # type: ignore[attr-defined]
    assert frame.dtype == np.uint8
    assert np.abs(frame.transpose(1, 2, 0) - 255 * shown).max() <= 0.5


@pytest.mark.parametrize(
    "space", [spaces.Box(0, 255, (20, 20, 4), np.uint8), spaces.Box(-1, 1, (20, 20, 3), np.float32)]
)
def test_what_is_no_image_is_refused_and_not_drawn_instead(showing: Any, space: spaces.Space[Any]) -> None:
    with pytest.raises(drq.UserError, match=r"observes 20x20x[34] of .* which is no image to learn from"):
        make(showing(space), EnvConfig(), 1)


def test_a_drawing_is_said_to_be_one(showing: Any) -> None:
    env = make(showing(spaces.Box(-1, 1, (4,))), EnvConfig(image_size=20), 1)
    assert (env.reset(0) == 7).all()
    assert env.spec.sees == "what render() draws, resized to 20x20"
