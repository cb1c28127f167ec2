"""CUDA kernels on the CPU: their own text, compiled with kernel_emulator.h by a C++ compiler."""

from __future__ import annotations

import ctypes
import hashlib
import math
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drq.engine import EngineSettings, FastBackend
from drq.engine.kernels import runtime

needs_hopper = pytest.mark.skipif(
    not (runtime.available() and runtime.multiplies_wide()), reason="needs a GPU of NVIDIA's Hopper architecture"
)
needs_bfloat16 = pytest.mark.skipif(not runtime.available(), reason="needs a CUDA GPU with bfloat16")

EMULATOR = Path(__file__).parent / "kernel_emulator.h"
OPTIONS = ("-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-shared", "-fPIC")


class EmulatedKernel:
    """A kernel compiled for the CPU. Three blocks at a time, so that small inputs make a block work more than once."""

    resident_blocks = 3

    def __init__(self, library: Path, threads: int, shared_bytes: int) -> None:
        self._run = ctypes.CDLL(str(library)).run
        self._shape = threads, shared_bytes

    def launch(self, grid: tuple[int, int], *arguments: runtime.Argument) -> None:
        assert all(a.is_contiguous() for a in arguments if isinstance(a, Tensor))
        self.launch_prepared(grid, runtime.argument_array(arguments))

    def launch_prepared(self, grid: tuple[int, int], arguments: ctypes.Array[ctypes.c_void_p]) -> None:
        self._run(arguments, *grid, *self._shape)


class Emulator:
    """Stands in for `runtime.kernel`. What it compiles stays in the folder, for other processes and for next time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._compiler = subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout
        self._built: dict[str, EmulatedKernel] = {}
        # Read once for all kernels: its own includes take most of the time.
        self._header = self._made(EMULATOR.read_text(), "c++-header", ".h.gch").with_suffix("")

    def kernel(
        self, name: str, parts: Sequence[str], defines: Mapping[str, int | str], threads: int, shared_bytes: int
    ) -> EmulatedKernel:
        text = runtime.program_text([part for part in parts if part != "primitives.cuh"], defines)
        if text not in self._built:
            self._built[text] = EmulatedKernel(self._library(name, text), threads, shared_bytes)
        return self._built[text]

    def _library(self, name: str, text: str) -> Path:
        entry = f'extern "C" void run(void** a, int x, int y, int t, int s) {{ emulate({name}, a, x, y, t, s); }}'
        return self._made(f"{text}\n{entry}\n", "c++", ".so", "-include", str(self._header))

    def _made(self, text: str, language: str, suffix: str, *options: str) -> Path:
        command = ["g++", *OPTIONS, *options, "-x", language]
        key = "\n".join((self._compiler, *command, text))
        made = self._folder / (hashlib.sha256(key.encode()).hexdigest()[:32] + suffix)
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=self._folder) as place:
                source, unfinished = Path(place) / "source", Path(place) / "made"
                source.write_text(text)
                subprocess.run([*command, str(source), "-o", str(unfinished)], check=True)
                unfinished.rename(made)  # whole, though another process may do the same
        return made


def fast_backend(device: str) -> FastBackend:
    """With kernels, emulated or not."""
    settings = EngineSettings(torch.device(device), "float32", False, False, kernels=True, eval_process=False)
    backend = FastBackend(settings)
    backend.kernels = True
    return backend


def two_gigabytes(device: str, frame_shape: tuple[int, ...]) -> Tensor:
    """Frames of zeros; the last ten begin where no int reaches. On the CPU only what is written is ever there."""
    shape = 2**31 // math.prod(frame_shape) + 11, *frame_shape
    if device == "cpu":
        return torch.from_numpy(np.zeros(shape, np.uint8))
    return torch.zeros(shape, dtype=torch.uint8, device=device)


class Recorded(TorchDispatchMode):
    """Operators that do more than look at memory otherwise: on a GPU, launches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not operator.is_view and operator.namespace != "profiler":
            self.names.append(operator.name())
        return operator(*args, **kwargs or {})
