"""Where a run's environment works: beside the calling thread, or in it."""

from __future__ import annotations

from collections.abc import Callable

from drq.envs.protocol import Action, Environment, Frame, Step
from drq.envs.remote import RemoteEnvironment
from drq.envs.thread import EnvThread


class ThreadedEnv:
    """Works an environment beside the calling thread, which updates the agent meanwhile.

    Rendering contexts belong to the thread that made them, so the environment lives in this one from its birth.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._thread = EnvThread("env")
        self.env = self._thread.submit(make).result()

    def reset(self, seed: int) -> Callable[[], Frame]:
        """Begins an episode; calling the result waits for its first frame."""
        return self._thread.submit(self.env.reset, seed).result

    def step(self, action: Action) -> Callable[[], Step]:
        """Begins a step; calling the result waits for it."""
        return self._thread.submit(self.env.step, action).result

    def close(self) -> None:
        self._thread.close(self.env.close)


class InlineEnv:
    """The same in the calling thread, which has left its updates to a GPU and has little else to do.

    Handing over to a thread and back would cost a tenth of a millisecond, which is a tenth of an Atari step.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self.env = make()

    def reset(self, seed: int) -> Callable[[], Frame]:
        frame = self.env.reset(seed)
        return lambda: frame

    def step(self, action: Action) -> Callable[[], Step]:
        step = self.env.step(action)
        return lambda: step

    def close(self) -> None:
        self.env.close()


class ProcessEnv:
    """The same in a process of its own, beside others of the same run."""

    def __init__(self, env: RemoteEnvironment) -> None:
        self.env = env
        self.reset = env.begin_reset
        self.step = env.begin_step
        self.close = env.close


EnvWorker = ThreadedEnv | InlineEnv | ProcessEnv
