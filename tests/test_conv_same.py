"""Convolutions of 64 and 128 channels with what stands around them against plain PyTorch: on a GPU, and emulated on the
CPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drq.engine.kernels import runtime
from drq.engine.kernels.conv_same import BlockSize, Weights, block_size, conv_same_suits, convolve
from drq.engine.kernels.many import Packing, packed
from emulation import needs_hopper

Switches = tuple[str, ...]
ALONE: Switches = ()
FIRST: Switches = ("relu_first", "bias", "relu")
SECOND: Switches = ("bias", "plus")
BACK: Switches = ("gate", "sums", "turned")
BACK_TO_BEGINNING: Switches = (*BACK, "plus")
"""Of a residual block."""


class Inputs:
    """Whole numbers, few of them not zero, so that what comes out is exact in bfloat16."""

    def __init__(self, device: str, images: int, channels: int, outputs: int, size: tuple[int, int]) -> None:
        torch.manual_seed(0)
        of_type: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "memory_format": torch.channels_last}
        self.x = torch.randint(-2, 3, (images, channels, *size)).to(**of_type)
        self.gate, self.plus = (torch.randint(-4, 5, (images, outputs, *size)).to(**of_type) for _ in range(2))
        few = torch.rand(2, outputs, channels, 3, 3) < 0.05
        self.weights = [each.to(**of_type) for each in torch.randint(-1, 2, few.shape) * few]
        self.biases = torch.randint(-3, 4, (2, outputs), device=device).float()

    def packed(self, switches: Switches) -> list[Weights]:
        outputs, channels = self.weights[0].shape[:2]
        block = block_size(channels, outputs, *self.x.shape[2:]).channels
        weights, back = self.weights, "turned" in switches
        if back:  # given as they are on the way there
            weights = [w.flip(2, 3).transpose(0, 1).contiguous(memory_format=torch.channels_last) for w in weights]
        found = packed([Packing(weight, block, back) for weight in weights])
        biases = list(self.biases) if "bias" in switches else [None, None]
        return [Weights(*pair) for pair in zip(found, biases, strict=True)]

    def expected(self, switches: Switches, of_first: int) -> Tensor:
        x = F.relu(self.x.double()) if "relu_first" in switches else self.x.double()
        parts = zip((x[:of_first], x[of_first:]), self.weights, self.biases, strict=True)
        biased = 1 if "bias" in switches else 0
        found = torch.cat([F.conv2d(p, w.double(), b.double() * biased, padding=1) for p, w, b in parts]).round()
        if "relu" in switches:
            found = F.relu(found)
        if "gate" in switches:
            found = found * (self.gate > 0)
        if "plus" in switches:
            found = found + self.plus.double()
        assert float(found.abs().max()) <= 256  # what bfloat16 holds exactly
        return found


def assert_same(given: Inputs, switches: Switches, of_first: int) -> None:
    out, expected = torch.empty_like(given.gate), given.expected(switches, of_first)
    around = {name: getattr(given, name) for name in ("gate", "plus") if name in switches}
    asked: dict[str, Any] = {name: True for name in ("relu_first", "relu", "sums") if name in switches}
    sums = convolve(given.x, out, *given.packed(switches), of_first, **around, **asked)
    assert torch.equal(out.double(), expected)
    assert (sums is None) == ("sums" not in switches)
    if sums is not None:
        assert torch.equal(sums.double().sum(0), expected.sum((0, 2, 3)))


# Blocks begin and end within rows and images, and hold more than one image; both networks' images, or one's.
@pytest.mark.parametrize(
    ("images", "channels", "outputs", "size", "of_first", "switches"),
    [
        (1, 64, 64, (3, 2), 1, FIRST),
        (7, 64, 64, (5, 7), 3, SECOND),
        (3, 64, 128, (9, 8), 2, ALONE),
        (2, 128, 128, (15, 14), 1, BACK),
        (2, 128, 64, (15, 15), 2, BACK_TO_BEGINNING),
        (5, 64, 64, (15, 14), 4, BACK_TO_BEGINNING),
        (2, 64, 128, (14, 15), 0, FIRST),
    ],
    ids=str,
)
def test_output(
    hopper: str,
    images: int,
    channels: int,
    outputs: int,
    size: tuple[int, int],
    of_first: int,
    switches: Switches,
) -> None:
    assert_same(Inputs(hopper, images, channels, outputs, size), switches, of_first)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("channels", "outputs", "side"), [(64, 64, 42), (64, 128, 42), (128, 64, 42), (128, 128, 21), (128, 128, 11)]
)
def test_batches_of_a_real_size(channels: int, outputs: int, side: int) -> None:
    for images, of_first in ((1, 1), (96, 64), (32, 32)):
        given = Inputs("cuda", images, channels, outputs, (side, side))
        for switches in (ALONE, FIRST, SECOND, BACK, BACK_TO_BEGINNING):
            assert_same(given, switches, of_first)


@pytest.mark.parametrize("tiles", [BlockSize(1, 128, 3), BlockSize(3, 64, 4), BlockSize(2, 64, 5)], ids=str)
def test_any_block_size(hopper: str, tiles: BlockSize, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (importlib.import_module("drq.engine.kernels.conv_same"), importlib.import_module(__name__)):
        monkeypatch.setattr(module, "block_size", lambda *_: tiles)
    assert_same(Inputs(hopper, 3, 64, 128, (9, 11)), BACK_TO_BEGINNING, 1)


def test_rounded_as_when_all_is_written_out(hopper: str) -> None:
    given = Inputs(hopper, 2, 64, 64, (4, 4))
    given.x, given.plus, given.weights[0] = (torch.randn_like(t) for t in (given.x, given.plus, given.weights[0]))
    given.weights[0] /= 16
    x, weight, bias, plus = given.x, given.weights[0], given.biases[0].normal_(), given.plus
    out = torch.empty_like(plus)
    first = F.conv2d(F.relu(x).double(), weight.double(), padding=1).bfloat16()
    expected = F.relu((first.float() + bias[:, None, None]).bfloat16())
    # A sum that is rounded otherwise once in a while: the last digit, before what is added may make it smaller.
    convolve(x, out, given.packed(FIRST)[0], relu_first=True, relu=True)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-5)
    second = F.conv2d(x.double(), weight.double(), padding=1).bfloat16()
    expected = plus + (second + bias.bfloat16()[:, None, None])
    convolve(x, out, given.packed(SECOND)[0], plus=plus)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-5)


def test_nans_and_infinities_stay_visible(hopper: str) -> None:
    given = Inputs(hopper, 1, 64, 64, (4, 4))
    given.weights[0].fill_(1)
    given.x[0, 3, 0, 0], given.biases[0, 5], given.plus[0, 7, 3, 3] = torch.nan, torch.inf, -torch.inf
    for switches in (FIRST, SECOND):
        found = torch.empty_like(given.plus)
        plus = given.plus if "plus" in switches else None
        convolve(given.x, found, given.packed(switches)[0], plus=plus, relu_first=plus is None, relu=plus is None)
        assert found[0, 0].isnan().nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
        assert bool((found[0, 5, 2:] == torch.inf).all())
    assert found[0, 7, 3, 3] == -torch.inf


def test_what_it_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    for shared, suits in ((227, True), (99, False)):
        monkeypatch.setattr(runtime, "shared_bytes_per_block", lambda: shared * 1024)  # noqa: B023
        assert conv_same_suits(128, 128, 21, 21) == suits
        assert conv_same_suits(64, 64, 42, 42)
    for wrong in ((32, 64, 42, 42), (64, 32, 42, 42), (64, 64, 42, 500)):
        assert not conv_same_suits(*wrong)
