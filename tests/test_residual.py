"""Passes through residual encoders, there and back, against PyTorch's own: on a GPU, and emulated on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drq.backend import same_pool
from drq.engine.kernels.conv_same import Weights
from drq.engine.kernels.many import sums_of_rows
from drq.engine.kernels.residual import LAYERS, STAGES, InTurn, Kept, Passes, _pack, back, there
from emulation import needs_hopper

CHANNELS = [(4, 64), *[(64, 64)] * 4, (64, 128), *[(128, 128)] * 9]
"""Of the layers: the encoder of `strong`."""


def network(device: str, seed: int) -> list[Weights]:
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=g).to(device)

    return [
        Weights(
            random(o, c, 3, 3, scale=(1 / (6 * c)) ** 0.5).bfloat16().contiguous(memory_format=torch.channels_last),
            random(o, scale=0.1),
        )
        for c, o in CHANNELS
    ]


def images(device: str, count: int, size: tuple[int, int] = (11, 9)) -> Tensor:
    return torch.randn(count, 4, *size).to(device, torch.bfloat16).contiguous(memory_format=torch.channels_last)


def plainly(x: Tensor, weights: list[Weights]) -> Tensor:
    """In float64."""
    x, layers = x.double(), iter(weights)

    def convolved(x: Tensor) -> Tensor:
        weight, bias = next(layers)
        assert bias is not None
        return F.conv2d(x, weight.double(), bias.double(), padding=1)

    for _ in range(STAGES):
        x = same_pool(convolved(x))
        for _ in range(2):
            x = x + convolved(F.relu(convolved(F.relu(x))))
    return F.relu(x)


def back_plainly(gradient: Tensor, kept: Kept, weights: list[Weights]) -> list[Tensor]:
    """In float64, by what the way there has kept: which of two nearly equal pixels a pool passed on, or whether what is
    nearly zero is above it, hangs on rounding."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(number: int, gradient: Tensor, x: Tensor) -> Tensor:
        x, weight = (t.double().requires_grad_() for t in (x, weights[number].weight.detach()))
        of_x, of_weight = torch.autograd.grad(F.conv2d(x, weight, padding=1), (x, weight), gradient)
        found[number] = of_weight, gradient.sum((0, 2, 3))
        return of_x

    gradient = gradient.double() * (kept.inputs[STAGES] > 0)
    for stage in reversed(range(STAGES)):
        for block in (1, 0):
            before, middle = kept.blocks[stage * 2 + block]
            number = stage * LAYERS + 1 + block * 2
            of_middle = layer(number + 1, gradient, middle) * (middle > 0)
            gradient = gradient + layer(number, of_middle, F.relu(before)) * (before > 0)
        x, place = kept.inputs[stage], kept.places[stage].long()
        height, width = x.shape[2:]
        y = 2 * torch.arange(place.shape[2], device=x.device)[:, None] - height % 2 + place // 3
        at = y * width + 2 * torch.arange(place.shape[3], device=x.device) - width % 2 + place % 3
        of_convolved = torch.zeros(*place.shape[:2], height * width, dtype=torch.float64, device=x.device)
        of_convolved.scatter_add_(2, at.flatten(2), gradient.flatten(2))
        gradient = layer(stage * LAYERS, of_convolved.view(*place.shape[:2], height, width), x)
    return [part for number in range(len(weights)) for part in found[number]]


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def assert_right(device: str, sizes: tuple[int, int], image_size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    online, target = network(device, 1), network(device, 2)
    views, next_views = (images(device, count, image_size) for count in sizes)
    passes = Passes([views, next_views], [next_views], target, True, InTurn())
    packs = _pack(passes, online)
    features, kept = there(passes, online, packs)
    expected = [plainly(views, online), plainly(next_views, online), plainly(next_views, target)]
    assert apart(features, torch.cat(expected)) < 0.01
    gradient = torch.randn_like(features[: len(views)])
    found = back(gradient, kept, online, packs.turned, InTurn())
    for number, (one, other) in enumerate(zip(found, back_plainly(gradient, kept, online), strict=True)):
        assert one.dtype == (torch.float32 if number % 2 else torch.bfloat16)
        assert apart(one, other) < 0.02, number


def test_there_and_back(hopper: str) -> None:
    assert_right(hopper, (3, 2), (11, 9))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("views", [32, 64])
def test_batches_of_a_real_size(views: int) -> None:
    assert_right("cuda", (views, 32), (84, 84))


def test_sums_of_rows(kernel_device: str) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(rows, columns, device=kernel_device) for rows, columns in ((1, 64), (77, 128), (300, 40))]
    for sums, part in zip(sums_of_rows(parts), parts, strict=True):
        torch.testing.assert_close(sums.double(), part.double().sum(0), rtol=1e-5, atol=1e-5)
