"""An environment in a process of its own: `python -m drq.envs.remote <pipe>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from drq import envs
from drq.child import ServedObject, serve
from drq.config import EnvConfig
from drq.envs.protocol import Action, Environment, EnvSpec, Frame, Step


class RemoteEnvironment:
    """An `Environment` that another process plays, so that several can be stepped at the same time."""

    render_seconds = 0.0
    """Unknown here: it draws while others step."""

    def __init__(self, task: str, config: EnvConfig, action_repeat: int, imports: Sequence[str]) -> None:
        """Waits for nothing: the first question does."""
        self._served = ServedObject("drq.envs.remote", task, task, config, action_repeat, tuple(imports))
        self.close = self._served.close

    @property
    def spec(self) -> EnvSpec:
        spec: EnvSpec = self._served.told[0]
        return spec

    @property
    def draws(self) -> bool:
        """Whether there are pictures of it for a video."""
        return bool(self._served.told[1])

    def reset(self, seed: int) -> Frame:
        return self.begin_reset(seed)()

    def step(self, action: Action) -> Step:
        return self.begin_step(action)()

    def render(self) -> NDArray[np.uint8]:
        picture: NDArray[np.uint8] = self._served.ask("render")()
        return picture

    def begin_reset(self, seed: int) -> Callable[[], Frame]:
        """`reset`; calling the result waits for it, and has to come before anything else is asked."""
        return self._served.ask("reset", seed)

    def begin_step(self, action: Action) -> Callable[[], Step]:
        """`step`, as `begin_reset`."""
        return self._served.ask("step", action)


def make(task: str, config: EnvConfig, action_repeat: int, imports: Sequence[str]) -> Environment:
    """The environment of a task, here or in a process of its own, as its settings say."""
    if config.own_process:
        return RemoteEnvironment(task, config, action_repeat, imports)
    return make_here(task, config, action_repeat, imports)


def make_here(task: str, config: EnvConfig, action_repeat: int, imports: Sequence[str]) -> Environment:
    envs.import_modules(imports)
    return envs.make(task, config, action_repeat)


if __name__ == "__main__":
    serve(make_here, lambda env: (env.spec, getattr(env, "draws", True)))
