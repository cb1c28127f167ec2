"""Our Adam is PyTorch's."""

from __future__ import annotations

import copy
import functools
import math
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from drq.backend import Average, Backend
from drq.engine import kernels
from drq.engine.adam import FusedAdam
from drq.engine.graphs import WARMUPS, Captured
from drq.engine.kernels import runtime
from drq.engine.kernels.adam import ELEMENTS, MAX_AVERAGED, MAX_PARAMETERS
from emulation import Recorded, fast_backend, needs_bfloat16


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


# The kernels, on a GPU and, their own text emulated, on the CPU.


def optimizers(device: str, shapes: list[tuple[int, ...]], weight_decay: float = 0.0) -> tuple[FusedAdam, FusedAdam]:
    """Equal ones, the second of which uses the kernel."""
    torch.manual_seed(0)
    ours_on = torch.device(device)
    initial = [torch.randn(shape, device=device) for shape in shapes]
    initial = [v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for v in initial]
    rates = 1e-2, (0.8, 0.95), 1.5e-4
    parameters, others = ([nn.Parameter(value.clone()) for value in initial] for _ in range(2))
    plain = FusedAdam(parameters, *rates, weight_decay=weight_decay)
    ours = FusedAdam(others, *rates, lambda: kernels.Adam(ours_on, decay=weight_decay > 0), weight_decay)
    return plain, ours


def test_parameters_in_double_precision_are_left_to_pytorch(kernel_device: str) -> None:
    """As the logarithm of a temperature is that numpy has taken."""
    plain, ours = (nn.Parameter(torch.tensor(np.log(0.1), device=kernel_device)) for _ in range(2))
    backend = fast_backend(kernel_device)
    for parameter, on in ((plain, Backend(kernel_device)), (ours, backend)):
        optimizer = on.adam([parameter], 0.1)
        for _ in range(3):
            on.descend(optimizer, (parameter + 2) ** 2, [parameter])
    assert ours.dtype == torch.float64
    assert ours.item() != np.log(0.1)
    torch.testing.assert_close(ours, plain)


def assert_same_steps(
    plain: FusedAdam, ours: FusedAdam, steps: int, *, max_norm: float | None = None, turned: bool = False
) -> None:
    for step in range(steps):
        for one, other in zip(plain.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
            gradient = torch.randn_like(one) * 10.0 ** (step - 1)
            one.grad, other.grad = gradient, gradient.contiguous() if turned else gradient.clone()
        if max_norm is None:
            plain.step()
            ours.step()
        else:
            torch.testing.assert_close(ours.clip_and_step(max_norm), plain.clip_and_step(max_norm))
    for one, other in zip(plain.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        for key, value in plain.state[one].items():
            # Means are sums whose parts may cancel: what is lost then is a share of the parts.
            torch.testing.assert_close(ours.state[other][key], value, rtol=1e-5, atol=1e-6)


SHAPES = [(8, 3, 5, 5), (2 * ELEMENTS + 5,), (), (1,), (7,), (ELEMENTS,), (50, 33), (4,)]
"""That fill a block and do not, that are and are not divisible by four; many, few, one."""
NORM = 0.1 * sum(math.prod(shape) for shape in SHAPES) ** 0.5
"""Of the first gradients, about; later ones are ten times as large each."""
CLIPPING = pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])


@pytest.mark.parametrize("max_norm", [None, 1e-3, NORM, 10 * NORM, 1e6])
def test_adam(kernel_device: str, max_norm: float | None) -> None:
    """Clipped far below the gradients' norm, near it, and far above it, which is not at all."""
    assert_same_steps(*optimizers(kernel_device, SHAPES), 4, max_norm=max_norm)


