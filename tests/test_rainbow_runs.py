"""Runs of Rainbow that are stopped around a reset go on exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drq.config import EngineConfig, EvalConfig, TrainConfig
from drq.presets import preset
from drq.training.run import train
from runs import rows, state
from test_rainbow import SMALL


def breakout(folder: Path, steps: int) -> TrainConfig:
    """The preset, made small, on a game as published code plays it: a reset before update 20, at agent step 50."""
    paper = preset("strong", "atari/breakout")
    small = {**SMALL, "seed_steps": 40, "reset_every": 50, "last_reset": 50, "anneal_updates": 15}
    return replace(
        paper,
        dir=str(folder),
        steps=steps,
        agent=replace(paper.agent, **small, epsilon_decay_steps=10),
        env=replace(paper.env, max_episode_steps=120, image_size=24, no_op_steps=True, zero_stack=True),
        eval=EvalConfig(every=30, episodes=2, video=False),
        checkpoint_every=15,
        log_every=10,
        device="cpu",
        engine=EngineConfig(eval_process="off"),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a pause."""
    pytest.importorskip("ale_py")
    folder = tmp_path_factory.mktemp("breakout") / "whole"
    train(breakout(folder, 70), quiet=True)
    return folder


@pytest.mark.parametrize("stopped_at", [50, 48, 57])
def test_a_run_goes_on_exactly_through_a_reset(tmp_path: Path, whole: Path, stopped_at: int) -> None:
    """Stopped right before the reset, earlier and later; a checkpoint is made when a run ends."""
    train(breakout(tmp_path / "parts", stopped_at), quiet=True)
    if stopped_at == 57:
        latest = json.loads((tmp_path / "parts" / "checkpoint" / "latest.json").read_text())
        assert latest["replay"][0]["age"] == 2  # a life was lost two steps ago, and the stack began anew
    held = state(tmp_path / "parts")
    assert bool((held["sampler.priorities"] > 0).any())
    train(breakout(tmp_path / "parts", 70), quiet=True)
    ours, theirs = state(whole), state(tmp_path / "parts")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    # Where it stopped it was evaluated once more; all other rows are the same.
    evaluations = [row for row in rows(tmp_path / "parts" / "eval.csv") if row["agent_step"] != str(stopped_at)]
    assert evaluations == rows(whole / "eval.csv")
    assert rows(tmp_path / "parts" / "train.csv") == rows(whole / "train.csv")
