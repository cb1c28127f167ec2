"""From the replay's rings to a batch: transitions in one launch, their stacked and augmented observations in another.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from drq.replay import Batch, Replay, StackedFrames

from . import runtime

THREADS = 128


def transitions_kernel(replay: Replay) -> runtime.Launchable:
    defines: dict[str, int | str] = {
        "THREADS": THREADS,
        "COLUMNS": replay.rows.shape[1],
        "STACK": replay.spec.frame_stack,
        "N_STEP": replay.n_step,
        "CONTINUOUS": int(replay.spec.action_kind == "continuous"),
    }
    return runtime.kernel("transitions", ("primitives.cuh", "transitions.cu"), defines, THREADS, 0)


def transitions(replay: Replay, random: Tensor) -> Batch:
    """`replay.gather(replay.slots(random))`."""
    spec, count = replay.spec, len(random)
    action = (
        replay.rows.new_empty(count, spec.action_size)
        if spec.action_kind == "continuous"
        else replay.places.new_empty(count)
    )
    reward, discount = replay.rows.new_empty(2, count)
    slots, next_slots = replay.places.new_empty(2, count, spec.frame_stack)
    transitions_kernel(replay).launch(
        (-(-count // THREADS), 1),
        *(random, replay.window, replay.rows, replay.places),
        *(action, reward, discount, slots, next_slots),
        *(count, replay.capacity, replay.frame_capacity, ctypes.c_double(replay.discount)),
    )
    return Batch(
        StackedFrames(replay.frames, slots), action, reward, discount, StackedFrames(replay.frames, next_slots)
    )


def stacked_views(states: StackedFrames, nu: Tensor, *, shifted: bool, intensity: float | None = None) -> Tensor:
    """`drq.regularize.views` with a random shift or none, then with an intensity of this scale or none.

    Channels last; uint8, or with an intensity float32. `nu` may have further columns.
    """
    views: Tensor = _stacked_views(states.frames, states.slots, nu.contiguous(), shifted, intensity)
    return views


def stacked_kernel(frames: Tensor, stack: int, *, shifted: bool, multiplied: bool) -> runtime.Launchable:
    _, channels, height, width = frames.shape
    defines: dict[str, int | str] = {
        "THREADS": THREADS,
        "H": height,
        "W": width,
        "STACK": stack,
        "FRAME_CHANNELS": channels,
        "SHIFTED": int(shifted),
        "MULTIPLIED": int(multiplied),
    }
    return runtime.kernel("stacked", ("primitives.cuh", "stacked.cu"), defines, THREADS, 0)


def _new_views(frames: Tensor, slots: Tensor, nu: Tensor, shifted: bool, intensity: float | None) -> Tensor:
    _, channels, height, width = frames.shape
    shape = len(nu), slots.shape[1] * channels, height, width
    kind = torch.uint8 if intensity is None else torch.float32
    return torch.empty(shape, dtype=kind, device=frames.device, memory_format=torch.channels_last)


# An operator, so that compiled code may contain it.
@torch.library.custom_op("drq::stacked_views", mutates_args=())
def _stacked_views(frames: Tensor, slots: Tensor, nu: Tensor, shifted: bool, intensity: float | None) -> Tensor:
    out = _new_views(frames, slots, nu, shifted, intensity)
    in_order = out.permute(0, 2, 3, 1)  # in which the memory lies: a pixel's channels together
    grid = -(-frames.shape[2] * frames.shape[3] // THREADS), len(nu)
    kernel = stacked_kernel(frames, slots.shape[1], shifted=shifted, multiplied=intensity is not None)
    kernel.launch(grid, frames, slots, nu, nu.shape[1], float(intensity or 0.0), in_order, len(slots))
    return out


_stacked_views.register_fake(_new_views)
