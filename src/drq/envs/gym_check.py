"""What an environment of the user's own says of itself, held against what it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
from gymnasium import spaces

from drq.config import EnvConfig
from drq.envs.gym import Sight, construct


def faults(identity: str, config: EnvConfig, env_steps: int) -> Iterator[str]:
    """A sentence each time that the environment does not do what Gymnasium's interface asks for."""
    with closing(construct(identity, config)) as env:
        sight = Sight(f"gym/{identity}", env, config)
        env.action_space.seed(0)
        answer: Any = env.reset(seed=0)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            yield f"reset() returns {type(answer).__name__}: return (observation, info)."
            return
        yield from _observation(sight, answer[0], "reset()")
        for _ in range(env_steps):
            answer = env.step(env.action_space.sample())
            if not (isinstance(answer, tuple) and len(answer) == 5):
                yield "step() returns no five values: return (observation, reward, terminated, truncated, info)."
                return
            observation, reward, terminated, truncated, info = answer
            yield from _observation(sight, observation, "step()")
            yield from _rest(reward, terminated, truncated, info)
            if terminated or truncated:
                env.reset()


def _observation(sight: Sight, observation: Any, where: str) -> Iterator[str]:
    """Faults of what the agent sees; the rest may be what it likes."""
    space = sight.space
    if sight.source == "render" or not isinstance(space, spaces.Box):
        return
    try:
        array = sight.part(observation)
    except (KeyError, TypeError, IndexError):
        yield f"{where} gives an observation without what observation_space promises: make them agree."
        return
    if array.shape != space.shape:
        yield (
            f"{where} gives an observation of shape {array.shape} and observation_space says {space.shape}: "
            "make them agree."
        )
    elif array.dtype != space.dtype:
        yield (
            f"{where} gives an observation of {array.dtype} and observation_space says {space.dtype}: "
            f"return .astype({space.dtype})."
        )
    elif not np.isfinite(array).all():
        yield f"{where} gives an observation that is not finite: mend what becomes NaN or infinite."
    elif not space.contains(array):
        yield f"{where} gives an observation outside its observation_space: widen the space, or clip to it."


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
