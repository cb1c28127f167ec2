"""What an environment of the user's own says of itself, held against what it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
from gymnasium import spaces

from drq.config import EnvConfig
from drq.envs.gym import construct


def faults(identity: str, config: EnvConfig, env_steps: int) -> Iterator[str]:
    """A sentence each time that the environment does not do what Gymnasium's interface asks for."""
    with closing(construct(identity, config)) as env:
        env.action_space.seed(0)
        answer: Any = env.reset(seed=0)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            yield f"reset() returns {type(answer).__name__}: return (observation, info)."
            return
        yield from _observation(env.observation_space, answer[0], "reset()")
        for _ in range(env_steps):
            answer = env.step(env.action_space.sample())
            if not (isinstance(answer, tuple) and len(answer) == 5):
                yield "step() returns no five values: return (observation, reward, terminated, truncated, info)."
                return
            observation, reward, terminated, truncated, info = answer
            yield from _observation(env.observation_space, observation, "step()")
            yield from _rest(reward, terminated, truncated, info)
            if terminated or truncated:
                env.reset()


def _observation(space: spaces.Space[Any], observation: Any, where: str, name: str = "") -> Iterator[str]:
    if isinstance(space, spaces.Dict) and isinstance(observation, dict) and observation.keys() == space.spaces.keys():
        for key, part in space.spaces.items():
            yield from _observation(part, observation[key], where, f" {key!r}")
        return
    if isinstance(space, spaces.Box):
        array = np.asarray(observation)
        if array.shape != space.shape:
            yield (
                f"{where} gives an observation{name} of shape {array.shape} and observation_space says {space.shape}: "
                "make them agree."
            )
            return
        if array.dtype != space.dtype:
            yield (
                f"{where} gives an observation{name} of {array.dtype} and observation_space says {space.dtype}: "
                f"return .astype({space.dtype})."
            )
            return
        if not np.isfinite(array).all():
            yield f"{where} gives an observation{name} that is not finite: mend what becomes NaN or infinite."
            return
    if not space.contains(observation):
        yield f"{where} gives an observation{name} outside its observation_space: widen the space, or clip to it."


def _rest(reward: Any, terminated: Any, truncated: Any, info: Any) -> Iterator[str]:
    if np.ndim(reward) != 0 or np.asarray(reward).dtype.kind not in "biuf":
        yield f"step() gives a reward of {type(reward).__name__}: return a float."
    elif not np.isfinite(float(reward)):
        yield f"step() gives a reward of {float(reward)}: return finite numbers."
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool | np.bool_):
            yield f"step() gives {name} as {type(value).__name__}: return True or False."
    if not isinstance(info, dict):
        yield f"step() gives info as {type(info).__name__}: return a dict."
