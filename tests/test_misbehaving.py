"""Environments that misbehave: one sentence that names the environment, the step and what was wrong."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import drq
from drq.config import EnvConfig, SACConfig, TrainConfig
from drq.errors import UserError
from drq.training import stopping
from drq.training.loop import Loop
from drq.training.run import Trainer
from runs import assert_same_run, small

IMAGE = spaces.Box(0, 255, (24, 24, 3), np.uint8)
VECTOR = spaces.Box(-1, 1, (3,), np.float32)
OBSERVATION = {"pixels": np.zeros((24, 24, 3), np.uint8), "state": np.zeros(3, np.float32)}


class Misbehaving(gymnasium.Env[Any, Any]):
    """Does one thing wrong, from its third step or its second reset on."""

    metadata = {"render_modes": []}  # noqa: RUF012
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, kind: str, at: str = "", gives: Any = None, render_mode: str | None = None) -> None:
        self.kind, self.at, self.gives = kind, at, gives
        self.observation_space = IMAGE if kind == "pixels" else VECTOR
        self.resets = self.steps = 0
        if at == "constructor":
            raise ValueError("no room\nfor it")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.resets += 1
        self.steps = 0
        if self.at == "first reset":
            time.sleep(3600)
        if self.at == "reset" and self.resets == 2:
            raise ZeroDivisionError("reset by zero")
        return self._observation() if self.at == "no info" else (self._observation(), {})

    def _observation(self) -> Any:
        wrong = self.at == "observation" and self.steps >= 3
        return self.gives if wrong else OBSERVATION[self.kind]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.at == "step" and self.steps == 3:
            raise self.gives or KeyError("joint")
        if self.at == "four":
            return self._observation(), 0.1, False, {}  # type: ignore[return-value]
        if self.at == "hang" and self.steps == 3:
            time.sleep(3600)
        return self._observation(), self.gives if self.at == "reward" else 0.1, False, self.steps == 20, {}

    def close(self) -> None:
        if self.at == "close":
            raise OSError("the robot does not let go")


class Unspeakable(Exception):
    """An error that fails when it is put into words."""

    def __str__(self) -> str:
        raise RecursionError


gymnasium.register("Misbehaving-v0", Misbehaving)


def config(folder: Path, kind: str = "state", **changes: Any) -> TrainConfig:
    return small(
        folder,
        "gym/Misbehaving-v0",
        env=EnvConfig(image_size=24, action_repeat=1, observation=kind),  # type: ignore[arg-type]
        **changes,
    )


NAN, INF = float("nan"), float("inf")
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nan reward": ({"at": "reward", "gives": NAN}, r"gave the reward nan in env step 1 "),
    "infinite reward": ({"at": "reward", "gives": -INF}, r"gave the reward -inf in env step 1 "),
    "no reward": ({"at": "reward", "gives": None}, r"in env step 1 of an episode \(TypeError: float"),
    "nan state": ({"at": "observation", "gives": np.array([0, NAN, 0])}, r"observation nan at place 1 in env step 3"),
    "infinite state": ({"at": "observation", "gives": np.full(3, INF)}, r"observation inf at place 0 in env step 3"),
    "state of one": ({"at": "observation", "gives": np.zeros(1)}, r"shape \(1,\) in env step 3 .* promised fl.*\(3,\)"),
    "state of none": ({"at": "observation", "gives": np.float32(0)}, r"of shape \(\) in env step 3 "),
    "state of text": ({"at": "observation", "gives": "left"}, r"of shape \(\) in env step 3 "),
    "image of one": ({"kind": "pixels", "at": "observation", "gives": np.zeros(1, np.uint8)}, r"shape \(1,\) in env "),
    "image of none": ({"kind": "pixels", "at": "observation", "gives": np.uint8(0)}, r"of shape \(\) in env step 3 "),
    "no image": ({"kind": "pixels", "at": "observation", "gives": None}, r"observes object of shape"),
    "float image": (
        {"kind": "pixels", "at": "observation", "gives": np.zeros((24, 24, 3))},
        "observes float64 of shape .* and promised uint8",
    ),
    "step raises": ({"at": "step"}, r"failed in env step 3 of an episode at test_misb.*, line \d+ \(KeyError: 'joint"),
    "reset raises": (
        {"at": "reset"},
        r"in its reset at test_misb.*, line \d+ \(ZeroDivisionError: reset by zero\): mend its reset\(\) first",
    ),
    "step exits": ({"at": "step", "gives": SystemExit(0)}, r"failed in env step 3 .* \(SystemExit: 0\)"),
    "step cannot say why": ({"at": "step", "gives": Unspeakable()}, r"failed in env step 3 .* \(Unspeakable\)"),
    "step gives four": ({"at": "four"}, r"failed in env step 1 .* \(ValueError: not enough values to unpack"),
    "reset without info": ({"at": "no info"}, r"failed in its reset \(ValueError: "),
    "reward of two": ({"at": "reward", "gives": np.ones(2)}, r"failed in env step 1 .* \(TypeError: only"),
    "state past float32": ({"at": "observation", "gives": np.full(3, 1e300)}, r"observation inf at place 0 in env st"),
    "constructor raises": ({"at": "constructor"}, r"in its constructor at test_misb.*, line \d+ \(ValueError: no room"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said_in_a_sentence(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how, said = CASES[case]
    how = {"kind": "state", **how}
    monkeypatch.setitem(gymnasium.registry["Misbehaving-v0"].__dict__, "kwargs", how)
    with pytest.raises(UserError, match=said) as raised:
        drq.train(config(tmp_path / "run", how["kind"]), quiet=True)
    assert "\n" not in str(raised.value)
    assert "gym/Misbehaving-v0" in str(raised.value)
    error = tmp_path / "run" / "error.txt"
    if how["at"] in ("step", "reset") and error.parent.exists():
        assert "Traceback" in error.read_text()
        assert error.read_text().splitlines()[-1] == str(raised.value)


def test_a_constructor_that_raises_before_an_agent_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"kind": "state", "at": "constructor"}
    monkeypatch.setitem(gymnasium.registry["Misbehaving-v0"].__dict__, "kwargs", how)
    with pytest.raises(UserError, match=CASES["constructor raises"][1]):
        drq.train("gym/Misbehaving-v0", preset="cpu", quiet=True)


@pytest.mark.parametrize(
    ("at", "number", "before"),
    [
        ("hang", signal.SIGINT, signal.default_int_handler),
        ("hang", signal.SIGTERM, signal.SIG_IGN),
        ("first reset", signal.SIGINT, signal.default_int_handler),
    ],
)
def test_a_hang_is_said_and_ctrl_c_ends_it(
    at: str, number: signal.Signals, before: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a scheduler's signal to the background of a script, where Ctrl-C is ignored."""
    how = {"kind": "state", "at": at}
    monkeypatch.setitem(gymnasium.registry["Misbehaving-v0"].__dict__, "kwargs", how)
    monkeypatch.setattr(stopping, "SAID_AFTER", 0.3)
    monkeypatch.setattr(stopping, "STOPPED_AFTER", 0.1)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        os.kill(os.getpid(), number)

    trainer = Trainer(config(tmp_path / "run"), quiet=True)
    trainer.watch._say = say
    handler = signal.signal(signal.SIGINT, before)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [text.partition(" for ")[0] for text in said] == ["has not answered"]


