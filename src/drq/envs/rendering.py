"""Drawing with MuJoCo: which OpenGL is in use, and what to install where there is none.

Nothing here imports mujoco at the top: MUJOCO_GL has to be set before anything does.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drq.errors import UserError

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
    _load_triton()
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


def _load_triton() -> None:
    """Loads what torch.compile will want, before OpenGL: Triton 3.7 and newer crash once Mesa has loaded its LLVM."""
    if "torch" in sys.modules:  # not in the processes of environments, which never compile
        with suppress(ImportError):  # a CPU build of torch comes without
            import triton  # noqa: F401


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
    with drawing_errors():
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


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@contextmanager
def drawing_errors() -> Iterator[None]:
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
