"""An environment in a process of its own: `python -m drq.envs.remote <pipe>`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drq import envs
from drq.child import end_child, start_child
from drq.config import EnvConfig
from drq.envs.protocol import Action, EnvSpec, Frame, Step
from drq.errors import UserError


class RemoteError(Exception):
    """What failed in the other process: its whole trace."""


class RemoteEnvironment:
    """An `Environment` that another process plays, so that several can be stepped at the same time."""

    render_seconds = 0.0
    """Unknown here: it draws while others step."""

    def __init__(self, task: str, config: EnvConfig, action_repeat: int, imports: Sequence[str]) -> None:
        """Waits for nothing: the first question does."""
        self._task = task
        self._process, self._pipe = start_child("drq.envs.remote", {"OMP_NUM_THREADS": "1"})
        self._pipe.send((task, config, action_repeat, tuple(imports)))
        self._made: tuple[EnvSpec, bool] | None = None

    @property
    def spec(self) -> EnvSpec:
        return self._answer_to_its_making()[0]

    @property
    def draws(self) -> bool:
        """Whether there are pictures of it for a video."""
        return self._answer_to_its_making()[1]

    def reset(self, seed: int) -> Frame:
        return self.begin_reset(seed)()

    def step(self, action: Action) -> Step:
        return self.begin_step(action)()

    def render(self) -> NDArray[np.uint8]:
        picture: NDArray[np.uint8] = self._ask("render")()
        return picture

    def begin_reset(self, seed: int) -> Callable[[], Frame]:
        """`reset`; calling the result waits for it, and has to come before anything else is asked."""
        return self._ask("reset", seed)

    def begin_step(self, action: Action) -> Callable[[], Step]:
        """`step`, as `begin_reset`."""
        return self._ask("step", action)

    def close(self) -> None:
        end_child(self._process, self._pipe)

    def _answer_to_its_making(self) -> tuple[EnvSpec, bool]:
        if self._made is None:
            self._made = self._answer()
        return self._made

    def _ask(self, what: str, *args: Any) -> Callable[[], Any]:
        self._answer_to_its_making()
        try:
            self._pipe.send((what, args))
        except OSError as error:
            raise self._ended() from error
        return self._answer

    def _answer(self) -> Any:
        try:
            answer, failed = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if failed is not None:
            raise UserError(answer) from RemoteError(failed)
        return answer

    def _ended(self) -> UserError:
        return UserError(f"A process of {self._task} has ended: see what it said, and run the same command again.")


def serve(pipe: Connection) -> None:
    """Makes the environment and does what is asked of it until the pipe closes. An answer comes with a trace where
    it failed."""
    env: Any = None

    def made() -> tuple[EnvSpec, bool]:
        nonlocal env
        task, config, action_repeat, imports = pipe.recv()
        envs.import_modules(imports)
        env = envs.make(task, config, action_repeat)
        return env.spec, bool(getattr(env, "draws", True))

    _send(pipe, made)
    while True:
        what, args = pipe.recv()
        _send(pipe, lambda: getattr(env, what)(*args))  # noqa: B023 (called at once)


def _send(pipe: Connection, call: Callable[[], Any]) -> None:
    try:
        answer, failed = call(), None
    except UserError as error:
        answer, failed = str(error), "".join(traceback.format_exception(error.__cause__ or error))
    pipe.send((answer, failed))


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # nobody asks any more
        serve(Connection(int(sys.argv[1])))
