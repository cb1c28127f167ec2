"""Atari games several times over, emulated side by side."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drq.child import end_child, start_child
from drq.config import EnvConfig
from drq.cores import allotted_cores, usable_cores
from drq.envs.atari import GameEpisode, check_playable, game_spec
from drq.envs.atari_emulator import Emulator, Played
from drq.envs.protocol import Action, EnvSpec, Frame, Step

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
    """One game in many slots, dealt out to some workers.

    A slot that a step does not name stays as it is.
    """

    def __init__(self, name: str, config: EnvConfig, count: int, workers: int) -> None:
        self._workers: Sequence[LocalWorker | ProcessWorker] = (
            [LocalWorker(name, config.image_size, config.no_op_steps)]
            if workers == 1
            else [ProcessWorker(name, config.image_size, config.no_op_steps) for _ in range(workers)]
        )
        self._spec = game_spec(name, config, self._workers[0].action_size)
        self._episodes = [GameEpisode(self._spec) for _ in range(count)]

    @property
    def spec(self) -> EnvSpec:
        return self._spec

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
        worker = self._workers[slot % len(self._workers)]
        worker.begin("colours", {slot: 0})
        picture: NDArray[np.uint8] = worker.finish()[slot]
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
                worker.begin(what, own)
                asked.append(worker)
        answers: dict[int, Played] = {}
        for worker in asked:
            answers |= worker.finish()
        return answers


class Slots:
    """Emulators, each made when its slot is first played in."""

    def __init__(self, name: str, size: int, no_op_steps: bool) -> None:
        self._make = partial(Emulator, name, size, no_op_steps)
        self._spare: Emulator | None = self._make()
        self._emulators: dict[int, Emulator] = {}
        self.action_size = self._spare.action_size

    def do(self, what: str, of_slots: Mapping[int, int]) -> dict[int, Any]:
        """`what` is `reset` with a seed for each slot, `step` with an action, or `colours` with anything."""
        return {slot: self._one(what, slot, value) for slot, value in of_slots.items()}

    def _one(self, what: str, slot: int, value: int) -> Any:
        if slot not in self._emulators:
            self._emulators[slot], self._spare = self._spare or self._make(), None
        emulator = self._emulators[slot]
        if what == "colours":
            return emulator.colours()
        return emulator.reset(value) if what == "reset" else emulator.step(value)


class LocalWorker(Slots):
    """Emulates some slots in the calling thread."""

    def begin(self, what: str, of_slots: Mapping[int, int]) -> None:
        """As `do`; `finish` gives what came of it, and has to come next."""
        self._done = self.do(what, of_slots)

    def finish(self) -> dict[int, Any]:
        return self._done

    def close(self) -> None:
        pass


class ProcessWorker:
    """The same in a process of its own: the emulator holds Python's lock, so that threads would take turns."""

    def __init__(self, name: str, size: int, no_op_steps: bool) -> None:
        self._process, self._pipe = start_child("drq.envs.atari_group", {"OMP_NUM_THREADS": "1"})
        self._pipe.send((name, size, no_op_steps))
        self._action_size: int | None = None

    @property
    def action_size(self) -> int:
        if self._action_size is None:
            with _told_of_its_end():
                self._action_size = self._pipe.recv()
        return self._action_size

    def begin(self, what: str, of_slots: Mapping[int, int]) -> None:
        _ = self.action_size  # the first answer
        with _told_of_its_end():
            self._pipe.send((what, of_slots))

    def finish(self) -> dict[int, Any]:
        with _told_of_its_end():
            answer: dict[int, Any] = self._pipe.recv()
        return answer

    def close(self) -> None:
        end_child(self._process, self._pipe)


@contextmanager
def _told_of_its_end() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise RuntimeError("A process that emulated Atari games has ended.") from error


def serve(pipe: Connection) -> None:
    """Emulates what it is asked to until the pipe closes."""
    os.nice(NICENESS)
    slots = Slots(*pipe.recv())
    pipe.send(slots.action_size)
    while True:
        pipe.send(slots.do(*pipe.recv()))


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # nobody asks any more
        serve(Connection(int(sys.argv[1])))
