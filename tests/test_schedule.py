"""What is due when, and how long it takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from drq.config import EnvConfig, EvalConfig, ReplayConfig
from drq.errors import UserError
from drq.training import clock as clock_module
from drq.training.clock import Clock
from drq.training.schedule import Schedule
from runs import small


def schedule(task: str = "toy/reach", repeat: int | None = None, **changes: Any) -> Schedule:
    return Schedule(dataclasses.replace(small(Path(), env=EnvConfig(action_repeat=repeat), **changes), task=task))


def due(asked: Any, until: int) -> list[int]:
    return [agent_step for agent_step in range(until + 1) if asked(agent_step)]


def test_intervals_count_env_steps() -> None:
    every_ten = schedule(repeat=4, steps=50, checkpoint_every=10, log_every=8, eval=EvalConfig(every=24))
    assert every_ten.agent_steps == 12
    assert due(every_ten.checkpoint_due, 12) == [3, 5, 8, 10]  # 12, 20, 32 and 40 reach or pass 10, 20, 30 and 40
    assert due(every_ten.log_due, 12) == [2, 4, 6, 8, 10, 12]
    assert due(every_ten.evaluation_due, 12) == [6, 12]
    assert due(every_ten.over, 12) == [12]
    assert (every_ten.env_step(3), every_ten.spent(3), every_ten.unit) == (12, 12, "env steps")
    assert every_ten.text(3000) == "12,000 env steps"


def test_a_game_counts_agent_steps() -> None:
    game = schedule("atari/pong", steps=50, checkpoint_every=20, eval=EvalConfig(every=0))
    assert (game.agent_steps, game.env_step(3), game.spent(3), game.unit) == (50, 12, 3, "agent steps")
    assert due(game.checkpoint_due, 50) == [20, 40]
    assert due(game.evaluation_due, 50) == [50]  # 0: only at the end
    assert game.text(3000) == "3,000 agent steps (12,000 frames)"


def test_steps_taken_together_pass_an_interval_together() -> None:
    four = schedule("gym/Any-v0", repeat=2, steps=100, num_envs=4, checkpoint_every=30, eval=EvalConfig(every=30))
    asked = range(4, 49, 4)  # 8, 16, ... 96 env steps, of which 32, 64 and 96 pass 30, 60 and 90
    assert four.agent_steps == 48
    assert [step for step in asked if four.checkpoint_due(step)] == [16, 32, 48]
    assert [step for step in asked if four.evaluation_due(step)] == [16, 32, 48]
    assert [four.evaluations_after(step) for step in (0, 12, 16, 32)] == [3, 3, 2, 1]


def test_the_replay_holds_the_whole_run_unless_told_otherwise() -> None:
    assert schedule(repeat=4, steps=50, replay=ReplayConfig(None)).capacity == 12
    assert schedule(repeat=4, steps=50, replay=ReplayConfig(7)).capacity == 7
    assert schedule("gym/Any-v0", num_envs=4, replay=ReplayConfig(15)).capacity == 12  # as much for each


def test_updates_begin_after_the_seed_steps() -> None:
    agent = dataclasses.replace(small(Path()).agent, seed_steps=20, updates_per_step=3)
    twenty = schedule(agent=agent, steps=120)
    assert [twenty.updates(agent_step) for agent_step in (0, 19, 20, 21)] == [0, 0, 3, 3]
    assert due(twenty.learning, 22) == [20, 21, 22]
    assert twenty.total_updates == 300 == sum(map(twenty.updates, range(twenty.agent_steps)))
    half, more = (schedule(agent=dataclasses.replace(agent, updates_per_step=rate), steps=25) for rate in (0.5, 1.5))
    assert [half.updates(agent_step) for agent_step in range(18, 25)] == [0, 0, 0, 1, 0, 1, 0]
    assert [more.updates(agent_step) for agent_step in range(18, 25)] == [0, 0, 1, 2, 1, 2, 1]
    four = schedule("gym/Any-v0", repeat=1, num_envs=4, agent=dataclasses.replace(agent, seed_steps=21), steps=40)
    assert [four.updates(agent_step) for agent_step in (16, 20, 24, 28)] == [0, 0, 12, 12]


def test_a_budget_of_less_than_one_agent_step_is_refused() -> None:
    with pytest.raises(UserError, match=r"^--steps 3 is less than one agent step \(4\): raise it\.$"):
        schedule(repeat=4, steps=3)
    with pytest.raises(UserError, match=r"one agent step \(8\)"):
        schedule("gym/Any-v0", repeat=2, num_envs=4, steps=7)
    assert schedule(repeat=4, steps=4).agent_steps == 1
    assert due(schedule(steps=3, log_every=1).log_due, 3) == [1, 2, 3]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its last number is the time."""
    now = [100.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[-1])
    return now


