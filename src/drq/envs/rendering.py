"""Drawing with MuJoCo: which OpenGL is in use, what to install where there is none, and the camera of a task.

Nothing here imports mujoco at the top: MUJOCO_GL has to be set before anything does.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drq.errors import UserError

FAST_SHADOW_SIZE = 512
"""Texels along a side of the shadow map with `render=fast`; the control suite's own models have 2,048."""

_TILES = 0
"""Which of a context's auxiliary buffers holds the tiles."""
_MAX_GEOMS = 10_000
"""As many as mujoco.Renderer draws by default."""
_SPARE_GEOMS = 10
"""Room in a scene beyond what is shown in it: MuJoCo takes a place before it leaves out what cannot be seen."""
_OFF = ("off", "disable", "disabled", "false", "0")
_KNOWN = ("egl", "osmesa", "glfw", *_OFF)
# One library of each group is needed.
_LIBRARIES = {
    "egl": (("libEGL.so.1",), ("libOpenGL.so.0", "libGL.so.1")),
    "osmesa": (("libOSMesa.so.8", "libOSMesa.so.6"),),
}
_REMEDY = (
    "on Debian or Ubuntu type `apt-get install libegl1 libopengl0 libgl1`, "
    "or `apt-get install libosmesa6` and set MUJOCO_GL=osmesa to draw in software; "
    "most tasks of the control suite need no OpenGL with --env.render auto, where there is a C++ compiler"
)


def choose_backend() -> str:
    """Settles MUJOCO_GL and returns it: the user's, else `egl` on Linux, else "" for the system's default."""
    too_late = "mujoco" in sys.modules  # it has already read the variable
    if sys.platform == "linux" and not os.environ.get("MUJOCO_GL") and not too_late:
        os.environ["MUJOCO_GL"] = "egl"
    backend = os.environ.get("MUJOCO_GL", "")
    if backend == "egl" and not os.environ.get("MUJOCO_EGL_DEVICE_ID") and (device := egl_device()) is not None:
        os.environ["MUJOCO_EGL_DEVICE_ID"] = device
    if backend and backend not in _KNOWN:
        raise UserError(
            f"MUJOCO_GL={backend} is not a way to draw: "
            "set it to egl (GPU, no display needed), osmesa (software) or glfw (a display)."
        )
    return backend


def egl_device(devices: Path = Path("/dev")) -> str | None:
    """The GPU to draw on: the one that CUDA_VISIBLE_DEVICES leaves to this process, where the machine has several.

    EGL knows nothing of that variable and would take the first. Its numbers are those of nvidia-smi; None: one GPU, or
    no saying which.
    """
    name = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    several = len(list(devices.glob("nvidia[0-9]*"))) > 1
    if several and name.startswith("GPU-"):
        name = _gpu_numbers().get(name, "")
    return name if several and name.isdecimal() else None


