"""From the replay's rings to a batch: transitions in one launch, and their stacked, shifted observations in another."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from drq.replay import Batch, Replay, StackedFrames

from . import runtime

THREADS = 128


def transitions(replay: Replay, random: Tensor) -> Batch:
    """`replay.gather(replay.slots(random))`."""
    spec, count = replay.spec, len(random)
    continuous = spec.action_kind == "continuous"
    action = (
        replay.rows.new_empty(count, spec.action_size)
        if continuous
        else replay.places.new_empty(count)
    )
    reward, discount = replay.rows.new_empty(2, count)
    slots, next_slots = replay.places.new_empty(2, count, spec.frame_stack)
    defines: dict[str, int | str] = {
        "THREADS": THREADS,
        "COLUMNS": replay.rows.shape[1],
        "STACK": spec.frame_stack,
        "N_STEP": replay.n_step,
        "CONTINUOUS": int(continuous),
    }
    kernel = runtime.kernel("transitions", ("primitives.cuh", "transitions.cu"), defines, THREADS, 0)
    kernel.launch(
        (-(-count // THREADS), 1),
        *(random, replay.window, replay.rows, replay.places),
        *(action, reward, discount, slots, next_slots),
        *(count, replay.capacity, replay.frame_capacity, ctypes.c_double(replay.discount)),
    )
    return Batch(
        StackedFrames(replay.frames, slots), action, reward, discount, StackedFrames(replay.frames, next_slots)
    )


def stacked_views(states: StackedFrames, shifts: Tensor) -> Tensor:
    """`drq.regularize.views` with a random shift: uint8, channels last. Without columns, `shifts` shift nothing."""
    views: Tensor = _stacked_views(states.frames, states.slots, shifts)
    return views


def _new_views(frames: Tensor, slots: Tensor, shifts: Tensor) -> Tensor:
    _, channels, height, width = frames.shape
    shape = len(shifts), slots.shape[1] * channels, height, width
    return torch.empty(shape, dtype=torch.uint8, device=frames.device, memory_format=torch.channels_last)


# An operator, so that compiled code may contain it.
@torch.library.custom_op("drq::stacked_views", mutates_args=())
def _stacked_views(frames: Tensor, slots: Tensor, shifts: Tensor) -> Tensor:
    _, channels, height, width = frames.shape
    views, stack = len(shifts), slots.shape[1]
    out = _new_views(frames, slots, shifts)
    defines: dict[str, int | str] = {
        "THREADS": THREADS,
        "H": height,
        "W": width,
        "STACK": stack,
        "FRAME_CHANNELS": channels,
        "SHIFTED": int(shifts.shape[1] > 0),
    }
    kernel = runtime.kernel("stacked", ("primitives.cuh", "stacked.cu"), defines, THREADS, 0)
    # Channels of a pixel together: the order in which the memory lies.
    kernel.launch((-(-height * width // THREADS), views), frames, slots, shifts, out.permute(0, 2, 3, 1), len(slots))
    return out


_stacked_views.register_fake(_new_views)
