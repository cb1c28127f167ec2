"""What the time of a convolution kernel consists of: the kernel with parts of it taken out.

    python benchmarks/kernel_parts.py

Needs a CUDA GPU. What is taken out leaves a few instructions in its place, so that the compiler keeps the rest; the
result is then wrong, and only its time is looked at. Times are microseconds at 1,024 images, first 32-channel layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from drq.engine.kernels import layers, runtime
from kernels import IMAGES, Problem, median_us

NOTHING = "{{address, address + 1, address + 2, address + 3}}"
"""Instead of what would have been read from that address."""

PARTS: dict[str, dict[str, str]] = {
    "reads": {"i < count * 4; i += THREADS": "i < count * 0; i += THREADS"},
    "writes": {"*(Vec4*)(output + to) = result;": "if (images < 0) *(Vec4*)(output + to) = result;"},
    "products": {
        'asm volatile("mma.sync': "d[0] = __uint_as_float(__float_as_uint(d[0]) ^ a.v[0] ^ b0); "
        'd[1] = __uint_as_float(__float_as_uint(d[1]) ^ a.v[1] ^ b1); if (0) asm volatile("mma.sync'
    },
    "shared memory": {
        'Vec4 r;\n    asm volatile("ldmatrix': f'Vec4 r = {NOTHING};\n    if (0) asm volatile("ldmatrix',
        'Vec4 r;\n    asm volatile("ld.shared.v4': f'Vec4 r = {NOTHING};\n    if (0) asm volatile("ld.shared.v4',
    },
}
"""Parts of a kernel, and what stands in the place of which text where they are taken out."""

ROWS: dict[str, tuple[str, ...]] = {
    "whole": (),
    "without reads and writes of the GPU's memory": ("reads", "writes"),
    "products alone": ("reads", "writes", "shared memory"),
    "everything but the products": ("products",),
    "reads and writes of the GPU's memory alone": ("products", "shared memory"),
}


def taken_out(text: str, parts: Sequence[str]) -> str:
    """A kernel without these parts. A weight gradient writes nothing in its loop: there is nothing to replace."""
    for part in parts:
        for present, instead in PARTS[part].items():
            text = text.replace(present, instead)
    return text


@contextmanager
def without(parts: Sequence[str]) -> Iterator[None]:
    """Kernels lack these parts here."""
    whole = runtime.program_text

    def text(files: Sequence[str], defines: Mapping[str, int | str]) -> str:
        return taken_out(whole(files, defines), parts)

    runtime.program_text = text
    try:
        yield
    finally:
        runtime.program_text = whole


def kernels(p: Problem) -> dict[str, Callable[[int], Any]]:
    """Each from a number of images."""
    weight, bias, x, dy = p.weights[1], p.biases[1], p.x[41], p.gradient[39]
    return {
        "forward": lambda n: layers.conv_forward(x[None, :n], (weight,), (bias,)),
        "input gradient": lambda n: layers.conv_input_gradient(dy[:n], weight, x[:n]),
        "weight gradient": lambda n: layers.conv_weight_gradient(dy[:n], x[:n], weight),
    }


def main() -> None:
    if not runtime.available():
        raise SystemExit("The kernels need a CUDA GPU with bfloat16 (compute capability 8.0): run this on one.")
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    found = kernels(Problem())
    print(f"{'microseconds':46s}" + "".join(f"{name:>17s}" for name in found))
    for row, parts in ROWS.items():
        with without(parts):
            times = [median_us(partial(call, IMAGES)) for call in found.values()]
        print(f"{row:46s}" + "".join(f"{us:17.0f}" for us in times), flush=True)


if __name__ == "__main__":
    main()
