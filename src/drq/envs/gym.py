"""Any registered Gymnasium environment, from pixels or from a vector of state.

Pixels are the environment's observations where those are images (H x W x 3, H x W x 1, H x W, or channels first; uint8,
or floats in [0, 1]), the image that `image_key` names where they are a Dict, and what its `rgb_array` render mode draws
otherwise. A run says which. Pictures of another size are squeezed to the configured square by averaging over areas.

Only `terminated` ends the return; `truncated` ends the episode and leaves the discount at 1.
"""

from __future__ import annotations

import ast
import json
import math
import os
from collections.abc import Callable
from typing import Any, Literal, SupportsFloat

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
    close_or_say,
    limit_agent_steps,
    of_its_type,
)
from drq.envs.pictures import channels_last, frame_of, image_channels
from drq.envs.protocol import Action, EnvSpec, Frame
from drq.envs.rendering import choose_backend
from drq.envs.tasks import import_modules, named_object
from drq.errors import UserError

UNBOUNDED = 1e10
"""Actions that reach this are as good as without bounds, as those up to a float32's largest: nothing could be learnt of
such a range."""


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
        if "ale_py" in str(spec.entry_point):  # an atari task, and registered only once that family is loaded
            continue
        candidate = (spec.version or 0, identity)
        key = (spec.namespace, spec.name)
        newest[key] = max(newest.get(key, candidate), candidate)
    return sorted(identity for _, identity in newest.values())


def action_kind(identity: str, config: EnvConfig) -> Literal["continuous", "discrete"]:
    """Known once it is made."""
    env = construct(identity, config)
    close_or_say(f"gym/{identity}", env.close)
    return _Actions(f"gym/{identity}", env.action_space).kind


def make(identity: str, config: EnvConfig, action_repeat: int) -> SteppedEnvironment[_Gymnasium]:
    """The environment registered as `identity`."""
    simulator = _Gymnasium(identity, config)
    limit = simulator.env.spec.max_episode_steps if simulator.env.spec is not None else None
    spec = EnvSpec(
        task=f"gym/{identity}",
        frame_shape=simulator.sight.frame_shape,
        frame_stack=config.frame_stack if config.observation == "pixels" else 1,
        action_kind=simulator.actions.kind,
        action_size=simulator.actions.size,
        action_repeat=action_repeat,
        max_episode_agent_steps=limit_agent_steps(limit, action_repeat),
        action_low=simulator.actions.low,
        action_high=simulator.actions.high,
        action_shape=simulator.actions.shape,
        action_dtype=simulator.actions.dtype,
        action_start=simulator.actions.start,
        sees=simulator.sight.text,
    )
    return SteppedEnvironment(spec, simulator, limit)


class _Gymnasium:
    """A Gymnasium environment as a `Simulator`."""

    def __init__(self, identity: str, config: EnvConfig) -> None:
        self._task = f"gym/{identity}"
        self.env = construct(identity, config)
        self._observation: Any = None
        self._env_step = 0
        try:
            self.actions = _Actions(self._task, self.env.action_space)
            self.sight = Sight(self._task, self.env, config)
        except UserError:
            close_or_say(self._task, self.env.close)
            raise

    def begin(self, seed: int) -> None:
        self._env_step = 0
        observation, _ = self.env.reset(seed=seed)
        self._observation = self._promised(observation)

    def advance(self, action: Action) -> EnvStep:
        self._env_step += 1
        observation, reward, terminated, truncated, info = self.env.step(self.actions(action))
        self._observation = self._promised(observation)
        return EnvStep(float(reward), bool(terminated), bool(truncated), info if isinstance(info, dict) else None)

    def _promised(self, observation: Any) -> Any:
        """The observation, if it is of the shape that its space promises; what else it is would be broadcast or cast
        in silence. Images have to be of the promised type too."""
        if isinstance(space := self.sight.space, spaces.Box):
            given = self.sight.part(observation)
            image = self.sight.source == "observation"
            mistyped = space.dtype == np.uint8 != given.dtype or (image and given.dtype == np.uint8 != space.dtype)
            if given.shape != space.shape or mistyped:
                raise UserError(
                    f"{self._task} observes {given.dtype} of shape {given.shape} in env step {self._env_step} of an "
                    f"episode and promised {space.dtype} of shape {space.shape}: make its "
                    "observation_space agree with its observations."
                )
            if image and given.dtype != np.uint8 and not (given.min() >= 0 and given.max() <= 1):
                raise UserError(
                    f"{self._task} observes floats from {given.min():g} to {given.max():g} in env step "
                    f"{self._env_step} of an episode: keep an image within [0, 1], as its observation_space says."
                )
        return observation

    def frame(self) -> Frame:
        return self.sight(self._observation)

    @property
    def draws(self) -> bool:
        """Whether there is a picture for a video."""
        return self.env.render_mode == "rgb_array" or self.sight.source == "observation"

    def picture(self) -> NDArray[np.uint8]:
        if self.env.render_mode == "rgb_array":
            return self.sight.drawing()
        if not self.draws:
            raise UserError(f"{self._task} has no rgb_array render mode for a video: go without (--eval.no-video).")
        image = channels_last(self.sight.part(self._observation))
        height, width = (max(1, round(side * VIDEO_SIZE / max(image.shape[:2]))) for side in image.shape[:2])
        picture = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image).convert("RGB")
        return np.asarray(picture.resize((width, height), Image.Resampling.BOX))

    def close(self) -> None:
        self.env.close()