def test_seconds_go_to_what_the_loop_waited_for(clock: list[float]) -> None:
    watched = Clock()
    watched.seconds_before = 50.0
    for waits, drawn in (((1.0, 2.0), 2.5), ((0.0, 0.5), 4.0)):  # the second frame was drawn while the loop updated
        watched.begin_step(render_seconds=7.0)
        clock[-1] += 0.5
        for wait in waits:
            with watched.waiting:
                clock[-1] += wait
            clock[-1] += 1.0
        watched.end_step(render_seconds=7.0 + drawn)
    clock[-1] += 1.5  # an evaluation
    assert watched.seconds == 50.0 + 10.0
    assert watched.shares() == "env 5%  render 30%  update 50%"


@pytest.mark.parametrize("updates_before", [0, 5000])
def test_the_expected_time_is_told_once_from_warm_updates(updates_before: int, clock: list[float]) -> None:
    """Of this process: a resumed run warms up again. Random steps, which are fast, do not count."""
    watched, told = Clock(), {}
    for step in range(0 if updates_before else 100):
        clock[-1] += 0.001
        watched.count(spent=4 * step, updates=0)
        assert watched.left(4000, 1) is None
    for update in range(1, 200):
        clock[-1] += 0.5 if update <= 10 else 0.125
        if watched.count(spent=4 * update, updates=updates_before + update):
            told[update] = watched.left(4000 - 4 * update, 1)
    assert told == {81: (0.125 / 4 * (4000 - 4 * 81), False)}


def test_slow_updates_are_not_waited_for(clock: list[float]) -> None:
    watched, told = Clock(), {}
    for update in range(1, 40):
        clock[-1] += 1.0
        if watched.count(spent=update, updates=update):
            told[update] = watched.left(1000 - update, 1)
    assert told == {17: (983.0, False)}


def test_the_time_left_counts_the_evaluations(clock: list[float]) -> None:
    """The last one whole, as it is waited for; those before it for as long as the loop waited, which is no part of its
    pace."""
    watched = Clock()
    for update in range(1, 101):
        clock[-1] += 0.25
        watched.count(spent=update, updates=update)
        if update in (40, 80):
            with watched.evaluating:
                clock[-1] += 30.0
            watched.evaluated(32.0)
    assert watched.rate == 4.0
    assert watched.left(to_spend=400, evaluations=5) == (100.0 + 4 * 30.0 + 32.0, True)
    with watched.evaluating:
        clock[-1] += 12.0
        assert watched.evaluation_left == 20.0


@pytest.mark.parametrize(("steps", "every"), [(50, 24), (48, 24), (50, 0), (10, 24)])
def test_the_evaluations_that_are_still_to_come(steps: int, every: int) -> None:
    run = schedule(repeat=4, steps=steps, eval=EvalConfig(every=every))
    played = due(run.evaluation_due, run.agent_steps)
    for agent_step in range(run.agent_steps):
        assert run.evaluations_after(agent_step) == sum(at > agent_step for at in played)
