"""Bias and max-pool in one launch against plain PyTorch: on a GPU, and, the kernels' own text emulated, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drq.backend import same_pool
from drq.engine.kernels.activation import _bias_pool, _bias_pool_gradient, bias_pool

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def inputs(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """x of few values, so that many windows have several greatest; a bias; a gradient of the output."""
    torch.manual_seed(0)
    out = *shape[:2], (shape[2] + 1) // 2, (shape[3] + 1) // 2
    of_type = {"device": device, "dtype": dtype, "memory_format": torch.channels_last}
    x, gradient = torch.randint(-3, 3, shape).to(**of_type), torch.randn(out).to(**of_type)  # type: ignore[call-overload]
    return x.requires_grad_(), torch.randn(shape[1], device=device).requires_grad_(), gradient


def assert_same(x: Tensor, bias: Tensor, gradient: Tensor) -> None:
    # The sum is rounded first, and then it is what the gradient goes to: of several greatest, to the first.
    biased = (x.float() + bias[:, None, None]).to(x.dtype).detach().double().contiguous().requires_grad_()
    expected = same_pool(biased)
    (of_biased,) = torch.autograd.grad(expected, biased, gradient.double())
    out = bias_pool(x, bias)
    of_x, of_bias = torch.autograd.grad(out, (x, bias), gradient)
    for tensor in (out, of_x):
        assert tensor.dtype == x.dtype
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out.double(), expected)
    torch.testing.assert_close(of_x.double(), of_biased.to(x.dtype).double(), rtol=1e-6, atol=1e-6)
    assert of_bias.dtype == torch.float32
    torch.testing.assert_close(of_bias, of_biased.sum((0, 2, 3)).float(), rtol=1e-5, atol=1e-4)


# Three emulated blocks run at once: the largest makes them take more than one turn.
@DTYPES
@pytest.mark.parametrize(
    "shape",
    [(1, 5, 1, 1), (2, 5, 9, 10), (1, 16, 1, 4), (3, 16, 2, 2), (2, 16, 21, 11), (3, 16, 22, 20)],
    ids=str,
)
def test_output_and_gradients(kernel_device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_same(*inputs(kernel_device, dtype, shape))


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", [(32, 64, 84, 84), (64, 128, 21, 21)], ids=str)
def test_batches_of_a_real_size(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_same(*inputs("cuda", dtype, shape))


def test_tensors_that_lie_otherwise(kernel_device: str) -> None:
    x, bias, gradient = inputs(kernel_device, torch.float32, (2, 16, 5, 6))
    assert_same(x.detach().contiguous().requires_grad_(), bias, gradient.contiguous())
    assert_same(x, bias, torch.ones((), device=kernel_device).expand(gradient.shape))


def test_nans_and_infinities_stay_visible(kernel_device: str) -> None:
    x, bias, _ = inputs(kernel_device, torch.float32, (1, 16, 4, 4))
    x.data[0, 3, 1, 1] = torch.nan
    x.data[0, 5] = -torch.inf
    out = bias_pool(x, bias)
    assert out.isnan().nonzero().tolist() == [[0, 3, 0, 0]]
    assert bool((out[0, 5] == -torch.inf).all())


def test_inside_compiled_code_and_by_the_rules_of_pytorch(kernel_device: str) -> None:
    x, bias, gradient = inputs(kernel_device, torch.float32, (2, 16, 5, 6))

    def results(f: object) -> tuple[Tensor, ...]:
        out = f(x * 2, bias)  # type: ignore[operator]
        return out, *torch.autograd.grad(out, (x, bias), gradient)

    compiled = torch.compile(bias_pool, backend="aot_eager", fullgraph=True)
    for found, expected in zip(results(compiled), results(bias_pool), strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
    torch.library.opcheck(_bias_pool, (x, bias))
    torch.library.opcheck(_bias_pool_gradient, (gradient, _bias_pool(x, bias)[1], 5, 6))
    with pytest.raises(ValueError, match="bias_pool wants"):
        bias_pool(x, bias.double())
