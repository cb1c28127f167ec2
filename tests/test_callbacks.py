"""Callbacks see a run, stop it, and change no bit of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import drq
from drq.errors import UserError
from runs import StopAt, assert_same_run, rows, small


class Note:
    """Notes all that it hears of; not of our class, which nobody needs."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.episodes: list[tuple[int, int, float | None]] = []
        self.evaluations: list[drq.RunView] = []

    def on_step(self, run: drq.RunView) -> None:
        self.steps.append(run.agent_step)
        assert run.updates == max(run.agent_step - 20, 0)

    def on_episode(self, run: drq.RunView) -> None:
        self.episodes.append((run.agent_step, run.episodes, run.episode_return))

    def on_evaluation(self, run: drq.RunView) -> bool:
        self.evaluations.append(run)
        return True  # only False stops


def test_they_hear_of_steps_episodes_and_evaluations(whole: Path, tmp_path: Path) -> None:
    note = Note()
    result = drq.train(small(tmp_path / "run"), callbacks=[drq.Callback(), note], quiet=True)
    assert result.finished
    assert note.steps == list(range(1, 121))
    assert [(step, count) for step, count, _ in note.episodes] == [(50, 1), (100, 2)]
    logged = {row["episode"]: row["episode_return"] for row in rows(tmp_path / "run" / "train.csv")}
    assert {str(count): str(score) for _, count, score in note.episodes}.items() <= logged.items()
    assert [run.evaluation for run in note.evaluations] == result.evaluations
    assert {(run.dir, run.config.seed) for run in note.evaluations} == {(tmp_path / "run", 1)}
    assert_same_run(whole, tmp_path / "run")


def test_a_policy_that_they_ask_for_is_a_copy_and_changes_nothing(whole: Path, tmp_path: Path) -> None:
    policies: list[drq.TrainedPolicy] = []

    class Act:
        def on_step(self, run: drq.RunView) -> None:
            if run.agent_step in (60, 120):
                policies.append(run.policy())
                policies[-1].act(np.zeros((24, 24, 3), np.uint8))

    drq.train(small(tmp_path / "run"), callbacks=[Act()], quiet=True)
    assert_same_run(whole, tmp_path / "run")
    assert [policy.agent_step for policy in policies] == [60, 120]
    trained, image = drq.load(whole), np.arange(24 * 24 * 3).reshape(24, 24, 3).astype(np.uint8)
    for policy in (trained, *policies):
        policy.reset()
    early, late = (policy.act(image) for policy in policies)
    assert np.array_equal(late, trained.act(image))
    assert not np.array_equal(early, late)


@pytest.mark.parametrize("agent_step", [40, 50])
def test_a_run_that_one_stopped_goes_on_to_the_same_bits(
    agent_step: int, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped = drq.train(small(tmp_path / "run"), callbacks=[StopAt(agent_step)])
    assert not stopped.finished
    assert f"Stopped at {agent_step} env steps by StopAt. Run the same command again" in capfd.readouterr().err
    assert not (tmp_path / "run" / "finished.json").exists()
    assert drq.load(stopped.dir).agent_step == agent_step
    assert drq.train(small(tmp_path / "run"), callbacks=[StopAt(agent_step)], quiet=True).finished
    assert_same_run(whole, tmp_path / "run")


class Enough(drq.Callback):
    """Ends when the first evaluation is there, whatever it is."""

    def on_evaluation(self, run: drq.RunView) -> bool:
        assert run.evaluation is not None
        return False


def test_an_evaluation_may_be_enough(whole: Path, tmp_path: Path) -> None:
    stopped = drq.train(small(tmp_path / "run"), callbacks=[Enough()], quiet=True)
    assert ([row["agent_step"] for row in stopped.evaluations], stopped.finished) == ([40], False)
    again = drq.train(small(tmp_path / "run"), callbacks=[Enough()], quiet=True)
    assert ([row["agent_step"] for row in again.evaluations], again.finished) == ([40, 80], False)
    last = drq.train(small(tmp_path / "run"), callbacks=[Enough()], quiet=True)
    assert (last.evaluations, last.finished) == (drq.train(small(tmp_path / "run"), quiet=True).evaluations, True)
    assert_same_run(whole, tmp_path / "run")


class Broken(drq.Callback):
    def on_episode(self, run: drq.RunView) -> None:
        raise KeyError("no such thing")


def test_one_that_fails_is_named_and_nothing_is_lost(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        drq.train(small(tmp_path / "run"), callbacks=[Broken()], quiet=True)
    assert str(raised.value).startswith("The callback Broken failed in on_episode at test_callbacks.py, line ")
    assert "(KeyError: 'no such thing')" in str(raised.value)
    text = (tmp_path / "run" / "error.txt").read_text()
    assert "Traceback" in text
    assert 'raise KeyError("no such thing")' in text
    assert drq.load(tmp_path / "run").agent_step == 50
    drq.train(small(tmp_path / "run"), quiet=True)
    assert_same_run(whole, tmp_path / "run")
    assert not (tmp_path / "run" / "error.txt").exists()


@pytest.mark.parametrize("callback", [StopAt, object(), print])
def test_what_is_no_callback_is_refused_before_anything_is_written(callback: object, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no callback: give an object with on_step, on_episode, on_evaluation"):
        drq.train(small(tmp_path / "run"), callbacks=[callback], quiet=True)
    assert not (tmp_path / "run").exists()