def _gpu_numbers() -> dict[str, str]:
    """UUID -> number, as nvidia-smi has them."""
    query = ["nvidia-smi", "--query-gpu=uuid,index", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    pairs = (line.split(",") for line in said.splitlines() if line.count(",") == 1)
    return {uuid.strip(): index.strip() for uuid, index in pairs}


def missing_libraries(backend: str) -> list[str]:
    """The OpenGL libraries that the backend needs and this machine does not have."""
    groups = _LIBRARIES.get(backend, ()) if sys.platform == "linux" else ()
    return [group[0] for group in groups if not any(_loads(library) for library in group)]


def require_rendering() -> None:
    """Raises UserError if nothing can be drawn because of MUJOCO_GL or of a library that is not installed."""
    backend = choose_backend()
    if backend in _OFF:
        raise UserError(f"MUJOCO_GL={backend} turns drawing off: unset it, or use --env.observation state.")
    if missing := missing_libraries(backend):
        raise UserError(f"Drawing with MUJOCO_GL={backend} needs {' and '.join(missing)}: {_REMEDY}.")


@contextmanager
def mujoco_imports() -> Iterator[None]:
    """Around imports of mujoco and dm_control, which fail without OpenGL though state needs none."""
    backend = choose_backend()
    if not missing_libraries(backend):
        yield
        return
    os.environ["MUJOCO_GL"] = "off"
    try:
        yield
    finally:
        os.environ["MUJOCO_GL"] = backend


def renderer_name() -> str:
    """What draws, in OpenGL's own words: the name of a GPU, or `llvmpipe (LLVM 15.0.6, 256 bits)`."""
    require_rendering()
    with _drawing_errors():
        import mujoco
        from OpenGL import GL

        context = mujoco.GLContext(16, 16)
        try:
            context.make_current()
            name: bytes = GL.glGetString(GL.GL_RENDERER)
        finally:
            context.free()
    return name.decode()


def is_software(name: str) -> bool:
    """Whether a renderer of this name draws on the CPU."""
    return any(driver in name.lower() for driver in ("llvmpipe", "softpipe", "swrast", "software"))


class Camera:
    """One camera of a model, drawn into an off-screen buffer of the image's size.

    dm_control's own buffer is 640 x 480 whatever the size of the image; the pixels are the same. An OpenGL
    context belongs to the thread that made it: use a camera only in the thread that created it.
    """

    def __init__(self, model: Any, size: int, camera: int, shadow_size: int | None) -> None:
        """`model` is a mujoco.MjModel. `shadow_size` replaces the model's own shadow map, unless None."""
        require_rendering()
        with _drawing_errors():
            import mujoco

            _set_buffer(model, size, shadow_size)
            self._renderer = mujoco.Renderer(model, size, size)
        self.model = model
        self._camera = camera
        _close_at_exit(self)

    def draw(self, data: Any) -> NDArray[np.uint8]:
        """An RGB image (size, size, 3) of the state in `data`, a mujoco.MjData."""
        self._renderer.update_scene(data, self._camera, _shown())
        image: NDArray[np.uint8] = self._renderer.render()
        return image

    def close(self) -> None:
        self._renderer.close()


class Tiles:
    """Pictures drawn in one OpenGL context and read back together.

    Reading back waits until the GPU has drawn, and while CUDA keeps it busy each wait lasts until its turn to draw
    comes: one wait for all is what this is for. Each picture is drawn by itself at the origin and then copied to its
    tile. Drawn in place, at another offset, colours would differ from `Camera`'s in the last bit here and there.

    What is uploaded when a context is made (meshes, textures, terrain) is that of one model for all pictures. Like a
    `Camera`, this belongs to the thread that created it.
    """

    def __init__(self, model: Any, size: int, count: int, shadow_size: int | None) -> None:
        """`count` tiles; the other arguments are those of `Camera`."""
        require_rendering()
        self._size = size
        self._columns, self._rows = grid(count)
        with _drawing_errors():
            import mujoco

            _set_buffer(model, size, shadow_size)
            self._gl = mujoco.GLContext(size, size)
            self._gl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150.value)
            mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
            mujoco.mjr_addAux(_TILES, self._columns * size, self._rows * size, 0, self._context)
        _close_at_exit(self)

    def draw(self, scenes: Mapping[int, Any]) -> dict[int, NDArray[np.uint8]]:
        """RGB images (size, size, 3) of the scenes (mujoco.MjvScene), each numbered as the tile it shall have."""
        import mujoco
        from OpenGL import GL

        size = self._size
        self._gl.make_current()
        for number, scene in scenes.items():
            mujoco.mjr_render(mujoco.MjrRect(0, 0, size, size), scene, self._context)
            row, column = divmod(number, self._columns)
            left, bottom = column * size, row * size
            GL.glBindFramebuffer(GL.GL_DRAW_FRAMEBUFFER, int(self._context.auxFBO[_TILES]))
            GL.glBlitFramebuffer(
                *(0, 0, size, size), *(left, bottom, left + size, bottom + size), GL.GL_COLOR_BUFFER_BIT, GL.GL_NEAREST
            )
            mujoco.mjr_restoreBuffer(self._context)
        tiles = np.empty((self._rows, size, self._columns, size, 3), dtype=np.uint8)
        mujoco.mjr_setAux(_TILES, self._context)
        GL.glReadPixels(*(0, 0, self._columns * size, self._rows * size), GL.GL_RGB, GL.GL_UNSIGNED_BYTE, tiles)
        mujoco.mjr_restoreBuffer(self._context)
        # OpenGL counts rows of pixels from below.
        return {number: tiles[number // self._columns, ::-1, number % self._columns] for number in scenes}

    def close(self) -> None:
        self._gl.free()
        self._context.free()


class TiledCamera:
    """The same camera of several models, drawn as `Tiles`: they share what is uploaded, that of the first."""

    def __init__(self, models: Sequence[Any], size: int, camera: int, shadow_size: int | None) -> None:
        """`models` are mujoco.MjModel; the other arguments are those of `Camera`."""
        self.models = list(models)
        self._camera = camera
        self._shadow_size = shadow_size
        self._tiles = self.tiles(size, len(models))
        import mujoco

        self._scenes = [mujoco.MjvScene(model, maxgeom=_MAX_GEOMS) for model in models]

    def draw(self, states: Mapping[int, Any]) -> dict[int, NDArray[np.uint8]]:
        """RGB images (size, size, 3) of the states (mujoco.MjData), each numbered as its model is."""
        for number, state in states.items():
            update_scene(self._scenes[number], self.models[number], state, self._camera)
        return self._tiles.draw({number: self._scenes[number] for number in states})

    def scene(self, number: int, state: Any) -> Any:
        """What there is to draw of a state of the model with that number, in a mujoco.MjvScene of its own.

        Neither a later state nor a change of the model (places, sizes, colours) changes it. Taking it needs no
        OpenGL. It is some 0.15 MB large (dog, with its skin, 0.7 MB), where a copy of a mujoco.MjData reserves more
        than 10 MB.
        """
        import mujoco

        model, largest = self.models[number], self._scenes[number]
        update_scene(largest, model, state, self._camera)
        scene = mujoco.MjvScene(model, maxgeom=largest.ngeom + _SPARE_GEOMS)
        update_scene(scene, model, state, self._camera)
        return scene

    def tiles(self, size: int, count: int) -> Tiles:
        """So many tiles of any size for scenes of this camera. Who asks for them closes them."""
        return Tiles(self.models[0], size, count, self._shadow_size)

    def close(self) -> None:
        self._tiles.close()


def grid(count: int) -> tuple[int, int]:
    """Columns and rows of the squarest grid with so many tiles."""
    columns = math.ceil(math.sqrt(count))
    return columns, math.ceil(count / columns)


def _set_buffer(model: Any, size: int, shadow_size: int | None) -> None:
    """Settles the sizes of buffers that a context made for the model will have."""
    model.vis.global_.offwidth = size
    model.vis.global_.offheight = size
    if shadow_size is not None:
        model.vis.quality.shadowsize = shadow_size


def update_scene(scene: Any, model: Any, data: Any, camera: int) -> None:
    """Fills a mujoco.MjvScene with what the camera of that number sees of a state, a mujoco.MjData."""
    import mujoco

    everything = mujoco.mjtCatBit.mjCAT_ALL.value
    mujoco.mjv_updateScene(model, data, _shown(), None, _fixed(camera), everything, scene)


@cache
def _shown() -> Any:
    """What is drawn, as mujoco.MjvOption: all but the rays of range finders (quadruped has some), as in the suite."""
    import mujoco

    options = mujoco.MjvOption()
    options.flags[mujoco.mjtVisFlag.mjVIS_RANGEFINDER] = False
    return options


@cache
def _fixed(camera: int) -> Any:
    import mujoco

    view = mujoco.MjvCamera()
    view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, camera
    return view


_open_cameras: weakref.WeakSet[Camera | Tiles] = weakref.WeakSet()


def _close_at_exit(camera: Camera | Tiles) -> None:
    _open_cameras.add(camera)
    _close_cameras_at_exit()


@cache
def _close_cameras_at_exit() -> None:
    """Registered once, after mujoco has registered the end of OpenGL, so that it runs before it."""
    atexit.register(_close_cameras)


def _close_cameras() -> None:
    for camera in _open_cameras:
        camera.close()


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@contextmanager
def _drawing_errors() -> Iterator[None]:
    """Turns whatever the layers below raise when a context cannot be made into one sentence.

    They raise anything from ImportError to AttributeError and mujoco.FatalError, hence the broad clause.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        backend = os.environ.get("MUJOCO_GL")
        remedy = _REMEDY if backend else "set MUJOCO_GL=egl before anything imports mujoco"
        raise UserError(f"Cannot draw with MUJOCO_GL={backend or ''} ({reason}): {remedy}.") from error
