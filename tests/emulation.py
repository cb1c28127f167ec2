"""CUDA kernels on the CPU: their own text, compiled with kernel_emulator.h by a C++ compiler."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from drq.engine.kernels import runtime

EMULATOR = Path(__file__).parent / "kernel_emulator.h"


class EmulatedKernel:
    """A kernel compiled for the CPU. Three blocks at a time, so that small inputs make a block work more than once."""

    resident_blocks = 3

    def __init__(self, name: str, text: str, threads: int, shared_bytes: int, folder: Path) -> None:
        source = folder / (hashlib.sha256(text.encode()).hexdigest()[:16] + ".cpp")
        entry = f'extern "C" void run(void** a, int x, int y, int t, int s) {{ emulate({name}, a, x, y, t, s); }}'
        source.write_text(f'#include "{EMULATOR}"\n{text}\n{entry}\n')
        library = source.with_suffix(".so")
        options = ["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-shared", "-fPIC"]
        subprocess.run(["g++", *options, str(source), "-o", str(library)], check=True)
        self._run = ctypes.CDLL(str(library)).run
        self._shape = threads, shared_bytes

    def launch(self, grid: tuple[int, int], *arguments: runtime.Argument) -> None:
        assert all(a.is_contiguous() for a in arguments if isinstance(a, Tensor))
        self.launch_prepared(grid, runtime.argument_array(arguments))

    def launch_prepared(self, grid: tuple[int, int], arguments: ctypes.Array[ctypes.c_void_p]) -> None:
        self._run(arguments, *grid, *self._shape)


class Emulator:
    """Stands in for `runtime.kernel`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[str, EmulatedKernel] = {}

    def kernel(
        self, name: str, parts: Sequence[str], defines: Mapping[str, int | str], threads: int, shared_bytes: int
    ) -> EmulatedKernel:
        text = runtime.program_text([part for part in parts if part != "primitives.cuh"], defines)
        if text not in self._built:
            self._built[text] = EmulatedKernel(name, text, threads, shared_bytes, self._folder)
        return self._built[text]
