"""Atari games several times over, emulated side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drq.config import EnvConfig
from drq.cores import usable_cores
from drq.envs.atari import MAX_FRAMES, GameEpisode, checked_name, emulators_range, game_spec
from drq.envs.atari_emulator import FRAME_SKIP, MAX_NO_OPS, ale_py
from drq.envs.protocol import Action, EnvSpec, Frame, Step


def lane_slots() -> int:
    """How many slots step together: many, for one call into ale-py wakes them all. Not all, as a lane in which nobody
    plays costs nothing, and no more than there are cores, as that would only make the last game of a lane wait."""
    return min(16, usable_cores())


def make_atari_group(game: str, config: EnvConfig, count: int) -> AtariGroup:
    """So many of the game of that name, in ale-py's spelling or the paper's."""
    return AtariGroup(checked_name(game, config), config, count)


class AtariGroup:
    """One game in many slots. The slots of a lane share an `AtariVectorEnv`, which has threads of its own.

    It steps all games of a lane or none. One that goes on unseen, be it over or not named in a step, is out of play
    until a reset with a seed, which loads it anew.
    """

    def __init__(self, name: str, config: EnvConfig, count: int) -> None:
        size = config.image_size
        most = lane_slots()
        self._lanes = []
        for first in range(0, count, most):
            slots = range(first, min(first + most, count))
            emulator = new_emulator(name, size, size, grayscale=True, count=len(slots), threads=len(slots))
            self._lanes.append(_Lane(emulator, slots))
        self._spec = game_spec(name, config, self._lanes[0].action_size)
        self._episodes = [GameEpisode(self._spec) for _ in range(count)]
        self._colour = [ColourReplay(name) for _ in range(count)]
        self._loading = ThreadPoolExecutor(len(self._lanes), thread_name_prefix="atari-group")

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    def reset(self, seeds: Mapping[int, int]) -> dict[int, Frame]:
        seeds = {slot: emulators_range(seed) for slot, seed in seeds.items()}
        lanes = [lane for lane in self._lanes if any(slot in seeds for slot in lane.slots)]
        first: dict[int, Frame] = {}
        # Loading a game takes some 0.1 s, without the GIL.
        for lane, (frames, lives) in zip(
            lanes, self._loading.map(lambda lane: lane.reset(seeds), lanes), strict=True
        ):
            for slot, frame, lives_left in zip(lane.slots, frames, lives, strict=True):
                if slot in seeds:
                    self._episodes[slot].begin(seeds[slot], lives_left)
                    first[slot] = frame
        return first

    def step(self, actions: Mapping[int, Action]) -> dict[int, Step]:
        # All are checked before any is sent, so that a mistake moves none.
        for slot, action in actions.items():
            self._episodes[slot].check(action)
        lanes = [lane for lane in self._lanes if any(slot in actions for slot in lane.slots)]
        for lane in lanes:
            lane.send(actions)
        for slot, episode in enumerate(self._episodes):
            if slot not in actions:
                episode.playing = False
        steps: dict[int, Step] = {}
        for lane in lanes:
            for slot, *outcome in zip(lane.slots, *lane.receive(), strict=True):
                if slot in actions:
                    steps[slot] = self._episodes[slot].step(actions[slot], *outcome)
        return steps

    def snapshot(self, slot: int) -> NDArray[np.uint8]:
        episode = self._episodes[slot]
        return self._colour[slot].picture(episode.seed, episode.actions)

    def develop(self, snapshots: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        return list(snapshots)

    def close(self) -> None:
        self._loading.shutdown()
        for lane in self._lanes:
            lane.close()
        for colour in self._colour:
            colour.close()


class _Lane:
    """Slots with one emulator. What it gives is in their order, in arrays that are new each time: a slot's frame is
    a view of one, which nothing writes to again."""

    def __init__(self, emulator: Any, slots: range) -> None:
        self._emulator = emulator
        self.slots = slots
        self._begun = False

    @property
    def action_size(self) -> int:
        return int(self._emulator.single_action_space.n)

    def reset(self, seeds: Mapping[int, int]) -> tuple[NDArray[np.uint8], list[int]]:
        """Frames and lives of all slots, of which those with a seed begin anew."""
        if self._begun:
            named = np.array([slot in seeds for slot in self.slots])
            options = {"reset_mask": named}
        else:
            # The first reset has to be of all; slots without a seed get any, as nobody plays in them.
            named, options = np.ones(len(self.slots), dtype=bool), {}
        chosen = np.array([seeds.get(slot, 0) for slot in self.slots])[named]
        frames, info = self._emulator.reset(seed=chosen, options=options)
        self._begun = True
        return frames, info["lives"].tolist()

    def send(self, actions: Mapping[int, Action]) -> None:
        """Begins a step in the emulator's threads. `receive` waits for it, and has to come next."""
        self._emulator.send(np.array([actions.get(slot, 0) for slot in self.slots], dtype=np.int32))

    def receive(self) -> tuple[NDArray[np.uint8], list[float], list[bool], list[int]]:
        """Frames, scores, whether the game is over, and lives of all slots."""
        frames, rewards, game_over, _, info = self._emulator.recv()
        return frames, rewards.astype(np.float64).tolist(), game_over.tolist(), info["lives"].tolist()

    def close(self) -> None:
        self._emulator.close()


class ColourReplay:
    """Plays an episode a second time, in colour: the grey emulator keeps nothing to draw a video from."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._emulator: Any = None
        self._episode: list[int] | None = None
        self._played = 0
        self._picture = np.zeros((210, 160, 3), dtype=np.uint8)

    def picture(self, seed: int, actions: list[int]) -> NDArray[np.uint8]:
        """The screen after these actions. A new list is a new episode, a longer one the same gone on."""
        if self._emulator is None:
            self._emulator = new_emulator(self._name, *self._picture.shape[:2], grayscale=False)
        if self._episode is not actions:
            self._episode, self._played = actions, 0
            self._picture = _only(_only(self._emulator.reset(seed=seed)[0]))
        for action in actions[self._played :]:
            self._picture = _only(_only(self._emulator.step(np.array([action], dtype=np.int32))[0]))
        self._played = len(actions)
        return self._picture

    def close(self) -> None:
        if self._emulator is not None:
            self._emulator.close()


def new_emulator(name: str, height: int, width: int, *, grayscale: bool, count: int = 1, threads: int = 1) -> Any:
    """So many of a game, one picture at a time: stacking, clipping, lives and the time limit are ours."""
    return ale_py().vector_env.AtariVectorEnv(
        name,
        num_envs=count,
        num_threads=threads,
        img_height=height,
        img_width=width,
        grayscale=grayscale,
        stack_num=1,
        frameskip=FRAME_SKIP,
        maxpool=True,
        noop_max=MAX_NO_OPS + 1,  # ale-py draws from 0 to one less
        repeat_action_probability=0.0,
        full_action_space=False,
        max_num_frames_per_episode=MAX_FRAMES + FRAME_SKIP,
        episodic_life=False,
        life_loss_info=False,
        reward_clipping=False,
        use_fire_reset=False,
    )


def _only(batch: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The one thing in a batch of one."""
    only: NDArray[np.uint8] = batch[0]
    return only