class Sight:
    """What an agent sees of a Gymnasium environment: frames, from its observations or from what it draws."""

    source: Literal["state", "observation", "render"]
    frame_shape: tuple[int, ...]
    space: spaces.Space[Any]
    """Of the observation, or of the image in it that `image_key` names."""
    text: str
    """Which pixels those are, in words: what the run says when it begins."""

    def __init__(self, task: str, env: gymnasium.Env[Any, Any], config: EnvConfig) -> None:
        self._task, self._env, self._key, self.space = task, env, None, env.observation_space
        size = config.image_size
        if config.observation == "state":
            self.source, self.frame_shape, self.text = "state", self._state_shape(), "the vector of state"
            return
        self._key = config.image_key
        space = self.space = self._image_space()
        if (channels := image_channels(space)) is not None:
            self.source, self.frame_shape = "observation", (channels, size, size)
            height, width, _ = channels_last(np.zeros(space.shape or (), np.uint8)).shape
            under = f" {self._key!r}" if self._key else ""
            self.text = f"the observation{under}, {height}x{width}x{channels}"
            if (height, width) != (size, size):
                self.text += f", resized to {size}x{size}"
        elif isinstance(space, spaces.Box) and len(space.shape) == 3:
            shown = "x".join(map(str, space.shape))
            raise UserError(
                f"{task} observes {shown} of {space.dtype} from {space.low.min():g} to {space.high.max():g}, which is "
                "no image to learn from: give it one frame of 1 or 3 channels, of uint8 or of floats within [0, 1], "
                f"for instance with --env.wrap my_module:Wrapper{self._or_drawn()}; frames are stacked here."
            )
        elif env.render_mode == "rgb_array":
            self.source, self.frame_shape = "render", (3, size, size)
            self.text = f"what render() draws, resized to {size}x{size}"
        else:
            raise UserError(
                f"{task} shows no pixels: give it uint8 image observations (height x width x 3) or an "
                'rgb_array render mode (render_mode="rgb_array"), or train with --env.observation state.'
            )

    def __call__(self, observation: Any) -> Frame:
        """The frame of the environment's current state, given its observation: a new array."""
        if self.source == "state":
            return np.array(observation, dtype=np.float32)
        return frame_of(self.drawing() if self.source == "render" else self.part(observation), self.frame_shape)

    def part(self, observation: Any) -> NDArray[Any]:
        """What an observation has of `space`."""
        return np.asarray(observation if self._key is None else observation[self._key])

    def drawing(self) -> NDArray[np.uint8]:
        """What `render()` draws."""
        try:
            picture: Any = self._env.render()
        except gymnasium.error.DependencyNotInstalled as error:
            without = "--eval.no-video, and --env.observation state where it has no images"
            raise UserError(_needs_package(self._task, error, f"what it needs, or draw nothing ({without})")) from error
        except Exception as error:
            if type(error).__module__ != "mujoco" or os.environ.get("MUJOCO_GL"):
                raise
            # Its module was imported before anything of ours could choose.
            raise UserError(
                f"{self._task} cannot be drawn ({error}): set MUJOCO_GL=egl before anything imports mujoco."
            ) from error
        shape, dtype = np.shape(picture), getattr(picture, "dtype", type(picture).__name__)
        if len(shape) != 3 or 0 in shape or shape[2] not in (3, 4) or dtype != np.uint8:
            raise UserError(
                f"{self._task} draws {dtype} of shape {shape} in its rgb_array render mode: "
                "make render() return a uint8 array of height x width x 3."
            )
        return np.asarray(picture)[..., :3]

    def _image_space(self) -> spaces.Space[Any]:
        space = self.space
        inner = dict(space.spaces) if isinstance(space, spaces.Dict) else {}
        images = [name for name, part in inner.items() if image_channels(part) is not None]
        listed = " or ".join(map(repr, images)) or "no image at all"
        if self._key is not None:
            unfit = isinstance(part := inner.get(self._key), spaces.Box) and len(part.shape) == 3  # refused with why
            if self._key not in images and not unfit:
                raise UserError(f"{self._task} observes no image {self._key!r} but {listed}: mend --env.image-key.")
            return inner[self._key]
        if images:
            raise UserError(
                f"{self._task} observes a Dict with the image {listed}: choose it with --env.image-key {images[0]}"
                f"{self._or_drawn()}."
            )
        return space

    def _or_drawn(self) -> str:
        """Another way, for an environment that can draw itself."""
        drawn = ", or what it draws with --env.wrap gymnasium.wrappers:AddRenderObservation"
        return drawn if self._env.render_mode == "rgb_array" else ""

    def _state_shape(self) -> tuple[int, ...]:
        if not isinstance(self.space, spaces.Box) or len(self.space.shape) != 1:
            raise UserError(
                f"{self._task} has no vector of state but {self.space}: "
                "drop --env.observation state, or flatten it with gymnasium.wrappers.FlattenObservation."
            )
        return self.space.shape


