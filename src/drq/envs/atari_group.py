"""Atari games several times over, emulated side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drq.envs.atari import AtariEnvironment
from drq.envs.protocol import Action, EnvSpec, Frame, Step

_SPARE = 4
"""Emulators that load expected episodes beside play. Loading takes some 0.1 s, in which more games seldom end."""


class AtariGroup:
    """Environments of one game, each with the thread in which its emulator works.

    An emulator a slot, and not one `AtariVectorEnv` for all: that one steps all of its games or none, so at the end
    of an evaluation it would go on with games that are over. Here a slot that is not stepped costs nothing.
    """

    def __init__(self, make: Callable[[], AtariEnvironment], count: int) -> None:
        self._make = make
        self._slots = [make() for _ in range(count)]
        self._spare: list[AtariEnvironment] = []
        self._begun: dict[int, _Begun] = {}
        """Expected episodes by their seeds, each in an emulator that was spare."""
        self._loading = ThreadPoolExecutor(thread_name_prefix="atari-group")

    @property
    def spec(self) -> EnvSpec:
        return self._slots[0].spec

    def reset(self, seeds: Mapping[int, int]) -> dict[int, Frame]:
        frames = {slot: self._reset(slot, seed) for slot, seed in seeds.items()}
        return {slot: frame.result() for slot, frame in frames.items()}

    def _reset(self, slot: int, seed: int) -> Future[Frame]:
        begun = self._begun.pop(seed, None)
        if begun is None:
            return self._loading.submit(self._slots[slot].reset, seed)
        self._spare.append(self._slots[slot])
        self._slots[slot] = begun.env
        return begun.frame

    def expect(self, seeds: Iterable[int]) -> None:
        expected = list(islice(seeds, _SPARE))
        for seed in self._begun.keys() - set(expected):
            env, frame = self._begun.pop(seed)
            frame.result()
            self._spare.append(env)
        for seed in expected:
            if seed not in self._begun:
                env = self._spare.pop() if self._spare else self._make()
                self._begun[seed] = _Begun(env, self._loading.submit(env.reset, seed))

    def step(self, actions: Mapping[int, Action]) -> dict[int, Step]:
        # All are checked before any is sent, so that a mistake leaves no emulator with an answer to be fetched.
        for slot, action in actions.items():
            self._slots[slot].check(action)
        for slot, action in actions.items():
            self._slots[slot].send(action)
        return {slot: self._slots[slot].receive() for slot in actions}

    def render(self, slot: int) -> NDArray[np.uint8]:
        return self._slots[slot].render()

    def close(self) -> None:
        self._loading.shutdown()
        for env in (*self._slots, *self._spare, *(begun.env for begun in self._begun.values())):
            env.close()


class _Begun(NamedTuple):
    """An episode that nobody plays yet."""

    env: AtariEnvironment
    frame: Future[Frame]
    """Its first frame, once it is loaded."""
