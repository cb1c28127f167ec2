"""Runs of Rainbow: each update learns from what was played, and those that are stopped around a reset go on exactly."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from drq.agents.rainbow import Rainbow
from drq.config import EngineConfig, EvalConfig, TrainConfig
from drq.engine import Learner
from drq.presets import preset
from drq.priorities import UNIT
from drq.regularize import Transformations
from drq.replay import Batch, Replay
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


class Kept(NamedTuple):
    """An agent step, as it came into the replay."""

    action: int
    reward: float
    discount: float
    done: bool


class Played:
    """All that a run has played, and what an update should make of a transition."""

    def __init__(self, zero_stack: bool) -> None:
        self.zero_stack = zero_stack
        self.frames: list[list[Any]] = []
        """Of every episode."""
        self.steps: list[list[Kept]] = []
        self.places: list[tuple[int, int]] = []
        """Of every transition: its episode, and its agent step there."""

    def stack(self, episode: int, at: int) -> Any:
        lost = [step for step in range(at) if self.steps[episode][step].discount == 0.0]
        first = lost[-1] + 1 if self.zero_stack and lost else 0
        frames = self.frames[episode]
        missing = 0 * frames[0] if self.zero_stack else frames[0]
        return np.concatenate([frames[number] if number >= first else missing for number in range(at - 3, at + 1)])

    def expected(self, number: int, n_step: int, gamma: float) -> tuple[float, float, int]:
        """The return, what multiplies the value after it, and its length."""
        episode, begin = self.places[number]
        total, factor = 0.0, 1.0
        for length, step in enumerate(self.steps[episode][begin : begin + n_step], 1):
            total += factor * step.reward
            factor *= gamma * step.discount
            if step.done or not step.discount or length == n_step:
                return total, factor, length
        raise AssertionError(f"the return of transition {number} is not complete")


@pytest.mark.parametrize("zero_stack", [False, True])
def test_every_update_of_a_run_learns_from_what_was_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_stack: bool
) -> None:
    """Through lost lives, time limits and resets: batches, weights, priorities, Adam's steps and the moving average."""
    pytest.importorskip("ale_py")
    config = breakout(tmp_path / "run", 150)
    config = replace(
        config,
        agent=replace(config.agent, last_reset=100, batch_size=8),
        env=replace(config.env, zero_stack=zero_stack),
        eval=EvalConfig(every=0, episodes=1, video=False),
    )
    played, learnt = Played(zero_stack), list[tuple[Batch, Tensor]]()
    ends = {"whole": 0, "lost": 0, "limit": 0}
    begin, add, loss, update = Replay.begin, Replay.add, Rainbow.loss, Learner.update

    def begin_noted(self: Replay, frame: Any, stream: int = 0) -> None:
        played.frames.append([np.array(frame)])
        played.steps.append([])
        begin(self, frame, stream)

    def add_noted(self: Replay, action: Any, reward: float, discount: float, done: bool, frame: Any, slot: int) -> None:
        played.places.append((len(played.steps) - 1, len(played.steps[-1])))
        played.steps[-1].append(Kept(int(action), reward, discount, done))
        played.frames[-1].append(np.array(frame))
        add(self, action, reward, discount, done, frame, slot)

    def loss_noted(self: Rainbow, batch: Batch, draws: Transformations) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        found = loss(self, batch, draws)
        learnt.append((batch, found[1]))
        return found

    def update_checked(self: Learner) -> None:
        before = {name: value.clone() for name, value in self.state().items()}
        reset = {20: 50, 120: 100}.get(self.updates)
        assert reset in (None, len(played.places))  # comes at this agent step
        since = self.updates - max(start for start in (0, 20, 120) if start <= self.updates)
        update(self)
        after, (batch, errors) = self.state(), learnt[-1]
        share = min(since / 15, 1.0)
        n_step, gamma = round(10 * 0.3**share), 1 - 0.03 * 0.1**share
        assert batch.slots is not None
        assert batch.weights is not None
        for row, number in enumerate(batch.slots.tolist()):
            total, factor, length = played.expected(number, n_step, gamma)
            episode, at = played.places[number]
            assert float(batch.reward[row]) == pytest.approx(total, abs=1e-5)
            assert float(batch.discount[row]) == pytest.approx(factor, abs=1e-5)
            assert int(batch.action[row]) == played.steps[episode][at].action
            assert np.array_equal(batch.obs.tensor()[row], played.stack(episode, at))  # type: ignore[union-attr]
            if factor:
                assert np.array_equal(batch.next_obs.tensor()[row], played.stack(episode, at + length))  # type: ignore[union-attr]
            ends["lost" if not factor else "whole" if length == n_step else "limit"] += 1
        priorities = before["sampler.priorities"] / UNIT
        chosen = priorities[batch.slots]
        torch.testing.assert_close(batch.weights, (chosen.min() / chosen).sqrt())
        for slot in set(batch.slots.tolist()):
            priorities[slot] = math.sqrt(float(errors[batch.slots == slot].max()))
        torch.testing.assert_close(after["sampler.priorities"] / UNIT, priorities)
        assert float(after["optimizer.online.0.step"]) == since + 1
        for name in after if reset is None else ():
            if name.startswith("agent.target"):
                online = after[name.replace("target", "online")]
                torch.testing.assert_close(after[name], before[name].lerp(online, 0.005))

    monkeypatch.setattr(Replay, "begin", begin_noted)
    monkeypatch.setattr(Replay, "add", add_noted)
    monkeypatch.setattr(Rainbow, "loss", loss_noted)
    monkeypatch.setattr(Learner, "update", update_checked)
    train(config, quiet=True)
    assert len(learnt) == 220
    assert min(ends.values()) > 5, ends
