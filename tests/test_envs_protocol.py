"""Every environment keeps the one protocol, whatever its family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from drq.config import EnvConfig
from drq.envs import Environment, Frame, episode, make
from drq.envs.episode import ActionRange, EnvStep, limit_env_steps
from drq.envs.toy import ToySimulator
from drq.errors import UserError
from environments import needs_gl, random_action

SMALL = EnvConfig(image_size=32)
STATE = EnvConfig(observation="state")
CASES = [
    pytest.param("toy/reach", SMALL, 1, id="toy-continuous"),
    pytest.param("toy/catch", SMALL, 1, id="toy-discrete"),
    pytest.param("toy/reach", EnvConfig(image_size=84, frame_stack=2), 3, id="toy-repeat"),
    pytest.param("toy/reach", STATE, 1, id="toy-state"),
    pytest.param("dmc/cartpole-swingup", EnvConfig(max_episode_steps=45), 8, id="dmc-pixels", marks=needs_gl),
    pytest.param("dmc/walker-walk", STATE, 100, id="dmc-state"),
    pytest.param("gym/Pendulum-v1", STATE, 7, id="gym-state"),
    pytest.param("gym/CartPole-v1", STATE, 1, id="gym-discrete"),
    pytest.param("gym/InvertedPendulum-v5", EnvConfig(max_episode_steps=9), 2, id="gym-render", marks=needs_gl),
]


def play(env: Environment, seed: int, agent_steps: int) -> list[Any]:
    """An episode's first frames, rewards and flags, with actions that follow from the seed."""
    rng = np.random.default_rng(seed)
    record: list[Any] = [env.reset(seed)]
    for _ in range(agent_steps):
        step = env.step(random_action(env.spec, rng))
        record += [step.frame, step.reward, step.discount, step.done]
        if step.done:
            break
    return record


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(("task", "config", "action_repeat"), CASES)
def test_an_environment_keeps_the_protocol(task: str, config: EnvConfig, action_repeat: int) -> None:
    env = make(task, config, action_repeat)
    spec = env.spec
    assert spec.task == task
    assert spec.action_repeat == action_repeat
    assert spec.pixels == (config.observation == "pixels")
    assert spec.frame_stack == (config.frame_stack if spec.pixels else 1)
    if spec.pixels:
        assert spec.frame_shape[1:] == (config.image_size, config.image_size)

    with pytest.raises(UserError, match=r"reset\(seed\)"):
        env.step(random_action(spec, np.random.default_rng(0)))

    frame = env.reset(5)
    kept = frame.copy()
    rng = np.random.default_rng(5)
    agent_steps, done = 0, False
    while not done:
        step = env.step(random_action(spec, rng))
        agent_steps += 1
        done = step.done
        assert step.frame.shape == spec.frame_shape
        assert step.frame.dtype == (np.uint8 if spec.pixels else np.float32)
        assert step.frame.flags["C_CONTIGUOUS"]
        assert isinstance(step.reward, float)
        assert step.score == step.reward
        assert step.discount in (0.0, 1.0)
        assert step.discount == 1.0 or step.done
    assert spec.max_episode_agent_steps is not None
    assert agent_steps <= spec.max_episode_agent_steps
    assert np.array_equal(frame, kept), "a frame changed after it was handed over"
    assert (env.render_seconds > 0) == spec.pixels
    with pytest.raises(UserError, match=r"reset\(seed\)"):
        env.step(random_action(spec, rng))
    env.close()


@pytest.mark.parametrize(("task", "config", "action_repeat"), CASES)
def test_an_episode_follows_from_its_seed_and_actions(task: str, config: EnvConfig, action_repeat: int) -> None:
    env, fresh = make(task, config, action_repeat), make(task, config, action_repeat)
    first = play(env, seed=11, agent_steps=4)
    assert not same(first, play(env, seed=12, agent_steps=4))
    assert same(first, play(env, seed=11, agent_steps=4)), "another episode in between left a trace"
    assert same(first, play(fresh, seed=11, agent_steps=4)), "the episode depends on the object, not the seed"
    env.close()
    fresh.close()


@pytest.mark.parametrize("task", ["toy/reach", "toy/catch"])
def test_pictures_for_videos_do_not_touch_the_episode(task: str) -> None:
    watched, alone = make(task, SMALL, 1), make(task, SMALL, 1)
    watched.reset(1)
    assert watched.draws is True
    picture = watched.render()
    assert picture.ndim == 3
    assert picture.shape[2] == 3
    assert min(picture.shape[:2]) > SMALL.image_size
    assert picture.dtype == np.uint8
    assert same(play(watched, 1, 3), play(alone, 1, 3))


