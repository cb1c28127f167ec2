"""Which OpenGL draws, and what is said where there is none. Each case is a process of its own: mujoco reads
MUJOCO_GL once, when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drq.envs.raycast import compiler
from drq.envs.rendering import choose_backend, egl_device, is_software, missing_libraries, renderer_name
from environments import needs_gl

# Stands for a machine without the library: the loader refuses it by name.
WITHOUT_EGL = """
import ctypes, ctypes.util
load, find = ctypes.CDLL.__init__, ctypes.util.find_library
def refuse(self, name, *args, **kwargs):
    if name and "EGL" in str(name):
        raise OSError(f"{name}: cannot open shared object file")
    load(self, name, *args, **kwargs)
ctypes.CDLL.__init__ = refuse
ctypes.util.find_library = lambda name: None if "EGL" in name else find(name)
"""
MAKE = """
import numpy as np
from drq.config import EnvConfig
from drq.envs import make
from drq.errors import UserError
def first_frame(task="dmc/cartpole-swingup", render="fast", **config):
    try:
        env = make(task, EnvConfig(render=render, **config), 2)
        print(env.reset(0).shape)
    except UserError as error:
        print("UserError:", error)
"""


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process without a display, with MUJOCO_GL unset unless given."""
    unset = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "DISPLAY", "WAYLAND_DISPLAY")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**environment, **variables}
    )
    assert result.returncode == 0, result.stderr
    return result


@needs_gl
def test_egl_is_chosen_on_linux_and_nothing_is_said_at_exit() -> None:
    if sys.platform != "linux":
        pytest.skip("EGL is Linux's")
    result = python(MAKE + "first_frame(); import os; print(os.environ['MUJOCO_GL'])")
    assert result.stdout.splitlines() == ["(3, 84, 84)", "egl"]
    assert result.stderr == ""


def test_triton_is_loaded_before_opengl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Mesa's LLVM, importing Triton 3.7 or newer is a segmentation fault."""
    stand_in = tmp_path / "triton.py"
    stand_in.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "triton", None)  # so that what was there comes back
    del sys.modules["triton"]
    choose_backend()
    assert sys.modules["triton"].__file__ == str(stand_in)


@needs_gl
def test_a_users_choice_is_kept() -> None:
    if missing_libraries("osmesa"):
        pytest.skip("no OSMesa")
    result = python(MAKE + "first_frame(); import os; print(os.environ['MUJOCO_GL'])", MUJOCO_GL="osmesa")
    assert result.stdout.splitlines() == ["(3, 84, 84)", "osmesa"]


def test_without_the_library_rays_are_cast() -> None:
    if sys.platform != "linux" or compiler() is None:
        pytest.skip("EGL is Linux's, and casting rays needs a C++ compiler")
    drawn, terrain = python(
        WITHOUT_EGL + MAKE + "first_frame(render='auto')\nfirst_frame('dmc/quadruped-escape', render='auto')\n"
    ).stdout.splitlines()
    assert drawn == "(3, 84, 84)"
    assert terrain.startswith("UserError: Drawing with MUJOCO_GL=egl needs libEGL.so.1")
    assert "--env.render auto, where there is a C++ compiler" in terrain


def test_without_the_library_pixels_are_refused_with_the_remedy_and_state_works() -> None:
    if sys.platform != "linux":
        pytest.skip("EGL is Linux's")
    code = (
        WITHOUT_EGL
        + MAKE
        + (
            "first_frame()\n"
            "first_frame(observation='state')\n"
            "first_frame('dmc/quadruped-escape', observation='state')\n"
            "first_frame()\n"
        )
    )
    said, state, escape, said_again = python(code).stdout.splitlines()
    assert "libEGL.so.1" in said
    assert "apt-get install libegl1 libopengl0 libgl1" in said
    assert "libosmesa6" in said
    assert "MUJOCO_GL=osmesa" in said
    assert state == "(5,)"
    assert escape == "(101,)"
    assert said_again == said


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("vulkan", "set it to egl (GPU, no display needed), osmesa (software) or glfw"),
        ("off", "MUJOCO_GL=off turns drawing off: unset it"),
    ],
)
def test_a_value_that_cannot_draw_is_refused(value: str, remedy: str) -> None:
    assert remedy in python(MAKE + "first_frame()", MUJOCO_GL=value).stdout


def test_a_context_that_cannot_be_made_is_one_sentence() -> None:
    said = python(MAKE + "first_frame()", MUJOCO_GL="glfw").stdout
    assert said.startswith("UserError: Cannot draw with MUJOCO_GL=glfw")
    assert "apt-get install libegl1" in said
    assert said.count("\n") == 1


def test_mujoco_imported_too_early_is_said() -> None:
    assert "set MUJOCO_GL=egl before anything imports mujoco" in python("import mujoco" + MAKE + "first_frame()").stdout


@needs_gl
def test_the_renderer_has_a_name() -> None:
    assert renderer_name().strip()


def test_software_is_told_from_hardware() -> None:
    assert is_software("llvmpipe (LLVM 15.0.6, 256 bits)")
    assert not is_software("NVIDIA H200/PCIe/SSE2")


@pytest.mark.parametrize(
    ("gpus", "visible", "drawn_on"),
    [
        (2, "1", "1"),
        (2, "0", "0"),
        (4, "3,1", "3"),
        (2, "GPU-b", "1"),
        (2, "GPU-c", None),  # not known here
        (2, None, None),  # all of them: EGL's choice
        (2, "", None),  # none of them
        (1, "0", None),  # there is no choice, and a software renderer may come first
        (0, None, None),
    ],
)
def test_a_run_draws_on_the_gpu_that_it_computes_on(
    gpus: int, visible: str | None, drawn_on: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On faked devices: no machine with several GPUs was at hand."""
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))):
        (tmp_path / name).touch()
    lists = tmp_path / "nvidia-smi"
    lists.write_text("#!/bin/sh\necho 'GPU-a, 0'\necho 'GPU-b, 1'\n")
    lists.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert egl_device(tmp_path) == drawn_on
