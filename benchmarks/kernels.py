"""Checks and times the encoder's kernels, several ways of cutting their work, against cuDNN and the bytes they move.

    python benchmarks/kernels.py

Needs a CUDA GPU. Every variant is first checked against float32 PyTorch on fresh random inputs, with results that
start as NaNs; a variant that is wrong, does not compile or does not fit is listed, and never chosen. Times are medians
of CUDA-graph replays. Floors count every input byte read once and every output byte written once.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drq.engine.kernels import encode_views, encode_views_two, encoder, layers, reference, runtime
from drq.engine.kernels.layers import Tiling

FLOOR_BYTES_PER_US = 4.3e6  # a large device-to-device copy on an H200
TOLERANCE = 1e-2
IMAGES, SMALL, CHECKED = 1024, 512, 48
SIZES = (41, 39, 37)  # inputs of the 32-channel layers

LETTERS = {"w": "warps", "t": "tiles", "s": "stages", "b": "blocks", "x": "repeat", "r": "rows"}

VARIANTS = {  # under the names of their defaults in `layers`; fields of a Tiling that are not named keep their defaults
    "FORWARD": "4w 6t 2s 2b | 4w 4t 4b | 4w 6t 3b | 4w 2t 2s 2b 2x held | 8w 1t 2s 4x held | 8w 3t 2s 2x held",
    "INPUT_GRADIENT": "8w 2t 3b | 4w 2t 5b | 4w 4t 4b | 8w 4t 2b 2x | 8w 2t 3b ahead | 4w 2t 5b ahead | "
    "4w 4t 4b ahead | 4w 4t 3b ahead | 4w 4t 2s 3b ahead | 4w 2t 2s 4b ahead | 4w 6t 2s 2b ahead",
    "WEIGHT_GRADIENT": "3w 8t 2s 4b | 3w 8t 4b | 6w 4t 2s 2b | 6w 6t 2s 2b | 6w 8t 2s 2b",
    "FIRST": "9w 2t 3b | 8w 2t 3b 6r | 4w 2t 6b 3r | 6w 3t 3b | 8w 2t 3b 6r ahead | 6w 3t 3b 6r ahead | "
    "4w 2t 5b 3r ahead | 4w 3t 4b 4r ahead | 9w 2t 2b ahead",
    "FIRST_TWO": "4w 2t 4b 3r | 9w 2t 2b | 8w 2t 2b 6r | 6w 3t 2b | 4w 2t 4b 3r ahead | 8w 2t 2b 6r ahead | "
    "6w 3t 2b 6r ahead | 5w 2t 3b 4r ahead",
    "FIRST_WEIGHT": "6w 2b | 9w 2b | 6w 3b 4r | 12w 2b | 6w 2b 6r ahead | 9w 2b 6r ahead | 6w 3b 4r ahead | "
    "6w 4b 3r ahead",
}


def tilings(kind: str) -> dict[str, Tiling]:
    """The variants of a kind of kernel, by their text."""
    found = {}
    for text in VARIANTS[kind].split(" | "):
        numbers = {LETTERS[word[-1]]: int(word[:-1]) for word in text.split() if word[0].isdigit()}
        found[text] = Tiling(**numbers, held="held" in text, ahead="ahead" in text)
    return found


@dataclass
class Operation:
    """One kernel on one shape: how to call it, what it should give, what it must move, what cuDNN does instead."""

    name: str
    kind: str
    """Key of its variants."""
    call: Callable[[int, Tiling], Sequence[Tensor]]
    """From a number of images."""
    expected: Callable[[int], Sequence[Tensor]]
    megabytes: float
    library: Callable[[], Any]
    library_us: float = math.nan
    error: float = 0.0
    """The largest among the variants that work."""
    us: dict[str, float] = field(default_factory=dict)
    """Of each variant that works."""


def median_us(call: Callable[[], Any], repeats: int = 4, replays: int = 9) -> float:
    """Median over graph replays of the time of one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / repeats)
    return statistics.median(times)


