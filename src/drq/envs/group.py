"""Several environments of one task, played side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from drq.envs.protocol import Action, Environment, EnvSpec, Frame, Step
from drq.envs.thread import EnvThread


class EnvironmentGroup(Protocol):
    """Environments of one task in numbered slots, from 0.

    Each is what `Environment` promises and knows nothing of the others: what a slot gives back does not depend on
    what is played beside it.
    """

    @property
    def spec(self) -> EnvSpec: ...

    def reset(self, seeds: Mapping[int, int]) -> dict[int, Frame]:
        """Begins an episode in each slot named, from the seed given for it, and returns the first frames."""
        ...

    def step(self, actions: Mapping[int, Action]) -> dict[int, Step]:
        """One agent step in each slot named, all at the same time.

        A slot that a step does not name may be left: its episode may go on unseen, and only a reset of the slot makes
        it playable again. Some groups keep it as it is; a user of any group names every slot it wants to go on with.
        """
        ...

    def snapshot(self, slot: int) -> Any:
        """Keeps a slot's current state for a video, cheaply. Only `develop` knows what it is."""
        ...

    def develop(self, snapshots: Sequence[Any]) -> list[NDArray[np.uint8]]:
        """RGB images (height, width, 3) of snapshots, drawn together where that is possible.

        To be asked for before a slot that they were taken of is reset.
        """
        ...

    def close(self) -> None: ...


class ThreadedGroup:
    """Any environments, each in a thread of its own.

    Rendering contexts belong to the thread that made them, so an environment lives in its thread from its birth.
    """

    def __init__(self, make: Callable[[], Environment], count: int) -> None:
        self._threads = [EnvThread("group") for _ in range(count)]
        self._envs: list[Environment] = []
        with ExitStack() as made:  # if one cannot be made, those before it are closed
            for thread in self._threads:
                self._envs.append(thread.submit(make).result())
                made.callback(thread.close, self._envs[-1].close)
            self._made = made.pop_all()
        self.spec = self._envs[0].spec

    def reset(self, seeds: Mapping[int, int]) -> dict[int, Frame]:
        frames = {slot: self._threads[slot].submit(self._envs[slot].reset, seed) for slot, seed in seeds.items()}
        return {slot: frame.result() for slot, frame in frames.items()}

    def step(self, actions: Mapping[int, Action]) -> dict[int, Step]:
        steps = {slot: self._threads[slot].submit(self._envs[slot].step, action) for slot, action in actions.items()}
        return {slot: step.result() for slot, step in steps.items()}

    def snapshot(self, slot: int) -> NDArray[np.uint8]:
        return self._threads[slot].submit(self._envs[slot].render).result()

    def develop(self, snapshots: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        return list(snapshots)

    def close(self) -> None:
        self._made.close()
