"""Compiles CUDA C++ with the NVRTC that comes with PyTorch, and launches the result on PyTorch's current stream.

No compiler, no header and no further package is needed on the user's machine. A launch neither allocates nor waits, so
it can be captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from drq.code_cache import code_for

SOURCES = Path(__file__).parent
EXACT = "#define EXACT 1\n"
"""In a program that defines this no product is fused with a sum: it computes what a CPU would, to the last bit."""
MOST_ELEMENTS = 2**31
"""Of what a convolution reads or writes, as far as kernels of ours count in 32 bits: 4,755 images of `strong`."""
Argument = torch.Tensor | int | float | ctypes.c_int | ctypes.c_double | ctypes.c_void_p | ctypes.Structure | None

_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PREFERRED_SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_MAX_SHARED_PER_BLOCK = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


class KernelError(RuntimeError):
    """A kernel could not be compiled, loaded or launched."""


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").split(".")[0]  # any will do where PyTorch has none: nothing is launched there
    nvidia = importlib.util.find_spec("nvidia")  # what all of NVIDIA's wheels are parts of
    folders = (nvidia.submodule_search_locations if nvidia else None) or ()

    def in_wheels(file: str) -> list[str]:
        return sorted(found for folder in folders for found in glob.glob(f"{folder}/*/lib/{file}"))

    # PyTorch's own shim pulls the library in; a wheel's folder and the system's search path are the other places. In a
    # wheel NVRTC needs a second library, and does not look for it beside itself.
    shim = str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so")
    for first in (shim, *in_wheels(f"libnvrtc-builtins.so.{major}*")):
        with suppress(OSError):
            ctypes.CDLL(first)
    wheels = in_wheels(f"libnvrtc.so.{major}*")
    for name in (f"libnvrtc.so.{major}", *wheels, "libnvrtc.so", f"nvrtc64_{major}0_0.dll"):
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise KernelError("NVRTC, which comes with PyTorch for CUDA, was not found")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError as error:
        raise KernelError("the CUDA driver library was not found") from error


@functools.cache
def available() -> bool:
    """Whether this machine can compile and run the kernels: a CUDA GPU with bfloat16 tensor cores, and NVRTC."""
    if not torch.cuda.is_available() or torch.version.cuda is None or torch.cuda.get_device_capability() < (8, 0):
        return False
    try:
        _nvrtc()
        _driver()
    except KernelError:
        return False
    return True


def program_text(parts: Sequence[str], defines: Mapping[str, int | str]) -> str:
    """The parts of one kernel behind each other, its compile-time values first. One text: nothing is included."""
    head = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return head + "".join((SOURCES / part).read_text() for part in parts)


def compile_program(text: str, architecture: str) -> bytes:
    """Machine code for one architecture, such as sm_90."""
    return compile_with_log(text, architecture)[0]


def compile_with_log(text: str, architecture: str, *options: str) -> tuple[bytes, str]:
    """The machine code, and what NVRTC with further options says of it."""
    nvrtc = _nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"drq.cu", 0, None, None):
        raise KernelError("NVRTC did not accept the program")
    try:
        fused = f"--fmad={'false' if EXACT in text else 'true'}"
        given = [each.encode() for each in (f"--gpu-architecture={architecture}", "--std=c++17", fused, *options)]
        failed = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        if failed:
            raise KernelError(f"a kernel does not compile for {architecture}:\n{log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code.raw, log.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise KernelError(f"{what}: {(text.value or b'unknown error').decode()}")


def shared_bytes_per_block() -> int:
    """The most shared memory a block can have on the current device."""
    value, device = ctypes.c_int(), ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()), "finding the device")
    read = _driver().cuDeviceGetAttribute
    _check(read(ctypes.byref(value), _MAX_SHARED_PER_BLOCK, device), "reading the shared memory")
    return value.value


def argument_array(arguments: Sequence[Argument]) -> ctypes.Array[ctypes.c_void_p]:
    """Pointers to the values of the arguments, as a kernel launch takes them. ctypes objects may change their value."""
    values: list[ctypes.c_void_p | ctypes.c_int | ctypes.c_float | ctypes.c_double | ctypes.Structure] = []
    for argument in arguments:
        if argument is None:
            values.append(ctypes.c_void_p(0))
        elif isinstance(argument, torch.Tensor):
            values.append(ctypes.c_void_p(argument.data_ptr()))
        elif isinstance(argument, ctypes.c_int | ctypes.c_double | ctypes.c_void_p | ctypes.Structure):
            values.append(argument)
        elif isinstance(argument, int):
            values.append(ctypes.c_int(argument))
        else:
            values.append(ctypes.c_float(argument))
    array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    array._values = values  # type: ignore[attr-defined]  # the values live as long as the pointers to them
    return array


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), "finding the device")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "entering the device's context")
    return context


def _enter_context() -> None:
    """Makes PyTorch's context current: threads of the autograd engine may not have one yet."""
    current = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(current)), "finding the context")
    if not current.value:
        context = _primary_context(torch.cuda.current_device())
        _check(_driver().cuCtxSetCurrent(context), "entering the device's context")


