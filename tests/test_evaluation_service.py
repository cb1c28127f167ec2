"""Evaluations beside training are those that training would have made itself."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch

import drq
from drq import envs
from drq.agents import make_agent
from drq.agents.protocol import Agent
from drq.config import EngineConfig, TrainConfig
from drq.engine.settings import EngineSettings
from drq.envs import EnvironmentGroup
from drq.training import evaluation_service
from drq.training.evaluation_service import EvaluationBeside, Request
from runs import assert_same_run, rows, small

BESIDE = EngineConfig(eval_process="on")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "alone"
    drq.train(small(folder), quiet=True)
    return folder


def test_a_process_of_its_own_changes_nothing(alone: Path, tmp_path: Path) -> None:
    drq.train(small(tmp_path / "run", engine=BESIDE), quiet=True)
    assert_same_run(alone, tmp_path / "run")


def test_a_dead_process_is_replaced_by_this_one(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = EvaluationBeside.submit

    def submit(self: EvaluationBeside, agent: Agent, request: Request) -> None:
        if request.agent_step == 80:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        original(self, agent, request)

    monkeypatch.setattr(EvaluationBeside, "submit", submit)
    drq.train(small(tmp_path / "run", engine=BESIDE), quiet=True)
    assert rows(alone / "eval.csv") == rows(tmp_path / "run" / "eval.csv")
    assert "The evaluation process has ended; this process evaluates instead." in capfd.readouterr().err


def test_it_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services: list[EvaluationBeside] = []
    original = EvaluationBeside.__init__

    def remember(self: EvaluationBeside, *args: object) -> None:
        original(self, *args)  # type: ignore[arg-type]
        services.append(self)

    monkeypatch.setattr(EvaluationBeside, "__init__", remember)
    drq.train(small(tmp_path / "run", engine=BESIDE, steps=40), quiet=True)
    assert services[0]._process.poll() is not None
    assert len(rows(tmp_path / "run" / "eval.csv")) == 1


@pytest.mark.parametrize(
    ("task", "at_once", "until_enough"),
    [("toy/reach", 10, 10), ("dmc/walker-walk", 10, 10), ("atari/pong", 100, 32)],
)
def test_games_are_played_more_at_once_than_tasks_of_control(
    task: str, at_once: int, until_enough: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        """With the number of environments."""

    def refuse(config: TrainConfig, count: int) -> EnvironmentGroup:
        raise Asked(count)

    config = dataclasses.replace(small(tmp_path), task=task)
    engine = EngineSettings.resolve(config.engine, torch.device("cpu"), config.agent)
    spec = envs.make("toy/reach", config.env, 1).spec
    agent = make_agent(spec, config.agent, torch.device("cpu"), seed=0)
    monkeypatch.setattr(evaluation_service, "make_group", refuse)
    evaluator = evaluation_service.make_evaluator(config, agent, engine)
    for episodes, min_agent_steps, count in ((3, 0, 3), (120, 0, at_once), (3, 125_000, until_enough)):
        with pytest.raises(Asked, match=f"^{count}$"):
            evaluator.evaluate(0, episodes=episodes, min_agent_steps=min_agent_steps)
