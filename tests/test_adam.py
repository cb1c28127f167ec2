"""Our Adam is PyTorch's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from drq.backend import Backend
from drq.engine.adam import FusedAdam


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bit_for_bit(device: str) -> None:
    torch.manual_seed(0)
    initial = [torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last), torch.randn(7), torch.randn(())]
    ours, theirs = ([nn.Parameter(value.to(device, copy=True)) for value in initial] for _ in range(2))
    options = {"betas": (0.8, 0.95), "eps": 1.5e-4}
    optimizers = [
        FusedAdam(ours, 1e-2, **options),  # type: ignore[arg-type]
        torch.optim.Adam(theirs, lr=1e-2, fused=True, capturable=device == "cuda", **options),  # type: ignore[arg-type]
    ]
    for update in range(6):
        gradients = [torch.randn_like(value) for value in initial]
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in parameters)
            for parameter, gradient in zip(parameters[: 2 + update % 2], gradients, strict=False):
                parameter.grad = torch.empty_like(parameter).copy_(gradient)  # laid out as its parameter is
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        for key, value in optimizers[1].state[other].items():
            assert torch.equal(optimizers[0].state[one][key].to(value.device), value), key


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("max_norm", [0.1, 5.0, 1e4])
def test_clipping_bit_for_bit(device: str, max_norm: float) -> None:
    """The gradients of the updates have norms from 0.03 to 300, and once none."""
    torch.manual_seed(0)
    initial = [torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last), torch.randn(7), torch.randn(())]
    ours, theirs = ([nn.Parameter(value.to(device, copy=True)) for value in initial] for _ in range(2))
    our_adam = FusedAdam(ours, 1e-2)
    their_adam = torch.optim.Adam(theirs, lr=1e-2, fused=True, capturable=device == "cuda")
    for size in (0.0017, 0.17, 0.0, 17.0):
        for one, other, value in zip(ours, theirs, initial, strict=True):
            gradient = torch.empty_like(one).copy_(torch.randn_like(value) * size)
            one.grad, other.grad = gradient, gradient.clone()
        expected = nn.utils.clip_grad_norm_(theirs, max_norm)
        their_adam.step()
        norm = our_adam.clip_and_step(max_norm)
        assert norm.shape == ()
        assert torch.equal(norm, expected)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_matrices_decay_and_vectors_do_not(device: str) -> None:
    """PyTorch's AdamW on the one kind, its Adam on the other, bit for bit; the plain backend's by the equations."""
    torch.manual_seed(0)
    initial = [torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last), torch.randn(7), torch.randn(6, 2)]
    ours, theirs, plain = ([nn.Parameter(value.to(device, copy=True)) for value in initial] for _ in range(3))
    by_hand = [value.double() for value in initial]
    rates = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1.5e-4}
    options = {"fused": True, "capturable": device == "cuda", **rates}
    optimizers = [
        FusedAdam(ours, 1e-2, (0.8, 0.95), 1.5e-4, weight_decay=0.3),
        torch.optim.AdamW([theirs[0], theirs[2]], weight_decay=0.3, **options),  # type: ignore[arg-type]
        torch.optim.Adam([theirs[1]], **options),  # type: ignore[arg-type]
        Backend(device).adam(plain, 1e-2, (0.8, 0.95), 1.5e-4, 0.3),
    ]
    means, squares = ([torch.zeros_like(value) for value in by_hand] for _ in range(2))
    for update in range(1, 5):
        for number, value in enumerate(initial):
            gradient = torch.randn_like(value)
            for parameters in (ours, theirs, plain):
                parameters[number].grad = torch.empty_like(parameters[number]).copy_(gradient)
            means[number] = 0.8 * means[number] + 0.2 * gradient.double()
            squares[number] = 0.95 * squares[number] + 0.05 * gradient.double() ** 2
            direction = means[number] / (1 - 0.8**update) / ((squares[number] / (1 - 0.95**update)).sqrt() + 1.5e-4)
            decay = 0.3 if value.ndim > 1 else 0.0
            by_hand[number] = by_hand[number] - 1e-2 * (direction + decay * by_hand[number])
        for optimizer in optimizers:
            optimizer.step()
    for one, other, third, exact in zip(ours, theirs, plain, by_hand, strict=True):
        assert torch.equal(one, other)
        for found in (one, third):
            torch.testing.assert_close(found.detach().cpu().double(), exact, rtol=1e-5, atol=1e-6)


def test_training_does_not_load_the_compiler() -> None:
    """It takes seconds, which is what this optimiser is for."""
    program = (
        "import sys, torch; from drq.engine.adam import FusedAdam\n"
        "p = torch.nn.Parameter(torch.ones(3)); adam = FusedAdam([p], 1e-3)\n"
        "p.square().sum().backward(); adam.step(); adam.zero_grad()\n"
        "assert (p < 1).all()\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
