"""A memory that keeps every transition whole in a list, and episodes that fill any number of memories alike."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drq.envs.protocol import EnvSpec
from drq.replay import Replay

GAMMA = 0.99
SPEC = EnvSpec("toy/lists", (2, 3, 4), 3, "continuous", 2, 1, None)
Transition = tuple[np.ndarray, np.ndarray, float, float, np.ndarray]
"""(s, a, r, γ or 0, s')"""


def picture(number: int, spec: EnvSpec = SPEC) -> np.ndarray:
    """A frame that can be told from all others."""
    return np.random.default_rng(number).integers(0, 256, spec.frame_shape, dtype=np.uint8)


@dataclass
class Lists:
    """Whole stacks, nothing shared, nothing forgotten."""

    stack: int
    transitions: list[Transition] = field(default_factory=list)
    oldest_frame: list[int] = field(default_factory=list)
    """Number of the oldest frame that each transition shows."""
    frames: int = 0
    episode: list[np.ndarray] = field(default_factory=list)

    def observation(self) -> np.ndarray:
        shown = self.episode[-self.stack :]
        return np.concatenate([self.episode[0]] * (self.stack - len(shown)) + shown)

    def begin(self, frame: np.ndarray) -> None:
        self.episode = [frame]
        self.frames += 1

    def add(self, action: np.ndarray, reward: float, discount: float, done: bool, frame: np.ndarray) -> None:
        before = self.observation()
        self.oldest_frame.append(self.frames - min(len(self.episode), self.stack))
        self.episode.append(frame)
        self.frames += 1
        self.transitions.append((before, action, reward, GAMMA * discount, self.observation()))

    def kept(self, capacity: int, frame_capacity: int) -> list[Transition]:
        """The newest that fit, and no more than have all of their frames."""
        oldest = max(len(self.transitions) - capacity, 0)
        while oldest < len(self.transitions) and self.oldest_frame[oldest] < self.frames - frame_capacity:
            oldest += 1
        return self.transitions[oldest:]


class Play:
    """Random episodes, written to any number of memories alike."""

    def __init__(self, seed: int, longest: int, spec: EnvSpec = SPEC) -> None:
        self.random = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.longest, self.spec = longest, spec
        self.left = 0
        self.frames = 0

    def frame(self) -> np.ndarray:
        self.frames += 1
        return picture(self.frames, self.spec)

    def step(self, *memories: Any) -> None:
        if self.left == 0:
            self.left = self.random.randint(1, self.longest)
            first = self.frame()
            for memory in memories:
                memory.begin(first)
            if self.random.random() < 0.2:
                return  # so that some checks fall between a reset and the first action
        self.left -= 1
        done = self.left == 0
        terminated = done and self.random.random() < 0.5
        action = self.numpy.uniform(-1, 1, self.spec.action_size).astype(np.float32)
        step = action, self.random.uniform(-1, 1), 0.0 if terminated else 1.0, done, self.frame()
        for memory in memories:
            memory.add(*step)


class OneStream:
    """One stream of a replay as if it were a memory of its own."""

    def __init__(self, replay: Replay, stream: int) -> None:
        self.replay, self.stream = replay, stream

    def begin(self, frame: np.ndarray) -> None:
        self.replay.begin(frame, self.stream)

    def add(self, action: np.ndarray, reward: float, discount: float, done: bool, frame: np.ndarray) -> None:
        self.replay.add(action, reward, discount, done, frame, self.stream)
