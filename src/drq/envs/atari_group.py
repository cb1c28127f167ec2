"""Atari games several times over, emulated side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drq.child import ServedObject, serve
from drq.config import EnvConfig
from drq.cores import allotted_cores, usable_cores
from drq.envs.atari import GameEpisode, check_playable, game_spec
from drq.envs.atari_emulator import Emulator, Played
from drq.envs.protocol import Action, Frame, Step

LEAST_WORKERS = 8
"""So many processes a group has, cores permitting, even where a launcher gives it fewer: as evaluations end, those that
have long games left take over their cores. It is not for nothing: on two busy cores a step of 16 games of Pong took 5.3
ms of processor time in one process, 6.9 in four and 6.9 to 7.4 in eight, of 31 MB each."""
NICENESS = 5
"""Of these processes: they take what the training of others leaves."""


def make_group(name: str, config: EnvConfig, action_repeat: int, count: int) -> AtariGroup:
    """So many of the game of that name. Its action repeat is always 4."""
    check_playable(name, config)
    return AtariGroup(name, config, count, min(max(allotted_cores(), LEAST_WORKERS), usable_cores(), count))


class AtariGroup:
    """One game in many slots, dealt out to some workers: processes, since the emulator holds Python's lock, so that
    threads would take turns.

    A slot that a step does not name stays as it is.
    """

    def __init__(self, name: str, config: EnvConfig, count: int, workers: int) -> None:
        settings = name, config.image_size, config.no_op_steps
        self._workers: Sequence[LocalSlots | ServedObject] = (
            [LocalSlots(Slots(*settings))]
            if workers == 1
            else [ServedObject("drq.envs.atari_group", f"atari/{name}", *settings) for _ in range(workers)]
        )
        self.spec = game_spec(name, config, self._workers[0].told)
        self._episodes = [GameEpisode(self.spec) for _ in range(count)]

    def reset(self, seeds: Mapping[int, int]) -> dict[int, Frame]:
        first = self._ask("reset", seeds)
        for slot, played in first.items():
            self._episodes[slot].begin(played.lives)
        return {slot: first[slot].frame for slot in seeds}

    def step(self, actions: Mapping[int, Action]) -> dict[int, Step]:
        # All are checked before any is sent, so that a mistake moves none.
        played = self._ask("step", {slot: self._episodes[slot].checked(action) for slot, action in actions.items()})
        return {slot: self._episodes[slot].step(*played[slot]) for slot in actions}

    def snapshot(self, slot: int) -> NDArray[np.uint8]:
        picture: NDArray[np.uint8] = self._workers[slot % len(self._workers)].ask("colours", slot)()
        return picture

    def develop(self, snapshots: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        return list(snapshots)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _ask(self, what: str, of_slots: Mapping[int, int]) -> dict[int, Played]:
        """Has all workers do something with their slots at the same time."""
        asked = []
        for number, worker in enumerate(self._workers):
            own = {slot: value for slot, value in of_slots.items() if slot % len(self._workers) == number}
            if own:
                asked.append(worker.ask(what, own))
        answers: dict[int, Played] = {}
        for answer in asked:
            answers |= answer()
        return answers


class Slots:
    """Emulators, each made when its slot is first played in."""

    def __init__(self, name: str, size: int, no_op_steps: bool) -> None:
        self._make = partial(Emulator, name, size, no_op_steps)
        self._spare: Emulator | None = self._make()
        self._emulators: dict[int, Emulator] = {}
        self.action_size = self._spare.action_size

    def reset(self, seeds: Mapping[int, int]) -> dict[int, Played]:
        return {slot: self._emulator(slot).reset(seed) for slot, seed in seeds.items()}

    def step(self, actions: Mapping[int, int]) -> dict[int, Played]:
        return {slot: self._emulator(slot).step(action) for slot, action in actions.items()}

    def colours(self, slot: int) -> NDArray[np.uint8]:
        return self._emulator(slot).colours()

    def _emulator(self, slot: int) -> Emulator:
        if slot not in self._emulators:
            self._emulators[slot], self._spare = self._spare or self._make(), None
        return self._emulators[slot]


class LocalSlots:
    """In the place of a process that serves `Slots`: works in the calling thread."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.told = slots.action_size

    def ask(self, method: str, *arguments: Any) -> Callable[[], Any]:
        answer = getattr(self._slots, method)(*arguments)
        return lambda: answer

    def close(self) -> None:
        pass


if __name__ == "__main__":
    os.nice(NICENESS)
    serve(Slots, lambda slots: slots.action_size)
