"""Any registered Gymnasium environment, from pixels or from a vector of state.

Pixels are the environment's observations where those are images (uint8: H x W x 3, H x W x 1, H x W, or
channels first), and what its `rgb_array` render mode draws otherwise. Pictures of another size are squeezed
to the configured square by averaging over areas.

Only `terminated` ends the return; `truncated` ends the episode and leaves the discount at 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image

from drq.config import EnvConfig
from drq.envs.episode import (
    VIDEO_SIZE,
    ActionRange,
    EnvStep,
    SteppedEnvironment,
    limit_agent_steps,
)
from drq.envs.protocol import Action, EnvSpec, Frame
from drq.envs.rendering import choose_backend
from drq.envs.tasks import import_modules
from drq.errors import UserError


def find(name: str) -> str | None:
    """The id, if it is registered. Gymnasium's own notation `module:id` names a module to import first."""
    module, _, identity = name.rpartition(":")
    if module:
        import_modules([module])
    return name if identity in gymnasium.registry else None


def names() -> list[str]:
    """Registered ids, less older versions of the same task and those that are no tasks for an agent here."""
    newest: dict[tuple[str | None, str], tuple[int, str]] = {}
    for identity, spec in gymnasium.registry.items():
        # phys2d and tabular are made for jax; the others adapt environments of the old gym.
        if spec.namespace in ("phys2d", "tabular") or identity.startswith(("GymV21", "GymV26")):
            continue
        candidate = (spec.version or 0, identity)
        key = (spec.namespace, spec.name)
        newest[key] = max(newest.get(key, candidate), candidate)
    return sorted(identity for _, identity in newest.values())


def make(identity: str, config: EnvConfig, action_repeat: int) -> SteppedEnvironment:
    """The environment registered as `identity`."""
    choose_backend()  # Gymnasium's MuJoCo tasks read MUJOCO_GL too
    simulator = _Gymnasium(identity, config)
    limit = simulator.env_step_limit
    spec = EnvSpec(
        task=f"gym/{identity}",
        frame_shape=simulator.frame_shape,
        frame_stack=config.frame_stack if config.observation == "pixels" else 1,
        action_kind=simulator.actions.kind,
        action_size=simulator.actions.size,
        action_repeat=action_repeat,
        max_episode_agent_steps=limit_agent_steps(limit, action_repeat),
    )
    return SteppedEnvironment(spec, simulator, limit)


class _Gymnasium:
    """A Gymnasium environment as a `Simulator`."""

    def __init__(self, identity: str, config: EnvConfig) -> None:
        self._task = f"gym/{identity}"
        self._env = _construct(identity, config.max_episode_steps)
        self._size = config.image_size
        self._observation: Any = None
        self.actions = _Actions(self._task, self._env.action_space)
        self._see: Callable[[], Frame]
        self.frame_shape: tuple[int, ...]
        if config.observation == "state":
            self.frame_shape, self._see = self._state_shape(), self._state
        elif (channels := _image_channels(self._env.observation_space)) is not None:
            self.frame_shape, self._see = (channels, self._size, self._size), self._observed_image
        elif self._env.render_mode == "rgb_array":
            self.frame_shape, self._see = (3, self._size, self._size), self._drawn_image
        else:
            raise UserError(
                f"{self._task} shows no pixels: give it uint8 image observations (height x width x 3) or an "
                "rgb_array render mode, or train with --env.observation state."
            )

    @property
    def env_step_limit(self) -> int | None:
        return self._env.spec.max_episode_steps if self._env.spec is not None else None

    def begin(self, seed: int) -> None:
        self._observation, _ = self._env.reset(seed=seed)

    def advance(self, action: Action) -> EnvStep:
        self._observation, reward, terminated, truncated, _ = self._env.step(self.actions(action))
        return EnvStep(float(reward), bool(terminated), bool(truncated))

    def frame(self) -> Frame:
        return self._see()

    def picture(self) -> NDArray[np.uint8]:
        if self._env.render_mode == "rgb_array":
            return self._draw()
        if _image_channels(self._env.observation_space) is None:
            raise UserError(f"{self._task} has no rgb_array render mode for a video: turn off --eval.video.")
        image = _resized(_channels_last(self._observation), VIDEO_SIZE)
        return np.broadcast_to(image, (VIDEO_SIZE, VIDEO_SIZE, 3)).copy()

    def close(self) -> None:
        self._env.close()

    def _state_shape(self) -> tuple[int, ...]:
        space = self._env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise UserError(
                f"{self._task} has no vector of state but {space}: "
                "drop --env.observation state, or flatten it with gymnasium.wrappers.FlattenObservation."
            )
        return space.shape

    def _state(self) -> Frame:
        return np.array(self._observation, dtype=np.float32)

    def _observed_image(self) -> Frame:
        return _frame(_channels_last(self._observation), self._size)

    def _drawn_image(self) -> Frame:
        return _frame(self._draw(), self._size)

    def _draw(self) -> NDArray[np.uint8]:
        try:
            picture: Any = self._env.render()
        except gymnasium.error.DependencyNotInstalled as error:
            raise UserError(_needs_package(self._task, error)) from error
        if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.dtype != np.uint8:
            raise UserError(
                f"{self._task} draws {type(picture).__name__} in its rgb_array render mode: "
                "make render() return a uint8 array of height x width x 3."
            )
        return picture[..., :3]


