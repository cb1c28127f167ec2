"""MuJoCo's abstract scene as arrays that a ray caster reads.

`mujoco.mjv_updateScene` fills a scene without OpenGL. What changes from frame to frame (shapes, lights, the camera) is
read out of its C structures; what does not (textures in all their sizes, grids of planes, tables) is packed once.

Nothing here imports mujoco at the top: see rendering.py.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drq.envs.cameras import update_scene

MAX_GEOMS = 200
"""Shapes in a scene: the suite's largest has 50."""

Driver = Literal["nvidia", "mesa"]
"""Whose OpenGL to draw like. They cut quads along different diagonals, and where a triangle does not cover a pixel's
centre, NVIDIA takes its colour from a place that it covers and Mesa from the centre nevertheless."""

_SAMPLES = (0.375, 0.125, 0.875, 0.375, 0.125, 0.625, 0.625, 0.875)
"""Where in a pixel, from its lower left, the four samples lie: x and y of each."""

_PLANE = 0
_UNDRAWABLE = {1: "a height field", 7: "meshes", 8: "a signed distance field", 105: "a flexible body", 106: "a skin"}
_DRAWABLE = (_PLANE, 2, 3, 4, 5, 6)
_MAX_LIGHTS, _MAX_SHADOWS, _MAX_PLANES, _MAX_LEVELS = 8, 2, 16, 14  # as in scene.cuh
_MAX_PLANE_CELLS = 200  # mjMAXPLANEGRID
_RGB = 1  # mjTEXROLE_RGB
_SKYBOX = 2  # mjTEXTURE_SKYBOX
_SRGB = 2  # mjCOLORSPACE_SRGB

# The order of these fields is that of scene.cuh.
_GEOM_FIELDS = (
    *("type", "dataid", "category", "matid", "size", "pos", "mat", "rgba"),
    *("emission", "specular", "shininess", "reflectance"),
)
_LIGHT_FIELDS = ("type", "pos", "dir", "attenuation", "cutoff", "exponent", "ambient", "diffuse", "specular")
_CAMERA_FIELDS = ("pos", "forward", "up", *(f"frustum_{name}" for name in ("center", "bottom", "top", "near", "far")))
_CAMERA_WORDS, _LIGHT_WORDS, _CUTOFF = 14, 24, 10
GEOM_WORDS = 27
FRAME_WORDS = 2 + 2 * _CAMERA_WORDS + _MAX_LIGHTS * _LIGHT_WORDS


class _AssetsStruct(ctypes.Structure):
    """`Assets` of scene.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("texels", "textures", "materials", "grids", "tables")),
        *((name, ctypes.c_int) for name in ("size", "shadow_size", "slices", "stacks", "quads")),
        *((name, ctypes.c_int) for name in ("sky", "nvidia", "serial")),
        ("shadow_clip", ctypes.c_float),
        ("samples", ctypes.c_float * len(_SAMPLES)),
    )


_serial_numbers = itertools.count()
ASSETS_BYTES = ctypes.sizeof(_AssetsStruct)


@dataclass(frozen=True)
class Assets:
    """What all frames of a model share."""

    arrays: tuple[NDArray[Any], ...]
    """Texels, textures, materials, grids and tables, as `Assets` of scene.cuh has them."""
    numbers: tuple[float, ...]
    size: int
    """Height and width of a frame in pixels."""

    def struct(self, addresses: Sequence[int]) -> ctypes.Structure:
        """The C structure, with the arrays at these addresses: the host's or a GPU's."""
        return _AssetsStruct(*addresses, *self.numbers, (ctypes.c_float * len(_SAMPLES))(*_SAMPLES))

    @cached_property
    def on_host(self) -> ctypes.Structure:
        return self.struct([array.ctypes.data for array in self.arrays])


class Scene(NamedTuple):
    """A frame that is not drawn yet."""

    assets: Assets
    words: NDArray[np.int32]
    """(FRAME_WORDS,)."""
    geoms: NDArray[np.int32]
    """(shapes, GEOM_WORDS)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the frame, once it is drawn; so is the type below."""
        return 3, self.assets.size, self.assets.size

    @property
    def dtype(self) -> np.dtype[np.uint8]:
        return np.dtype(np.uint8)


def _pack_assets(model: Any, size: int, driver: Driver) -> Assets:
    quality = model.vis.quality
    around = np.arange(quality.numslices + 1) * (2 * np.pi / quality.numslices)
    upwards = (np.arange(quality.numstacks + 1) / quality.numstacks - 0.5) * np.pi
    tables = [np.cos(around), np.sin(around), np.cos(upwards), np.sin(upwards)]
    planes = model.geom_size[model.geom_type == _PLANE]
    grids = np.zeros((max(1, len(planes)), 6), np.int32)
    for grid, sizes in zip(grids, planes, strict=False):
        xs, ys = (_plane_lines(sizes[axis], sizes[2]) for axis in (0, 1))
        start = sum(map(len, tables))
        grid[:4] = len(xs), len(ys), start, start + len(xs)
        grid[4:].view(np.float32)[:] = 1 / np.diff(xs).max(), 1 / np.diff(ys).max()
        tables += [xs, ys]
    materials = np.zeros((max(1, model.nmat), 4), np.int32)
    materials[: model.nmat, 0] = model.mat_texid[:, _RGB]
    materials[: model.nmat, 1] = model.mat_texuniform
    materials[: model.nmat, 2:] = model.mat_texrepeat.astype(np.float32).view(np.int32)
    skies = np.flatnonzero(model.tex_type == _SKYBOX)
    numbers = (
        *(size, quality.shadowsize, quality.numslices, quality.numstacks, quality.numquads),
        *(int(skies[0]) if len(skies) else -1, driver == "nvidia", next(_serial_numbers)),
        float(model.vis.map.shadowclip * model.stat.extent),
    )
    return Assets((*_pack_textures(model), materials, grids, np.concatenate(tables).astype(np.float32)), numbers, size)


def _plane_lines(half: float, spacing: float) -> NDArray[np.float64]:
    """Where a plane's cells end along an axis: an even number of them, and what is left at both ends."""
    spacing = max(spacing, half / (_MAX_PLANE_CELLS - 2))
    cells = int(half / spacing)
    cells -= cells % 2
    inner = spacing * (2 * np.arange(cells + 1) - cells)
    return np.unique(np.concatenate([[-half], inner, [half]]).astype(np.float32)).astype(np.float64)


