"""The DeepMind Control Suite, from pixels or from state.

Choices that change results:
- An episode ends at the suite's time limit (1,000 env steps), which is not terminal: its discount stays 1.
- The two lqr tasks have neither a time limit nor bounds on their actions: they get 1,000 env steps, like the
  rest of the suite, and actions in [-1, 1]. Their model is drawn at random when it is built: always from the
  same seed here.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from drq.config import EnvConfig, Render
from drq.envs.cameras import FAST_SHADOW_SIZE, Camera, TiledCamera
from drq.envs.capsules import LOADING, lighten
from drq.envs.episode import VIDEO_SIZE, ActionRange, EnvStep, SteppedEnvironment, limit_agent_steps, limit_env_steps
from drq.envs.protocol import Action, EnvSpec, Frame
from drq.envs.raycast import RayCamera, Scene, compiler, draw, require_compiler
from drq.envs.rendering import choose_backend, missing_libraries, mujoco_imports, require_rendering
from drq.errors import UserError

_ENV_STEPS_WITHOUT_LIMIT = 1000
_MODEL_SEED = 0
_RAYS: tuple[Render, ...] = ("ray", "cuda")
"""Ways to draw by casting rays: the same pixels, whatever computes them."""

_TASKS = {
    "acrobot": "swingup swingup_sparse",
    "ball_in_cup": "catch",
    "cartpole": "balance balance_sparse swingup swingup_sparse two_poles three_poles",
    "cheetah": "run",
    "dog": "stand walk trot run fetch",
    "finger": "spin turn_easy turn_hard",
    "fish": "upright swim",
    "hopper": "stand hop",
    "humanoid": "stand walk run run_pure_state",
    "humanoid_CMU": "stand walk run",
    "lqr": "lqr_2_1 lqr_6_2",
    "manipulator": "bring_ball bring_peg insert_ball insert_peg",
    "pendulum": "swingup",
    "point_mass": "easy hard",
    "quadruped": "walk run escape fetch",
    "reacher": "easy hard",
    "stacker": "stack_2 stack_4",
    "swimmer": "swimmer6 swimmer15",
    "walker": "stand walk run",
}


def names() -> list[str]:
    """All tasks of the suite, `<domain>-<task>`."""
    return [f"{domain}-{task}" for domain, tasks in _TASKS.items() for task in tasks.split()]


def find(name: str) -> str | None:
    return name if name in names() else None


def choose_render(name: str, config: EnvConfig, rays: Literal["ray", "cuda"] | None) -> Render:
    """What `auto` is: `rays`, the way to cast them that is faster than OpenGL here, where they can draw the task.

    A CPU casts them several times as fast as Mesa draws (docs/fidelity.md); on a GPU OpenGL would wait for its turn
    while CUDA computes. A compiler is needed there too: evaluations leave the GPU to training and draw on the CPU.
    """
    if config.observation == "state" or compiler() is None:
        return "fast"
    if rays is None:
        rays = "ray" if missing_libraries(choose_backend()) else None
    domain, task = name.split("-", 1)
    simulator = ControlSuite(domain, task, dataclasses.replace(config, observation="state", render="fast"))
    return rays if rays is not None and simulator.why_no_rays() is None else "fast"


def make(name: str, config: EnvConfig, action_repeat: int) -> SteppedEnvironment[ControlSuite]:
    """The task `<domain>-<task>`.

    Use the environment in one thread only: that of the first `reset`, where its OpenGL context is made.
    """
    if config.render == "auto":
        config = dataclasses.replace(config, render=choose_render(name, config, "ray"))
    if config.observation == "pixels":
        require_compiler(config.render) if config.render in _RAYS else require_rendering()
    domain, task = name.split("-", 1)
    simulator = ControlSuite(domain, task, config)
    limit = limit_env_steps(simulator.env_step_limit, config.max_episode_steps)
    spec = EnvSpec(
        task=f"dmc/{name}",
        frame_shape=simulator.frame_shape,
        frame_stack=config.frame_stack if config.observation == "pixels" else 1,
        action_kind="continuous",
        action_size=simulator.action_size,
        action_repeat=action_repeat,
        max_episode_agent_steps=limit_agent_steps(limit, action_repeat),
        action_low=simulator.action_low,
        action_high=simulator.action_high,
    )
    return SteppedEnvironment(spec, simulator, limit)


class ControlSuite:
    """One task of the suite as a `Simulator`."""

    def __init__(self, domain: str, task: str, config: EnvConfig) -> None:
        with mujoco_imports():
            from dm_control import suite
        with LOADING:
            self._env: Any = suite.load(domain, task, task_kwargs={"random": _MODEL_SEED})
            self._physics = self._env.physics
            if config.physics == "paper":
                lighten(self._physics, f"dmc/{domain}-{task}")
        _without_own_contexts(self._physics)
        self._pixels = config.observation == "pixels"
        self._size = config.image_size
        self._camera_id = self._checked_camera(config.camera, domain)
        self._shadow_size = FAST_SHADOW_SIZE if config.render == "fast" else None
        wanted = self._pixels and config.render in _RAYS
        self.casts_rays = wanted and self._can_cast_rays(f"dmc/{domain}-{task}", config.render)
        self.undrawn = False
        """Whether frames are handed over as scenes."""
        self._ray_cameras: dict[int, RayCamera] = {}
        self._cameras: dict[int, Camera] = {}
        """By size: one of observations, one of pictures for videos, so that the buffers of the first stay small."""

        bounds = self._env.action_spec()
        # dm_control writes the absence of bounds as +-1e10.
        self._action_range = ActionRange(bounds.minimum, bounds.maximum, unbounded=1e10)
        self.action_size = int(bounds.shape[0])
        ends = (self._action_range(np.full(self.action_size, end, np.float32)).tolist() for end in (-1, 1))
        self.action_low, self.action_high = map(tuple, ends)
        self._observation: dict[str, Any] = {}
        state_size = sum(math.prod(part.shape) for part in self._env.observation_spec().values())
        self.frame_shape = (3, self._size, self._size) if self._pixels else (state_size,)

    @property
    def env_step_limit(self) -> int:
        limit = self._env._step_limit  # the suite offers no public name for it
        return _ENV_STEPS_WITHOUT_LIMIT if math.isinf(limit) else math.ceil(limit)

    @property
    def model(self) -> Any:
        """The mujoco.MjModel. A task may put another in its place when an episode begins."""
        return self._physics.model.ptr

    @property
    def data(self) -> Any:
        """The mujoco.MjData: the current state."""
        return self._physics.data.ptr

    @property
    def has_terrain(self) -> bool:
        """Whether there is terrain, which an OpenGL context keeps (in quadruped-escape every episode has its own)."""
        with mujoco_imports():
            from mujoco import mjtGeom
        return int(mjtGeom.mjGEOM_HFIELD) in self._physics.model.geom_type

    def begin(self, seed: int) -> None:
        # All that an episode draws comes from this generator. With the same seed it is dm_control's own first
        # episode of suite.load(..., task_kwargs={"random": seed}).
        self._env.task._random = np.random.RandomState(seed % 2**32)
        self._observation = self._env.reset().observation
        if self.has_terrain:
            self.close()  # the context of the last episode has the last episode's

    def advance(self, action: Action) -> EnvStep:
        assert isinstance(action, np.ndarray)
        result = self._env.step(self._action_range(action))
        self._observation = result.observation
        terminated = result.last() and result.discount == 0.0
        return EnvStep(float(result.reward), terminated, result.last() and not terminated)

    def frame(self) -> Frame:
        if not self._pixels:
            return np.concatenate([np.ravel(part) for part in self._observation.values()], dtype=np.float32)
        if self.undrawn:
            return cast(Frame, self.scene())
        return draw(self.scene()) if self.casts_rays else to_frame(self._camera(self._size).draw(self.data))

    def leave_undrawn(self) -> bool:
        """Hands over scenes instead of frames from now on, where a GPU shall draw them. Says whether it will."""
        self.undrawn = self.casts_rays
        return self.undrawn

    def scene(self, size: int | None = None) -> Scene:
        """What `frame` would draw, where rays are cast, or a picture of another size."""
        size = size or self._size
        camera = self._ray_cameras.get(size)
        if camera is None or camera.model is not self.model:  # a task may rebuild its model
            camera = self._ray_cameras[size] = RayCamera(self.model, size, self._camera_id)
        return camera.scene(self.data)

    def picture(self) -> NDArray[np.uint8]:
        return to_picture(draw(self.scene(VIDEO_SIZE))) if self.casts_rays else self._camera(VIDEO_SIZE).draw(self.data)

    def tiled_camera(self, models: Sequence[Any]) -> TiledCamera:
        """A camera that draws models of this task as `frame` does."""
        return TiledCamera(models, self._size, self._camera_id, self._shadow_size)

    def close(self) -> None:
        for camera in self._cameras.values():
            camera.close()
        self._cameras.clear()

    def _camera(self, size: int) -> Camera:
        """OpenGL's, made anew where there is none yet or the task has rebuilt its model."""
        if size in self._cameras and self._cameras[size].model is not self.model:
            self._cameras.pop(size).close()
        if size not in self._cameras:
            self._cameras[size] = Camera(self.model, size, self._camera_id, self._shadow_size)
        return self._cameras[size]

    def why_no_rays(self) -> str | None:
        """What there is in the task that casting rays cannot draw, or None."""
        return RayCamera(self.model, self._size, self._camera_id).why_undrawable(self.data)

    def _can_cast_rays(self, task: str, render: Render) -> bool:
        reason = self.why_no_rays()
        if reason is not None:
            _say_once(f"{task} has {reason}, which --env.render {render} cannot draw: OpenGL draws it.")
            require_rendering()
        return reason is None

    def _checked_camera(self, camera: int | None, domain: str) -> int:
        if camera is None:
            return 2 if domain == "quadruped" else 0
        cameras = int(self._physics.model.ncam)
        if not 0 <= camera < cameras:
            raise UserError(f"{domain} has no camera {camera}: set --env.camera to 0 to {cameras - 1}.")
        return camera


def to_frame(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An image (height, width, channels) as a frame (channels, height, width)."""
    return np.ascontiguousarray(image.transpose(2, 0, 1))


def to_picture(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The other way round."""
    return np.ascontiguousarray(frame.transpose(1, 2, 0))


@cache
def _say_once(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def _without_own_contexts(physics: Any) -> None:
    """Keeps dm_control from opening an OpenGL context of its own.

    quadruped-escape would, at every reset, even where only the state is asked for.
    """
    physics.__class__ = type("Physics", (physics.__class__,), {"contexts": None})