class AsTrained(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A Gymnasium environment as a policy knew it in training: observations are the frames that it saw, and a step
    repeats its action as often, rewards summed. Actions are the environment's own."""

    def __init__(
        self, env: gymnasium.Env[Any, Any], config: EnvConfig, action_repeat: int, on_reset: Callable[[], None]
    ) -> None:
        super().__init__(env)
        self._on_reset = on_reset
        name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
        self._sight = Sight(name, env, config)
        self._action_repeat = action_repeat
        shape = self._sight.frame_shape
        self.observation_space = (
            spaces.Box(-np.inf, np.inf, shape, np.float32)
            if self._sight.source == "state"
            else spaces.Box(0, 255, shape, np.uint8)
        )

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        self._on_reset()
        return self._sight(observation), info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        if isinstance(self.action_space, spaces.Box):
            action = of_its_type(action, self.action_space.dtype)
        total = 0.0
        for _ in range(self._action_repeat):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return self._sight(observation), total, terminated, truncated, info


class _Actions:
    """Turns the agent's actions into an environment's own."""

    kind: Literal["continuous", "discrete"]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __init__(self, task: str, space: spaces.Space[Any]) -> None:
        self._space = space
        self.low, self.high, self.start, self.dtype = (), (), 0, "float32"
        self.shape = space.shape
        if isinstance(space, spaces.Discrete):
            self.kind, self.size, self.start = "discrete", int(space.n), int(space.start)
        elif isinstance(space, spaces.Box):
            if max(-float(space.low.min(initial=0)), float(space.high.max(initial=0))) >= UNBOUNDED:
                raise UserError(
                    f"{task} has actions without bounds: bound its action_space, for instance with "
                    "gymnasium.wrappers.RescaleAction or spaces.Box(-1, 1, shape)."
                )
            self.kind, self.size = "continuous", math.prod(space.shape)
            low, high = (bound.ravel().astype(np.float64) for bound in (space.low, space.high))
            self._range = ActionRange(low, high)
            self.low, self.high = tuple(low.tolist()), tuple(high.tolist())
            self.dtype = str(space.dtype)
        else:
            raise UserError(
                f"{task} takes actions of {type(space).__name__}, and an agent gives Box or Discrete ones: "
                "wrap it with gymnasium.wrappers.TransformAction."
            )

    def __call__(self, action: Action) -> Any:
        if isinstance(self._space, spaces.Discrete):
            return int(action) + self.start
        assert isinstance(self._space, spaces.Box)
        assert isinstance(action, np.ndarray)
        return of_its_type(self._range(action).reshape(self._space.shape), self._space.dtype)


def construct(identity: str, config: EnvConfig) -> gymnasium.Env[Any, Any]:
    """Makes the environment, able to draw itself if it can, with the wrappers asked for around it."""
    choose_backend()  # Gymnasium's MuJoCo tasks read MUJOCO_GL too
    arguments: dict[str, Any] = {
        "max_episode_steps": config.max_episode_steps,
        "disable_env_checker": True,  # what it warns of ends a run with a sentence, or is for `drq check` to say
        **keyword_arguments(config.kwargs),
    }
    wrappers = [named_object(reference, "wrapper") for reference in config.wrap]
    try:
        env = gymnasium.make(identity, **arguments)
        # Only an environment that exists tells its render modes, and the mode is fixed when it is made.
        if "rgb_array" in ((env.metadata or {}).get("render_modes") or ()) and "render_mode" not in arguments:
            close_or_say(f"gym/{identity}", env.close)
            env = gymnasium.make(identity, **arguments, render_mode="rgb_array")
    except (gymnasium.error.Error, ImportError) as error:
        raise UserError(_needs_package(f"gym/{identity}", error)) from error
    except TypeError as error:
        if config.kwargs == "{}" and "missing" not in str(error):
            raise
        why = str(error).partition(" was raised from the environment creator")[0]
        raise UserError(
            f"gym/{identity} does not take --env.kwargs '{config.kwargs}' ({why}): mend them, as '{{\"speed\": 0.1}}'."
        ) from error
    for wrapper in wrappers:
        env = wrapper(env)
    return env


def keyword_arguments(text: str) -> dict[str, Any]:
    """What `--env.kwargs` says."""
    try:
        found = json.loads(text)
    except ValueError as error:
        try:
            found = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise UserError(
                f"--env.kwargs is {text!r}, which is no JSON ({error}): write it as '{{\"friction\": 0.5}}'."
            ) from None
    if not isinstance(found, dict):
        raise UserError(f"--env.kwargs is {text!r}: give a JSON object, as '{{\"friction\": 0.5}}'.")
    return found


def _needs_package(task: str, error: Exception, what: str = "what it needs") -> str:
    reason = " ".join(str(error).split()).rstrip(".")
    return f"{task} cannot be used as it is ({reason}): install {what}."
