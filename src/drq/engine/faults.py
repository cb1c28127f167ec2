"""A GPU that has no memory left, or fails: recognised by what PyTorch raises, and put into words."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from drq.engine.kernels import KernelError

NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "size calculation overflowed")
"""In the texts of CUDA, of PyTorch's allocator on the host, of cuBLAS and cuDNN, and of what no machine has."""
FAILED = ("CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS_STATUS", "CUDNN_STATUS", "NVML")

NO_CODE = "no kernel image is available"
"""What CUDA says of a GPU that PyTorch was not built for."""


def lacks_memory(error: BaseException) -> bool:
    """Whether the GPU, or the host, has no memory left."""
    return any(
        isinstance(each, torch.OutOfMemoryError | MemoryError)
        or (isinstance(each, RuntimeError) and any(text in str(each) for text in NO_MEMORY))
        for each in _and_before(error)
    )


def gpu_failed(error: BaseException) -> bool:
    """Whether the GPU is lost to this process: by a fault of its own, or of another process that shares it by MPS."""
    return isinstance(error, torch.AcceleratorError | KernelError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in FAILED)
    )


def lacks_code(error: BaseException) -> bool:
    """Whether this build of PyTorch is for other GPUs: older ones, or newer."""
    return isinstance(error, RuntimeError) and NO_CODE in str(error)


def in_words(error: BaseException) -> str | None:
    """What has happened to the device, up to what can be done about it; None for any other error."""
    reason = str(error).partition("\n")[0].partition(". GPU")[0].rstrip(".") or type(error).__name__
    if lacks_memory(error):
        return f"There is no memory left ({reason}{_memory_of_gpu()})"
    if lacks_code(error):
        return f"This PyTorch is not built for this GPU ({reason})"
    return f"The GPU failed ({reason})" if gpu_failed(error) else None


def _and_before(error: BaseException) -> Iterator[BaseException]:
    """An error, and those it followed: where a graph is captured, want of memory shows as a capture that failed."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def _memory_of_gpu() -> str:
    """What of it is whose, where there is one to ask."""
    try:
        if not torch.cuda.is_initialized():
            return ""
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
    except RuntimeError:  # it does not even answer that
        return ""
    return f"; of the GPU's {total / 1e9:.1f} GB this process holds {held / 1e9:.2f} and {free / 1e9:.2f} are free"
