"""A run that begins with what another has learnt: `--init-from`."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import drq
from drq.config import DQNConfig, EnvConfig, ReplayConfig, SACConfig, TrainConfig
from drq.errors import UserError
from drq.replay import Choice, Replay
from drq.training.checkpoint import drop_replay
from drq.training.loop import Loop
from drq.training.run import Trainer
from runs import StopAt, assert_same_run, small, state

AGENT = SACConfig(batch_size=8, hidden_dim=16, feature_dim=8, seed_steps=20)


def after(folder: Path, source: Path, **changes: Any) -> TrainConfig:
    return small(folder, seed=2, init_from=str(source), **{"steps": 60, **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state(folder).items() if name.startswith("agent.")}


def test_it_begins_with_all_weights_of_a_run(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    drq.train(after(tmp_path / "run", whole), callbacks=[StopAt(1)])
    assert f"Begins with the weights of {whole}, of agent step 120." in capfd.readouterr().err
    here, there = weights(tmp_path / "run"), weights(whole)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert not any(name.startswith("optimizer") for name in state(tmp_path / "run"))


def test_an_exported_file_brings_what_acts_and_targets_follow(whole: Path, tmp_path: Path) -> None:
    file = drq.export(whole, tmp_path / "policy.drq")
    drq.train(after(tmp_path / "run", file), callbacks=[StopAt(1)], quiet=True)
    here, there, brought = weights(tmp_path / "run"), weights(whole), drq.load(file).agent.modules.state_dict()
    encoder = [name for name in here if name.startswith("agent.critic.encoder")]
    acting = [name for name in here if name.startswith("agent.actor")] + encoder
    assert all(torch.equal(here[name], there[name]) for name in acting)
    assert len(encoder) > 0 < len(brought)
    assert all(torch.equal(here[name], here[name.replace("critic", "target")]) for name in encoder)
    head = next(name for name in here if name.startswith("agent.critic") and name not in encoder)
    assert not torch.equal(here[head], there[head])


def test_resuming_needs_the_source_no_more_and_is_exact(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    drq.train(after(tmp_path / "whole", copy, init_replay=True), quiet=True)
    drq.train(after(tmp_path / "run", copy, init_replay=True), callbacks=[StopAt(30)], quiet=True)
    shutil.rmtree(copy)
    drq.train(after(tmp_path / "run", copy, init_replay=True), quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_crash_before_the_first_step_is_no_exception(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        """The power goes out."""

    def crash(self: Loop) -> None:
        raise Crash

    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "train", crash)
        with pytest.raises(Crash):
            drq.train(after(tmp_path / "run", copy), quiet=True)
    shutil.rmtree(copy)
    assert drq.train(after(tmp_path / "run", copy), quiet=True).finished


def test_the_policy_acts_from_the_first_step(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at random until the first update, as a new agent."""
    monkeypatch.delattr("drq.training.loop.random_action")
    assert drq.train(after(tmp_path / "run", whole, steps=30), quiet=True).finished


def observations(replay: Replay, stream: int) -> list[list[np.ndarray]]:
    """Every transition's observation, action, reward, discount and next observation, the oldest first."""
    own, found = replay.streams[stream], []
    for number in range(own.oldest, own.transitions_added):
        slot = stream * replay.stream_capacity + number % replay.stream_capacity
        batch = replay.gather(Choice(torch.tensor([slot])))
        obs, next_obs = (part.tensor() for part in (batch.obs, batch.next_obs))  # type: ignore[union-attr]
        found.append([part.numpy()[0] for part in (obs, batch.action, batch.reward, batch.discount, next_obs)])
    return found


@pytest.mark.parametrize(("capacity", "kept"), [(200, 20), (15, 15)])
def test_the_replay_comes_along_in_whole_episodes(
    capacity: int, kept: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring of 60 holds steps 60 to 120: an episode began at 50 is cut, that of 100 to 120 is whole."""
    trainer = Trainer(after(tmp_path / "run", whole, init_replay=True, replay=ReplayConfig(capacity)), quiet=True)
    original = Trainer(small(Path(shutil.copytree(whole, tmp_path / "copy"))), quiet=True)
    original.folder.finished_file.unlink()  # so that it opens what it has
    monkeypatch.setattr(Loop, "train", lambda self: None)
    original.run()
    trainer.run()
    there, here = observations(original.loop.learner.replay, 0), observations(trainer.loop.learner.replay, 0)
    assert (len(there), len(here), trainer.loop.state.inherited) == (60, kept, 20)
    for one, other in zip(there[-kept:], here, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "narrower": (
        {"agent": dataclasses.replace(AGENT, hidden_dim=8)},
        r"do not fit this run \(actor\.mlp\.0\.bias is 16 there and 8 here; .* 16x8 .* 8x8 .*; and \d+ more\): repeat",
    ),
    "another agent": (
        {"task": "toy/catch", "agent": DQNConfig(batch_size=8, hidden_dim=16), "env": EnvConfig(image_size=36)},
        r"do not fit this run \(actor\.\S+ is \S+ there and missing here",
    ),
    "another image for the replay": (
        {"env": EnvConfig(image_size=24, action_repeat=2), "init_replay": True},
        r"The replay of .* does not fit this run \(action_repeat is 1 there and 2 here\): leave --init-replay out",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_named_and_nothing_is_written(misfit: str, whole: Path, tmp_path: Path) -> None:
    changes, said = MISFITS[misfit]
    with pytest.raises(UserError, match=said) as raised:
        drq.train(after(tmp_path / "run", whole, **changes), quiet=True)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_what_is_nothing_to_begin_with_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder"):
        drq.train(after(tmp_path / "run", tmp_path / "nowhere"), quiet=True)
    (tmp_path / "text.drq").write_text("no weights")
    with pytest.raises(UserError, match="is no policy that `drq export` wrote"):
        drq.train(after(tmp_path / "run", tmp_path / "text.drq"), quiet=True)
    with pytest.raises(UserError, match="--init-replay says what to take from a run"):
        drq.train(small(tmp_path / "run", init_replay=True), quiet=True)
    drop_replay(Path(shutil.copytree(whole, tmp_path / "dropped")) / "checkpoint")
    with pytest.raises(UserError, match=r"The replay in .* was dropped"):
        drq.train(after(tmp_path / "run", tmp_path / "dropped", init_replay=True), quiet=True)
    file = drq.export(whole, tmp_path / "policy.drq")
    with pytest.raises(UserError, match="is a policy without a replay"):
        drq.train(after(tmp_path / "run", file, init_replay=True), quiet=True)
    assert not (tmp_path / "run").exists()
