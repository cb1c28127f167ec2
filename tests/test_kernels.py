"""The encoder's kernels against plain PyTorch: on a GPU, and, their own text emulated, on the CPU.

The emulator runs the CUDA source itself (kernel_emulator.h) and needs a C++ compiler.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drq.backend import Backend
from drq.engine import kernels
from drq.engine.kernels import encoder, layers, reference, runtime
from drq.engine.kernels.layers import Tiling
from drq.networks.encoders import PixelEncoder
from emulation import needs_bfloat16, two_gigabytes

TOLERANCE = 1e-2  # bfloat16 operands, relative to the norm


@pytest.fixture
def device(kernel_device: str) -> str:
    return kernel_device


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert relative_error(found, expected) < TOLERANCE


def nchw(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def observations(
    device: str, images: int, height: int, width: int, channels: int = 3, stack: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """Frames, slots and shifts; the first observation is that of an episode's start, one frame repeated."""
    frames = torch.randint(0, 256, (11, channels, height, width), dtype=torch.uint8, device=device)
    slots = torch.randint(0, 11, (images, stack), device=device)
    slots[0] = slots[0, 0]
    return frames, slots, torch.randint(-4, 5, (images, 2), dtype=torch.int32, device=device)


def network(device: str, channels: int = 9, depth: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    inputs = [channels] + [32] * (depth - 1)
    weights = [torch.randn(32, c, 3, 3, device=device) * (2 / (9 * c)) ** 0.5 for c in inputs]
    return weights, [torch.randn(32, device=device) * 0.1 for _ in inputs]


def rounded(x: Tensor) -> Tensor:
    """bfloat16 rounding that gradients pass through unchanged."""
    return x + (x.bfloat16().to(x.dtype) - x).detach()


def encode_rounded(views: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """float64, but with weights and activations rounded where the kernels round them: the same ReLUs are open."""
    x = views.double()
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        scale, stride = (1 / 255, 2) if layer == 0 else (1.0, 1)
        convolved = F.conv2d(x, rounded(weight).double(), stride=stride) * scale
        x = rounded(F.relu(convolved + bias.double()[:, None, None]))
    return x.permute(0, 2, 3, 1).flatten(1)


def test_views_are_replicate_padded_crops() -> None:
    frames = torch.randint(0, 256, (5, 3, 12, 15), dtype=torch.uint8)
    shifts = torch.tensor(list(itertools.product(range(-4, 5), repeat=2)))
    slots = torch.randint(0, 5, (len(shifts), 3))
    views = reference.perturbed_views(frames, slots, shifts)
    for view, slot, (dy, dx) in zip(views, slots, shifts.tolist(), strict=True):
        stacked = torch.cat([frames[i] for i in slot])[None].float()
        padded = F.pad(stacked, (4, 4, 4, 4), mode="replicate")[0]
        assert torch.equal(view.float(), padded[:, 4 + dy : 16 + dy, 4 + dx : 19 + dx])


def test_features_have_the_order_of_the_plain_encoder() -> None:
    frames, slots, shifts = observations("cpu", 3, 24, 21)
    plain = PixelEncoder("sac-ae", (9, 24, 21), Backend())
    convolutions = [layer for layer in plain.layers if isinstance(layer, torch.nn.Conv2d)]
    parameters = [c.weight for c in convolutions], [c.bias for c in convolutions if c.bias is not None]
    features = reference.encode_views(frames, slots, shifts, *parameters)
    torch.testing.assert_close(features, plain(reference.perturbed_views(frames, slots, shifts)))


def test_the_cpu_is_left_to_plain_pytorch() -> None:
    frames, _, _ = observations("cpu", 1, 24, 24)
    assert not kernels.supported(frames, network("cpu")[0])


@pytest.mark.parametrize("size", [20, 48, 84])
def test_the_shared_memory_asked_for_is_what_kernels_take(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all layers: at 48 x 48 a later one takes most, which an RTX 4090 does not have."""
    taken: list[int] = []

    def kernel(*asked: Any) -> runtime.Launchable:
        taken.append(asked[-1])
        return runtime._Unlaunched()

    monkeypatch.setattr(runtime, "kernel", kernel)
    monkeypatch.setattr(runtime, "compile_together", lambda calls: calls())
    frames, slots, _ = observations("cpu", 1, size, size)
    encoder.prepare(frames, slots, network("cpu")[0])
    assert layers.shared_bytes_needed(9, size, size, depth=4) == max(taken)


def test_features_of_more_than_two_gigabytes_of_frames(device: str) -> None:
    images, slots, shifts = observations(device, 2, 20, 20)
    frames = two_gigabytes(device, images.shape[1:])
    frames[-len(images) :] = images
    parameters = network(device, depth=1)
    found = kernels.encode_views(frames, slots + len(frames) - len(images), shifts, *parameters)
    assert torch.equal(found, kernels.encode_views(images, slots, shifts, *parameters))


def test_features_and_gradients(device: str) -> None:
    images, height, width, depth = (2, 20, 23, 3) if device == "cpu" else (37, 84, 84, 4)
    frames, slots, shifts = observations(device, images, height, width)
    weights, biases = network(device, depth=depth)
    parameters = [p.requires_grad_() for p in (*weights, *biases)]
    features = kernels.encode_views(frames, slots, shifts, weights, biases)
    assert features.dtype == torch.bfloat16
    expected = encode_rounded(reference.perturbed_views(frames, slots, shifts), weights, biases)
    assert_close(features, expected)
    assert_close(features, reference.encode_views(frames, slots, shifts, weights, biases))
    upstream = torch.randn_like(features)
    found = torch.autograd.grad(features, parameters, upstream)
    for gradient, exact in zip(found, torch.autograd.grad(expected, parameters, upstream.double()), strict=True):
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, exact) < 2 * TOLERANCE  # a ReLU may open on one side of a rounding only


def test_every_layer_of_a_batch_of_the_paper(device: str) -> None:
    """Each from what the kernels made of the one before. On a GPU every block takes work some twenty times, and fetches
    the next while it multiplies."""
    images, height, width, depth = (2, 20, 23, 3) if device == "cpu" else (1024, 84, 84, 4)
    frames, slots, shifts = observations(device, images, height, width)
    weights, biases = network(device, depth=depth)
    outputs = [output[0] for output in encoder._forward(frames, slots, shifts, [weights], [biases])]
    views = reference.perturbed_views(frames, slots, shifts)
    inputs = [views.float() / 255, *(nchw(output).float() for output in outputs)]
    for layer, (x, output) in enumerate(zip(inputs, outputs, strict=False)):
        weight, bias, stride = weights[layer].bfloat16().float(), biases[layer], 1 if layer else 2
        assert_close(nchw(output), F.relu(F.conv2d(x, weight, bias, stride)))
    gradient = torch.randn_like(outputs[-1])
    for layer in reversed(range(1, depth)):
        x, weight = outputs[layer - 1], weights[layer]
        found = layers.conv_weight_gradient(gradient, x, weight)
        assert_exact_sums(found, nchw(x), weight, gradient, stride=1)
        expected = F.conv_transpose2d(nchw(gradient).float(), weight)
        gradient = layers.conv_input_gradient(gradient, weight, x)
        assert_close(nchw(gradient), torch.where(nchw(x) > 0, expected, 0))
    found = layers.first_weight_gradient(gradient, frames, slots, shifts, weights[0])
    assert_exact_sums(found, views.double() / 255, weights[0], gradient, stride=2)


def test_two_networks_see_the_same_views(device: str) -> None:
    frames, slots, shifts = observations(device, 3, 20, 23)
    one, two = network(device, depth=2), network(device, depth=2)
    found = kernels.encode_views_two(frames, slots.int(), shifts, *one, *two)
    for features, parameters in zip(found, (one, two), strict=True):
        assert_close(features, reference.encode_views(frames, slots, shifts, *parameters))
        with torch.no_grad():
            assert torch.equal(features, kernels.encode_views(frames, slots, shifts, *parameters))


def test_every_shift(device: str) -> None:
    shifts = torch.tensor(list(itertools.product(range(-4, 5), repeat=2)), dtype=torch.int32, device=device)
    frames, slots, _ = observations(device, len(shifts), 20, 20, channels=1)
    weights, biases = network(device, channels=3, depth=1)
    found = kernels.encode_views(frames, slots, shifts, weights, biases)
    for features, expected in zip(found, reference.encode_views(frames, slots, shifts, weights, biases), strict=True):
        assert_close(features, expected)


@pytest.mark.parametrize(("channels", "stack"), [(1, 4), (3, 5)])
def test_other_stacks(device: str, channels: int, stack: int) -> None:
    frames, slots, shifts = observations(device, 2, 27, 20, channels, stack)
    weights, biases = network(device, channels * stack, depth=1)
    parameters = [p.requires_grad_() for p in (*weights, *biases)]
    features = kernels.encode_views(frames, slots, shifts, weights, biases)
    expected = encode_rounded(reference.perturbed_views(frames, slots, shifts), weights, biases)
    assert_close(features, expected)
    upstream = torch.randn_like(features)
    found = torch.autograd.grad(features, parameters, upstream)
    for gradient, exact in zip(found, torch.autograd.grad(expected, parameters, upstream.double()), strict=True):
        assert relative_error(gradient, exact) < 2 * TOLERANCE


@pytest.mark.parametrize(
    "tiling",
    [Tiling(4, 2, stages=2, ahead=True), Tiling(4, 1, stages=2, repeat=2, held=True)],
    ids=["ahead", "held"],
)
def test_cuts_of_a_layer(device: str, tiling: Tiling) -> None:
    """Forward and input gradient do not depend on how the work is cut. A block has three parts of it, so that the first
    place of two is fetched into once more."""
    x = torch.randn(1, 9, 11, 14, 32, device=device).relu().bfloat16()
    weight, bias = torch.randn(32, 32, 3, 3, device=device) / 17, torch.randn(32, device=device)
    out = layers.conv_forward(x, (weight,), (bias,), tiling)[0]
    assert_close(nchw(out), F.relu(F.conv2d(nchw(x[0]).float(), weight, bias)))
    gradient = torch.randn_like(out)
    expected = F.conv_transpose2d(nchw(gradient).float(), weight)
    found = layers.conv_input_gradient(gradient, weight, x[0], tiling)
    assert_close(nchw(found), torch.where(nchw(x[0]) > 0, expected, 0))


@pytest.mark.parametrize(("width", "ahead"), [(21, False), (24, True), (21, True)])
def test_cuts_of_the_first_layer(device: str, width: int, ahead: bool) -> None:
    """Strips that do not divide an image, and more of them than blocks; bytes fetched ahead where the width allows."""
    tiling = Tiling(6, 1, rows=3, ahead=ahead)
    frames, slots, shifts = observations(device, 2, 22, width)
    (weight,), (bias,) = network(device, depth=1)
    views = reference.perturbed_views(frames, slots, shifts)
    out = layers.first_forward(frames, slots, shifts, (weight,), (bias,), tiling)[0]
    assert_close(nchw(out), encode_rounded(views, [weight], [bias]).view(out.shape).permute(0, 3, 1, 2))
    gradient = torch.randn_like(out)
    found = layers.first_weight_gradient(gradient, frames, slots, shifts, weight, tiling)
    assert_exact_sums(found, views.double() / 255, weight, gradient, stride=2)


def assert_exact_sums(found: Sequence[Tensor], x: Tensor, weight: Tensor, gradient: Tensor, stride: int) -> None:
    parameters = weight.double().requires_grad_(), torch.zeros_like(weight[:, 0, 0, 0]).double().requires_grad_()
    out = F.conv2d(x.double(), *parameters, stride=stride)
    exact = torch.autograd.grad(out, parameters, nchw(gradient).double())
    for sums, expected in zip(found, exact, strict=True):
        assert relative_error(sums, expected) < 1e-5


@pytest.mark.parametrize("tiling", [Tiling(6, 2, stages=2), Tiling(3, 3)], ids=["two stages", "one group"])
def test_weight_gradients_are_exact_sums(device: str, tiling: Tiling) -> None:
    x = torch.randn(5, 11, 14, 32, device=device).relu().bfloat16()
    weight = torch.randn(32, 32, 3, 3, device=device)
    gradient = torch.randn(5, 9, 12, 32, device=device).bfloat16()
    found = layers.conv_weight_gradient(gradient, x, weight, tiling)
    assert_exact_sums(found, nchw(x), weight, gradient, stride=1)
    again = layers.conv_weight_gradient(gradient, x, weight, tiling)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_inside_compiled_code(device: str) -> None:
    frames, slots, shifts = observations(device, 2, 20, 23)
    weights, biases = network(device, depth=2)
    parameters = [p.requires_grad_() for p in (*weights, *biases)]

    def loss(slots: Tensor, shifts: Tensor) -> Tensor:
        return kernels.encode_views(frames, slots, shifts, weights, biases).float().square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(slots, shifts), parameters)
    for gradient, expected in zip(found, torch.autograd.grad(loss(slots, shifts), parameters), strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.gpu
@needs_bfloat16
@pytest.mark.parametrize(("height", "width", "images"), [(84, 84, 129), (20, 20, 1), (64, 100, 7), (85, 51, 33)])
def test_sizes_and_graph_capture(height: int, width: int, images: int) -> None:
    frames, slots, shifts = observations("cuda", images, height, width)
    weights, biases = network("cuda")
    assert kernels.supported(frames, weights)
    encoder.prepare(frames, slots, weights)
    parameters = [p.requires_grad_() for p in (*weights, *biases)]

    def update() -> tuple[Tensor, tuple[Tensor, ...]]:
        features = kernels.encode_views(frames, slots, shifts, weights, biases)
        return features, torch.autograd.grad(features.float().square().mean(), parameters)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        features, gradients = update()
    shifts.copy_(torch.randint(-4, 5, shifts.shape))  # the graph reads what its inputs hold when it is replayed
    graph.replay()
    expected, exact = update()
    assert torch.equal(features, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))
    assert_close(features, reference.encode_views(frames, slots, shifts, weights, biases))