@CLIPPING
def test_adam_with_decay(kernel_device: str, max_norm: float | None) -> None:
    plain, ours = optimizers(kernel_device, SHAPES, weight_decay=0.5)
    _, without = optimizers(kernel_device, SHAPES)
    assert_same_steps(plain, ours, 4, max_norm=max_norm)
    for each in (ours, without):
        for parameter in each.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in without.param_groups[0]["params"]]
    without.step()
    after = [parameter.detach().clone() for parameter in without.param_groups[0]["params"]]
    _, decayed = optimizers(kernel_device, SHAPES, weight_decay=0.5)
    for parameter in decayed.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    decayed.step()
    for parameter, began, ended in zip(decayed.param_groups[0]["params"], before, after, strict=True):
        if parameter.ndim > 1:
            torch.testing.assert_close(parameter.detach(), ended - 1e-2 * 0.5 * began, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(parameter, ended)  # to the bit: a vector does not decay


@pytest.mark.parametrize("tau", [0.005, 0.7, 1.0])
@CLIPPING
def test_adam_with_an_average_and_rounded_copies(kernel_device: str, max_norm: float | None, tau: float) -> None:
    """As PyTorch, which steps, then moves the average, then rounds. Some parameters have a copy in bfloat16, and their
    gradients with it; one has no gradient at all, and its average moves all the same."""
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [*SHAPES, *[(6,)] * MAX_AVERAGED]
    initial = [torch.randn(shape, device=kernel_device) for shape in shapes]
    initial = [v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for v in initial]
    mine, theirs = ([nn.Parameter(value.clone()) for value in initial] for _ in range(2))
    followers, expected = ([value * 0.5 for value in initial] for _ in range(2))
    rounded = {w: w.detach().bfloat16() for each in (mine, followers) for w in each[2::2]}
    rates = 1e-2, (0.8, 0.95), 1.5e-4
    plain = FusedAdam(theirs, *rates, weight_decay=0.5, average=Average(expected, tau))
    kernel = functools.partial(kernels.Adam, torch.device(kernel_device), decay=True, average=True)
    ours = FusedAdam(mine, *rates, kernel, 0.5, Average(followers, tau), rounded)
    for _ in range(3):
        for one, other in zip(theirs[1:], mine[1:], strict=True):
            ours.leaf(other).grad = gradient = torch.randn_like(ours.leaf(other))
            one.grad = gradient.to(torch.float32, copy=True)
        norms = [optimizer.clip_and_step(max_norm) for optimizer in (plain, ours)]
        torch.testing.assert_close(*norms)
    pairs = [*zip(mine, theirs, strict=True), *zip(followers, expected, strict=True)]
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for weight, copied in rounded.items():
        assert torch.equal(copied, weight.bfloat16())


@pytest.mark.parametrize("blocks", [1, 2, 300])
def test_the_norm_of_few_and_many_blocks(kernel_device: str, blocks: int) -> None:
    """More than a block has threads, too: the last block adds up several sums with each of them."""
    _, ours = optimizers(kernel_device, [(ELEMENTS * (blocks - 1) + 1,)])
    (parameter,) = ours.param_groups[0]["params"]
    for _ in range(2):
        parameter.grad = torch.randn_like(parameter)
        norm = ours.clip_and_step(1.0)
        torch.testing.assert_close(norm.double(), parameter.grad.double().norm())


def test_a_limit_that_is_not_reached_changes_no_bit(kernel_device: str) -> None:
    _, free = optimizers(kernel_device, SHAPES)
    _, limited = optimizers(kernel_device, SHAPES)
    for one, other in zip(free.param_groups[0]["params"], limited.param_groups[0]["params"], strict=True):
        one.grad = other.grad = torch.randn_like(one)
    free.step()
    limited.clip_and_step(1e6)
    for one, other in zip(free.param_groups[0]["params"], limited.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_clipping_gradients_without_a_direction(kernel_device: str, value: float) -> None:
    plain, ours = optimizers(kernel_device, [(9,), (3,)])
    for optimizer in (plain, ours):
        first, second = optimizer.param_groups[0]["params"]
        first.grad, second.grad = torch.zeros_like(first), torch.full_like(second, value)
    expected = plain.clip_and_step(1.0)
    torch.testing.assert_close(ours.clip_and_step(1.0), expected, equal_nan=True)
    for one, other in zip(plain.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(other, one, equal_nan=True)


def test_equal_steps_give_equal_bits(kernel_device: str) -> None:
    def trained() -> list[torch.Tensor]:
        _, ours = optimizers(kernel_device, [*SHAPES, *[(3,)] * MAX_PARAMETERS])
        norms = []
        for _ in range(3):
            for parameter in ours.param_groups[0]["params"]:
                parameter.grad = torch.randn_like(parameter)
            norms.append(ours.clip_and_step(1.0))
        return [*norms, *ours.param_groups[0]["params"]]

    first = trained()
    for _ in range(3):
        for one, other in zip(first, trained(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("max_norm", "launches"), [(None, ["adam"]), (1.0, ["gradient_norm", "adam"])])
def test_launches_of_a_step(
    kernel_device: str, max_norm: float | None, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    kernel = runtime.kernel

    def counting(name: str, *args: Any) -> Any:
        def launch(*arguments: Any) -> None:
            made.append(name)
            inner.launch(*arguments)

        inner = kernel(name, *args)
        return types.SimpleNamespace(launch=launch)

    monkeypatch.setattr(runtime, "kernel", counting)
    plain, ours = optimizers(kernel_device, SHAPES)
    assert_same_steps(plain, ours, 1)  # makes the moments
    made.clear()
    with Recorded() as recorded:
        ours.step() if max_norm is None else ours.clip_and_step(max_norm)
    assert made == launches
    assert set(recorded.names) <= {"aten::empty.memory_format"}


def test_nothing_but_the_state_of_adam_is_saved(kernel_device: str) -> None:
    """A checkpoint of one way of stepping goes on in the other."""
    plain, ours = optimizers(kernel_device, [(9,), (3,)])
    assert_same_steps(plain, ours, 2, max_norm=1.0)
    assert ours.state_dict().keys() == plain.state_dict().keys()
    assert ours.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    plain.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert_same_steps(plain, ours, 2, max_norm=1.0)


@pytest.mark.gpu
@needs_bfloat16
def test_steps_as_a_graph() -> None:
    """The norm and the counted steps are those of the replay, and the blocks' counter goes on."""
    _, eager = optimizers("cuda", SHAPES)
    _, replayed = optimizers("cuda", SHAPES)
    gradients = [torch.randn_like(parameter) for parameter in eager.param_groups[0]["params"]]
    for optimizer in (eager, replayed):
        for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
            parameter.grad = gradient
    graph = Captured(lambda: replayed.clip_and_step(1.0), [])
    for _ in range(WARMUPS):
        eager.clip_and_step(1.0)
    for factor in (2.0, 0.1):
        torch._foreach_mul_(gradients, factor)
        assert torch.equal(graph.replay(), eager.clip_and_step(1.0))
    for one, other in zip(eager.param_groups[0]["params"], replayed.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)
        assert eager.state[one]["step"] == replayed.state[other]["step"] == WARMUPS + 2


@CLIPPING
def test_adam_where_memory_is_not_aligned(kernel_device: str, max_norm: float | None) -> None:
    plain, ours = optimizers(kernel_device, [(1,)])
    for optimizer in (plain, ours):
        torch.manual_seed(1)
        storage = torch.randn(40, device=kernel_device)
        optimizer.param_groups[0]["params"] = [nn.Parameter(storage[1:30])]
    assert_same_steps(plain, ours, 2, max_norm=max_norm)


@CLIPPING
def test_adam_with_gradients_laid_out_otherwise(kernel_device: str, max_norm: float | None) -> None:
    assert_same_steps(*optimizers(kernel_device, [(6, 3, 4, 4)]), 2, max_norm=max_norm, turned=True)


@CLIPPING
def test_adam_with_more_parameters_than_one_launch_takes(kernel_device: str, max_norm: float | None) -> None:
    assert_same_steps(*optimizers(kernel_device, [(3,)] * (2 * MAX_PARAMETERS + 2)), 2, max_norm=max_norm)
