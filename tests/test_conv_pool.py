"""Convolution, bias and max-pool in one launch against plain PyTorch: on a GPU, and emulated on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drq.backend import same_pool
from drq.engine import EngineSettings, FastBackend, kernels
from drq.engine.kernels import conv_pool_weight, runtime
from drq.engine.kernels.conv_pool import _conv_pool, conv_pool, conv_pool_suits
from drq.engine.kernels.conv_pool_weight import _conv_pool_weight, conv_pool_weight_suits


def inputs(device: str, shape: tuple[int, ...], outputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of few values, so that sums are exact and many windows have several greatest; and a gradient of the output."""
    torch.manual_seed(0)
    out = shape[0], outputs, (shape[2] + 1) // 2, (shape[3] + 1) // 2
    of_type = {"device": device, "dtype": torch.bfloat16, "memory_format": torch.channels_last}
    x, weight, gradient = (
        tensor.to(**of_type)  # type: ignore[call-overload]
        for tensor in (torch.randint(-2, 3, shape), torch.randint(-1, 2, (outputs, shape[1], 3, 3)), torch.randn(out))
    )
    bias = torch.randint(-2, 3, (outputs,), device=device).float() / 2
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), gradient


def assert_same(x: Tensor, weight: Tensor, bias: Tensor, gradient: Tensor) -> None:
    exact = [tensor.detach().double().contiguous().requires_grad_() for tensor in (x, weight, bias)]
    # By a matrix product: a library's convolution need not be exact, and which of equals is the first would show it.
    products = exact[1].flatten(1) @ F.unfold(exact[0], 3, padding=1)
    expected = same_pool(products.view(len(x), len(weight), *x.shape[2:]) + exact[2][:, None, None])
    out = conv_pool(x, weight, bias)
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out.double(), expected)
    found = torch.autograd.grad(out, (x, weight, bias), gradient)
    for one, other in zip(found, torch.autograd.grad(expected, exact, gradient.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.02, atol=0.02 * float(other.abs().max()))


# Three emulated blocks run at once: the largest makes them take more than one turn.
@pytest.mark.parametrize(
    ("shape", "outputs"),
    [
        ((1, 4, 1, 1), 8),
        ((1, 4, 5, 7), 8),
        ((2, 2, 6, 4), 16),
        ((2, 6, 8, 9), 24),
        ((1, 4, 14, 12), 64),
        ((1, 16, 4, 4), 8),
    ],
    ids=str,
)
def test_output_and_gradients(kernel_device: str, shape: tuple[int, ...], outputs: int) -> None:
    assert_same(*inputs(kernel_device, shape, outputs))


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, 32])
def test_batches_of_a_real_size(images: int) -> None:
    assert_same(*inputs("cuda", (images, 4, 84, 84), 64))