class _Actions:
    """Turns the agent's actions into an environment's own."""

    kind: Literal["continuous", "discrete"]

    def __init__(self, task: str, space: spaces.Space[Any]) -> None:
        self._space = space
        if isinstance(space, spaces.Discrete):
            self.kind, self.size = "discrete", int(space.n)
        elif isinstance(space, spaces.Box):
            if not space.is_bounded():
                raise UserError(
                    f"{task} has actions without bounds: bound its action_space, for instance with "
                    "gymnasium.wrappers.RescaleAction or spaces.Box(-1, 1, shape)."
                )
            self.kind, self.size = "continuous", math.prod(space.shape)
            self._range = ActionRange(
                space.low.ravel().astype(np.float64), space.high.ravel().astype(np.float64)
            )
        else:
            raise UserError(
                f"{task} takes actions of {type(space).__name__}, and an agent gives Box or Discrete ones: "
                "wrap it with gymnasium.wrappers.TransformAction."
            )

    def __call__(self, action: Action) -> Any:
        if isinstance(self._space, spaces.Discrete):
            return int(action) + int(self._space.start)
        assert isinstance(self._space, spaces.Box)
        assert isinstance(action, np.ndarray)
        return self._range(action).reshape(self._space.shape).astype(self._space.dtype)


def _construct(identity: str, max_episode_steps: int | None) -> gymnasium.Env[Any, Any]:
    """Makes the environment, able to draw itself if it can."""
    try:
        env = gymnasium.make(identity, max_episode_steps=max_episode_steps)
        # Only an environment that exists tells its render modes, and the mode is fixed when it is made.
        if "rgb_array" in (env.metadata.get("render_modes") or ()):
            env.close()
            env = gymnasium.make(identity, max_episode_steps=max_episode_steps, render_mode="rgb_array")
    except (gymnasium.error.Error, ImportError) as error:
        raise UserError(_needs_package(f"gym/{identity}", error)) from error
    return env


def _needs_package(task: str, error: Exception) -> str:
    reason = " ".join(str(error).split()).rstrip(".")
    return f"{task} cannot be used as it is ({reason}): install what it needs."


def _image_channels(space: spaces.Space[Any]) -> int | None:
    """Channels of an image observation; None where observations are no images."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return None
    if len(space.shape) == 2:
        return 1
    for channels in (space.shape[2], space.shape[0]):
        if channels in (1, 3):
            return channels
    return None


def _channels_last(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An image observation as (height, width, channels)."""
    if image.ndim == 2:
        return image[..., None]
    return image if image.shape[2] in (1, 3) else image.transpose(1, 2, 0)


def _resized(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """(height, width, channels) squeezed to a square; an image of that size is handed on as it is."""
    if image.shape[:2] == (size, size):
        return image
    grey = image.shape[2] == 1
    picture = Image.fromarray(image[..., 0] if grey else image).resize((size, size), Image.Resampling.BOX)
    return np.asarray(picture)[..., None] if grey else np.asarray(picture)


def _frame(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """A new array (channels, size, size)."""
    return _resized(image, size).transpose(2, 0, 1).copy(order="C")
