"""Gymnasium environments: any image layout, any bounded action range, endings kept apart."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from drq.config import EnvConfig
from drq.envs import Environment, make
from drq.envs.protocol import spec_from_json
from drq.errors import UserError

BOX = spaces.Box(np.array([0, -10], np.float32), np.array([10, 30], np.float32))
VECTOR = spaces.Box(-1, 1, (3,), np.float32)
STATE = EnvConfig(observation="state")


class Sample(gymnasium.Env[Any, Any]):
    """Observations from its space, drawn from the seed; remembers the actions it was given."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        observation_space: spaces.Space[Any] = VECTOR,
        action_space: spaces.Space[Any] = BOX,
        terminate_at: int = 10**9,
        truncate_at: int = 10**9,
        lies: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.ends = terminate_at, truncate_at
        self.lies = lies
        self.render_mode = render_mode
        self.actions: list[Any] = []

    def observation(self) -> Any:
        self.shown = self.observation_space.sample()
        return self.shown[:-1] if self.lies else self.shown

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.actions.clear()
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        terminated, truncated = (len(self.actions) >= end for end in self.ends)
        return self.observation(), 1.0, terminated, truncated, {}


class Drawn(Sample):
    """Draws itself instead: left half red, right half blue, 50 x 100."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def render(self) -> Any:
        picture = np.zeros((50, 100, 3), np.uint8)
        picture[:, :50, 0] = 200
        picture[:, 50:, 2] = 100
        return picture


numbers = itertools.count()


@pytest.fixture
def registered() -> Iterator[Any]:
    """Registers an environment class for the test and returns its task name."""
    identities = []

    def register(kind: type = Sample, max_episode_steps: int | None = None, **kwargs: Any) -> str:
        identity = f"Sample{next(numbers)}-v0"
        gymnasium.register(identity, kind, max_episode_steps=max_episode_steps, kwargs=kwargs, disable_env_checker=True)
        identities.append(identity)
        return f"gym/{identity}"

    yield register
    for identity in identities:
        gymnasium.registry.pop(identity)


def inner(env: Environment) -> Any:
    return env.simulator.env.unwrapped  # type: ignore[attr-defined]


def images(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


@pytest.mark.parametrize(
    ("shape", "channels", "to_chw"),
    [
        ((32, 32, 3), 3, (2, 0, 1)),
        ((32, 32, 1), 1, (2, 0, 1)),
        ((3, 32, 32), 3, (0, 1, 2)),
        ((1, 32, 32), 1, (0, 1, 2)),
        ((32, 32), 1, (0, 1)),
    ],
)
def test_image_observations_of_the_right_size_are_handed_on_bit_for_bit(
    registered: Any, shape: tuple[int, ...], channels: int, to_chw: tuple[int, ...]
) -> None:
    env = make(registered(observation_space=images(*shape)), EnvConfig(image_size=32), 1)
    assert env.spec.frame_shape == (channels, 32, 32)
    frame = env.reset(1)
    assert np.array_equal(frame, inner(env).shown.transpose(to_chw).reshape(channels, 32, 32))
    frame = env.step(np.zeros(2, np.float32)).frame
    assert np.array_equal(frame, inner(env).shown.transpose(to_chw).reshape(channels, 32, 32))
    assert env.render().shape == (256, 256, 3)


@pytest.mark.parametrize("shape", [(64, 96, 3), (64, 96)])
def test_other_sizes_are_averaged_over_areas(registered: Any, shape: tuple[int, ...]) -> None:
    env = make(registered(observation_space=images(*shape)), EnvConfig(image_size=32), 1)
    frame = env.reset(1).transpose(1, 2, 0)
    areas = inner(env).shown.reshape(32, 2, 32, 3, -1).mean((1, 3))
    assert np.abs(frame - areas).max() <= 1  # whole numbers


def test_what_has_no_images_is_drawn(registered: Any) -> None:
    env = make(registered(Drawn), EnvConfig(image_size=20), 1)
    frame = env.reset(0)
    assert frame.shape == (3, 20, 20)
    assert (frame[0] == [200] * 10 + [0] * 10).all()
    assert (frame[2] == [0] * 10 + [100] * 10).all()
    assert env.render().shape == (50, 100, 3)


def test_images_are_preferred_to_drawings(registered: Any) -> None:
    env = make(registered(Drawn, observation_space=images(20, 20, 3)), EnvConfig(image_size=20), 1)
    assert np.array_equal(env.reset(0), inner(env).shown.transpose(2, 0, 1))


def test_what_observes_no_image_can_be_drawn_instead(registered: Any) -> None:
    task = registered(Drawn, observation_space=images(20, 20, 12))
    with pytest.raises(UserError, match=r"no image .*, or what it draws with --env.wrap gymnasium") as refused:
        make(task, EnvConfig(image_size=20), 1)
    wrapper = str(refused.value).partition("what it draws with --env.wrap ")[2].partition(";")[0]
    frame = make(task, EnvConfig(image_size=20, wrap=(wrapper,)), 1).reset(0)
    assert (frame[0] == [200] * 10 + [0] * 10).all()


def test_a_function_can_be_the_entry_point(registered: Any) -> None:
    def entry_point(render_mode: str | None = None) -> Drawn:
        return Drawn(render_mode=render_mode)

    assert make(registered(entry_point), EnvConfig(image_size=20), 1).reset(0).shape == (3, 20, 20)


def test_no_metadata_are_no_render_modes(registered: Any) -> None:
    """As of an adapter around an environment of the old gym."""

    def entry_point() -> Sample:
        env = Sample()
        env.metadata = None  # type: ignore[assignment]
        return env

    assert make(registered(entry_point), STATE, 1).reset(0).shape == (3,)


@pytest.mark.parametrize(("terminate_at", "truncate_at", "discount"), [(5, 99, 0.0), (99, 5, 1.0), (5, 5, 0.0)])
def test_only_termination_stops_the_bootstrap(
    registered: Any, terminate_at: int, truncate_at: int, discount: float
) -> None:
    env = make(registered(terminate_at=terminate_at, truncate_at=truncate_at), STATE, 2)
    env.reset(0)
    steps = [env.step(np.zeros(2, np.float32)) for _ in range(3)]
    assert [(step.discount, step.done) for step in steps] == [(1.0, False), (1.0, False), (discount, True)]
    assert [step.reward for step in steps] == [2.0, 2.0, 1.0], "the repeat stops at the end"


def test_a_time_limit_is_the_environments_unless_configured(registered: Any) -> None:
    own = make(registered(max_episode_steps=9), STATE, 2)
    assert own.spec.max_episode_agent_steps == 5
    longer = make(registered(max_episode_steps=9), EnvConfig(observation="state", max_episode_steps=12), 2)
    assert longer.spec.max_episode_agent_steps == 6
    for env, agent_steps in ((own, 5), (longer, 6)):
        env.reset(0)
        steps = [env.step(np.zeros(2, np.float32)) for _ in range(agent_steps)]
        assert [step.done for step in steps] == [False] * (agent_steps - 1) + [True]
        assert steps[-1].discount == 1.0
    assert make(registered(), STATE, 2).spec.max_episode_agent_steps is None


def test_actions_are_rescaled_to_the_environments_range(registered: Any) -> None:
    env = make(registered(), STATE, 1)
    env.reset(0)
    for action in ([-1, -1], [1, 1], [0, 0.5]):
        env.step(np.array(action, np.float32))
    assert np.array_equal(inner(env).actions, [[0, -10], [10, 30], [5, 20]])
    assert all(action.dtype == np.float32 and action in BOX for action in inner(env).actions)


def test_whole_numbered_actions_are_the_nearest(registered: Any) -> None:
    env = make(registered(action_space=spaces.Box(-1, 2, (1,), np.int32)), STATE, 1)
    env.reset(0)
    for action in np.linspace(-1, 1, 10, dtype=np.float32):
        env.step(action[None])
    assert np.array_equal(np.ravel(inner(env).actions), [-1, -1, 0, 0, 0, 1, 1, 1, 2, 2])


def test_actions_of_any_shape_are_one_vector_to_the_agent(registered: Any) -> None:
    env = make(registered(action_space=spaces.Box(-1, 1, (2, 3), np.float32)), STATE, 1)
    assert env.spec.action_size == 6
    env.reset(0)
    action = np.linspace(-1, 1, 6, dtype=np.float32)
    env.step(action)
    assert np.array_equal(inner(env).actions[0], action.reshape(2, 3))


def test_discrete_actions_count_from_the_environments_own_start(registered: Any) -> None:
    env = make(registered(action_space=spaces.Discrete(3, start=5)), STATE, 1)
    assert (env.spec.action_kind, env.spec.action_size) == ("discrete", 3)
    env.reset(0)
    env.step(0)
    env.step(2)
    assert inner(env).actions == [5, 7]


@pytest.mark.parametrize("space", [spaces.Discrete(3, start=5), BOX, spaces.Box(-1, 1, (2, 3)), spaces.Box(0, 1, ())])
def test_what_a_run_folder_says_of_an_environment_is_believed(registered: Any, space: spaces.Space[Any]) -> None:
    spec = make(registered(action_space=space), STATE, 1).spec
    assert spec_from_json(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec


@pytest.mark.parametrize(
    ("kwargs", "config", "remedy"),
    [
        ({"action_space": spaces.Box(-np.inf, np.inf, (2,))}, STATE, "RescaleAction"),
        ({"action_space": spaces.Box(-1, np.finfo(np.float32).max, (2,))}, STATE, "RescaleAction"),
        ({"action_space": spaces.MultiDiscrete([2, 2])}, STATE, "TransformAction"),
        ({"observation_space": spaces.Dict(a=VECTOR)}, STATE, "FlattenObservation"),
        ({"observation_space": images(8, 8, 3)}, STATE, "FlattenObservation"),
        ({"observation_space": spaces.Dict(a=VECTOR)}, EnvConfig(), "--env.observation state"),
        ({"observation_space": VECTOR}, EnvConfig(), "rgb_array render mode"),
        ({"observation_space": images(8, 8, 12)}, EnvConfig(), "one frame of 1 or 3 channels"),
        ({"observation_space": spaces.Dict(a=images(8, 8, 4))}, EnvConfig(image_key="a"), "8x8x4 .* 1 or 3 channels"),
    ],
)
def test_spaces_no_agent_can_use_are_refused_with_the_remedy(
    registered: Any, kwargs: dict[str, Any], config: EnvConfig, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []
    monkeypatch.setattr(Sample, "close", lambda env: closed.append(env))
    with pytest.raises(UserError, match=remedy):
        make(registered(**kwargs), config, 1)
    assert len(closed) == 1


def test_observations_that_are_not_what_was_promised_are_refused(registered: Any) -> None:
    env = make(registered(lies=True), STATE, 1)
    with pytest.raises(UserError, match=r"of shape \(2,\) in env step 0 .* promised float32 of shape \(3,\)"):
        env.reset(0)


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (np.full((8, 8, 3), 1.5), "floats from 1.5 to 1.5 in env step 0 .* keep an image within"),
        (np.ones((8, 8, 3), np.uint8), "observes uint8 .* promised float32"),  # black, not the promised white
    ],
)
def test_images_of_floats_that_are_not_as_promised_are_refused(
    registered: Any, gives: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make(registered(observation_space=spaces.Box(0, 1, (8, 8, 3))), EnvConfig(), 1)
    monkeypatch.setattr(Sample, "observation", lambda self: gives)
    with pytest.raises(UserError, match=rf"gym/Sample.*{said}"):
        env.reset(0)


@pytest.mark.parametrize(("shape", "picture"), [((20, 40, 3), (128, 256, 3)), ((3, 30, 10), (256, 85, 3))])
def test_a_video_of_observations_keeps_their_proportions(
    registered: Any, shape: tuple[int, ...], picture: tuple[int, ...]
) -> None:
    env = make(registered(observation_space=images(*shape)), EnvConfig(image_size=24), 1)
    env.reset(0)
    assert env.render().shape == picture


def test_an_info_that_is_no_dict_tells_nothing(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env, step = make(registered(terminate_at=1), STATE, 1), Sample.step
    monkeypatch.setattr(Sample, "step", lambda self, action: (*step(self, action)[:4], ["won"]))
    env.reset(0)
    assert env.step(np.zeros(2, np.float32)).info is None


def test_an_info_is_told_at_the_end_alone(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env, step = make(registered(terminate_at=2), STATE, 1), Sample.step
    monkeypatch.setattr(Sample, "step", lambda self, action: (*step(self, action)[:4], {"level": len(self.actions)}))
    env.reset(0)
    assert [env.step(np.zeros(2, np.float32)).info for _ in range(2)] == [None, {"level": 2.0}]


def test_a_video_of_what_cannot_be_drawn_is_refused(registered: Any) -> None:
    env = make(registered(), STATE, 1)
    env.reset(0)
    assert not env.draws
    with pytest.raises(UserError, match=r"--eval.no-video"):
        env.render()


def test_a_drawing_that_fails_is_said(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def render(self: Any) -> Any:
        raise ValueError("no light")

    env = make(registered(Drawn), EnvConfig(), 1)
    monkeypatch.setattr(Drawn, "render", render)
    with pytest.raises(UserError, match=r"in its reset at .* \(ValueError: no light\): mend its render\(\) first"):
        env.reset(0)


def test_mujoco_that_was_imported_too_early_is_said(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Python program does that draws a MuJoCo task with a policy of ours."""

    def render(self: Any) -> Any:
        raise type("FatalError", (Exception,), {"__module__": "mujoco"})("no OpenGL platform library")

    monkeypatch.setattr(Drawn, "render", render)
    env = make(registered(Drawn), EnvConfig(), 1)
    monkeypatch.setitem(os.environ, "MUJOCO_GL", "")
    with pytest.raises(UserError, match=r"no OpenGL platform library\): set MUJOCO_GL=egl before anything imports"):
        env.reset(0)
    monkeypatch.setitem(os.environ, "MUJOCO_GL", "egl")
    with pytest.raises(UserError, match=r"mend its render\(\) first"):
        env.reset(0)


def test_a_missing_package_is_said(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def render(self: Any) -> Any:
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed, run `pip install pygame`")

    env = make(registered(Drawn), EnvConfig(), 1)
    monkeypatch.setattr(Drawn, "render", render)
    with pytest.raises(UserError, match=r"^gym/Sample\d+-v0 cannot be used as it is \(.*pygame`\): .*or draw nothing"):
        env.reset(0)


def test_a_package_missing_when_the_environment_is_made_is_said(registered: Any) -> None:
    def entry_point(**kwargs: Any) -> Any:
        raise ModuleNotFoundError("No module named 'my_physics'")

    with pytest.raises(UserError, match="my_physics"):
        make(registered(entry_point), EnvConfig(), 1)
