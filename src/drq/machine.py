"""What this machine has: packages, devices, memory, disk, a renderer. It looks; `doctor.py` judges.

Only the standard library is imported before a package is known to be there, and nothing here raises: what
cannot be found out is None.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drq.cores import usable_cores
from drq.errors import UserError


@dataclass(frozen=True)
class Requirement:
    """A package that training imports, as pyproject.toml asks for it."""

    module: str
    """What is imported to see that it works."""
    oldest: str
    below: str | None = None


REQUIRED = {
    "torch": Requirement("torch", "2.11"),
    "mujoco": Requirement("mujoco", "3.3.3", below="4"),
    "dm_control": Requirement("dm_control.suite", "1.0.31"),
    "gymnasium": Requirement("gymnasium", "1.2", below="2"),
    "numpy": Requirement("numpy", "1.26"),
    "tyro": Requirement("tyro", "1.0.2"),
    "rich": Requirement("rich", "13"),
    "tensorboard": Requirement("tensorboard", "2.17"),
    "imageio": Requirement("imageio", "2.34"),
    "imageio-ffmpeg": Requirement("imageio_ffmpeg", "0.5"),
    "pillow": Requirement("PIL", "10"),
    "safetensors": Requirement("safetensors", "0.5"),
    "scipy": Requirement("scipy", "1.13"),
    "matplotlib": Requirement("matplotlib", "3.8"),
}
OPTIONAL = {
    "ale-py": ("atari", "Atari tasks need it"),
    "ray": ("ray", "the Ray launcher needs it"),
    "wandb": ("wandb", "`--wandb` needs it"),
}
"""Package -> the extra that brings it, and what it is for."""


@dataclass(frozen=True)
class GPU:
    name: str
    total: int
    """Bytes."""
    free: int
    """Bytes."""
    bf16: bool


@dataclass(frozen=True)
class BrokenGPU:
    """One that `--device auto` would choose and fail with."""

    name: str
    reason: str


@dataclass(frozen=True)
class Renderer:
    name: str
    software: bool


@dataclass(frozen=True)
class ReplaySize:
    transitions: int
    bytes: int


@dataclass(frozen=True)
class Machine:
    """What `probe` found."""

    python: tuple[int, ...]
    drq: str | None
    commit: str | None
    versions: Mapping[str, str]
    """Of the packages in REQUIRED and OPTIONAL that are installed."""
    import_errors: Mapping[str, str]
    """Of those required that are installed and do not import: why."""
    cuda: str | None
    """The CUDA version that torch was built with."""
    gpu: GPU | BrokenGPU | None
    """The one that would train. None: training would be on the CPU."""
    cuda_warning: str | None
    """What torch said when it looked for a GPU."""
    nvidia_device: bool
    """The system shows an NVIDIA GPU, whatever torch says."""
    cpu_cores: int
    memory_free: int | None
    """Host memory in bytes, within the limit of a container."""
    compiler: bool
    python_headers: bool
    rays: Literal["cuda", "ray"] | None
    """What `--env.render auto` is for most tasks; None: OpenGL."""
    renderer: Renderer | str
    """What draws, or the sentence why nothing does."""
    replay: ReplaySize | None
    """That of the default run."""
    directory: Path
    """Where runs are written."""
    writable: bool
    disk_free: int
    """Bytes."""
    ffmpeg: str | None


def probe(directory: Path) -> Machine:
    """Looks at this machine. `directory` is where runs would be written."""
    installed = {name: installed_version(name) for name in (*REQUIRED, *OPTIONAL)}
    versions = {name: version for name, version in installed.items() if version is not None}
    tried = {name: _import_error(REQUIRED[name].module) for name in REQUIRED if name in versions}
    import_errors = {name: error for name, error in tried.items() if error is not None}
    usable = versions.keys() - import_errors.keys()
    cuda, gpu, cuda_warning = _cuda() if "torch" in usable else (None, None, None)
    # The run folder is made when a run begins: what counts is the folder it would be made in.
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return Machine(
        python=sys.version_info[:3],
        drq=installed_version("drq"),
        commit=_commit(),
        versions=versions,
        import_errors=import_errors,
        cuda=cuda,
        gpu=gpu,
        cuda_warning=cuda_warning,
        nvidia_device=any(Path("/dev").glob("nvidia[0-9]*")),
        cpu_cores=usable_cores(),
        memory_free=free_memory(),
        compiler=any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        rays=_rays(gpu) if {"torch", "numpy", "tyro"} <= usable else None,
        renderer=_renderer() if {"numpy", "mujoco"} <= usable else "cannot be tried without mujoco.",
        replay=_default_replay() if {"torch", "numpy", "tyro"} <= usable else None,
        directory=directory,
        writable=existing.is_dir() and os.access(existing, os.W_OK),
        disk_free=shutil.disk_usage(existing).free,
        ffmpeg=_ffmpeg(),
    )


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        from drq.training.folder import git_commit
    except ImportError:  # it needs packages that may be missing
        return None
    return git_commit()


def free_memory(root: Path = Path("/")) -> int | None:
    """Host memory in bytes that can be had without swapping, within a container's limit. None off Linux."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    group = root / "sys/fs/cgroup"
    with suppress(OSError, ValueError):  # no such file or the word "max": no limit
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Cached files count as used, but give way.
        free = min(free, limit - used + int(statistics.get("inactive_file", 0)))
    return max(free, 0)


