"""benchmarks/kernel_parts.py, as far as it can be tried without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import kernel_parts  # noqa: E402
from drq.engine.kernels import runtime  # noqa: E402

FILES = {
    "forward": ("primitives.cuh", "common.cuh", "padded.cuh", "conv.cu"),
    "weight gradient": ("primitives.cuh", "common.cuh", "padded.cuh", "weight_sums.cuh", "conv_weight.cu"),
}


@pytest.mark.parametrize("part", kernel_parts.PARTS)
@pytest.mark.parametrize("kernel", FILES)
def test_every_part_is_found_where_it_is_taken_out(kernel: str, part: str) -> None:
    """A kernel that is written anew must not leave the script measuring the whole of it under another name."""
    text = runtime.program_text(FILES[kernel], {})
    found = [present in text for present in kernel_parts.PARTS[part]]
    assert all(found) or (kernel, part) == ("weight gradient", "writes")
    with kernel_parts.without([part]):
        assert (runtime.program_text(FILES[kernel], {}) != text) == any(found)
    assert runtime.program_text(FILES[kernel], {}) == text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    program = [sys.executable, str(BENCHMARKS / "kernel_parts.py")]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "The kernels need a CUDA GPU with bfloat16 (compute capability 8.0): run this on one."
