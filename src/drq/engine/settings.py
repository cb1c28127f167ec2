"""From what was asked for to what this machine will do: device, precision, compilation, CUDA graphs."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from drq.config import AgentConfig, DQNConfig, EngineConfig
from drq.engine import kernels
from drq.errors import UserError

WORTH_COMPILING = 100_000
"""Updates from which compiling pays. On an H200 it takes 15 to 25 s and saves 0.27 of 2.67 ms a paper update, less
where it is the environment that a run waits for."""


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device to learn on. auto: the GPU if there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "This PyTorch sees no CUDA device: leave --device out to train on the CPU, "
            "or install a CUDA build of PyTorch (drq doctor shows what is here)."
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def keep_freed_memory() -> None:
    """Has glibc keep what it frees, instead of giving large blocks back to the system and asking for them again.

    Every update allocates the same activations, hundreds of megabytes, and the system hands out pages one fault at a
    time: 1.7 times the time of a float32 update on two cores.
    """
    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
    with suppress(OSError, AttributeError):  # another C library keeps its own counsel
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def computes_in_bf16(device: torch.device) -> bool:
    """Whether bfloat16 is the device's own arithmetic. Where it is emulated it would only lose time."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # PyTorch 2.11 has none
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@dataclass(frozen=True)
class EngineSettings:
    """Resolved engine settings."""

    device: torch.device
    precision: Literal["float32", "tf32", "bf16"]
    compile: bool
    cuda_graphs: bool
    kernels: bool
    eval_process: bool

    @staticmethod
    def resolve(
        config: EngineConfig, device: torch.device, agent: AgentConfig, updates: int | None = None
    ) -> EngineSettings:
        """Settings for this device. `updates` is the length of the run, if it is known: see WORTH_COMPILING."""
        on_gpu = device.type == "cuda"
        precision = config.precision
        if precision == "auto":
            precision = "bf16" if computes_in_bf16(device) else "float32"
            if on_gpu and precision == "bf16" and isinstance(agent, DQNConfig):
                # 32 images are no work for a GPU: turning weights into bfloat16 would cost more than it saves.
                precision = "tf32"
        if precision == "tf32" and not on_gpu:
            raise UserError("tf32 is a GPU's arithmetic: choose --engine.precision float32 or bf16 on the CPU.")
        if config.cuda_graphs == "on" and not on_gpu:
            raise UserError("CUDA graphs need a GPU: leave --engine.cuda-graphs at auto on the CPU.")
        if config.kernels == "on" and not (on_gpu and kernels.available()):
            raise UserError(
                "The kernels need a GPU with bfloat16 (NVIDIA's from compute capability 8.0 on) and NVRTC, which comes "
                "with PyTorch for CUDA: leave --engine.kernels at auto."
            )

        def on(choice: Literal["auto", "on", "off"]) -> bool:
            return on_gpu if choice == "auto" else choice == "on"

        return EngineSettings(
            device=device,
            precision=precision,
            compile=on(config.compile) and (config.compile == "on" or updates is None or updates >= WORTH_COMPILING),
            cuda_graphs=on(config.cuda_graphs),
            kernels=on(config.kernels),
            eval_process=on(config.eval_process),
        )

    @property
    def on_tensor_cores(self) -> bool:
        return self.device.type == "cuda" and self.precision != "float32"

    def apply_globally(self) -> None:
        """Sets the process-wide switches for this device and precision."""
        if self.device.type == "cpu":
            keep_freed_memory()
        else:
            tf32 = self.precision != "float32"
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.allow_tf32 = tf32
            # Timed against each other, convolutions would be other ones in each process, and so would the last bits.
            torch.backends.cudnn.benchmark = False
            torch.backends.cudnn.deterministic = True
