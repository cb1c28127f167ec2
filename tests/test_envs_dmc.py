"""The control suite: dm_control's own pixels, rewards and episodes are the oracle."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from drq.config import EnvConfig
from drq.envs import Environment, make, task_names
from drq.envs.rendering import mujoco_imports
from drq.errors import UserError
from environments import needs_compiler, needs_gl, paint_red, random_action, red_pixels

with mujoco_imports():
    from dm_control import suite


STATE = EnvConfig(observation="state")
OPENGL = EnvConfig(render="fast")
DRAWN = [
    "cartpole-swingup",
    "cheetah-run",
    "walker-walk",
    "reacher-easy",
    "finger-spin",
    "ball_in_cup-catch",
    "quadruped-walk",
    "quadruped-escape",
    "swimmer-swimmer6",
]
SEEDS = (3, 4)
AGENT_STEPS = 3

# dm_control takes its own context for current without asking OpenGL, so a second renderer in its thread would draw
# into its pictures: it gets a process of its own.
ORACLE = f"""
import sys, numpy as np
from dm_control import suite
frames = {{}}
for name in {DRAWN}:
    domain, task = name.split("-", 1)
    for seed in {SEEDS}:
        env = suite.load(domain, task, task_kwargs={{"random": seed}})
        spec = env.action_spec()
        env.reset()
        drawn = []
        for agent_step in range({AGENT_STEPS}):
            drawn.append(env.physics.render(84, 84, camera_id=2 if domain == "quadruped" else 0))
            for _ in range(2):
                env.step(spec.minimum + (agent_step + 1) / 4 * (spec.maximum - spec.minimum))
        frames[f"{{name}}/{{seed}}"] = np.array(drawn)
np.savez(sys.argv[1], **frames)
"""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[np.uint8]]:
    """dm_control's own pictures of the first frames of episodes, as (frames, height, width, 3)."""
    file = Path(tmp_path_factory.mktemp("oracle")) / "frames.npz"
    subprocess.run([sys.executable, "-c", ORACLE, str(file)], check=True)
    with np.load(file) as frames:
        return dict(frames)


def draw_episode(env: Environment, seed: int) -> NDArray[np.uint8]:
    """The frames of the oracle's episode as `env` shows them."""
    frames = [env.reset(seed)]
    for agent_step in range(AGENT_STEPS - 1):
        action = np.full(env.spec.action_size, (agent_step + 1) / 4 * 2 - 1, np.float32)
        frames.append(env.step(action).frame)
    return np.array(frames).transpose(0, 2, 3, 1)


def physics_of(env: Any) -> Any:
    return env.simulator._physics


@needs_gl
@pytest.mark.parametrize("name", DRAWN)
def test_paper_rendering_is_dm_controls_own_to_the_bit(name: str, oracle: dict[str, NDArray[np.uint8]]) -> None:
    env = make(f"dmc/{name}", EnvConfig(render="paper"), 2)
    for seed in SEEDS:
        assert np.array_equal(draw_episode(env, seed), oracle[f"{name}/{seed}"])
    env.close()


@needs_gl
@pytest.mark.parametrize("name", ["cartpole-swingup", "walker-walk", "reacher-easy", "finger-spin"])
def test_fast_rendering_differs_in_the_edges_of_shadows_only(name: str, oracle: dict[str, NDArray[np.uint8]]) -> None:
    env = make(f"dmc/{name}", EnvConfig(render="fast"), 2)
    difference = np.abs(draw_episode(env, 3).astype(int) - oracle[f"{name}/3"])
    assert 0 < difference.mean() < 0.1
    env.close()


@needs_gl
@pytest.mark.parametrize(
    "name",
    [
        "reacher-easy",
        "finger-turn_hard",
        "ball_in_cup-catch",
        "point_mass-hard",
        "quadruped-escape",
        "quadruped-fetch",
        "swimmer-swimmer6",
        "lqr-lqr_2_1",
        "stacker-stack_2",
        "manipulator-insert_peg",
    ],
)
def test_an_episode_is_a_function_of_its_seed_where_the_model_is_random_too(name: str) -> None:
    def play(env: Environment, seed: int) -> list[Any]:
        rng = np.random.default_rng(seed)
        record: list[Any] = [env.reset(seed)]
        for _ in range(2):
            step = env.step(random_action(env.spec, rng))
            record += [step.frame, step.reward]
        return record

    config = EnvConfig(image_size=48)
    env, fresh = make(f"dmc/{name}", config, 2), make(f"dmc/{name}", config, 2)
    first = play(env, 7)
    other = play(env, 8)
    again = play(env, 7)
    elsewhere = play(fresh, 7)
    for a, b, c in zip(first, again, elsewhere, strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)
    assert not np.array_equal(first[0], other[0])
    env.close()
    fresh.close()


@pytest.mark.parametrize("name", ["cheetah-run", "reacher-hard", "humanoid-walk"])
def test_state_and_rewards_are_dm_controls_own(name: str) -> None:
    domain, task = name.split("-")
    own = suite.load(domain, task, task_kwargs={"random": 5})
    env = make(f"dmc/{name}", STATE, 4)
    expected = own.reset().observation
    frame = env.reset(5)
    rng = np.random.default_rng(0)
    for _ in range(5):
        assert np.array_equal(frame, np.concatenate([np.ravel(v) for v in expected.values()]).astype(np.float32))
        action = random_action(env.spec, rng)
        results = [own.step(action) for _ in range(4)]
        expected = results[-1].observation
        step = env.step(action)
        frame = step.frame
        assert step.reward == pytest.approx(sum(result.reward for result in results))