def relative_error(found: Tensor, expected: Tensor) -> float:
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    return error if math.isfinite(error) else math.inf


def nhwc(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous()


def nchw(x: Tensor) -> Tensor:
    """The same memory seen as PyTorch's channels-last format."""
    return x.permute(0, 3, 1, 2)


def in_bfloat16(weight: Tensor) -> Tensor:
    """As cuDNN likes it: channels-last, at least 16 input channels."""
    missing = max(0, 16 - weight.shape[1])
    return F.pad(weight, (0, 0, 0, 0, 0, missing)).bfloat16().to(memory_format=torch.channels_last)


def backward(gradient: Tensor, x: Tensor, weight: Tensor, stride: int, mask: list[bool]) -> tuple[Tensor, ...]:
    """Gradients of x, weight and bias, where `mask` asks for them."""
    where = [stride, stride], [0, 0], [1, 1], False, [0, 0], 1
    return tuple(torch.ops.aten.convolution_backward(gradient, x, weight, [32], *where, mask))


def network() -> tuple[list[Tensor], list[Tensor]]:
    channels = (9, 32, 32, 32)
    weights = [torch.randn(32, c, 3, 3, device="cuda") * (2 / (9 * c)) ** 0.5 for c in channels]
    return weights, [torch.randn(32, device="cuda") * 0.1 for _ in channels]


class Problem:
    """Random inputs of every operation, drawn anew for each run."""

    def __init__(self) -> None:
        self.frames = torch.randint(0, 256, (20_000, 3, 84, 84), dtype=torch.uint8, device="cuda")
        self.slots = torch.randint(0, len(self.frames), (IMAGES, 3), device="cuda")
        self.shifts = torch.randint(-4, 5, (IMAGES, 2), device="cuda", dtype=torch.int32)
        (self.weights, self.biases), (self.weights_b, self.biases_b) = network(), network()
        self.x = {n: torch.randn(IMAGES, n, n, 32, device="cuda").relu().bfloat16() for n in SIZES}
        self.gradient = {n: torch.randn(IMAGES, n, n, 32, device="cuda").bfloat16() for n in (*SIZES, 35)}

    def views(self, images: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.frames, self.slots[:images], self.shifts[:images]


def library_forward(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Callable[[], Tensor]:
    weight, bias = in_bfloat16(weight), bias.bfloat16()
    return torch.no_grad()(torch.compile(lambda: F.relu(F.conv2d(x, weight, bias, stride)), dynamic=False))


def megabytes(size: int) -> float:
    """Of an activation."""
    return IMAGES * size * size * 64 / 1e6


def first_operations(p: Problem) -> list[Operation]:
    networks = ((p.weights[0], p.biases[0]), (p.weights_b[0], p.biases_b[0]))
    pixels = IMAGES * 84 * 84 * 9 / 1e6
    sums = [False, True, True]

    def seen(n: int) -> Tensor:
        return reference.perturbed_views(*p.views(n))

    padded = F.pad(seen(IMAGES), (0, 0, 0, 0, 0, 7)).bfloat16().to(memory_format=torch.channels_last) / 255
    library = library_forward(padded, *networks[0], 2)

    def forward(count: int, n: int, tiling: Tiling) -> Sequence[Tensor]:
        weights, biases = zip(*networks[:count], strict=True)
        return list(layers.first_forward(*p.views(n), weights, biases, tiling))

    def expected(count: int, n: int) -> Sequence[Tensor]:
        return [nhwc(reference.convolve(seen(n), [weight], [bias])[0]) for weight, bias in networks[:count]]

    moved, both = pixels + megabytes(41), pixels + 2 * megabytes(41)
    return [
        Operation("first x1", "FIRST", partial(forward, 1), partial(expected, 1), moved, library),
        Operation(
            "first x2", "FIRST_TWO", partial(forward, 2), partial(expected, 2), both, lambda: (library(), library())
        ),
        Operation(
            "first weight",
            "FIRST_WEIGHT",
            lambda n, tiling: layers.first_weight_gradient(p.gradient[41][:n], *p.views(n), p.weights[0], tiling),
            lambda n: backward(nchw(p.gradient[41][:n]).float(), seen(n).float() / 255, p.weights[0], 2, sums)[1:],
            moved,
            lambda: backward(nchw(p.gradient[41]), padded, in_bfloat16(p.weights[0]), 2, sums),
        ),
    ]


def layer_operations(p: Problem, index: int, size: int) -> list[Operation]:
    """Forward pass, input gradient and weight gradient of one 32-channel layer."""
    weight, bias, x, dy = p.weights[index], p.biases[index], p.x[size], p.gradient[size - 2]
    moved, library = megabytes(size) + megabytes(size - 2), partial(backward, nchw(dy), nchw(x), in_bfloat16(weight), 1)
    return [
        Operation(
            f"forward {size}",
            "FORWARD",
            lambda n, tiling: list(layers.conv_forward(x[None, :n], (weight,), (bias,), tiling)),
            lambda n: [nhwc(F.relu(F.conv2d(nchw(x[:n]).float(), weight, bias)))],
            moved,
            library_forward(nchw(x), weight, bias, 1),
        ),
        Operation(
            f"input {size}",
            "INPUT_GRADIENT",
            lambda n, tiling: [layers.conv_input_gradient(dy[:n], weight, x[:n], tiling)],
            lambda n: [torch.where(x[:n] > 0, nhwc(F.conv_transpose2d(nchw(dy[:n]).float(), weight)), 0)],
            moved + megabytes(size),
            partial(library, [True, False, False]),
        ),
        Operation(
            f"weight {size}",
            "WEIGHT_GRADIENT",
            lambda n, tiling: layers.conv_weight_gradient(dy[:n], x[:n], weight, tiling),
            lambda n: backward(nchw(dy[:n]).float(), nchw(x[:n]).float(), weight, 1, [False, True, True])[1:],
            moved,
            partial(library, [False, True, True]),
        ),
    ]


def compile_everything(found: list[Operation]) -> None:
    """All variants at once, on all cores. What fails here fails again, and is listed, when it is measured."""

    def every_call() -> None:
        for operation in found:
            for tiling in tilings(operation.kind).values():
                operation.call(1, tiling)

    try:
        runtime.compile_together(every_call)
    except runtime.KernelError as error:
        print(f"a variant failed: {error}")


def check(operation: Operation, tiling: Tiling, expected: Sequence[Tensor]) -> float:
    """The variant's error; `KernelError` if it is too large, or the variant does not even run."""
    torch.use_deterministic_algorithms(True)  # makes every new tensor start as NaNs
    try:
        found, again = (operation.call(CHECKED, tiling) for _ in range(2))
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    error = max(relative_error(f, e) for f, e in zip(found, expected, strict=True))
    if not error < TOLERANCE:
        raise runtime.KernelError(f"wrong: error {error:.2g}")
    if any(not torch.equal(a, b) for a, b in zip(found, again, strict=True)):
        raise runtime.KernelError("two runs differ")
    return error


def measure(operation: Operation) -> None:
    """Checks and times every variant of an operation."""
    expected = operation.expected(CHECKED)
    for variant, tiling in tilings(operation.kind).items():
        try:
            operation.error = max(operation.error, check(operation, tiling, expected))
            operation.us[variant] = median_us(partial(operation.call, IMAGES, tiling))
        except runtime.KernelError as error:
            print(f"FAILED {operation.name:16s} {variant:24s} {str(error).splitlines()[0]}")
    operation.library_us = median_us(operation.library)


def choose(found: list[Operation]) -> None:
    """For each kind of kernel the variant with the least time over its layers becomes the default of this run."""
    print("\nbest over the layers")
    for kind in VARIANTS:
        members = [o.us for o in found if o.kind == kind]
        total = {variant: sum(us.get(variant, math.inf) for us in members) for variant in tilings(kind)}
        best = min(total, key=lambda variant: total[variant])
        print(f"{kind:16s} {best}")
        setattr(layers, kind, tilings(kind)[best])


def library_encoder(
    frames: Tensor, slots: Tensor, shifts: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """The encoder as PyTorch runs it best: 16 input channels, channels_last, bfloat16."""
    x = F.pad(reference.perturbed_views(frames, slots, shifts), (0, 0, 0, 0, 0, 16 - weights[0].shape[1]))
    x = (x.bfloat16() / 255).to(memory_format=torch.channels_last)
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = F.relu(F.conv2d(x, in_bfloat16(weight), bias.bfloat16(), stride=2 if layer == 0 else 1))
    return x.permute(0, 2, 3, 1).flatten(1)


def library_encoder_two(f: Tensor, s: Tensor, h: Tensor, *networks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return library_encoder(f, s, h, *networks[:2]), library_encoder(f, s, h, *networks[2:])


def whole_encoder(p: Problem, encode: Callable[..., Tensor], two: Callable[..., Any]) -> dict[str, float]:
    """The passes of a paper update, in microseconds; compiled, as in training."""
    encode, two = torch.compile(encode, dynamic=False), torch.compile(two, dynamic=False)
    parameters = [t.clone().requires_grad_() for t in (*p.weights, *p.biases)]
    upstream = torch.randn(IMAGES, 35 * 35 * 32, device="cuda").bfloat16()

    def forward() -> Tensor:
        return encode(*p.views(IMAGES), parameters[:4], parameters[4:])

    inference = torch.no_grad()
    networks = p.weights, p.biases, p.weights_b, p.biases_b
    times = {
        "two networks, 1024": median_us(inference(lambda: two(*p.views(IMAGES), *networks))),
        "forward + backward, 1024": median_us(lambda: torch.autograd.grad(forward(), parameters, upstream)),
        "of which forward": median_us(forward),
        "one network, 512": median_us(inference(lambda: encode(*p.views(SMALL), p.weights, p.biases))),
    }
    update = times["two networks, 1024"] + times["forward + backward, 1024"] + times["one network, 512"] / 2
    return {**times, "conv us per paper update": update}


def main() -> None:
    if not runtime.available():
        raise SystemExit("The kernels need a CUDA GPU with bfloat16 (compute capability 8.0): run this on one.")
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    began = time.monotonic()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    p = Problem()
    found = first_operations(p)
    for layer, size in enumerate(SIZES, start=1):
        found += layer_operations(p, layer, size)
    compile_everything(found)
    for operation in found:
        measure(operation)
    print(f"\n{'variants':16s} us at {IMAGES} images, best first")
    for o in found:
        print(f"{o.name:16s} {' | '.join(f'{v}={o.us[v]:.0f}' for v in sorted(o.us, key=lambda v: o.us[v]))}")
    print(f"\n{'operation':16s}  floor   ours  B=512  cuDNN  error    best")
    for o in found:
        best = min(o.us, key=lambda v: o.us[v])
        small = median_us(partial(o.call, SMALL, tilings(o.kind)[best]))
        times = (o.megabytes * 1e6 / FLOOR_BYTES_PER_US, o.us[best], small, o.library_us)
        print(f"{o.name:16s}" + "".join(f" {us:6.0f}" for us in times) + f"  {o.error:.1e}  {best}")
    choose(found)
    encoder.prepare(p.frames, p.slots, p.weights)
    features = encode_views(*p.views(CHECKED), p.weights, p.biases)
    error = relative_error(features, reference.encode_views(*p.views(CHECKED), p.weights, p.biases))
    stack = whole_encoder(p, encode_views, encode_views_two), whole_encoder(p, library_encoder, library_encoder_two)
    print(f"\n{'whole encoder':28s}   kernels     cuDNN")
    for name in stack[0]:
        print(f"{name:28s}" + "".join(f"{column[name]:10.0f}" for column in stack))
    print(f"features against float32: relative error {error:.1e}; {time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