def _pack_textures(model: Any) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
    """All texels of all sizes, and where a texture has its own."""
    texels = [np.zeros(1, np.uint32)]
    table = np.zeros((max(1, model.ntex), 4 + _MAX_LEVELS), np.int32)
    start = 1
    for number in range(model.ntex):
        width, height = int(model.tex_width[number]), int(model.tex_height[number])
        first = model.tex_adr[number]
        level = model.tex_data[first : first + width * height * 3].reshape(-1, height, width, 3)
        is_cube = bool(model.tex_type[number])
        if is_cube:  # six faces below each other, or one for all
            level = level.reshape(-1, width, width, 3)
            level = np.broadcast_to(level, (6, *level.shape[1:]))
        table[number, :4] = is_cube, 0, width, level.shape[1]
        while True:
            table[number, 4 + table[number, 1]] = start
            table[number, 1] += 1
            words = level.astype(np.uint32)
            texels.append((words[..., 0] | words[..., 1] << 8 | words[..., 2] << 16).ravel())
            start += texels[-1].size
            if level.shape[1:3] == (1, 1):
                break
            level = _halved(level)
    return np.concatenate(texels), table


def _halved(level: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A texture's next smaller size: its values at the centres of the new texels."""
    values: Any = level.astype(np.float32)
    for axis in (1, 2):
        old = values.shape[axis]
        new = max(1, old // 2)
        place = (np.arange(new) + 0.5) * (old / new) - 0.5
        low = np.floor(place).astype(int)
        weight = (place - low).astype(np.float32).reshape(-1, *[1] * (3 - axis))
        before, after = (values.take(np.clip(index, 0, old - 1), axis) for index in (low, low + 1))
        values = before * (1 - weight) + after * weight
    halved: NDArray[np.uint8] = np.floor(values + 0.5).astype(np.uint8)
    return halved


class RayCamera:
    """What a camera of a model sees, to be drawn by casting rays. Any thread may use it."""

    def __init__(self, model: Any, size: int, camera: int, driver: Driver = "nvidia") -> None:
        """`model` is a mujoco.MjModel."""
        import mujoco

        self.model = model
        self._size, self._camera, self._driver = size, camera, driver
        self._scene = mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
        self._geoms = _Records(self._scene.geoms, _GEOM_FIELDS)
        self._lights = _Records(self._scene.lights, _LIGHT_FIELDS)
        self._cameras = _Records(self._scene.camera, _CAMERA_FIELDS)

    @cached_property
    def _assets(self) -> Assets:
        return _pack_assets(self.model, self._size, self._driver)

    def scene(self, data: Any) -> Scene:
        """The state in `data`, a mujoco.MjData, as `FrameWords` and `GeomWords` of scene.cuh. Neither a later state nor
        a change of the model changes it."""
        update_scene(self._scene, self.model, data, self._camera)
        count = self._scene.ngeom
        frame = np.zeros(FRAME_WORDS, np.int32)
        lights = min(self._scene.nlight, _MAX_LIGHTS)
        frame[:2] = count, lights
        frame[2 : 2 + 2 * _CAMERA_WORDS] = self._cameras.read(2).ravel()
        words = frame[2 + 2 * _CAMERA_WORDS :].reshape(_MAX_LIGHTS, _LIGHT_WORDS)[:lights]
        words[:, :-3] = self._lights.read(lights)
        words[:, -3] = [light.castshadow for light in self._scene.lights[:lights]]
        # Once in double precision: what the drawing itself needs no machine's mathematical library for.
        cutoff = np.radians(words[:, _CUTOFF].view(np.float32), dtype=np.float64)
        words[:, -2] = np.cos(cutoff).astype(np.float32).view(np.int32)
        half = np.minimum(cutoff * float(self.model.vis.map.shadowscale), np.radians(80))
        words[:, -1] = np.tan(half).astype(np.float32).view(np.int32)
        geoms = np.ascontiguousarray(self._geoms.read(count))  # numpy had the columns outside
        return Scene(self._assets, frame, geoms)

    def why_undrawable(self, data: Any) -> str | None:
        """What there is in the scene that cannot be drawn by casting rays, or None."""
        model, scene = self.model, self._scene
        update_scene(scene, model, data, self._camera)
        types = {geom.type for geom in scene.geoms[: scene.ngeom]}
        lights = scene.lights[: scene.nlight]
        textures = model.mat_texid[:, _RGB]
        quality = model.vis.quality
        planes = model.geom_size[model.geom_type == _PLANE]
        reasons = {
            **{name: bool(number in types) for number, name in _UNDRAWABLE.items()},
            "shapes of an unknown kind": bool(types.difference(_DRAWABLE)),
            f"more than {MAX_GEOMS - 10} shapes": scene.ngeom > MAX_GEOMS - 10,
            "an infinite plane": bool((planes[:, :2] <= 0).any()),
            f"more than {_MAX_PLANES} planes": len(planes) > _MAX_PLANES,
            f"more than {_MAX_LIGHTS} lights": len(lights) > _MAX_LIGHTS,
            "a light that is neither directional nor a spot": any(light.type not in (0, 1) for light in lights),
            "more than two lights with shadows": sum(map(bool, (light.castshadow for light in lights))) > _MAX_SHADOWS,
            "a texture that is not plain RGB": bool(
                (model.tex_nchannel != 3).any() or (model.tex_colorspace[textures[textures >= 0]] == _SRGB).any()
            ),
            "a camera with a sensor of its own": bool(scene.camera[0].orthographic or scene.camera[0].frustum_width),
            "another quality than four samples a pixel": quality.offsamples != len(_SAMPLES) // 2,
            "finer shapes than expected": max(2 * quality.numstacks, quality.numslices, 6 * quality.numquads) > 240,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


class _Records:
    """Some fields of an array of MuJoCo's C structures, read all at once: one row of 32-bit words for each.

    Field by field through Python would take longer than a GPU needs to draw. Where a field lies is found out
    by writing to it.
    """

    def __init__(self, items: Sequence[Any], fields: Sequence[str]) -> None:
        anchor = next(field for field in fields if isinstance(getattr(items[0], field), np.ndarray))
        first, second = (getattr(item, anchor).ctypes.data for item in items[:2])
        between = _words_at(first, second - first)
        offsets: list[int] = []
        for field in fields:
            value = getattr(items[0], field)
            if isinstance(value, np.ndarray):
                offset = (value.ctypes.data - first) // 4
                offsets += range(offset, offset + value.size)
            else:
                offsets.append(_offset_of(field, items, between))
        start = min(offsets)
        self._words = _words_at(first + 4 * start, (second - first) * len(items)).reshape(len(items), -1)
        self._columns = np.array(offsets) - start

    def read(self, count: int) -> NDArray[np.int32]:
        return self._words[:count, self._columns]


def _words_at(address: int, size: int) -> NDArray[np.int32]:
    memory: Any = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype=np.int32)


def _offset_of(field: str, items: Sequence[Any], between: NDArray[np.int32]) -> int:
    """In words from the start of `between`, which goes from one field of the first item to the same of the second."""
    for item, shift in ((items[0], 0), (items[1], len(between))):
        kept = getattr(item, field)
        setattr(item, field, type(kept)(1))
        before = between.copy()
        setattr(item, field, type(kept)(2))
        (changed,) = np.nonzero(between != before)
        setattr(item, field, kept)
        if len(changed) == 1:
            return int(changed[0]) - shift
    raise RuntimeError(f"this version of mujoco keeps {field} where it is not looked for")
