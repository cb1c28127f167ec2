"""Casting rays on a CPU, by a library that the system's C++ compiler makes when it is first needed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drq.code_cache import code_for
from drq.envs.raycast.scene import ASSETS_BYTES, FRAME_WORDS, GEOM_WORDS, Scene
from drq.errors import UserError

_FOLDER = Path(__file__).parent
_PARTS = ("numbers", "scene", "intersections", "triangles", "textures", "shading", "pixels")
SOURCES = tuple(_FOLDER / f"{part}.cuh" for part in _PARTS)
"""The ray caster itself, which a GPU compiles too: one text, in this order."""

# Products and sums must not be fused: then every CPU, and a GPU, draws the same pixels.
_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_FOR_THIS_CPU = "-march=native"


def draw(scene: Scene) -> NDArray[np.uint8]:
    """The image (3, size, size) of a scene. Other threads of Python go on meanwhile."""
    image = np.empty(scene.shape, np.uint8)
    _library().draw(
        *(ctypes.byref(scene.assets.on_host), _pointer(scene.words), _pointer(scene.geoms)),
        *(1, len(scene.geoms), _pointer(image)),
    )
    return image


def compiler() -> str | None:
    """The C++ compiler: what CXX names, else the system's."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)


def require_compiler(render: str = "ray") -> str:
    found = compiler()
    if found is None:
        raise UserError(
            f"--env.render {render} needs a C++ compiler: on Debian or Ubuntu type `apt-get install g++`, "
            "or use --env.render fast, which draws with OpenGL."
        )
    return found


@cache
def _library() -> ctypes.CDLL:
    command = [require_compiler(), *_OPTIONS]
    macros = _macros([*command, _FOR_THIS_CPU])
    if macros:
        command.append(_FOR_THIS_CPU)
    shared = "".join(source.read_text() for source in SOURCES)
    text = (_FOLDER / "cpu.cpp").read_text().replace('#include "raycast"', shared)
    # The macros know the compiler's version and what this CPU can do: a home may be shared by several kinds.
    code = code_for("\n".join([*command, macros, text]), lambda: _compile(command, text))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "raycast.so"
        file.write_bytes(code)
        library = ctypes.CDLL(str(file))
    sizes = (ctypes.c_int * 3)()
    library.sizes(sizes)
    assert tuple(sizes) == (ASSETS_BYTES, 4 * FRAME_WORDS, 4 * GEOM_WORDS), "scene.py and scene.cuh disagree"
    return library


def _macros(command: list[str]) -> str:
    """What the compiler defines by itself, or nothing where it does not know an option."""
    result = subprocess.run([*command, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True)
    return "" if result.returncode else result.stdout


def _compile(command: list[str], text: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "raycast.cpp", Path(folder) / "raycast.so"
        source.write_text(text)
        result = subprocess.run([*command, str(source), "-o", str(made)], capture_output=True, text=True)
        if result.returncode:
            said = " ".join(result.stderr.split())[-300:]
            raise UserError(
                f"{command[0]} does not compile the ray caster ({said}): "
                "set CXX to a C++17 compiler, or use --env.render fast."
            )
        return made.read_bytes()


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
