"""Where a run's environment works: beside the calling thread, or in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from drq.envs.protocol import Action, Environment, Frame, Step
from drq.envs.thread import EnvThread


class EnvWorker(Protocol):
    """An environment whose steps can be waited for later."""

    @property
    def env(self) -> Environment: ...

    def reset(self, seed: int) -> Frame:
        """Begins an episode."""
        ...

    def step(self, action: Action) -> Callable[[], Step]:
        """Begins a step, or makes it; calling the result waits for what is left of it."""
        ...

    def close(self) -> None: ...


class ThreadedEnv:
    """Works an environment beside the calling thread, which updates the agent meanwhile.

    Rendering contexts belong to the thread that made them, so the environment lives in this one from its birth.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._thread = EnvThread("env")
        self.env = self._thread.submit(make).result()

    def reset(self, seed: int) -> Frame:
        return self._thread.submit(self.env.reset, seed).result()

    def step(self, action: Action) -> Callable[[], Step]:
        return self._thread.submit(self.env.step, action).result

    def close(self) -> None:
        self._thread.close(self.env.close)


class InlineEnv:
    """Works an environment in the calling thread, which has left its updates to a GPU and has little else to do.

    Handing over to a thread and back would cost a tenth of a millisecond, which is a tenth of an Atari step.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self.env = make()

    def reset(self, seed: int) -> Frame:
        return self.env.reset(seed)

    def step(self, action: Action) -> Callable[[], Step]:
        step = self.env.step(action)
        return lambda: step

    def close(self) -> None:
        self.env.close()