def _reason(error: Exception) -> str:
    """An exception in one line, to stand inside a sentence."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _import_error(module: str) -> str | None:
    """Why a module does not import. It may raise anything: for a missing library OSError, for versions that do
    not fit each other AttributeError."""
    try:
        if module.startswith(("mujoco", "dm_control")):
            from drq.envs.rendering import mujoco_imports

            with mujoco_imports():
                importlib.import_module(module)
        else:
            importlib.import_module(module)
    except Exception as error:
        return _reason(error)
    return None


def _cuda() -> tuple[str | None, GPU | BrokenGPU | None, str | None]:
    """The fields `cuda`, `gpu` and `cuda_warning`. A GPU works if it has done a little work."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    warning = str(said[0].message).splitlines()[0].rstrip(".") if said else None
    if not available:
        return torch.version.cuda, None, warning
    name = "the GPU"
    try:
        name = torch.cuda.get_device_name()
        ones = torch.ones(16, 16, device="cuda")
        torch.equal(ones @ ones, 16 * ones)  # a build without code for this GPU fails here
        free, total = torch.cuda.mem_get_info()
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    except Exception as error:
        return torch.version.cuda, BrokenGPU(name, _reason(error)), warning
    return torch.version.cuda, GPU(name, total, free, bf16), warning


def _rays(gpu: GPU | BrokenGPU | None) -> Literal["cuda", "ray"] | None:
    from drq.engine import kernels
    from drq.envs.raycast import compiler
    from drq.envs.rendering import choose_backend, missing_libraries

    if compiler() is None:
        return None
    if not isinstance(gpu, GPU):
        return "ray"
    if kernels.available():
        return "cuda"
    return "ray" if missing_libraries(choose_backend()) else None  # as `choose_render` of the control suite decides


def _renderer() -> Renderer | str:
    from drq.envs.rendering import is_software, renderer_name

    try:
        name = renderer_name()
    except UserError as error:
        return str(error)
    return Renderer(name, is_software(name))


def _default_replay() -> ReplaySize:
    """The memory of `drq train dmc/walker-walk`."""
    from drq.config import EnvConfig, ReplayConfig
    from drq.envs.protocol import EnvSpec
    from drq.replay import Replay

    env = EnvConfig()
    spec = EnvSpec(
        task="dmc/walker-walk",
        frame_shape=(3, env.image_size, env.image_size),
        frame_stack=env.frame_stack,
        action_kind="continuous",
        action_size=6,
        action_repeat=2,
        max_episode_agent_steps=500,
    )
    capacity = ReplayConfig().capacity or 0
    return ReplaySize(capacity, Replay.bytes_needed(spec, capacity))


def _ffmpeg() -> str | None:
    """The program that writes videos: the one that imageio-ffmpeg brings, or the system's."""
    try:
        import imageio_ffmpeg

        executable: str = imageio_ffmpeg.get_ffmpeg_exe()
    except Exception:  # the package may be missing, or have no program for this system
        return shutil.which("ffmpeg")
    return executable
