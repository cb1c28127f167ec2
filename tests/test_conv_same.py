"""Convolutions of 64 channels with what stands around them against plain PyTorch: on a GPU, and emulated on the
CPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drq.engine import EngineSettings, FastBackend
from drq.engine.kernels import runtime
from drq.engine.kernels.conv_same import _conv_same, conv_same, conv_same_suits
from drq.networks import PixelEncoder

Switches = tuple[str, ...]
ALONE: Switches = ()
FIRST: Switches = ("relu_first", "bias", "relu")
SECOND: Switches = ("bias", "plus")
"""Of a residual block."""


def inputs(device: str, shape: tuple[int, ...], outputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias, plus: whole numbers, few of them not zero, so that what comes out is exact in bfloat16."""
    torch.manual_seed(0)
    x, plus = torch.randint(-2, 3, shape), torch.randint(-4, 5, (shape[0], outputs, *shape[2:]))
    weight = torch.randint(-1, 2, (outputs, shape[1], 3, 3)) * (torch.rand(outputs, shape[1], 3, 3) < 0.1)
    of_type: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "memory_format": torch.channels_last}
    x, weight, plus = x.to(**of_type), weight.to(**of_type), plus.to(**of_type)
    return x, weight, torch.randint(-3, 4, (outputs,), device=device).float(), plus


def assert_same(x: Tensor, weight: Tensor, bias: Tensor, plus: Tensor, switches: Switches) -> None:
    relu_first, relu = "relu_first" in switches, "relu" in switches
    expected = F.conv2d(F.relu(x.double()) if relu_first else x.double(), weight.double(), padding=1).round()
    if "bias" in switches:
        expected = expected + bias.double()[:, None, None]
    if relu:
        expected = F.relu(expected)
    if "plus" in switches:
        expected = expected + plus.double()
    assert float(expected.abs().max()) <= 256  # what bfloat16 holds exactly
    asked = bias if "bias" in switches else None, plus if "plus" in switches else None
    found = conv_same(x, weight, *asked, relu_first=relu_first, relu=relu)
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found.double(), expected)


# Blocks begin and end within rows and images, and hold more than one image.
@pytest.mark.parametrize(
    ("shape", "outputs", "switches"),
    [
        ((1, 64, 3, 2), 64, FIRST),
        ((7, 64, 5, 7), 64, SECOND),
        ((3, 64, 9, 8), 128, SECOND),
        ((2, 64, 15, 15), 128, ALONE),
        ((2, 64, 11, 12), 64, FIRST),
    ],
    ids=str,
)
def test_output(kernel_device: str, shape: tuple[int, ...], outputs: int, switches: Switches) -> None:
    assert_same(*inputs(kernel_device, shape, outputs), switches)


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, 32])
@pytest.mark.parametrize("outputs", [64, 128])
def test_batches_of_a_real_size(images: int, outputs: int) -> None:
    tensors = inputs("cuda", (images, 64, 42, 42), outputs)
    for switches in (ALONE, FIRST, SECOND):
        assert_same(*tensors, switches)


def test_rounded_as_when_all_is_written_out(kernel_device: str) -> None:
    x, plus = (torch.randn(2, 64, 4, 4, device=kernel_device).bfloat16() for _ in range(2))
    weight = torch.randn(64, 64, 3, 3, device=kernel_device).bfloat16() / 16
    bias = torch.randn(64, device=kernel_device)
    first = F.conv2d(F.relu(x).double(), weight.double(), padding=1).bfloat16()
    expected = F.relu((first.float() + bias[:, None, None]).bfloat16())
    # A sum that is rounded otherwise once in a while: the last digit, before what is added may make it smaller.
    torch.testing.assert_close(conv_same(x, weight, bias, relu_first=True, relu=True), expected, rtol=2**-7, atol=2**-5)
    second = F.conv2d(x.double(), weight.double(), padding=1).bfloat16()
    expected = plus + (second + bias.bfloat16()[:, None, None])
    torch.testing.assert_close(conv_same(x, weight, bias, plus), expected, rtol=2**-7, atol=2**-5)


def test_nans_and_infinities_stay_visible(kernel_device: str) -> None:
    x, weight, bias, plus = inputs(kernel_device, (1, 64, 4, 4), 64)
    weight.fill_(1)
    x[0, 3, 0, 0], bias[5], plus[0, 7, 3, 3] = torch.nan, torch.inf, -torch.inf
    for found in (conv_same(x, weight, bias, relu_first=True, relu=True), conv_same(x, weight, bias, plus)):
        assert found[0, 0].isnan().nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
        assert bool((found[0, 5, 2:] == torch.inf).all())
    assert found[0, 7, 3, 3] == -torch.inf


def test_inside_compiled_code_and_by_the_rules_of_pytorch(kernel_device: str) -> None:
    x, weight, bias, plus = inputs(kernel_device, (2, 64, 4, 4), 64)

    @torch.no_grad()
    def block(x: Tensor, plus: Tensor) -> Tensor:
        return conv_same(conv_same(x, weight, bias, relu_first=True, relu=True), weight, bias, plus) * 2

    found = torch.compile(block, backend="aot_eager", fullgraph=True)(x.requires_grad_(), plus)
    expected = block(x, plus)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    torch.library.opcheck(_conv_same, (x.detach(), weight, bias, plus, False, False))


def test_a_residual_block_without_gradient_is_two_launches(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings(torch.device(kernel_device), "bf16", False, False, kernels=True, eval_process=False)
    backend = FastBackend(settings)
    block = PixelEncoder("impala-same", (4, 8, 8), backend, width=4).layers[2].to(kernel_device)
    backend.kernels = True
    x = torch.randn(2, 64, 4, 4, device=kernel_device).bfloat16()
    # Its function has the module's name.
    monkeypatch.setattr(importlib.import_module("drq.engine.kernels.conv_same"), "LEAST_PIXELS", 16)
    expected = block(x)  # with a gradient: by PyTorch and bias_relu
    kernel, launched = runtime.kernel, []
    monkeypatch.setattr(runtime, "kernel", lambda name, *rest: launched.append(name) or kernel(name, *rest))
    with torch.no_grad():
        found = block(x)
        assert launched == ["conv_same"] * 2
        assert torch.equal(torch.compile(block, backend="aot_eager", fullgraph=True)(x), found)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-5)
    assert not torch.equal(found, x)


def test_what_it_does_not_suit_is_refused() -> None:
    x, weight, bias, plus = inputs("cpu", (1, 64, 4, 4), 64)
    for wrong in ((x.float(), weight), (x[:, :32], weight), (x, weight, bias[1:]), (x, weight, bias, plus[:, :, 1:])):
        with pytest.raises(ValueError, match="conv_same does not suit"):
            conv_same(*wrong)
    assert conv_same_suits(weight, 84, 84)
    assert not conv_same_suits(weight, 84, 500)
    assert not conv_same_suits(weight, 21, 21)
    assert not conv_same_suits(weight.float(), 84, 84)
    for shape in ((64, 32, 3, 3), (64, 128, 3, 3), (32, 64, 3, 3), (64, 64, 5, 5)):
        assert not conv_same_suits(weight.new_zeros(shape), 84, 84)
