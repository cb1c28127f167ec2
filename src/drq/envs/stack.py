"""Observations where somebody acts: the newest frames of an episode, stacked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from drq.envs.protocol import EnvSpec, Frame


def blank_observations(spec: EnvSpec, count: int) -> NDArray[Any]:
    """A batch of so many stacked observations, all zero."""
    return np.zeros((count, *spec.observation_shape), dtype=np.uint8 if spec.pixels else np.float32)


class FrameStack:
    """The newest frames of one episode as an observation; at a reset the first is repeated, or zeros go before it."""

    def __init__(self, spec: EnvSpec, memory: NDArray[Any] | None = None) -> None:
        """`memory`: where to keep the observation, if it has its place in a batch."""
        self._channels, self._zeros = spec.frame_shape[0], spec.zero_stack
        self._stack = blank_observations(spec, 1)[0] if memory is None else memory

    def reset(self, frame: Frame) -> None:
        for start in range(0, len(self._stack), self._channels):
            self._stack[start : start + self._channels] = 0 if self._zeros else frame
        self._stack[-self._channels :] = frame

    def push(self, frame: Frame) -> None:
        self._stack[: -self._channels] = self._stack[self._channels :]
        self._stack[-self._channels :] = frame

    @property
    def observation(self) -> NDArray[Any]:
        return self._stack

    @property
    def newest(self) -> NDArray[Any]:
        """The newest frame: ours, where that which it was copied from may be drawn over already."""
        return self._stack[-self._channels :]

    def on_host(self) -> NDArray[Any]:
        return self._stack