def test_rounded_as_when_both_are_written_out(kernel_device: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(1, 4, 6, 6, device=kernel_device).bfloat16()
    weight, bias = torch.randn(16, 4, 3, 3, device=kernel_device).bfloat16(), torch.randn(16, device=kernel_device)
    convolved = F.conv2d(x.double(), weight.double(), padding=1).bfloat16()
    expected = same_pool((convolved.float() + bias[:, None, None]).bfloat16())
    # A sum that is rounded otherwise once in a while: the last digit.
    torch.testing.assert_close(conv_pool(x, weight, bias), expected, rtol=2**-7, atol=2**-7)


def test_nans_and_infinities_stay_visible(kernel_device: str) -> None:
    x, weight, bias, _ = (tensor.detach() for tensor in inputs(kernel_device, (1, 4, 8, 8), 8))
    bias[5] = -torch.inf
    x[0, 0, 7, 7] = torch.nan
    out = conv_pool(x, weight, bias)
    # What is convolved with it is the last 2 x 2 pixels, which four windows look at.
    assert out[0, 0].isnan().nonzero().tolist() == [[2, 2], [2, 3], [3, 2], [3, 3]]
    assert bool((out[0, 5, :2] == -torch.inf).all())


def test_inside_compiled_code_and_by_the_rules_of_pytorch(kernel_device: str) -> None:
    x, weight, bias, gradient = inputs(kernel_device, (2, 4, 5, 6), 8)

    def results(f: object) -> tuple[Tensor, ...]:
        out = f(x * 2, weight, bias)  # type: ignore[operator]
        return out, *torch.autograd.grad(out, (x, weight, bias), gradient)

    compiled = torch.compile(conv_pool, backend="aot_eager", fullgraph=True)
    for found, expected in zip(results(compiled), results(conv_pool), strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
    torch.library.opcheck(_conv_pool, (x, weight, bias))


def pooled(device: str, shape: tuple[int, ...], outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of an output, places that are in the image, and the input: of any values."""
    torch.manual_seed(0)
    of_type = {"device": device, "dtype": torch.bfloat16, "memory_format": torch.channels_last}
    x = torch.randn(shape).to(**of_type)  # type: ignore[call-overload]
    place = _conv_pool(x, x.new_empty(outputs, shape[1], 3, 3).normal_(), torch.zeros(outputs, device=device))[1]
    return torch.randn(place.shape).to(**of_type), place, x  # type: ignore[call-overload]


def exactly(gradient: Tensor, place: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the weight and of the bias in float64: every gradient goes to its pixel, all at once."""
    (batch, outputs, rows, columns), (height, width) = gradient.shape, x.shape[2:]
    y = 2 * torch.arange(rows, device=x.device)[:, None] - height % 2 + place.long() // 3
    at = y * width + 2 * torch.arange(columns, device=x.device) - width % 2 + place.long() % 3
    of_convolved = torch.zeros(batch, outputs, height * width, dtype=torch.float64, device=x.device)
    of_convolved.scatter_add_(2, at.flatten(2), gradient.double().flatten(2))
    patches = F.unfold(x.double(), 3, padding=1)
    of_weight = torch.einsum("bop,bfp->of", of_convolved, patches).view(outputs, x.shape[1], 3, 3)
    return of_weight, gradient.double().sum((0, 2, 3))


def assert_gradients(gradient: Tensor, place: Tensor, x: Tensor) -> None:
    found, expected = _conv_pool_weight(gradient, place, x), exactly(gradient, place, x)
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.float32]
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    # The weight's is rounded once, at its end.
    for one, other, rounding in zip(found, expected, (2**-8, 0), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=rounding, atol=1e-5 * float(other.abs().max() + 1))
    for one, other in zip(_conv_pool_weight(gradient, place, x), found, strict=True):
        assert torch.equal(one, other)


# Sides odd and even, rows with and without a window alone; images that end within a block's rows and where they end;
# several groups of windows for a warp; both ways to divide the output channels.
@pytest.mark.parametrize(
    ("shape", "outputs"),
    [
        ((1, 4, 1, 1), 16),
        ((1, 4, 5, 7), 32),
        ((2, 4, 6, 4), 16),
        ((2, 4, 8, 9), 48),
        ((5, 4, 7, 8), 64),
        ((1, 4, 20, 60), 64),
        ((32, 4, 6, 7), 32),
    ],
    ids=str,
)
def test_gradients_where_the_input_has_none(kernel_device: str, shape: tuple[int, ...], outputs: int) -> None:
    assert_gradients(*pooled(kernel_device, shape, outputs))
    x, weight, bias, gradient = inputs(kernel_device, shape, outputs)
    with_gradient = torch.autograd.grad(conv_pool(x, weight, bias), (weight, bias, x), gradient)
    without = torch.autograd.grad(conv_pool(x.detach(), weight, bias), (weight, bias), gradient)
    for one, other in zip(without, with_gradient, strict=False):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))


def test_a_block_takes_rows_and_a_warp_sums_more_than_once(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_pool_weight, "_MOST_ROWS", 2)
    monkeypatch.setattr(conv_pool_weight, "_SUM_WARPS", 2)
    # Three emulated blocks have 3 x 5 rows between them, two or one at a time.
    assert_gradients(*pooled(kernel_device, (3, 4, 9, 13), 32))


@pytest.mark.parametrize("tiling", [(4, 1, 32), (8, 1, 64), (8, 2, 16)], ids=str)
def test_other_tilings(kernel_device: str, monkeypatch: pytest.MonkeyPatch, tiling: tuple[int, ...]) -> None:
    for name, value in zip(("WARPS", "BLOCKS", "OUTPUTS"), tiling, strict=True):
        monkeypatch.setattr(conv_pool_weight, name, value)
    assert_gradients(*pooled(kernel_device, (2, 4, 10, 11), 64))


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, 32, 300])
def test_gradients_of_a_real_size(images: int) -> None:
    assert_gradients(*pooled("cuda", (images, 4, 84, 84), 64))


