"""From the replay's rings to a batch: transitions in one launch, their stacked, augmented observations in another."""

from __future__ import annotations

import torch
from torch import Tensor

from drq.backend import StackedFrames
from drq.replay import Batch, Choice, Replay

from . import runtime

THREADS = 128
MOST_VIEWS = 2**16 - 1
"""That `stacked_views` makes at once: a launch has no more rows of blocks."""


def transitions_kernel(replay: Replay, *, uniform: bool = True) -> runtime.Launchable:
    defines: dict[str, int | str] = {
        "THREADS": THREADS,
        "COLUMNS": replay.rings.rows.shape[1],
        "STACK": replay.spec.frame_stack,
        "STREAMS": len(replay.streams),
        "UNIFORM": int(uniform),
        "CONTINUOUS": int(replay.spec.action_kind == "continuous"),
        "EARLY_BOOTSTRAP": int(replay.early_bootstrap),
        "ZERO_STACK": int(replay.spec.zero_stack),
    }
    return runtime.kernel("transitions", ("primitives.cuh", "transitions.cu"), defines, THREADS, 0)


def transitions(replay: Replay, chosen: Tensor | Choice) -> Batch:
    """`replay.gather` of a choice, or of what random bits choose among all transitions alike."""
    frames, rows, places, window = replay.rings
    spec = replay.spec
    uniform = isinstance(chosen, Tensor)
    picked, weights = (chosen, None) if isinstance(chosen, Tensor) else chosen
    picked = picked.long().contiguous()  # a sampler of somebody's own may give them otherwise
    count = len(picked)
    action = rows.new_empty(count, spec.action_size) if spec.action_kind == "continuous" else places.new_empty(count)
    reward, discount = rows.new_empty(2, count)
    slots, next_slots = places.new_empty(2, count, spec.frame_stack)
    chosen_slots = places.new_empty(count) if uniform else picked
    transitions_kernel(replay, uniform=uniform).launch(
        (-(-count // THREADS), 1),
        *(picked, window, replay.returns, rows, places),
        *(action, reward, discount, slots, next_slots, chosen_slots),
        *(count, replay.stream_capacity, replay.stream_frames),
    )
    return Batch(
        StackedFrames(frames, slots), action, reward, discount, StackedFrames(frames, next_slots), chosen_slots, weights
    )


def stacked_views(states: StackedFrames, nu: Tensor, *, shifted: bool, intensity: float | None = None) -> Tensor:
    """`Backend.views` with a random shift or none, then with an intensity of this scale or none.

    Channels last; uint8, or with an intensity float32. `nu` may have further columns.
    """
    slots, nu = states.slots.long().contiguous(), nu.float().contiguous()
    views: Tensor = _stacked_views(states.frames, slots, nu, shifted, intensity)
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
