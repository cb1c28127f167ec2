"""Small pixel tasks drawn by numpy: for the demo, the tests and a first look at an agent.

- `toy/reach`: steer a dot to a goal, continuous actions. Start and goal are new in every episode and only the
  picture shows them.
- `toy/catch`: move a paddle under a falling ball, three actions. The landing is terminal.

Everything moves inside the middle of the picture, so that a random shift never pushes it out of sight.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from drq.config import EnvConfig
from drq.envs.episode import VIDEO_SIZE, EnvStep, SteppedEnvironment, limit_agent_steps, limit_env_steps
from drq.envs.protocol import Action, EnvSpec, Frame
from drq.errors import UserError

MIN_IMAGE_SIZE = 16
_MARGIN = 0.2
"""Share of the picture on every side that nothing enters."""

Colour = tuple[int, int, int]


class Reach:
    """A dot in the square [-1, 1] x [-1, 1], moved by the action.

    The reward is 1 at the goal and falls linearly to 0 at a distance of 1.
    """

    action_kind: Literal["continuous", "discrete"] = "continuous"
    action_size = 2
    env_step_limit = 50
    random_return = 8.91
    """Mean return of uniformly random actions, without action repeat."""
    perfect_return = 47.84
    """Mean return of the best actions, without action repeat."""
    _SPEED = 0.2
    _RADIUS = 0.08
    _DOT: Colour = (235, 60, 50)
    _GOAL: Colour = (60, 220, 90)

    def __init__(self) -> None:
        self._position = np.zeros(2)
        self._goal = np.zeros(2)

    def begin(self, random: np.random.Generator) -> None:
        self._position, self._goal = random.uniform(-1.0, 1.0, size=(2, 2))

    def advance(self, action: Action) -> EnvStep:
        move = self._SPEED * np.asarray(action, dtype=np.float64)
        self._position = np.clip(self._position + move, -1.0, 1.0)
        x, y = (self._goal - self._position).tolist()
        distance = math.sqrt(x * x + y * y)  # BLAS's norm rounds as the processor's kernel does
        return EnvStep(max(0.0, 1.0 - distance), terminated=False, truncated=False)

    def state(self) -> NDArray[np.float32]:
        return np.concatenate([self._position, self._goal], dtype=np.float32)

    def draw(self, size: int) -> NDArray[np.uint8]:
        image = _background(size)
        for place, colour in ((self._goal, self._GOAL), (self._position, self._DOT)):
            _paint_disc(image, _inside((place + 1) / 2), self._RADIUS, colour)
        return image.astype(np.uint8)


class Catch:
    """A ball falls one row an env step through a grid of 8 x 8; the paddle moves left, stays, or moves right.

    When the ball lands the episode terminates with +1 if the paddle is there and -1 if not.
    """

    action_kind: Literal["continuous", "discrete"] = "discrete"
    action_size = 3
    cells = 8
    env_step_limit = cells - 1
    random_return = -0.75
    perfect_return = 1.0
    _BALL: Colour = (250, 210, 60)
    _PADDLE: Colour = (90, 170, 250)

    def __init__(self) -> None:
        self._row = self._ball = self._paddle = 0

    def begin(self, random: np.random.Generator) -> None:
        self._row = 0
        self._ball, self._paddle = (int(column) for column in random.integers(self.cells, size=2))

    def advance(self, action: Action) -> EnvStep:
        self._paddle = min(max(self._paddle + int(action) - 1, 0), self.cells - 1)
        self._row += 1
        landed = self._row == self.cells - 1
        reward = (1.0 if self._paddle == self._ball else -1.0) if landed else 0.0
        return EnvStep(reward, terminated=landed, truncated=False)

    def state(self) -> NDArray[np.float32]:
        return np.array([self._row, self._ball, self._paddle], dtype=np.float32) / np.float32(self.cells - 1)

    def draw(self, size: int) -> NDArray[np.uint8]:
        image = _background(size)
        edges = np.rint(size * _inside(np.arange(self.cells + 1) / self.cells)).astype(int)
        paddle = (self.cells - 1, self._paddle, self._PADDLE)
        ball = (self._row, self._ball, self._BALL)
        for row, column, colour in (paddle, ball):
            image[edges[row] : edges[row + 1], edges[column] : edges[column + 1]] = colour
        return image.astype(np.uint8)


TASKS: dict[str, type[Reach] | type[Catch]] = {"reach": Reach, "catch": Catch}


def names() -> list[str]:
    return list(TASKS)


def find(name: str) -> str | None:
    return name if name in TASKS else None


def action_kind(name: str, config: EnvConfig) -> Literal["continuous", "discrete"]:
    return TASKS[name].action_kind


def make(name: str, config: EnvConfig, action_repeat: int) -> SteppedEnvironment[ToySimulator]:
    """The task `toy/<name>`."""
    if config.image_size < MIN_IMAGE_SIZE:
        raise UserError(f"toy/{name} needs at least {MIN_IMAGE_SIZE} pixels a side: set --env.image-size 32.")
    task = TASKS[name]()
    pixels = config.observation == "pixels"
    simulator = ToySimulator(task, config.image_size if pixels else None)
    limit = limit_env_steps(task.env_step_limit, config.max_episode_steps)
    as_published = action_repeat == 1 and limit == task.env_step_limit
    spec = EnvSpec(
        task=f"toy/{name}",
        frame_shape=simulator.frame().shape,
        frame_stack=config.frame_stack if pixels else 1,
        action_kind=task.action_kind,
        action_size=task.action_size,
        action_repeat=action_repeat,
        max_episode_agent_steps=limit_agent_steps(limit, action_repeat),
        random_return=task.random_return if as_published else None,
        perfect_return=task.perfect_return if as_published else None,
    )
    return SteppedEnvironment(spec, simulator, limit)


class ToySimulator:
    """A toy task as the agent is shown it."""

    def __init__(self, task: Reach | Catch, image_size: int | None) -> None:
        """Shows the state vector where there is no image size."""
        self._task = task
        self._image_size = image_size

    def begin(self, seed: int) -> None:
        self._task.begin(np.random.default_rng(seed))

    def advance(self, action: Action) -> EnvStep:
        return self._task.advance(action)

    def frame(self) -> Frame:
        if self._image_size is None:
            return self._task.state()
        return np.ascontiguousarray(self._task.draw(self._image_size).transpose(2, 0, 1))

    def picture(self) -> NDArray[np.uint8]:
        return self._task.draw(VIDEO_SIZE)

    def close(self) -> None:
        pass


def _background(size: int) -> NDArray[np.float32]:
    """A dim blue and violet gradient with a lighter field where things happen."""
    ramp = np.linspace(20.0, 70.0, size, dtype=np.float32)
    image = np.empty((size, size, 3), dtype=np.float32)
    image[..., 0] = ramp / 2
    image[..., 1] = 20.0
    image[..., 2] = ramp[:, None] + 10.0
    inside = slice(round(size * _MARGIN / 2), size - round(size * _MARGIN / 2))
    image[inside, inside] += 25.0
    return image


def _inside(place: NDArray[np.float64]) -> NDArray[np.float64]:
    """Maps [0, 1] onto the part of the picture within the margin."""
    return _MARGIN + (1 - 2 * _MARGIN) * place


def _paint_disc(image: NDArray[np.float32], centre: NDArray[np.float64], radius: float, colour: Colour) -> None:
    """Blends a disc in, lengths as shares of the side. Soft edges let moves of less than a pixel show."""
    size = image.shape[0]
    pixels = (np.arange(size, dtype=np.float32) + 0.5) / size
    squared = (pixels - np.float32(centre[0])) ** 2 + ((pixels - np.float32(centre[1])) ** 2)[:, None]
    cover = np.clip((np.float32(radius) - np.sqrt(squared)) * size + 0.5, 0.0, 1.0)[..., None]
    image += cover * (np.array(colour, dtype=np.float32) - image)