def test_one_that_does_not_close_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    how = {"kind": "state", "at": "close"}
    monkeypatch.setitem(gymnasium.registry["Misbehaving-v0"].__dict__, "kwargs", how)
    drq.train(config(tmp_path / "run"), quiet=True)
    assert (tmp_path / "run" / "finished.json").exists()
    said = capfd.readouterr().err
    assert "gym/Misbehaving-v0 failed in its close() at test_misbehaving.py" in said
    assert "Traceback" not in said


Poison = Callable[[Loop], None]


def poison_weights(loop: Loop) -> None:
    next(iter(loop.learner.agent.modules.parameters())).data[0] = torch.nan


def poison_a_moment(loop: Loop) -> None:
    optimizer = next(iter(loop.learner.agent.optimizers.values()))
    next(iter(optimizer.state.values()))["exp_avg"][0] = torch.inf


@pytest.mark.parametrize("poison", [poison_weights, poison_a_moment])
def test_what_is_not_finite_stops_the_run_and_spares_the_checkpoint(
    poison: Poison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gymnasium.registry["Misbehaving-v0"].__dict__, "kwargs", {"kind": "state"})
    trainer = Trainer(config(tmp_path / "run"), quiet=True)
    original = Loop._learn

    def learn(self: Loop) -> None:
        original(self)
        if self.state.agent_step == 60:
            poison(self)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_learn", learn)
        with pytest.raises(UserError, match="diverged"):
            trainer.run()
    assert not (tmp_path / "run" / "finished.json").exists()
    drq.train(config(tmp_path / "run"), quiet=True)
    drq.train(config(tmp_path / "whole"), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_huge_rewards_end_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"kind": "state", "at": "reward", "gives": 1e38}
    monkeypatch.setitem(gymnasium.registry["Misbehaving-v0"].__dict__, "kwargs", how)
    agent = SACConfig(batch_size=8, hidden_dim=16, feature_dim=8, seed_steps=20)
    with pytest.raises(UserError, match="diverged"):
        drq.train(dataclasses.replace(config(tmp_path / "run"), agent=agent), quiet=True)
    assert not (tmp_path / "run" / "finished.json").exists()
