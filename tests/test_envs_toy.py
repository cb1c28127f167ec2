"""The toy tasks: their returns are known, their pictures tell all, and a random shift hides nothing."""

from __future__ import annotations

import numpy as np
import pytest

from drq.config import EnvConfig
from drq.envs import task_names
from drq.envs.episode import SteppedEnvironment
from drq.envs.protocol import Action, Frame
from drq.envs.toy import TASKS, ToySimulator, make
from drq.errors import UserError
from environments import random_action

STATE = EnvConfig(observation="state")


def perfect_action(state: Frame) -> Action:
    """The best action, by the state vector of either task."""
    if len(state) == 4:  # reach: each axis at full speed until it is level with the goal
        return np.clip((state[2:] - state[:2]) / 0.2, -1.0, 1.0).astype(np.float32)
    _, ball, paddle = state
    return int(np.sign(ball - paddle)) + 1


def mean_return(env: SteppedEnvironment[ToySimulator], player: str, episodes: int) -> float:
    rng = np.random.default_rng(0)
    total = 0.0
    for seed in range(episodes):
        state = env.reset(seed)
        done = False
        while not done:
            step = env.step(perfect_action(state) if player == "perfect" else random_action(env.spec, rng))
            state = step.frame
            total += step.reward
            done = step.done
    return total / episodes


# Tolerances are four standard errors of the mean over this many episodes.
@pytest.mark.parametrize(
    ("name", "player", "episodes", "tolerance"),
    [
        ("reach", "random", 600, 1.64),
        ("reach", "perfect", 200, 0.5),
        ("catch", "random", 1500, 0.07),
        ("catch", "perfect", 200, 0.0),
    ],
)
def test_the_published_returns_are_the_measured_ones(name: str, player: str, episodes: int, tolerance: float) -> None:
    env = make(name, STATE, 1)
    published = env.spec.random_return if player == "random" else env.spec.perfect_return
    assert published is not None
    assert abs(mean_return(env, player, episodes) - published) <= tolerance


def test_returns_are_published_only_for_the_task_they_were_measured_on() -> None:
    assert make("reach", STATE, 2).spec.random_return is None
    assert make("reach", EnvConfig(max_episode_steps=10), 1).spec.perfect_return is None


@pytest.mark.parametrize("size", [32, 84])
@pytest.mark.parametrize("name", ["reach", "catch"])
def test_the_picture_tells_states_apart_and_moves_with_them(name: str, size: int) -> None:
    env, state = make(name, EnvConfig(image_size=size), 1), make(name, STATE, 1)
    pictures = {env.reset(seed).tobytes() for seed in range(30)}
    states = {state.reset(seed).tobytes() for seed in range(30)}
    assert len(pictures) == len(states) > 20
    before = env.reset(0)
    assert (env.step(perfect_action(state.reset(0))).frame != before).any()
    assert all(len(np.unique(channel)) > 2 for channel in before), "the picture should be colourful"


@pytest.mark.parametrize("name", ["reach", "catch"])
def test_a_shift_by_four_pixels_pushes_nothing_out_of_a_small_picture(name: str) -> None:
    env = make(name, EnvConfig(image_size=32), 1)
    for seed in range(40):
        frames = [env.reset(seed)]
        done = False
        while not done:
            step = env.step(2 if name == "catch" else np.ones(2, np.float32))
            frames.append(step.frame)
            done = step.done
        bright = np.max(frames, axis=(0, 1)) > 150  # neither the background nor its field is that bright
        rows, columns = np.nonzero(bright)
        assert min(rows.min(), columns.min()) >= 4
        assert max(rows.max(), columns.max()) < 28


def test_reach_rewards_closeness() -> None:
    env = make("reach", STATE, 1)
    x, y, goal_x, goal_y = env.reset(3)
    step = env.step(np.zeros(2, np.float32))
    assert step.reward == pytest.approx(max(0.0, 1 - np.hypot(goal_x - x, goal_y - y)), abs=1e-6)
    rewards = [step.reward]
    for _ in range(15):
        step = env.step(perfect_action(step.frame))
        rewards.append(step.reward)
    assert (np.diff(rewards) > -1e-6).all()
    assert rewards[-1] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("corner", [(1.0, 1.0), (-1.0, -1.0)])
def test_reach_has_walls(corner: tuple[float, float]) -> None:
    env = make("reach", STATE, 1)
    env.reset(0)
    for _ in range(11):  # as far as from the opposite wall, and on
        step = env.step(np.array(corner, np.float32))
    assert step.frame[:2].tolist() == [*corner]


def test_reach_ends_by_time_and_catch_by_landing() -> None:
    reach, catch = make("reach", STATE, 1), make("catch", STATE, 1)
    assert (reach.spec.action_size, reach.spec.max_episode_agent_steps) == (2, 50)
    assert (catch.spec.action_size, catch.spec.max_episode_agent_steps) == (3, 7)
    reach.reset(0)
    state = catch.reset(0)
    steps = [reach.step(np.zeros(2, np.float32)) for _ in range(50)]
    assert [step.done for step in steps] == [False] * 49 + [True]
    assert steps[-1].discount == 1.0
    steps = [catch.step(perfect_action(state))]
    while not steps[-1].done:
        steps.append(catch.step(perfect_action(steps[-1].frame)))
    assert [(step.done, step.discount, step.reward) for step in steps] == [(False, 1.0, 0.0)] * 6 + [(True, 0.0, 1.0)]


def test_action_repeat_sums_rewards_and_stops_at_the_end() -> None:
    once, often = make("reach", STATE, 1), make("reach", STATE, 8)
    once.reset(2)
    often.reset(2)
    action = np.array([0.1, -0.2], np.float32)
    rewards = [once.step(action).reward for _ in range(50)]
    steps = [often.step(action) for _ in range(7)]
    assert often.spec.max_episode_agent_steps == 7
    assert [step.done for step in steps] == [False] * 6 + [True]
    assert [step.reward for step in steps] == pytest.approx([sum(rewards[i : i + 8]) for i in range(0, 50, 8)])


def test_every_toy_task_is_listed() -> None:
    assert task_names("toy") == [f"toy/{name}" for name in TASKS]


def test_a_picture_too_small_to_see_anything_is_refused() -> None:
    with pytest.raises(UserError, match=r"--env.image-size 32"):
        make("reach", EnvConfig(image_size=8), 1)
