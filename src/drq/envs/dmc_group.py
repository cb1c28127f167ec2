"""The DeepMind Control Suite several times over, drawn together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drq.config import EnvConfig
from drq.envs.cameras import TiledCamera, Tiles, grid
from drq.envs.dmc import ControlSuite, make, to_frame, to_picture
from drq.envs.episode import VIDEO_SIZE, SteppedEnvironment
from drq.envs.group import EnvironmentGroup, ThreadedGroup
from drq.envs.protocol import Action, Frame, Step
from drq.envs.raycast import Scene, draw

_LARGEST_BUFFER = 2048
"""Pixels along a side that the buffer of a group may have: more than any OpenGL in use would refuse to give."""

_PICTURES_TOGETHER = 25
"""Pictures for a video that are drawn and read back together. More would save few waits, and each would be longer."""

_COMPARED = 2
"""Slots whose first tile is compared with what the environment draws alone: one at the origin, one elsewhere."""


def make_group(name: str, config: EnvConfig, action_repeat: int, count: int) -> EnvironmentGroup:
    """So many environments of the task `<domain>-<task>`, drawn together where that is possible."""
    envs = [make(name, config, action_repeat) for _ in range(count)]
    simulator = envs[0].simulator
    if simulator.casts_rays:
        return RayGroup(envs)
    in_one_buffer = max(grid(count)) * config.image_size <= _LARGEST_BUFFER
    if config.observation == "pixels" and in_one_buffer and not simulator.has_terrain:
        return ControlSuiteGroup(envs)
    return ThreadedGroup(envs.pop, count)  # none was reset yet: each gets its OpenGL context in its thread


class RayGroup:
    """Environments of one task whose frames are drawn by casting rays.

    Each has a thread that draws for it, since much of a frame is that of the frame before, while the physics of the
    others go on. Those take turns, as in `ControlSuiteGroup`.
    """

    def __init__(self, envs: list[SteppedEnvironment[ControlSuite]]) -> None:
        self._envs, self.spec = envs, envs[0].spec
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="rays") for _ in envs]

    def reset(self, seeds: Mapping[int, int]) -> dict[int, Frame]:
        drawn = {}
        for slot, seed in seeds.items():
            self._envs[slot].begin(seed)
            drawn[slot] = self._draw(slot)
        return {slot: frame.result() for slot, frame in drawn.items()}

    def step(self, actions: Mapping[int, Action]) -> dict[int, Step]:
        under_way = {slot: (self._envs[slot].advance(action), self._draw(slot)) for slot, action in actions.items()}
        return {slot: outcome.with_frame(frame.result()) for slot, (outcome, frame) in under_way.items()}

    def snapshot(self, slot: int) -> Scene:
        return self._envs[slot].simulator.scene(VIDEO_SIZE)

    def develop(self, snapshots: Sequence[Scene]) -> list[NDArray[np.uint8]]:
        drawn = [thread.submit(draw, scene) for scene, thread in zip(snapshots, cycle(self._threads), strict=False)]
        return [to_picture(image.result()) for image in drawn]

    def close(self) -> None:
        for env, thread in zip(self._envs, self._threads, strict=True):
            thread.shutdown()
            env.close()

    def _draw(self, slot: int) -> Future[NDArray[np.uint8]]:
        return self._threads[slot].submit(draw, self._envs[slot].simulator.scene())


class ControlSuiteGroup:
    """Environments of one task whose frames are drawn together, by a thread that does nothing else.

    They share what an OpenGL context keeps of a model, which is the same for all: their models are built from one
    file and one seed, and what a task changes in an episode, terrain excepted (places, sizes, colours, lights), is
    read from each model for every frame.
    """

    def __init__(self, envs: list[SteppedEnvironment[ControlSuite]]) -> None:
        """The environments must be new: none was reset yet."""
        self._envs, self.spec = envs, envs[0].spec
        self._camera: TiledCamera | None = None
        self._video: Tiles | None = None
        self._one_by_one = False
        """This machine's OpenGL draws tiles otherwise: every environment then draws for itself."""
        self._compared: set[int] = set()
        self._drawing = ThreadPoolExecutor(1, thread_name_prefix="drawing")

    def reset(self, seeds: Mapping[int, int]) -> dict[int, Frame]:
        for slot, seed in seeds.items():
            self._envs[slot].begin(seed)
        return self._frames(seeds)

    def step(self, actions: Mapping[int, Action]) -> dict[int, Step]:
        # One after the other: half of the time and more is the suite's Python, and threads would wait for its lock.
        outcomes = {slot: self._envs[slot].advance(action) for slot, action in actions.items()}
        frames = self._frames(actions)
        return {slot: outcome.with_frame(frames[slot]) for slot, outcome in outcomes.items()}

    def snapshot(self, slot: int) -> Any:
        """A mujoco.MjvScene, or the picture itself where every environment draws for itself."""
        return self._drawing.submit(self._snapshot, slot).result()

    def develop(self, snapshots: Sequence[Any]) -> list[NDArray[np.uint8]]:
        return self._drawing.submit(self._develop, snapshots).result()

    def close(self) -> None:
        self._drawing.submit(self._close).result()
        self._drawing.shutdown()

    def _frames(self, slots: Iterable[int]) -> dict[int, Frame]:
        return self._drawing.submit(self._draw, slots).result()

    def _draw(self, slots: Iterable[int]) -> dict[int, Frame]:
        simulators = [env.simulator for env in self._envs]
        if self._one_by_one:
            return {slot: simulators[slot].frame() for slot in slots}
        images = self._current_camera().draw({slot: simulators[slot].data for slot in slots})
        frames: dict[int, Frame] = {slot: to_frame(image) for slot, image in images.items()}
        for slot in frames.keys() - self._compared:
            if len(self._compared) < _COMPARED:
                self._compared.add(slot)
                if not np.array_equal(frames[slot], simulators[slot].frame()):
                    self._one_by_one = True
                    return self._draw(slots)
        return frames

    def _snapshot(self, slot: int) -> Any:
        if self._one_by_one:
            return self._envs[slot].render()
        return self._current_camera().scene(slot, self._envs[slot].simulator.data)

    def _develop(self, snapshots: Sequence[Any]) -> list[NDArray[np.uint8]]:
        pictures = list(snapshots)
        undrawn = [number for number, snapshot in enumerate(snapshots) if not isinstance(snapshot, np.ndarray)]
        for start in range(0, len(undrawn), _PICTURES_TOGETHER):
            together = undrawn[start : start + _PICTURES_TOGETHER]
            self._video = self._video or self._current_camera().tiles(VIDEO_SIZE, _PICTURES_TOGETHER)
            images = self._video.draw({tile: snapshots[number] for tile, number in enumerate(together)})
            for tile, number in enumerate(together):
                pictures[number] = np.ascontiguousarray(images[tile])
        return pictures

    def _current_camera(self) -> TiledCamera:
        """The camera, made anew where there is none yet or a task has rebuilt its model (see ControlSuite.model)."""
        models = [env.simulator.model for env in self._envs]
        # `is`, since models do not compare.
        if self._camera is None or any(a is not b for a, b in zip(models, self._camera.models, strict=True)):
            self._close_cameras()
            self._camera = self._envs[0].simulator.tiled_camera(models)
        return self._camera

    def _close_cameras(self) -> None:
        for camera in (self._camera, self._video):
            if camera is not None:
                camera.close()
        self._camera = self._video = None

    def _close(self) -> None:
        self._close_cameras()
        for env in self._envs:
            env.close()