def test_without_images_gradients_are_zero(kernel_device: str) -> None:
    x, weight, bias, gradient = inputs(kernel_device, (0, 4, 6, 6), 16)
    for found in torch.autograd.grad(conv_pool(x.detach(), weight, bias), (weight, bias), gradient):
        assert not found.any()


def test_nans_in_a_gradient_stay_with_their_channel(kernel_device: str) -> None:
    gradient, place, x = pooled(kernel_device, (2, 4, 8, 8), 32)
    gradient[1, 5, 0, 3] = torch.nan
    gradient[0, 9, 3, 3] = torch.inf
    of_weight, of_bias = _conv_pool_weight(gradient, place, x)
    assert of_bias.isfinite().logical_not().nonzero().flatten().tolist() == [5, 9]
    assert of_weight.isfinite().logical_not().flatten(1).any(1).nonzero().flatten().tolist() == [5, 9]
    assert bool(of_weight[5].isnan().all())


def test_gradients_inside_compiled_code_and_by_the_rules_of_pytorch(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias, gradient = inputs(kernel_device, (2, 4, 5, 6), 16)
    kernel, launched = runtime.kernel, []
    monkeypatch.setattr(runtime, "kernel", lambda name, *rest: launched.append(name) or kernel(name, *rest))

    def gradients(f: object) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f(x.detach(), weight, bias), (weight, bias), gradient)  # type: ignore[operator]

    compiled = torch.compile(conv_pool, backend="aot_eager", fullgraph=True)
    for found, expected in zip(gradients(compiled), gradients(conv_pool), strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
    assert launched == ["conv_pool", "conv_pool_weight", "conv_pool_weight_sum"] * 2
    torch.library.opcheck(_conv_pool_weight, pooled(kernel_device, (2, 4, 5, 6), 16))


def test_other_inputs_than_four_channels_are_left_to_a_library(kernel_device: str) -> None:
    x, weight, bias, gradient = inputs(kernel_device, (1, 6, 5, 6), 16)
    with_gradient = torch.autograd.grad(conv_pool(x, weight, bias), (weight, bias, x), gradient)
    without = torch.autograd.grad(conv_pool(x.detach(), weight, bias), (weight, bias), gradient)
    for one, other in zip(without, with_gradient, strict=False):
        assert torch.equal(one, other)
    assert conv_pool_weight_suits(4, 64, 84, 84)
    assert conv_pool_weight_suits(4, 16, 84, 400)
    for channels, out, width in ((4, 24, 84), (8, 64, 84), (4, 64, 2_000)):
        assert not conv_pool_weight_suits(channels, out, 84, width)


def test_what_it_does_not_suit_is_refused() -> None:
    x, weight, bias, _ = inputs("cpu", (1, 4, 4, 4), 8)
    for wrong in (x.float(), x[:, :3]):
        with pytest.raises(ValueError, match="conv_pool does not suit"):
            conv_pool(wrong, weight, bias)
    suited = torch.zeros(64, 4, 3, 3, dtype=torch.bfloat16)
    assert conv_pool_suits(suited, 84, 84)
    assert not conv_pool_suits(suited, 84, 500)
    assert not conv_pool_suits(suited.float(), 84, 84)
    for shape in ((64, 3, 3, 3), (64, 12, 3, 3), (64, 64, 3, 3), (128, 4, 3, 3), (64, 4, 5, 5)):
        assert not conv_pool_suits(suited.new_zeros(shape), 84, 84)


def test_what_32_bits_do_not_count_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(kernels, "conv_pool", lambda x, *rest: taken.append(len(x)) or conv_pool(x, *rest))
    nowhere = torch.device("meta")
    backend = FastBackend(EngineSettings(nowhere, "bf16", False, False, kernels=True, eval_process=False))
    backend.kernels = True
    weight, bias = torch.empty(64, 4, 3, 3, device=nowhere), torch.empty(64, device=nowhere)
    for images in (4_755, 4_756):
        x = torch.empty(images, 4, 84, 84, dtype=torch.uint8, device=nowhere)
        assert backend.convolution(x, weight, bias, padding=1, pool=True).shape == (images, 64, 42, 42)
    assert taken == [4_755]
