"""When a step's work is done changes nothing of a run: what is learnt from, and which weights act, stay the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import drq
from drq.config import DQNConfig, EngineConfig, EnvConfig, TrainConfig
from drq.engine.learner import Learner
from drq.envs import make
from drq.envs.protocol import Action, Environment, EnvSpec, Frame, Step
from drq.errors import UserError
from drq.replay import Replay
from drq.training import components
from drq.training.env_worker import InlineEnv, ThreadedEnv
from runs import assert_same_run, edit_checkpoint, small

PONG: dict[str, Any] = {
    "task": "atari/pong",
    "steps": 70,
    "checkpoint_every": 50,
    "agent": DQNConfig(batch_size=8, hidden_dim=16, seed_steps=20, n_step=3),
    "env": EnvConfig(image_size=36, max_episode_steps=120),  # 30 agent steps: episodes end
    "eval": dataclasses.replace(small(Path()).eval, every=0, episodes=1),
}
REACH: dict[str, Any] = {"checkpoint_every": 50}


class Order:
    """Trains, and keeps the order in which the loop asked for things."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def of(self, folder: Path, worker: type, *, runs_ahead: bool, **changes: Any) -> list[str]:
        """Of the last but one agent step: from choosing its action to choosing the next. No checkpoint may be due."""
        asked: list[str] = []

        def noting(name: str, original: Any) -> Any:
            def call(*args: Any) -> Any:
                asked.append(name)
                result = original(*args)
                if name not in ("act", "step"):
                    return result

                def wait() -> Any:
                    asked.append(f"{name}: waited for")
                    return result()

                return wait

            return call

        class Noting(worker):  # type: ignore[misc]
            step = noting("step", worker.step)

        with self._monkeypatch.context() as patch:
            patch.setattr(Learner, "runs_ahead", runs_ahead)
            patch.setattr(Learner, "actions", noting("act", Learner.actions))
            patch.setattr(Learner, "update", noting("update", Learner.update))
            patch.setattr(Replay, "add", noting("store", Replay.add))
            patch.setattr(components, "ThreadedEnv", Noting)
            drq.train(small(folder, **changes), quiet=True)
        first, last = [place for place, name in enumerate(asked) if name == "act"][-2:]
        return asked[first:last]


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Order:
    return Order(monkeypatch)


FIRST = ["act", "store", "update", "act: waited for", "step", "step: waited for"]
BESIDE = ["act", "act: waited for", "step", "store", "update", "step: waited for"]


@pytest.mark.parametrize("task", [REACH, PONG], ids=["toy/reach", "atari/pong"])
def test_any_order_gives_the_same_run(task: dict[str, Any], order: Order, tmp_path: Path) -> None:
    assert order.of(tmp_path / "thread", ThreadedEnv, runs_ahead=False, **task) == BESIDE
    assert order.of(tmp_path / "first", InlineEnv, runs_ahead=True, **task) == FIRST
    assert order.of(tmp_path / "inline", InlineEnv, runs_ahead=False, **task) == BESIDE
    for other in ("first", "inline"):
        assert_same_run(tmp_path / "thread", tmp_path / other)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too short": ({"steps": 3, "env": EnvConfig(image_size=24, action_repeat=4)}, "less than one agent step"),
    "no repeat": ({"env": EnvConfig(action_repeat=-1)}, "--env.action-repeat is -1: set it to 1 or more"),
    "a GPU's arithmetic": ({"engine": EngineConfig(precision="tf32")}, "tf32 is a GPU's arithmetic"),
    "other settings": ({"seed": 2}, "holds a run with other settings"),
    "other device": ({}, "The run was begun on cuda"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_settings_are_refused_before_an_environment_is_opened(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    drq.train(small(folder, steps=20), quiet=True)
    if refused == "other device":
        edit_checkpoint(folder, device="cuda")
    elif refused != "other settings":
        folder = tmp_path / "another"
    changes, said = REFUSED[refused]
    opened: list[TrainConfig] = []
    monkeypatch.setattr(components, "make_env", opened.append)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=said):
        drq.train(small(folder, **changes), quiet=True)
    assert opened == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_finished_run_needs_neither_its_environment_nor_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    trained = drq.train(small(folder, steps=20), quiet=True)
    edit_checkpoint(folder, device="cuda")
    monkeypatch.delattr(components, "make_env")
    assert drq.train(small(folder, steps=20), quiet=True) == trained


class OneBuffer:
    """An environment as a third party may write it: all frames in one array, nothing that is not asked for."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._frame: Frame | None = None

    @property
    def spec(self) -> EnvSpec:
        return self._env.spec

    @property
    def render_seconds(self) -> float:
        return self._env.render_seconds

    def reset(self, seed: int) -> Frame:
        return self._drawn(self._env.reset(seed))

    def step(self, action: Action) -> Step:
        step = self._env.step(action)
        return step._replace(frame=self._drawn(step.frame))

    def render(self) -> np.ndarray:
        return self._env.render()

    def close(self) -> None:
        self._env.close()

    def _drawn(self, frame: Frame) -> Frame:
        if self._frame is None:
            self._frame = frame.copy()
        self._frame[...] = frame
        return self._frame


@pytest.mark.parametrize("worker", [ThreadedEnv, InlineEnv])
def test_an_environment_may_draw_into_one_buffer(
    worker: type, order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order.of(tmp_path / "whole", ThreadedEnv, runs_ahead=False)
    monkeypatch.setattr(
        components, "make_env", lambda config: OneBuffer(make(config.task, config.env, config.env.action_repeat or 1))
    )

    class StepMadeEarly(worker):  # type: ignore[misc]
        """The worst case: the next frame is drawn before the last one is stored."""

        def step(self, action: Action) -> Callable[[], Step]:
            step = super().step(action)()
            return lambda: step

    order.of(tmp_path / "run", StepMadeEarly, runs_ahead=False)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
