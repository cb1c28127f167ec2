"""The replay memory: every frame is kept once, stacks and n-step returns are rebuilt by index.

Two rings. `frames` holds single frames, the last one of every episode included; `rows` and `places` hold the
transitions, each with the slot of its newest frame and that frame's age in its episode. A stack reaches back over at
most `age` frames, so the first frame of an episode is repeated, as at a reset. Frames and transitions are numbered
from 0 since the start of the run; number modulo ring size is the slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from drq.envs.protocol import Action, EnvSpec, Frame

REWARD, DISCOUNT, DONE, ACTION = 0, 1, 2, 3
"""Columns of `rows`; the action begins at the last."""


class StackedFrames(NamedTuple):
    """N observations as references into the ring of frames, so that gathering can fuse with what comes next."""

    frames: Tensor
    """[slots, *frame_shape]."""
    slots: Tensor
    """[N, frame_stack], oldest first."""

    def tensor(self) -> Tensor:
        """The observations: [N, frame_stack * channels, ...]."""
        return self.frames[self.slots].flatten(1, 2)


class Batch(NamedTuple):
    """N transitions (s, a, r, s')."""

    obs: Tensor | StackedFrames
    action: Tensor
    reward: Tensor
    discount: Tensor
    """What multiplies the next value: γ to the power of the return's length, 0 where the return ended."""
    next_obs: Tensor | StackedFrames


class Staging(NamedTuple):
    """What is new, on the host: page-locked where there is a GPU, so that a store need not wait for it."""

    frame: Tensor
    row: Tensor
    place: Tensor
    window: Tensor


Write = Callable[[int | None, int], None]
"""Begins to bring what is staged to the device. Given are the slots of the transition and of the frame; the first is
None where an episode begins and there is only a frame."""


class Copies:
    """A `Write` that copies each part by itself."""

    def __init__(self, replay: Replay) -> None:
        # Not the replay itself: as long as the two held each other, its memory would not be given back.
        self._staging = replay.staging
        self._rings = replay.frames, replay.rows, replay.places
        self._window = replay.window

    def __call__(self, slot: int | None, frame_slot: int) -> None:
        frames, rows, places = self._rings
        new = self._staging
        frames[frame_slot].copy_(new.frame, non_blocking=True)
        if slot is not None:
            rows[slot].copy_(new.row, non_blocking=True)
            places[slot].copy_(new.place, non_blocking=True)
        self._window.copy_(new.window, non_blocking=True)


class Replay:
    """Transitions of one run, on one device.

    Args:
        spec: the task's shapes.
        capacity: transitions kept.
        n_step: length of the returns that `gather` builds. A return ends early at a terminal state (no bootstrap)
            and at a time limit (bootstrap from the episode's last frame).
        discount: γ.
        device: where the memory lives.
    """

    def __init__(
        self, spec: EnvSpec, capacity: int, *, n_step: int = 1, discount: float = 0.99, device: torch.device
    ) -> None:
        self.spec = spec
        self.capacity = capacity
        self.n_step = n_step
        self.discount = discount
        self.device = device
        self.frame_capacity = _frames_needed(spec, capacity)
        action_columns = spec.action_size if spec.action_kind == "continuous" else 1
        frame_dtype = torch.uint8 if spec.pixels else torch.float32
        self.frames = torch.zeros((self.frame_capacity, *spec.frame_shape), dtype=frame_dtype, device=device)
        self.rows = torch.zeros((capacity, ACTION + action_columns), device=device)
        self.places = torch.zeros((capacity, 2), dtype=torch.int64, device=device)
        """Frame slot and age of each transition's observation."""
        self.window = torch.zeros(2, dtype=torch.int64, device=device)
        """Slot of the oldest transition and how many may be sampled: on the device, so that sampling needs no host."""

        # Made once: an update is so many small operations that each counts.
        self._ahead = torch.arange(n_step, device=device)
        self._back = torch.arange(spec.frame_stack - 1, -1, -1, device=device)

        pin = device.type == "cuda"
        self.staging = Staging(
            torch.zeros(spec.frame_shape, dtype=frame_dtype, pin_memory=pin),
            torch.zeros(ACTION + action_columns, pin_memory=pin),
            torch.zeros(2, dtype=torch.int64, pin_memory=pin),
            torch.zeros(2, dtype=torch.int64, pin_memory=pin),
        )
        # Through numpy: setting one element of a tensor takes twenty times as long.
        self._new_frame, self._new_row, self._new_place, self._new_window = (part.numpy() for part in self.staging)
        self.write: Write = Copies(self)
        """The engine may put another in its place."""
        self._written = torch.cuda.Event() if pin else None
        """When what was staged last has been written, and the staging may be overwritten."""

        self.transitions_added = 0
        self.frames_added = 0
        self.oldest = 0
        """Number of the oldest transition kept."""
        self.age = -1
        """Age of the newest frame in its episode; -1 before the first episode and after the end of one."""
        self._oldest_frame = np.zeros(capacity, dtype=np.int64)
        """Number of the oldest frame in each transition's stack: what must not be overwritten."""

    def __len__(self) -> int:
        return self.transitions_added - self.oldest

    @property
    def sampleable(self) -> int:
        """Transitions whose return is complete. Those without are the newest of the episode under way."""
        pending = min(self.n_step - 1, max(self.age, 0))
        return max(len(self) - pending, 0)

    @staticmethod
    def bytes_needed(spec: EnvSpec, capacity: int) -> int:
        """What the rings of a memory of this capacity will take on its device."""
        frame = math.prod(spec.frame_shape) * (1 if spec.pixels else 4)
        row = 4 * (ACTION + (spec.action_size if spec.action_kind == "continuous" else 1)) + 16
        return _frames_needed(spec, capacity) * frame + capacity * row

    def begin(self, frame: Frame) -> None:
        """Starts an episode with its first frame. One that was under way is over, as at a time limit."""
        self._wait_for_staging()
        if self.age > 0:  # no return may reach from it into this one
            self.rows[(self.transitions_added - 1) % self.capacity, DONE] = 1.0
        self.age = 0
        self._store(None, frame)

    def add(self, action: Action, reward: float, discount: float, done: bool, frame: Frame) -> None:
        """Stores one agent step: what was done in the newest frame's state, and the frame that followed."""
        if self.age < 0:
            raise RuntimeError("begin an episode before adding to it")
        self._wait_for_staging()
        slot = self.transitions_added % self.capacity
        newest = self.frames_added - 1
        place, row = self._new_place, self._new_row
        place[0], place[1] = newest % self.frame_capacity, self.age
        row[REWARD], row[DISCOUNT], row[DONE] = reward, discount, done
        row[ACTION:] = action
        self._oldest_frame[slot] = newest - min(self.age, self.spec.frame_stack - 1)
        self.transitions_added += 1
        self.oldest = max(self.oldest, self.transitions_added - self.capacity)
        self.age = -1 if done else self.age + 1
        self._store(slot, frame)

    def sample(self, count: int, generator: Generator) -> Tensor:
        """Draws slots of `count` transitions uniformly, with replacement."""
        return self.slots(self.draw(count, generator))

    def draw(self, count: int, generator: Generator) -> Tensor:
        """Random bits that choose `count` transitions, however many there are to choose from."""
        # 62 of them leave no bias worth naming, and the host need not know how many transitions there are.
        return torch.randint(0, 2**62, (count,), generator=generator, device=self.device)

    def slots(self, random: Tensor) -> Tensor:
        """The slots that these bits choose."""
        oldest, sampleable = self.window.unbind()
        return (oldest + random % sampleable) % self.capacity

    def gather(self, slots: Tensor) -> Batch:
        """Rebuilds the transitions in these slots."""
        frame, age = self.places[slots].unbind(1)
        rows = self.rows[(slots[:, None] + self._ahead) % self.capacity]
        first, rewards, dones = rows[:, 0], rows[:, :, REWARD], rows[:, :, DONE]
        goes_on = (1.0 - dones[:, :-1]).cumprod(1)  # after each of its steps but the last, does the return go on?
        discounts = (self.discount * rows[:, :, DISCOUNT]).cumprod(1)
        reward = rewards[:, 0] + (goes_on * discounts[:, :-1] * rewards[:, 1:]).sum(1)
        last = goes_on.sum(1).long()
        discount = discounts.gather(1, last[:, None])[:, 0]
        length = last + 1
        return Batch(
            obs=self._stack(frame, age),
            action=first[:, ACTION:] if self.spec.action_kind == "continuous" else first[:, ACTION].long(),
            reward=reward,
            discount=discount,
            next_obs=self._stack(frame + length, age + length),
        )

    def newest_observation(self) -> NDArray[np.uint8] | NDArray[np.float32]:
        """The stacked observation of the newest frame, on the host: what acting resumes from."""
        newest = torch.tensor([(self.frames_added - 1) % self.frame_capacity], device=self.device)
        stack = self._stack(newest, torch.tensor([self.age], device=self.device))
        return stack.tensor()[0].cpu().numpy()

    def _stack(self, frame: Tensor, age: Tensor) -> StackedFrames:
        slots = (frame[:, None] - torch.minimum(self._back[None], age[:, None])) % self.frame_capacity
        return StackedFrames(self.frames, slots)

    def _wait_for_staging(self) -> None:
        """Returns once the staging may be overwritten."""
        if self._written is not None:
            self._written.synchronize()

    def _store(self, slot: int | None, frame: Frame) -> None:
        """Writes the frame and the window, and the transition already staged if there is one for `slot`."""
        self._new_frame[...] = frame
        frame_slot = self.frames_added % self.frame_capacity
        self.frames_added += 1
        self._evict()
        self.write(slot, frame_slot)
        if self._written is not None:
            self._written.record()

    def _evict(self) -> None:
        """Drops transitions whose frames are overwritten (episodes shorter than the ring was sized for), and stages
        the window that is left."""
        oldest_frame_kept = self.frames_added - self.frame_capacity
        while len(self) and self._oldest_frame[self.oldest % self.capacity] < oldest_frame_kept:
            self.oldest += 1
        window = self._new_window
        window[0], window[1] = self.oldest % self.capacity, self.sampleable

    # What a checkpoint needs: counters, and the part of the rings that was written since an earlier one.

    def counters(self) -> dict[str, int]:
        """Everything but the rings' contents."""
        return {
            "transitions_added": self.transitions_added,
            "frames_added": self.frames_added,
            "oldest": self.oldest,
            "age": self.age,
        }

    def written_since(self, transitions: int, frames: int) -> dict[str, Tensor]:
        """Transitions and frames with these numbers or higher that are still in the rings, on the host."""
        rows = torch.arange(max(transitions, self.transitions_added - self.capacity), self.transitions_added)
        kept = torch.arange(max(frames, self.frames_added - self.frame_capacity), self.frames_added)
        row_slots = (rows % self.capacity).to(self.device)
        return {
            "rows": self.rows[row_slots].cpu(),
            "places": self.places[row_slots].cpu(),
            "oldest_frame": torch.from_numpy(self._oldest_frame[(rows % self.capacity).numpy()]),
            "frames": self.frames[(kept % self.frame_capacity).to(self.device)].cpu(),
        }

    def restore(self, parts: Iterable[tuple[int, int, dict[str, Tensor]]], counters: dict[str, int]) -> None:
        """Puts back parts made by `written_since`, each with the numbers after its last transition and frame."""
        for transitions_end, frames_end, part in parts:
            rows, frames = len(part["rows"]), len(part["frames"])
            row_slots = torch.arange(transitions_end - rows, transitions_end) % self.capacity
            frame_slots = torch.arange(frames_end - frames, frames_end) % self.frame_capacity
            self.rows[row_slots.to(self.device)] = part["rows"].to(self.device)
            self.places[row_slots.to(self.device)] = part["places"].to(self.device)
            self._oldest_frame[row_slots.numpy()] = part["oldest_frame"].numpy()
            self.frames[frame_slots.to(self.device)] = part["frames"].to(self.device)
        self.transitions_added = counters["transitions_added"]
        self.frames_added = counters["frames_added"]
        self.oldest = counters["oldest"]
        self.age = counters["age"]
        self._wait_for_staging()
        self._evict()
        self.window.copy_(self.staging.window)


def _frames_needed(spec: EnvSpec, capacity: int) -> int:
    """Slots for `capacity` transitions and the last frame of each of their episodes.

    Where episodes may be shorter than 50 agent steps the time limit, if known, says how many to expect; more than
    an eighth is never added: then the memory holds somewhat fewer transitions instead of growing without bound.
    """
    episodes = capacity // 50
    if spec.max_episode_agent_steps is not None:
        episodes = max(episodes, min(capacity // spec.max_episode_agent_steps, capacity // 8))
    return capacity + episodes + spec.frame_stack + 1
