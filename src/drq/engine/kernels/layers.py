"""One function per kernel: chooses how its work is cut, allocates the result, launches.

Activations are channels-last bfloat16, [B, H, W, 32]. The sizes of images are compile-time constants of a kernel, the
number of images is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import runtime

CHANNELS = 32
MAX_INPUT_CHANNELS = 16
_TAPS = 9
_PIXEL_BYTES = 80  # PIXEL of common.cuh
_VIEW_PIXEL_BYTES = 48  # VIEW_PIXEL of views.cuh
_GROUP_BYTES = 1024  # a fragment group of weights (common.cuh)
_STRIP_PIXELS = 288  # output pixels of a strip of the first layer, about


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its work: what benchmarks/kernels.py tunes."""

    warps: int
    """Warps of a block. Weight gradients: a multiple of 3."""
    tiles: int = 4
    """16-pixel tiles a warp works on at once (conv_weight: one after the other)."""
    stages: int = 1
    """2: the next pixels are fetched while these are multiplied."""
    blocks: int = 1
    """Blocks of a multiprocessor the registers must suffice for."""
    repeat: int = 1
    """conv: times a warp takes its tiles before the block fetches more pixels."""
    held: bool = False
    """conv: weights stay in registers."""
    rows: int = 0
    """First layer: output rows of a strip. 0: as many as make about 288 pixels."""
    ahead: bool = False
    """Input gradient: the mask is read before the products. First layer: the next strip's bytes are fetched during
    the products, where a frame's width is a multiple of 4 (else this says nothing)."""


# Fastest on an H200 at 84 x 84 and 1,024 images (benchmarks/kernels.py).
FORWARD = Tiling(warps=4, tiles=6, stages=2, blocks=2)
INPUT_GRADIENT = Tiling(warps=4, tiles=4, stages=2, blocks=3, ahead=True)
WEIGHT_GRADIENT = Tiling(warps=6, tiles=8, stages=2, blocks=2)
FIRST = Tiling(warps=8, tiles=2, blocks=3, rows=6, ahead=True)
FIRST_TWO = Tiling(warps=4, tiles=2, blocks=4, rows=3, ahead=True)
FIRST_WEIGHT = Tiling(warps=9, blocks=2, rows=6, ahead=True)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _sums(inputs: int) -> int:
    """Floats of a weight and a bias gradient (SUMS of weight_sums.cuh)."""
    return _TAPS * CHANNELS * inputs + CHANNELS


def out_size(size: int) -> int:
    """Height or width after the first layer."""
    return (size - 3) // 2 + 1


def _conv_tile(tiling: Tiling) -> int:
    return tiling.warps * tiling.tiles * 16 * tiling.repeat


def _conv_stage_pixels(height: int, width: int, tiling: Tiling, forward: bool) -> int:
    """Pixels a tile of `conv` holds in shared memory; `height`, `width` of the layer's input."""
    tile, margin = _conv_tile(tiling), 2 * width + 2
    if not forward:
        return tile + margin
    # An output row ends two pixels, an image two rows before the input's. What is skipped is held too.
    skipped = 2 * _ceil(tile, width - 2) + 2 * width * _ceil(tile, (height - 2) * (width - 2))
    return tile + skipped + margin


def _conv_bytes(height: int, width: int, tiling: Tiling, forward: bool) -> int:
    stage = _conv_stage_pixels(height, width, tiling, forward) * _PIXEL_BYTES
    return 2 * _TAPS * _GROUP_BYTES + tiling.stages * stage


def _conv_weight_tile(tiling: Tiling) -> int:
    return tiling.warps // 3 * tiling.tiles * 16


def _conv_weight_bytes(width: int, tiling: Tiling) -> int:
    stage = (2 * _conv_weight_tile(tiling) + 2 * width + 2) * _PIXEL_BYTES
    return max(tiling.stages * stage, _sums(CHANNELS) * 4)


