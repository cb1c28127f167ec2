"""`drq check`: a sound environment passes, and each fault has its sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from drq import cli
from runs import OWN_ENV


def check(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, list[str]]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["check", *args])
    said = capsys.readouterr()
    return int(stopped.value.code or 0), said.out, said.err.strip().splitlines()


def test_a_sound_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--import", OWN_ENV, "--env.image-size", "24", "--steps", "40", "--picture", "seen.png")
    code, said, faults = check(capsys, "gym/Lamp-v0", *options)
    assert (code, faults) == (0, [])
    assert "sees      the observation, 30x40x3, resized to 24x24: 24x24x3, 3 stacked" in said
    assert "actions   1 number from -2 to 2: SAC learns" in said
    assert "agent steps/s" in said
    assert Image.open(tmp_path / "seen.png").size == (3 * 24 * 4, 24 * 4)


def test_bounds_that_differ_are_all_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    low, high = np.array([-1, 0, 10], np.float32), np.array([1, 5, 10.5], np.float32)
    monkeypatch.setattr(Faulty, "action_space", spaces.Box(low, high))
    gymnasium.register("Arm-v0", lambda: Faulty("none"), max_episode_steps=9)
    assert "3 numbers from (-1, 0, 10) to (1, 5, 10.5): SAC" in check(capsys, "gym/Arm-v0")[1]


@pytest.mark.parametrize("task", ["toy/catch", "toy/reach"])
def test_our_own_tasks_have_no_fault(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check(capsys, task, "--steps", "30")[0] == 0


class Faulty(gymnasium.Env[Any, Any]):
    """Wrong in one way."""

    action_space = spaces.Discrete(2)

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.observation_space = spaces.Box(0, 1 if fault == "floats" else 255, (16, 16, 3), np.uint8)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        self.level = int(self.np_random.integers(100))
        if self.fault == "unseeded":
            self.level = int(np.random.default_rng().integers(10**9)) % 200
        return self.seen(), {}

    def seen(self) -> Any:
        image = np.full((16, 16, 3), 7 if self.fault == "still" else self.level + self.steps, np.uint8)
        image[..., 0] = 9  # no grey
        if self.fault == "codes":
            image[:4], image[4:] = 0, self.steps
        elif self.fault not in ("still", "blank"):
            image[:4] = 255
        return image.astype(np.float64) if self.fault == "dtype" else image

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.steps += 1 // 0 if self.fault == "raises" else 0
        reward: Any = {"nan": float("nan"), "vector": np.zeros(2), "none": None}.get(self.fault, 1.0)
        done: Any = self.steps >= 8 and self.fault != "endless"
        return self.seen(), reward, 1 if self.fault == "bool" and done else done, False, {}


@pytest.fixture
def faulty() -> Iterator[Any]:
    def register(fault: str) -> str:
        gymnasium.register("Faulty-v0", Faulty, kwargs={"fault": fault}, disable_env_checker=True)
        return "gym/Faulty-v0"

    yield register
    gymnasium.registry.pop("Faulty-v0")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("dtype", "reset() gives an observation of float64 and observation_space says uint8: return .astype(uint8)."),
        ("nan", "step() gives a reward of nan: return finite numbers."),
        ("vector", "step() gives a reward of ndarray: return a float."),
        ("none", "step() gives a reward of NoneType: return a float."),
        ("bool", "step() gives terminated as int: return True or False."),
        ("unseeded", "The same seed and actions gave another episode (the first frame differed)"),
        ("endless", "No episode ended in 30 agent steps and no time limit is registered: set --env.max-episode-steps"),
        ("still", "What the agent sees did not change in 30 agent steps"),
        ("blank", "Pictures are of one colour all over"),
        ("codes", "All pixels lie from 0 to 8 of 255, as codes do, not colours"),
        ("raises", "Playing it failed at test_env_check.py, line"),
        ("floats", "outside its observation_space: widen the space, or clip to it."),
    ],
)
def test_each_fault_has_its_sentence(
    fault: str, sentence: str, faulty: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, faults = check(capsys, faulty(fault), "--steps", "30", "--picture", str(tmp_path / "seen.png"))
    assert code == 1
    assert any(sentence in each for each in faults), faults
    assert all(each.startswith("fault: ") for each in faults)


class Careless(Faulty):
    """Its vector leaves its space; what it shows is sound."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    vector = spaces.Box(-1, 1, (2,))

    def __init__(self, image: str | None, render_mode: str | None = None) -> None:
        super().__init__("none")
        self.image, self.render_mode = image, render_mode
        shown = self.observation_space
        self.observation_space = spaces.Dict({"vector": self.vector, image: shown}) if image else self.vector

    def seen(self) -> Any:
        vector = np.full(2, 1.5 + self.steps, np.float32)
        return {"vector": vector, self.image: super().seen()} if self.image else vector

    def render(self) -> Any:
        return super().seen()

    def step(self, action: Any) -> Any:
        return *super().step(action)[:1], 1.0, self.steps >= 8, False, {}


@pytest.mark.parametrize(
    ("image", "options", "faults"),
    [
        (None, [], []),
        ("eye", ["--env.image-key", "eye"], []),
        (None, ["--env.observation", "state"], ["fault: reset() gives an observation outside", "fault: step() gives"]),
    ],
)
def test_only_what_the_agent_sees_can_be_at_fault(
    image: str | None, options: list[str], faults: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gymnasium.register("Careless-v0", Careless, kwargs={"image": image}, disable_env_checker=True)
    picture = ["--picture", str(tmp_path / "seen.png")]
    code, _, said = check(capsys, "gym/Careless-v0", "--steps", "30", *picture, *options)
    gymnasium.registry.pop("Careless-v0")
    assert (code, len(said)) == (bool(faults), len(faults)), said
    assert all(map(str.startswith, said, faults)), said


def test_a_task_that_is_not_there_and_no_steps_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, faults = check(capsys, "gym/NoSuch-v0")
    assert code == 1
    assert "There is no task 'gym/NoSuch-v0'" in faults[0]
    assert check(capsys, "toy/reach", "--steps", "0")[2] == ["fault: --steps is 0: set it to 1 or more."]
