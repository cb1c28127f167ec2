"""Drawing with MuJoCo: which OpenGL is in use, what to install where there is none, and the camera of a task.

Nothing here imports mujoco at the top: MUJOCO_GL has to be set before anything does.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drq.errors import UserError

FAST_SHADOW_SIZE = 512
"""Texels along a side of the shadow map with `render=fast`; the control suite's own models have 2,048."""

_OFF = ("off", "disable", "disabled", "false", "0")
_KNOWN = ("egl", "osmesa", "glfw", *_OFF)
# One library of each group is needed.
_LIBRARIES = {
    "egl": (("libEGL.so.1",), ("libOpenGL.so.0", "libGL.so.1")),
    "osmesa": (("libOSMesa.so.8", "libOSMesa.so.6"),),
}
_REMEDY = (
    "on Debian or Ubuntu type `apt-get install libegl1 libopengl0 libgl1`, "
    "or `apt-get install libosmesa6` and set MUJOCO_GL=osmesa to draw in software"
)


def choose_backend() -> str:
    """Settles MUJOCO_GL and returns it: the user's, else `egl` on Linux, else "" for the system's default."""
    too_late = "mujoco" in sys.modules  # it has already read the variable
    if sys.platform == "linux" and not os.environ.get("MUJOCO_GL") and not too_late:
        os.environ["MUJOCO_GL"] = "egl"
    backend = os.environ.get("MUJOCO_GL", "")
    if backend and backend not in _KNOWN:
        raise UserError(
            f"MUJOCO_GL={backend} is not a way to draw: "
            "set it to egl (GPU, no display needed), osmesa (software) or glfw (a display)."
        )
    return backend


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

            model.vis.global_.offwidth = size
            model.vis.global_.offheight = size
            if shadow_size is not None:
                model.vis.quality.shadowsize = shadow_size
            self._renderer = mujoco.Renderer(model, size, size)
        self.model = model
        self._camera = camera
        _open_cameras.add(self)
        _close_cameras_at_exit()
        self._options = mujoco.MjvOption()
        # The suite's own pictures do not show the rays of range finders (quadruped has some).
        self._options.flags[mujoco.mjtVisFlag.mjVIS_RANGEFINDER] = False

    def draw(self, data: Any) -> NDArray[np.uint8]:
        """An RGB image (size, size, 3) of the state in `data`, a mujoco.MjData."""
        self._renderer.update_scene(data, self._camera, self._options)
        image: NDArray[np.uint8] = self._renderer.render()
        return image

    def close(self) -> None:
        self._renderer.close()


_open_cameras: weakref.WeakSet[Camera] = weakref.WeakSet()


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