class Launchable(Protocol):
    """What the layers need of a kernel."""

    @property
    def resident_blocks(self) -> int:
        """Blocks the device runs at once."""

    def launch(self, grid: tuple[int, int], *arguments: Argument) -> None: ...

    def launch_prepared(self, grid: tuple[int, int], arguments: ctypes.Array[ctypes.c_void_p]) -> None:
        """With an `argument_array`, for a kernel launched so often that making one anew each time is felt."""


class Kernel:
    """A compiled kernel, loaded on the current device."""

    def __init__(self, name: str, code: bytes, threads: int, shared_bytes: int) -> None:
        _enter_context()
        driver = _driver()
        self.name, self.threads, self.shared_bytes = name, threads, shared_bytes
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), code), f"loading {name}")
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), f"finding {name}")
        set_attribute = driver.cuFuncSetAttribute
        _check(set_attribute(self._function, _MAX_DYNAMIC_SHARED_SIZE, shared_bytes), f"shared memory of {name}")
        _check(set_attribute(self._function, _PREFERRED_SHARED_CARVEOUT, 100), f"shared memory of {name}")
        resident = ctypes.c_int()
        occupancy = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        _check(
            occupancy(ctypes.byref(resident), self._function, threads, ctypes.c_size_t(shared_bytes)),
            f"occupancy of {name}",
        )
        if not resident.value:
            raise KernelError(f"{name} does not fit on a multiprocessor")
        self.resident_blocks = resident.value * torch.cuda.get_device_properties().multi_processor_count

    def launch(self, grid: tuple[int, int], *arguments: Argument) -> None:
        self.launch_prepared(grid, argument_array(arguments))

    def launch_prepared(self, grid: tuple[int, int], arguments: ctypes.Array[ctypes.c_void_p]) -> None:
        _enter_context()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(
            _driver().cuLaunchKernel(
                self._function, *grid, 1, self.threads, 1, 1, self.shared_bytes, stream, arguments, None
            ),
            f"launching {self.name}",
        )


class _Unlaunched:
    """Stands in for a kernel while `compile_together` finds out which ones are needed."""

    resident_blocks = 1

    def launch(self, grid: tuple[int, int], *arguments: Argument) -> None:
        pass

    def launch_prepared(self, grid: tuple[int, int], arguments: ctypes.Array[ctypes.c_void_p]) -> None:
        pass


_kernels: dict[tuple[str, int], Kernel] = {}
_codes: dict[tuple[str, str], bytes] = {}
_wanted: dict[str, tuple[str, int, int]] | None = None
_lock = threading.RLock()


def multiplies_wide() -> bool:
    """Whether the current GPU has Hopper's matrix instructions, which what comes after it does not have either."""
    return torch.cuda.get_device_capability() == (9, 0)


def _architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + ("a" if multiplies_wide() else "")


def kernel(
    name: str, parts: Sequence[str], defines: Mapping[str, int | str], threads: int, shared_bytes: int
) -> Launchable:
    """The kernel `name` of this program text on the current device, compiled when first asked for."""
    text = program_text(parts, defines)
    with _lock:
        if _wanted is not None:
            _wanted[text] = (name, threads, shared_bytes)
            return _Unlaunched()
        return _loaded(text, name, threads, shared_bytes)


def _loaded(text: str, name: str, threads: int, shared_bytes: int) -> Kernel:
    key = (text, torch.cuda.current_device())
    if key not in _kernels:
        architecture = _architecture()
        code = _codes.get((text, architecture)) or _code(text, architecture)
        _kernels[key] = Kernel(name, code, threads, shared_bytes)
    return _kernels[key]


def _code(text: str, architecture: str) -> bytes:
    made_from = f"{torch.version.cuda} {architecture}\n{text}"
    return code_for(made_from, lambda: compile_program(text, architecture))


def compile_together(calls: Callable[[], None]) -> None:
    """Compiles in parallel, and loads, the kernels that `calls` would launch. Nothing is launched, no data is read."""
    global _wanted
    with _lock:
        _wanted = {}
        try:
            calls()
            wanted = _wanted
        finally:
            _wanted = None
        if not wanted:
            return
        architecture = _architecture()
        texts = [text for text in wanted if (text, architecture) not in _codes]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for text, code in zip(texts, pool.map(lambda t: _code(t, architecture), texts), strict=True):
                _codes[text, architecture] = code
        for text, asked in wanted.items():
            _loaded(text, *asked)
