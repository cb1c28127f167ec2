"""The replay memory: every frame is kept once, stacks and n-step returns are rebuilt by index.

Two rings for each stream of episodes (one environment plays one). `frames` holds single frames, the last one of every
episode included; `rows` and `places` hold the transitions, each with the slot of its newest frame and that frame's age
in its episode. A stack reaches back over at most `age` frames, so the first frame of an episode is repeated, as at a
reset. A stream's frames and transitions are numbered from 0 since the start of the run; number modulo ring size is the
place in its part of the ring.

An update first chooses transitions (a `Sampler`), then fetches them (`gather`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor

from drq.backend import Backend, Entry, Rings, StackedFrames
from drq.envs.protocol import Action, EnvSpec, Frame

REWARD, DISCOUNT, DONE, ACTION = 0, 1, 2, 3
"""Columns of `rows`; the action begins at the last."""


class Batch(NamedTuple):
    """N transitions (s, a, r, s')."""

    obs: Tensor | StackedFrames
    action: Tensor
    reward: Tensor
    discount: Tensor
    """What multiplies the next value: γ to the power of the return's length, 0 where the return ended."""
    next_obs: Tensor | StackedFrames
    slots: Tensor | None = None
    """Where in the replay they are."""
    weights: Tensor | None = None
    """What each counts in the loss; None: all the same."""


class Choice(NamedTuple):
    """Which transitions an update learns from."""

    slots: Tensor
    weights: Tensor | None = None


class Sampler(Protocol):
    """Decides which transitions an update learns from, on the replay's device, inside CUDA graphs too."""

    def choose(self, replay: Replay, random: Tensor) -> Choice:
        """The transitions that these random bits (`Replay.draw`) choose."""
        ...

    def stored(self, replay: Replay, slot: int) -> None:
        """Hears of a new transition. It may be chosen once `Replay.may_sample` says so."""
        ...

    def learnt(self, slots: Tensor, errors: Tensor) -> None:
        """Hears of each transition's error in the update that has just been made."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, to be written into in place when a run resumes."""
        ...


class UniformSampler:
    """Every transition with the same probability, with replacement."""

    def choose(self, replay: Replay, random: Tensor) -> Choice:
        oldest, sampleable = replay.rings.window.unbind(1)
        ends = sampleable.cumsum(0)
        chosen = random % ends[-1]
        stream = torch.searchsorted(ends, chosen, right=True)
        number = oldest[stream] + chosen - (ends - sampleable)[stream]
        return Choice(stream * replay.stream_capacity + number % replay.stream_capacity)

    def stored(self, replay: Replay, slot: int) -> None:
        pass

    def learnt(self, slots: Tensor, errors: Tensor) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return {}


class Stream:
    """What the host knows of one stream of episodes: how far it is, and which frames each transition needs."""

    def __init__(self, capacity: int) -> None:
        self.transitions_added = 0
        self.frames_added = 0
        self.oldest = 0
        """Number of the oldest transition kept."""
        self.age = -1
        """Age of the newest frame in its episode; -1 before the first episode and after the end of one."""
        self.oldest_frame = np.zeros(capacity, dtype=np.int64)
        """Number of the oldest frame in each transition's stack: what must not be overwritten."""

    def __len__(self) -> int:
        return self.transitions_added - self.oldest

    def counters(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("transitions_added", "frames_added", "oldest", "age")}


class Replay:
    """Transitions of one run, on one device.

    Args:
        spec: the task's shapes.
        capacity: transitions kept.
        n_step: length of the returns that `gather` builds, and the longest that `set_returns` may ask for. A return
            ends early at a terminal state (no bootstrap) and at a time limit (bootstrap from the episode's last frame).
        discount: γ.
        early_bootstrap: a return that has its whole length bootstraps from the state one step before its end, and does
            not see whether that last step was terminal: a slip in published code, to compare with.
        streams: environments that are played side by side, each an equal part of the capacity.
        sampler: which transitions an update learns from.
        backend: how, and on which device.
    """

    def __init__(
        self,
        spec: EnvSpec,
        capacity: int,
        *,
        n_step: int = 1,
        discount: float = 0.99,
        early_bootstrap: bool = False,
        streams: int = 1,
        sampler: Sampler | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.spec = spec
        self.n_step = n_step
        self.early_bootstrap = early_bootstrap
        self.backend = backend or Backend()
        self.sampler = sampler or UniformSampler()
        self.stream_capacity = capacity // streams
        self.stream_frames = _frames_needed(spec, self.stream_capacity)
        self.streams = [Stream(self.stream_capacity) for _ in range(streams)]
        device = self.device = self.backend.device
        rows, frames = streams * self.stream_capacity, streams * self.stream_frames
        frame_dtype = torch.uint8 if spec.pixels else torch.float32
        self.rings = Rings(
            # The last of them stays zero, where zeros stand for frames that a stack lacks.
            torch.zeros((frames + spec.zero_stack, *spec.frame_shape), dtype=frame_dtype, device=device),
            torch.zeros((rows, ACTION + _action_columns(spec)), device=device),
            torch.zeros((rows, 2), dtype=torch.int64, device=device),
            torch.zeros((streams, 2), dtype=torch.int64, device=device),
        )
        # On the device, so that neither sampling nor a schedule needs the host.
        self.returns = torch.tensor([n_step, discount], dtype=torch.float64, device=device)
        """Length of returns, and γ."""
        self._returns = n_step, discount
        # Made once: an update is so many small operations that each counts.
        self._ahead = torch.arange(n_step, device=device)
        self._back = torch.arange(spec.frame_stack - 1, -1, -1, device=device)
        self._store = self.backend.store(self.rings)

    def __len__(self) -> int:
        return sum(map(len, self.streams))

    @property
    def capacity(self) -> int:
        return self.stream_capacity * len(self.streams)

    @property
    def sampleable(self) -> int:
        """Transitions whose return is complete. Those without are the newest of the episodes under way."""
        return sum(map(self._sampleable, self.streams))

    def _sampleable(self, stream: Stream) -> int:
        pending = min(self.n_step - 1, max(stream.age, 0))
        return max(len(stream) - pending, 0)

    @staticmethod
    def bytes_needed(spec: EnvSpec, capacity: int) -> int:
        """What the rings of a memory of this capacity will take on its device."""
        frame = math.prod(spec.frame_shape) * (1 if spec.pixels else 4)
        row = 4 * (ACTION + _action_columns(spec)) + 16
        return _frames_needed(spec, capacity) * frame + capacity * row

    # Storing.

    def begin(self, frame: Frame | Tensor, stream: int = 0) -> None:
        """Starts an episode with its first frame. One that was under way is over, as at a time limit."""
        own = self.streams[stream]
        if own.age > 0:  # no return may reach from it into this one
            newest = (own.transitions_added - 1) % self.stream_capacity
            self.rings.rows[stream * self.stream_capacity + newest, DONE] = 1.0
        own.age = 0
        self._write(stream, frame)

    def add(
        self, action: Action, reward: float, discount: float, done: bool, frame: Frame | Tensor, stream: int = 0
    ) -> None:
        """Stores one agent step: what was done in the newest frame's state, and the frame that followed."""
        own = self.streams[stream]
        if own.age < 0:
            raise RuntimeError("begin an episode before adding to it")
        number, newest = own.transitions_added % self.stream_capacity, own.frames_added - 1
        place = newest % self.stream_frames, own.age
        row = np.empty(self.rings.rows.shape[1], dtype=np.float32)
        row[REWARD], row[DISCOUNT], row[DONE] = reward, discount, done
        row[ACTION:] = action
        own.oldest_frame[number] = newest - min(own.age, self.spec.frame_stack - 1)
        own.transitions_added += 1
        own.oldest = max(own.oldest, own.transitions_added - self.stream_capacity)
        # No return goes on beyond a stack's first frame: as few wait for the next steps as when an episode begins.
        own.age = -1 if done else 0 if self.spec.stacks_anew(discount) else own.age + 1
        slot = stream * self.stream_capacity + number
        self._write(stream, frame, slot, place, row)
        self.sampler.stored(self, slot)

    def _write(
        self,
        stream: int,
        frame: Frame | Tensor,
        slot: int | None = None,
        place: tuple[int, int] = (0, 0),
        row: NDArray[np.float32] | None = None,
    ) -> None:
        own = self.streams[stream]
        frame_slot = stream * self.stream_frames + own.frames_added % self.stream_frames
        own.frames_added += 1
        self._store(Entry(stream, frame_slot, frame, self._window(own), slot, place, row))

    def _window(self, own: Stream) -> tuple[int, int]:
        """Place of the oldest transition and how many may be sampled, once those whose frames are overwritten (by
        episodes shorter than the ring was sized for) are dropped."""
        oldest_frame_kept = own.frames_added - self.stream_frames
        while len(own) and own.oldest_frame[own.oldest % self.stream_capacity] < oldest_frame_kept:
            own.oldest += 1
        return own.oldest % self.stream_capacity, self._sampleable(own)

    # Sampling and gathering.

    def draw(self, count: int, generator: Generator) -> Tensor:
        """Random bits that choose `count` transitions, however many there are to choose from."""
        # 62 of them leave no bias worth naming, and the host need not know how many transitions there are.
        return torch.randint(0, 2**62, (count,), generator=generator, device=self.device)

    def batch(self, random: Tensor) -> Batch:
        """The transitions that these bits choose."""
        return self.gather(self.sampler.choose(self, random))

    def may_sample(self) -> Tensor:
        """For every slot, whether its transition may be chosen."""
        oldest, sampleable = self.rings.window.unbind(1)
        places = torch.arange(self.stream_capacity, device=self.device)
        return ((places - oldest[:, None]) % self.stream_capacity < sampleable[:, None]).flatten()

    def set_returns(self, n_step: int, discount: float) -> None:
        """The length of returns and γ from the next update on. Captured updates follow."""
        if not 1 <= n_step <= self.n_step:
            raise ValueError(f"returns of {n_step} steps from a replay made for 1 to {self.n_step}")
        for place, (old, new) in enumerate(zip(self._returns, (n_step, discount), strict=True)):
            if old != new:
                self.returns[place].fill_(new)  # launched, not waited for
        self._returns = n_step, discount

    def gather(self, choice: Choice) -> Batch:
        """Rebuilds the chosen transitions."""
        slots = choice.slots
        stream = slots // self.stream_capacity
        frame, age = self.rings.places[slots].unbind(1)
        begins = (stream * self.stream_capacity)[:, None]
        rows = self.rings.rows[begins + (slots[:, None] - begins + self._ahead) % self.stream_capacity]
        first, rewards, dones = rows[:, 0], rows[:, :, REWARD], rows[:, :, DONE]
        n_step, gamma = self.returns[0], self.returns[1].to(rows.dtype)
        # After each of its steps but the last, does the return go on?
        goes_on = (1.0 - dones[:, :-1]).cumprod(1) * (self._ahead[1:] < n_step)
        discounts = (gamma * rows[:, :, DISCOUNT]).cumprod(1)
        reward = rewards[:, 0] + (goes_on * discounts[:, :-1] * rewards[:, 1:]).sum(1)
        last = goes_on.sum(1).long()
        length = last + 1
        discount = discounts.gather(1, last[:, None])[:, 0]
        ahead = length
        if self.early_bootstrap:
            whole = length == n_step
            ahead = length - whole.long()
            earlier = F.pad(discounts, (1, 0), value=1.0).gather(1, last[:, None])[:, 0]
            discount = torch.where(whole, gamma * earlier, discount)
        return Batch(
            obs=self._stack(stream, frame, age),
            action=first[:, ACTION:] if self.spec.action_kind == "continuous" else first[:, ACTION].long(),
            reward=reward,
            discount=discount,
            next_obs=self._stack(stream, frame + ahead, age + ahead),
            slots=slots,
            weights=choice.weights,
        )

    def newest_observation(self, stream: int = 0) -> NDArray[np.uint8] | NDArray[np.float32]:
        """The stacked observation of the newest frame, on the host: what acting resumes from."""
        own = self.streams[stream]
        newest = (stream, (own.frames_added - 1) % self.stream_frames, own.age)
        return self._stack(*(torch.tensor([number], device=self.device) for number in newest)).tensor()[0].cpu().numpy()

    def _stack(self, stream: Tensor, frame: Tensor, age: Tensor) -> StackedFrames:
        places = (frame[:, None] - torch.minimum(self._back[None], age[:, None])) % self.stream_frames
        slots = (stream * self.stream_frames)[:, None] + places
        if self.spec.zero_stack:
            slots = slots.where(self._back[None] <= age[:, None], len(self.rings.frames) - 1)
        return StackedFrames(self.rings.frames, slots)

    # What a checkpoint needs: counters, and the part of the rings that was written since an earlier one.

    def counters(self) -> list[dict[str, int]]:
        """Everything but the rings' contents, for each stream."""
        return [stream.counters() for stream in self.streams]

    def marks(self) -> list[tuple[int, int]]:
        """How far each stream is: numbers after its last transition and frame."""
        return [(stream.transitions_added, stream.frames_added) for stream in self.streams]

    def keeps(self, marks: Sequence[tuple[int, int]]) -> bool:
        """Whether anything that was written just before these marks is still in the rings."""
        return any(
            transitions > stream.transitions_added - self.stream_capacity
            or frames > stream.frames_added - self.stream_frames
            for stream, (transitions, frames) in zip(self.streams, marks, strict=True)
        )

    def written_since(self, marks: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        """Copies of transitions and frames added after these marks that are still in the rings, on its device; and of
        the transition before, whose episode may have been abandoned since."""
        parts: dict[str, Tensor] = {}
        for number, (stream, (transitions, frames)) in enumerate(zip(self.streams, marks, strict=True)):
            last_row, last_frame = stream.transitions_added, stream.frames_added
            rows = np.arange(max(transitions - 1, last_row - self.stream_capacity, 0), last_row)
            kept = np.arange(max(frames, last_frame - self.stream_frames), last_frame)
            suffix = stream_suffix(number)
            for name, slots in self._slots(number, rows, kept).items():
                parts[f"{name}{suffix}"] = getattr(self.rings, name)[slots]
            parts[f"oldest_frame{suffix}"] = torch.from_numpy(stream.oldest_frame[rows % self.stream_capacity])
        return parts

    def restore(
        self, parts: Iterable[tuple[Sequence[tuple[int, int]], dict[str, Tensor]]], counters: Sequence[dict[str, int]]
    ) -> None:
        """Puts back parts made by `written_since`, each with the marks at its end."""
        for marks, part in parts:
            for number, (stream, (transitions, frames)) in enumerate(zip(self.streams, marks, strict=True)):
                suffix = stream_suffix(number)
                rows = np.arange(transitions - len(part[f"rows{suffix}"]), transitions)
                kept = np.arange(frames - len(part[f"frames{suffix}"]), frames)
                slots_of = self._slots(number, rows, kept)
                for name, slots in slots_of.items():
                    getattr(self.rings, name)[slots] = part[f"{name}{suffix}"].to(self.device)
                oldest, ages = part[f"oldest_frame{suffix}"], part[f"places{suffix}"][:, 1]
                stream.oldest_frame[rows % self.stream_capacity] = oldest.numpy()
                # In a ring that has grown since, frames that had gone round the smaller one are elsewhere.
                newest = oldest + ages.cpu().clamp(max=self.spec.frame_stack - 1)
                self.rings.places[slots_of["places"], 0] = (newest % self.stream_frames).to(self.device)
        for number, (stream, own) in enumerate(zip(self.streams, counters, strict=True)):
            for name, value in own.items():
                setattr(stream, name, value)
            self.rings.window[number] = torch.tensor(self._window(stream), device=self.device)

    def _slots(self, stream: int, rows: NDArray[np.int64], frames: NDArray[np.int64]) -> dict[str, Tensor]:
        """Of the transitions and frames of a stream that have these numbers, by ring."""
        row_slots = torch.from_numpy(stream * self.stream_capacity + rows % self.stream_capacity).to(self.device)
        frame_slots = torch.from_numpy(stream * self.stream_frames + frames % self.stream_frames).to(self.device)
        return {"rows": row_slots, "places": row_slots, "frames": frame_slots}


def stream_suffix(stream: int) -> str:
    """Of a stream's tensors in a checkpoint; the only one of most runs has none."""
    return f".{stream}" if stream else ""


def _action_columns(spec: EnvSpec) -> int:
    return spec.action_size if spec.action_kind == "continuous" else 1


def _frames_needed(spec: EnvSpec, capacity: int) -> int:
    """Slots for `capacity` transitions and the last frame of each of their episodes.

    Where episodes may be shorter than 50 agent steps the time limit, if known, says how many to expect; more than
    an eighth is never added: then the memory holds somewhat fewer transitions instead of growing without bound.
    """
    episodes = capacity // 50
    if spec.max_episode_agent_steps is not None:
        episodes = max(episodes, min(capacity // spec.max_episode_agent_steps, capacity // 8))
    return capacity + episodes + spec.frame_stack + 1
