"""An environment in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from drq.envs.protocol import Action, Environment, Frame, Step


class EnvThread:
    """Works an environment beside the calling thread, which updates the agent meanwhile.

    Rendering contexts belong to the thread that made them, so the environment lives in this one from its birth.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="env")
        self.env = self._pool.submit(make).result()

    def reset(self, seed: int) -> Frame:
        return self._pool.submit(self.env.reset, seed).result()

    def step(self, action: Action) -> Callable[[], Step]:
        """Begins a step; calling the result waits for it."""
        return self._pool.submit(self.env.step, action).result

    def close(self) -> None:
        self._pool.submit(self.env.close).result()
        self._pool.shutdown()