def test_every_task_can_be_made_and_played_from_state() -> None:
    for task in task_names("dmc"):
        env = make(task, STATE, 2)
        assert env.spec.max_episode_agent_steps == 500
        frame = env.reset(0)
        step = env.step(np.ones(env.spec.action_size, np.float32))
        assert frame.shape == step.frame.shape == env.spec.frame_shape
        assert np.isfinite(step.frame).all()
        assert (step.discount, step.done) == (1.0, False)
        assert env.render_seconds == 0


@pytest.mark.parametrize(("action_repeat", "agent_steps"), [(8, 125), (3, 334)])
def test_the_time_limit_ends_the_episode_but_not_the_return(action_repeat: int, agent_steps: int) -> None:
    env = make("dmc/cartpole-swingup", STATE, action_repeat)
    assert env.spec.max_episode_agent_steps == agent_steps
    env.reset(0)
    steps = [env.step(np.zeros(1, np.float32)) for _ in range(agent_steps)]
    assert [step.done for step in steps] == [False] * (agent_steps - 1) + [True]
    assert all(step.discount == 1.0 for step in steps)


def test_a_task_that_really_terminates_ends_the_return() -> None:
    env = make("dmc/lqr-lqr_2_1", STATE, 4)
    env.reset(0)
    physics = physics_of(env)
    physics.data.qpos[:] = 0
    physics.data.qvel[:] = 0
    physics.forward()
    step = env.step(np.zeros(1, np.float32))
    assert (step.discount, step.done) == (0.0, True)
    assert step.reward == pytest.approx(1.0), "the repeat goes on after the end"


def test_actions_reach_the_bounds_of_the_task() -> None:
    env = make("dmc/quadruped-walk", STATE, 1)  # its bounds are not all [-1, 1]
    bounds = suite.load("quadruped", "walk").action_spec()
    env.reset(0)
    for action, bound in ((1, bounds.maximum), (-1, bounds.minimum), (0, (bounds.minimum + bounds.maximum) / 2)):
        env.step(np.full(12, action, np.float32))
        assert physics_of(env).control() == pytest.approx(bound)


def test_an_action_without_bounds_is_taken_as_it_is() -> None:
    env = make("dmc/lqr-lqr_2_1", STATE, 1)
    env.reset(0)
    env.step(np.full(1, 0.25, np.float32))
    assert physics_of(env).control() == pytest.approx(0.25)


@needs_gl
def test_cameras() -> None:
    def first(config: EnvConfig) -> NDArray[Any]:
        env = make("dmc/quadruped-walk", config, 2)
        frame = env.reset(0)
        env.close()
        return frame

    default = first(OPENGL)
    assert np.array_equal(default, first(dataclasses.replace(OPENGL, camera=2)))
    assert not np.array_equal(default, first(dataclasses.replace(OPENGL, camera=0)))
    with pytest.raises(UserError, match=r"set --env.camera to 0 to 3"):
        make("dmc/quadruped-walk", EnvConfig(camera=4), 2)


@needs_gl
@pytest.mark.parametrize("render", ["paper", "fast", pytest.param("ray", marks=needs_compiler)])
def test_video_pictures_are_larger_and_leave_observations_alone(render: Any) -> None:
    env = make("dmc/walker-walk", EnvConfig(render=render), 2)
    frame = env.reset(1)
    picture = env.render()
    assert picture.shape == (256, 256, 3)
    # The same scene: shrunk to the observation's size they agree, up to the edges of things.
    shrunk = picture.reshape(64, 4, 64, 4, 3).mean((1, 3))
    small = make("dmc/walker-walk", EnvConfig(render=render, image_size=64), 2)
    assert np.abs(small.reset(1).transpose(1, 2, 0) - shrunk).mean() < 3
    assert np.array_equal(env.reset(1), frame)
    env.close()
    small.close()


@needs_gl
@pytest.mark.parametrize("render", ["fast", pytest.param("ray", marks=needs_compiler)])
def test_a_model_rebuilt_by_the_task_is_drawn_anew(render: Any) -> None:
    env = make("dmc/cartpole-swingup", EnvConfig(render=render), 2)
    before = env.reset(0)
    paint_red(physics_of(env))
    after = env.step(np.zeros(1, np.float32)).frame
    assert red_pixels(before) == 0
    assert red_pixels(after) > 50
    env.close()


@needs_gl
def test_an_environment_can_live_in_another_thread_than_its_maker() -> None:
    env = make("dmc/cartpole-swingup", OPENGL, 8)
    frames = []

    def live() -> None:
        frames.append(env.reset(0))
        frames.append(env.step(np.ones(1, np.float32)).frame)
        env.close()

    thread = threading.Thread(target=live)
    thread.start()
    thread.join()
    here = make("dmc/cartpole-swingup", OPENGL, 8)
    assert np.array_equal(frames, [here.reset(0), here.step(np.ones(1, np.float32)).frame])
    here.close()
