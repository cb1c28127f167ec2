"""Frames that an environment hands over undrawn, drawn where the networks and the replay are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from drq.engine import kernels
from drq.engine.kernels.raycast import RayFrames, compile_kernels
from drq.engine.settings import EngineSettings
from drq.envs.protocol import EnvSpec, Frame
from drq.envs.raycast import Scene


def draws_frames(engine: EngineSettings) -> bool:
    """Whether the engine can draw the control suite's frames itself (`--env.render cuda`)."""
    return engine.kernels and kernels.available()


class DrawnStack:
    """The newest frames of one episode as an observation on the device, drawn there: they never visit the host.

    There are two, by turns: while acting, the replay and an update still read the last one, the next is drawn beside
    them on a stream of its own. What is launched after that waits for it.
    """

    def __init__(self, spec: EnvSpec, device: torch.device) -> None:
        compile_kernels()
        self._stacks = torch.zeros(2, spec.frame_stack, *spec.frame_shape, dtype=torch.uint8, device=device)
        self._turn = 0
        self._frames: RayFrames | None = None
        on_gpu = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if on_gpu else None
        self._left = torch.cuda.Event() if on_gpu else None
        """When all that read the last observation but one is over; at first, when the stacks are zero."""
        if self._left is not None:
            self._left.record()

    def reset(self, scene: Frame) -> None:
        with self._beside():
            stack = self._drawn(scene)
            stack[:-1] = stack[-1]

    def push(self, scene: Frame) -> None:
        with self._beside():
            before = self._stacks[self._turn]
            self._drawn(scene)[:-1] = before[1:]

    @property
    def observation(self) -> Tensor:
        return self._stacks[self._turn].flatten(0, 1)

    @property
    def newest(self) -> Tensor:
        """The newest frame."""
        return self._stacks[self._turn, -1]

    def on_host(self) -> NDArray[Any]:
        return self.observation.cpu().numpy()

    def _drawn(self, frame: Frame) -> Tensor:
        """The other stack, its newest frame drawn."""
        scene = cast(Scene, frame)
        if self._frames is None or self._frames.assets is not scene.assets:  # a task may rebuild its model
            self._frames = RayFrames(scene.assets, 1, self._stacks.device)
        self._turn = 1 - self._turn
        self._frames.put(0, scene)
        self._frames.draw(self._stacks[self._turn, -1:])
        return self._stacks[self._turn]

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Launches beside what was launched since the last frame, before all that follows."""
        if self._side is None or self._left is None:
            yield
            return
        current = torch.cuda.current_stream()
        self._side.wait_event(self._left)
        with torch.cuda.stream(self._side):
            yield
        current.wait_stream(self._side)
        self._left.record(current)