def test_an_action_of_the_wrong_kind_is_refused() -> None:
    reach, catch = make("toy/reach", SMALL, 1), make("toy/catch", SMALL, 1)
    reach.reset(0)
    catch.reset(0)
    with pytest.raises(UserError, match=r"actions of shape \(2,\), not \(3,\)"):
        reach.step(np.zeros(3, np.float32))
    with pytest.raises(UserError, match="not finite"):
        reach.step(np.array([np.nan, 0], np.float32))
    with pytest.raises(UserError, match="actions from 0 to 2, not 3"):
        catch.step(3)
    with pytest.raises(UserError, match="actions from 0 to 2, not -1"):
        catch.step(-1)
    with pytest.raises(UserError, match=r"actions from 0 to 2, not array\(\[1\]\)"):
        catch.step(np.array([1]))


@pytest.mark.parametrize(
    ("config", "frame", "said"),
    [
        (SMALL, np.zeros((3, 32, 31), np.uint8), r"uint8 \(3, 32, 32\) but gave uint8 \(3, 32, 31\) in env step 0"),
        (SMALL, np.zeros((3, 32, 32), np.float32), r"uint8 \(3, 32, 32\) but gave float32 \(3, 32, 32\)"),
        (STATE, np.zeros(4), r"float32 \(4,\) but gave float64 \(4,\)"),
        (STATE, np.zeros(1, np.float32), r"float32 \(4,\) but gave float32 \(1,\)"),
    ],
)
def test_frames_that_are_not_as_promised_are_refused(
    config: EnvConfig, frame: Frame, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make("toy/reach", config, 1)
    monkeypatch.setattr(ToySimulator, "frame", lambda simulator: frame)
    with pytest.raises(UserError, match=rf"^toy/reach promised frames of {said}"):
        env.reset(0)


def test_an_episode_ends_where_its_environment_is_closed() -> None:
    env = make("toy/reach", STATE, 1)
    env.reset(0)
    env.close()
    with pytest.raises(UserError, match=r"reset\(seed\)"):
        env.step(np.zeros(2, np.float32))


def test_a_simulator_gets_float32_within_the_range_or_an_int(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(ToySimulator, "advance", lambda _, action: seen.append(action) or EnvStep(0.0, False, False))
    for task, action in (("toy/reach", np.array([5, -0.5])), ("toy/catch", np.array(2))):
        env = make(task, STATE, 1)
        env.reset(0)
        env.step(action)
    assert (seen[0].dtype, seen[0].tolist()) == (np.float32, [1.0, -0.5])
    assert (type(seen[1]), seen[1]) == (int, 2)


def test_an_action_is_scaled_to_its_bounds_or_taken_as_it_is_where_one_lacks() -> None:
    scale = ActionRange(np.array([0, -10, -1e10, 0, -1e10]), np.array([4, 30, 1e10, 1e10, 0]), unbounded=1e10)
    expected = {-1.0: [0, -10, -1, 0, -1], 0.0: [2, 10, 0, 0, 0], 0.5: [3, 20, 0.5, 0.5, 0], 1.0: [4, 30, 1, 1, 0]}
    assert {action: scale(np.full(5, action, np.float32)).tolist() for action in expected} == expected


def test_the_tighter_time_limit_holds() -> None:
    both = ((9, 5), (5, 9), (None, 5), (5, None), (None, None))
    assert [limit_env_steps(own, configured) for own, configured in both] == [5, 5, 5, 5, None]


def test_the_time_that_drawing_takes_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    env, now, frame = make("toy/reach", SMALL, 1), [100.0], ToySimulator.frame

    def slow(simulator: ToySimulator) -> Frame:
        now[0] += 0.5
        return frame(simulator)

    monkeypatch.setattr(ToySimulator, "frame", slow)
    monkeypatch.setattr(episode.time, "perf_counter", lambda: now[0])
    env.reset(0)
    env.step(np.zeros(2, np.float32))
    assert env.render_seconds == 1.0


@pytest.mark.parametrize(
    ("config", "action_repeat", "flag"),
    [
        (SMALL, 0, "action-repeat"),
        (EnvConfig(image_size=0), 1, "image-size"),
        (EnvConfig(frame_stack=0), 1, "frame-stack"),
        (EnvConfig(max_episode_steps=0), 1, "max-episode-steps"),
    ],
)
def test_impossible_settings_name_their_flag(config: EnvConfig, action_repeat: int, flag: str) -> None:
    with pytest.raises(UserError, match=f"--env.{flag} is 0"):
        make("toy/reach", config, action_repeat)
