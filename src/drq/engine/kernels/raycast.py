"""Frames of the control suite, drawn on the GPU by casting rays."""

from __future__ import annotations

import torch
from torch import Tensor

from drq.envs.raycast import FRAME_WORDS, GEOM_WORDS, MAX_GEOMS, SOURCES, Assets, Scene

from . import runtime

THREADS = 128
TILE_WIDTH, TILE_HEIGHT = 8, 4
FRAME_BYTES, SHAPE_BYTES = 1560, 304
"""Room for what the GPU makes of a frame and of a shape."""


class RayFrames:
    """So many frames at a time of one model, or of models that share what does not change.

    The host puts scenes into page-locked memory and launches twice; it does not wait, but for the launch that still
    reads what is about to be overwritten.
    """

    def __init__(self, assets: Assets, count: int, device: str | torch.device) -> None:
        on_gpu = torch.device(device).type == "cuda"
        self.assets = assets
        self._arrays = [torch.from_numpy(array).to(device) for array in assets.arrays]
        self._struct = assets.struct([array.data_ptr() for array in self._arrays])
        self._frames = torch.zeros(count, FRAME_WORDS, dtype=torch.int32, pin_memory=on_gpu)
        self._geoms = torch.zeros(count, MAX_GEOMS, GEOM_WORDS, dtype=torch.int32, pin_memory=on_gpu)
        self._words, self._shapes = self._frames.numpy(), self._geoms.numpy()
        self._ready_frames = torch.empty(count, FRAME_BYTES, dtype=torch.uint8, device=device)
        self._ready_shapes = torch.empty(count, MAX_GEOMS, SHAPE_BYTES, dtype=torch.uint8, device=device)
        self._tiles = -(-assets.size // TILE_WIDTH) * -(-assets.size // TILE_HEIGHT)
        self._shape = 3, assets.size, assets.size
        self._prepare, self._draw = _kernel("prepare"), _kernel("draw")
        self._fetched = torch.cuda.Event() if on_gpu else None

    def put(self, number: int, scene: Scene) -> None:
        """Makes a scene the frame of that number. It may be of another model that shares the assets."""
        if self._fetched is not None:
            self._fetched.synchronize()
        self._words[number] = scene.words
        self._shapes[number, : len(scene.geoms)] = scene.geoms

    def draw(self, out: Tensor) -> None:
        """Draws the first frames into `out`, uint8 (frames, 3, size, size), without waiting for it."""
        count = len(out)
        assert out.is_contiguous()
        assert (out.dtype, out.shape[1:]) == (torch.uint8, self._shape)
        largest = int(self._words[:count, 0].max())
        ready = self._ready_frames, self._ready_shapes
        self._prepare.launch((count, 1), self._struct, self._frames, self._geoms, largest, *ready)
        if self._fetched is not None:
            self._fetched.record()
        self._draw.launch((self._tiles, count), self._struct, *ready, out)


def compile_kernels() -> None:
    """Compiles what `RayFrames` launches, where it is not yet."""
    _kernel("prepare"), _kernel("draw")


def _kernel(name: str) -> runtime.Launchable:
    defines: dict[str, int | str] = {
        "EXACT": 1,
        "DEVICE": "static __device__",
        "LARGE": "static __device__ __noinline__",
        "THREADS": THREADS,
        "FRAME_BYTES": FRAME_BYTES,
        "SHAPE_BYTES": SHAPE_BYTES,
    }
    parts = "primitives.cuh", *map(str, SOURCES), f"raycast_{name}.cu"
    return runtime.kernel(name, parts, defines, THREADS, 0)