def _rows(height: int, width: int, tiling: Tiling) -> int:
    """Output rows of a strip; `height`, `width` of a frame, as below."""
    return min(tiling.rows or max(1, _STRIP_PIXELS // out_size(width)), out_size(height))


def _ahead(width: int, tiling: Tiling) -> bool:
    """Whether the first layer fetches bytes ahead: copies move four, aligned."""
    return tiling.ahead and width % 4 == 0


def _view_bytes(channels: int, height: int, width: int, tiling: Tiling) -> int:
    """A strip (VIEW_BYTES of views.cuh) and, where they are fetched ahead, the bytes of the next."""
    columns = ((width + 1) // 2 * _VIEW_PIXEL_BYTES + 63) // 128 * 128 + 64
    next_bytes = channels * width if _ahead(width, tiling) else 0
    return (2 * _rows(height, width, tiling) + 1) * (2 * columns + next_bytes)


def _first_bytes(channels: int, height: int, width: int, tiling: Tiling, networks: int) -> int:
    return _TAPS * networks * _GROUP_BYTES + _view_bytes(channels, height, width, tiling)


def _first_weight_bytes(channels: int, height: int, width: int, tiling: Tiling) -> int:
    pixels = _ceil(_rows(height, width, tiling) * out_size(width), 16) * 16
    gradients = (1 + _ahead(width, tiling)) * pixels * _PIXEL_BYTES
    return max(gradients + _view_bytes(channels, height, width, tiling), _sums(MAX_INPUT_CHANNELS) * 4)


def shared_bytes_needed(channels: int, height: int, width: int, depth: int) -> int:
    """The most shared memory a block takes for stacks of frames of this size, in an encoder of so many layers."""
    stack = channels, height, width
    needed = [
        _first_bytes(*stack, FIRST, 1),
        _first_bytes(*stack, FIRST_TWO, 2),
        _first_weight_bytes(*stack, FIRST_WEIGHT),
    ]
    for layer in range(depth - 1):  # a tile of a smaller image reaches over more rows, whose ends it holds too
        size = out_size(height) - 2 * layer, out_size(width) - 2 * layer
        needed += [
            _conv_bytes(*size, FORWARD, True),
            _conv_bytes(*size, INPUT_GRADIENT, False),
            _conv_weight_bytes(size[1], WEIGHT_GRADIENT),
        ]
    return max(needed)


def _conv_kernel(height: int, width: int, tiling: Tiling, *, forward: bool) -> runtime.Launchable:
    defines: dict[str, int | str] = {
        "H": height,
        "W": width,
        "WARPS": tiling.warps,
        "BLOCKS": tiling.blocks,
        "MT": tiling.tiles,
        "STAGES": tiling.stages,
        "REPEAT": tiling.repeat,
        "HELD": int(tiling.held),
        "STAGE_PIXELS": _conv_stage_pixels(height, width, tiling, forward),
        "FORWARD": int(forward),
        "AHEAD": int(tiling.ahead),
    }
    parts = ("primitives.cuh", "common.cuh", "padded.cuh", "conv.cu")
    return runtime.kernel("conv", parts, defines, tiling.warps * 32, _conv_bytes(height, width, tiling, forward))


def conv_forward(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...], tiling: Tiling = FORWARD
) -> Tensor:
    """relu(conv(x)), 3 x 3, stride 1, of one or two networks, each on its own input: [networks, B, H, W, 32]."""
    networks, images, height, width, _ = x.shape
    out = x.new_empty(networks, images, height - 2, width - 2, CHANNELS)
    kernel = _conv_kernel(height, width, tiling, forward=True)
    work = _ceil(images * (height - 2) * (width - 2), _conv_tile(tiling))
    blocks = min(work, _ceil(kernel.resident_blocks, networks))
    kernel.launch((blocks, networks), x, out, None, weights[0], biases[0], weights[-1], biases[-1], images)
    return out


def conv_input_gradient(gradient: Tensor, weight: Tensor, x: Tensor, tiling: Tiling = INPUT_GRADIENT) -> Tensor:
    """Gradient of a layer's input `x`, before the ReLU that made `x`; `gradient`: of its output before the ReLU."""
    images, height, width, _ = x.shape
    out = torch.empty_like(x)
    kernel = _conv_kernel(height, width, tiling, forward=False)
    blocks = min(kernel.resident_blocks, _ceil(images * height * width, _conv_tile(tiling)))
    kernel.launch((blocks, 1), gradient, out, x, weight, None, None, None, images)
    return out


def _reduced(partial: Tensor, like: Tensor, inputs: int, scale: float) -> tuple[Tensor, Tensor]:
    """Weight and bias gradients from the blocks' partial sums; `inputs` counts the padded channels."""
    weight = torch.empty_like(like)
    bias = weight.new_empty(CHANNELS)
    warps = 8
    defines: dict[str, int | str] = {"WARPS": warps, "INPUTS": inputs, "IN_CHANNELS": like.shape[1]}
    parts = ("primitives.cuh", "common.cuh", "weight_sums.cuh", "reduce.cu")
    kernel = runtime.kernel("reduce", parts, defines, warps * 32, warps * 32 * 4)
    kernel.launch((_ceil(partial.shape[1], 32), 1), partial, weight, bias, partial.shape[0], scale)
    return weight, bias


def conv_weight_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, tiling: Tiling = WEIGHT_GRADIENT
) -> tuple[Tensor, Tensor]:
    """Gradients of a layer's weight and bias, float32; `gradient`: of its output before the ReLU."""
    images, height, width, _ = x.shape
    defines: dict[str, int | str] = {
        "H": height,
        "W": width,
        "WARPS": tiling.warps,
        "BLOCKS": tiling.blocks,
        "STAGES": tiling.stages,
        "TILE_PIXELS": _conv_weight_tile(tiling),
        "INPUTS": CHANNELS,
    }
    parts = ("primitives.cuh", "common.cuh", "padded.cuh", "weight_sums.cuh", "conv_weight.cu")
    shared = _conv_weight_bytes(width, tiling)
    kernel = runtime.kernel("conv_weight", parts, defines, tiling.warps * 32, shared)
    blocks = min(kernel.resident_blocks, _ceil(images * height * width, _conv_weight_tile(tiling)))
    partial = torch.empty(blocks, _sums(CHANNELS), device=x.device)
    kernel.launch((blocks, 1), x, gradient, partial, images)
    return _reduced(partial, weight, CHANNELS, 1.0)


def _first_kernel(
    name: str, parts: tuple[str, ...], frames: Tensor, slots: Tensor, tiling: Tiling, shared: int, **more: int
) -> tuple[runtime.Launchable, int]:
    """A kernel on views of frames, and its number of blocks."""
    _, channels, height, width = frames.shape
    rows = _rows(height, width, tiling)
    defines: dict[str, int | str] = {
        "H": height,
        "W": width,
        "WARPS": tiling.warps,
        "BLOCKS": tiling.blocks,
        "ROWS": rows,
        "STACK": slots.shape[1],
        "FRAME_CHANNELS": channels,
        "SLOT": "long long" if slots.dtype == torch.int64 else "int",
        "AHEAD": int(_ahead(width, tiling)),
        **more,
    }
    parts = ("primitives.cuh", "common.cuh", "views.cuh", *parts)
    kernel = runtime.kernel(name, parts, defines, tiling.warps * 32, shared)
    return kernel, min(kernel.resident_blocks, len(slots) * _ceil(out_size(height), rows))


def first_forward(
    frames: Tensor,
    slots: Tensor,
    shifts: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...],
    tiling: Tiling | None = None,
) -> Tensor:
    """First layer, stride 2, of one or two networks on the same views: [networks, B, H, W, 32]."""
    networks, images = len(weights), len(slots)
    height, width = frames.shape[2:]
    tiling = tiling or (FIRST if networks == 1 else FIRST_TWO)
    shared = _first_bytes(weights[0].shape[1], height, width, tiling, networks)
    more = {"NETS": networks, "MT": tiling.tiles}
    kernel, blocks = _first_kernel("first", ("first.cu",), frames, slots, tiling, shared, **more)
    shape = networks, images, out_size(height), out_size(width), CHANNELS
    out = torch.empty(shape, device=frames.device, dtype=torch.bfloat16)
    kernel.launch((blocks, 1), frames, slots, shifts, out, weights[0], biases[0], weights[-1], biases[-1], images)
    return out


def first_weight_gradient(
    gradient: Tensor, frames: Tensor, slots: Tensor, shifts: Tensor, weight: Tensor, tiling: Tiling = FIRST_WEIGHT
) -> tuple[Tensor, Tensor]:
    """Gradients of the first layer's weight and bias; `gradient`: of its output before the ReLU."""
    parts = ("weight_sums.cuh", "first_weight.cu")
    height, width = frames.shape[2:]
    shared = _first_weight_bytes(weight.shape[1], height, width, tiling)
    kernel, blocks = _first_kernel("first_weight", parts, frames, slots, tiling, shared, INPUTS=MAX_INPUT_CHANNELS)
    partial = torch.empty(blocks, _sums(MAX_INPUT_CHANNELS), device=frames.device)
    kernel.launch((blocks, 1), frames, slots, shifts, gradient, partial, len(slots))
    return _reduced(partial, weight, MAX_INPUT_CHANNELS, 1 / 255)
