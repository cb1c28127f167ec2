"""Bias and ReLU in one launch against plain PyTorch: on a GPU, and, the kernels' own text emulated, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drq.engine.kernels import runtime
from drq.engine.kernels.activation import _bias_relu, _bias_relu_gradient, bias_kernels, bias_relu
from emulation import needs_bfloat16

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def inputs(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """x, a bias, and a gradient of the output. Some sums of x and bias are exactly zero, some nearly so."""
    torch.manual_seed(0)
    bias = torch.randn(shape[1])
    bias[::2] = bias[::2].to(dtype)
    x = torch.where(torch.rand(shape) < 0.1, -bias[:, None, None], torch.randn(shape))
    of_type = {"device": device, "dtype": dtype, "memory_format": torch.channels_last}
    x, gradient = (tensor.to(**of_type) for tensor in (x, torch.randn(shape)))
    return x.requires_grad_(), bias.to(device).requires_grad_(), gradient


def oracle(x: Tensor, bias: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output and the gradients of x and of the bias, in float64."""
    x, bias = (tensor.detach().double().requires_grad_() for tensor in (x, bias))
    out = functional.relu(x + bias[None, :, None, None])
    return out.detach(), *torch.autograd.grad(out, (x, bias), gradient.double())


def assert_same(x: Tensor, bias: Tensor, gradient: Tensor) -> None:
    expected, of_x, of_bias = oracle(x, bias, gradient)
    out = bias_relu(x, bias)
    found_of_x, found_of_bias = torch.autograd.grad(out, (x, bias), gradient)
    assert out.dtype == found_of_x.dtype == x.dtype
    for tensor in (out, found_of_x):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out, expected.float().to(x.dtype))
    assert torch.equal(found_of_x, of_x.to(x.dtype))  # exactly zero where the output is, elsewhere as it came
    assert found_of_bias.dtype == torch.float32
    sum_of = x.numel() // len(bias)
    torch.testing.assert_close(found_of_bias, of_bias.float(), rtol=1e-5, atol=1e-6 * sum_of**0.5)


# A block takes 512 pixels of one channel, 64 of 32 and 32 of 64 at a time, and three emulated blocks run at once.
@DTYPES
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 1, 1, 1), (2, 1, 29, 31)),
        *((1, 5, 1, 1), (3, 5, 1, 7), (7, 5, 11, 13)),
        *((1, 32, 1, 1), (1, 32, 20, 20), (5, 32, 13, 7), (2, 32, 1, 32)),
        *((1, 64, 7, 7), (3, 64, 9, 9)),
        *((2, 257, 3, 1), (2, 1028, 2, 1)),  # more columns than a block has threads
    ],
    ids=str,
)
def test_output_and_gradients(kernel_device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_same(*inputs(kernel_device, dtype, shape))


@pytest.mark.gpu
@needs_bfloat16
@DTYPES
@pytest.mark.parametrize("shape", [(32, 32, 20, 20), (32, 64, 9, 9), (32, 64, 7, 7), (512, 32, 41, 41)], ids=str)
def test_batches_of_a_real_size(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_same(*inputs("cuda", dtype, shape))


def test_no_pixels(kernel_device: str) -> None:
    x, bias, gradient = inputs(kernel_device, torch.float32, (0, 32, 3, 3))
    out = bias_relu(x, bias)
    of_x, of_bias = torch.autograd.grad(out, (x, bias), gradient)
    assert out.shape == of_x.shape == x.shape
    assert torch.equal(of_bias, torch.zeros_like(bias))


def test_nans_stay_visible(kernel_device: str) -> None:
    x, bias, _ = inputs(kernel_device, torch.float32, (1, 32, 2, 2))
    x.data[0, 3, 1, 1] = torch.nan
    assert bias_relu(x, bias).isnan().nonzero().tolist() == [[0, 3, 1, 1]]


@DTYPES
def test_bias_gradients_are_the_same_bit_for_bit(kernel_device: str, dtype: torch.dtype) -> None:
    """However often it is asked for them, which also shows that the counter of blocks starts anew every time."""
    x, bias, gradient = inputs(kernel_device, dtype, (3, 64, 9, 9))
    out = bias_relu(x, bias)
    repeated = [torch.autograd.grad(out, bias, gradient, retain_graph=True)[0] for _ in range(3)]
    anew = [torch.autograd.grad(bias_relu(x, bias), bias, gradient)[0] for _ in range(2)]
    for one, other in pairwise(repeated + anew):
        assert torch.equal(one, other)


def test_two_calls_may_be_differentiated_in_any_order(kernel_device: str) -> None:
    first, second = (inputs(kernel_device, torch.float32, shape) for shape in ((5, 32, 13, 7), (2, 32, 9, 9)))
    outs = [bias_relu(x, bias) for x, bias, _ in (first, second)]
    for out, (x, bias, gradient) in zip(outs, (first, second), strict=True):
        found = torch.autograd.grad(out, (x, bias), gradient)
        torch.testing.assert_close(found, tuple(g.float() for g in oracle(x, bias, gradient)[1:]))


def not_channels_last(x: Tensor) -> Tensor:
    return x.detach().contiguous()


def not_aligned(x: Tensor) -> Tensor:
    storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    batch, channels, height, width = x.shape
    return storage[1:].view(batch, height, width, channels).permute(0, 3, 1, 2).copy_(x.detach())


@DTYPES
@pytest.mark.parametrize("laid_out", [not_channels_last, not_aligned])
def test_tensors_that_lie_otherwise(
    kernel_device: str, dtype: torch.dtype, laid_out: Callable[[Tensor], Tensor]
) -> None:
    x, bias, gradient = inputs(kernel_device, dtype, (2, 32, 5, 3))
    assert_same(x, bias, laid_out(gradient))
    assert_same(laid_out(x).requires_grad_(), bias, gradient)


def test_gradient_of_a_sum(kernel_device: str) -> None:
    """One value with strides of zero."""
    x, bias, _ = inputs(kernel_device, torch.float32, (2, 32, 5, 3))
    assert_same(x, bias, torch.ones((), device=kernel_device).expand(x.shape))


def test_gradients_that_are_not_asked_for(kernel_device: str) -> None:
    x, bias, gradient = inputs(kernel_device, torch.float32, (2, 32, 5, 3))
    expected, of_x, of_bias = (value.float() for value in oracle(x, bias, gradient))
    torch.testing.assert_close(torch.autograd.grad(bias_relu(x, bias.detach()), x, gradient)[0], of_x)
    torch.testing.assert_close(torch.autograd.grad(bias_relu(x.detach(), bias), bias, gradient)[0], of_bias)
    with torch.no_grad():
        out = bias_relu(x, bias)
    assert not out.requires_grad
    torch.testing.assert_close(out, expected)


def test_a_second_derivative_is_refused(kernel_device: str) -> None:
    x, bias, _ = inputs(kernel_device, torch.float32, (1, 32, 2, 2))
    (of_x,) = torch.autograd.grad(bias_relu(x, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        of_x.sum().backward()


@DTYPES
def test_inside_compiled_code(kernel_device: str, dtype: torch.dtype) -> None:
    x, bias, gradient = inputs(kernel_device, dtype, (2, 32, 5, 3))

    def twice(x: Tensor, bias: Tensor) -> Tensor:
        return bias_relu(bias_relu(x, bias) * 2 - 1, bias)

    def results(f: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        out = f(x, bias)
        return out, *torch.autograd.grad(out, (x, bias), gradient)

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    for found, expected in zip(results(compiled), results(twice), strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("channels", [5, 32])
def test_operators_keep_the_rules_of_pytorch(kernel_device: str, channels: int) -> None:
    x, bias, gradient = inputs(kernel_device, torch.float32, (2, channels, 5, 3))
    torch.library.opcheck(_bias_relu, (x, bias))
    out, counter = (value.detach() for value in _bias_relu(x, bias))
    torch.library.opcheck(_bias_relu_gradient, (gradient, out, counter))


def test_what_does_not_fit_is_refused(kernel_device: str) -> None:
    x, bias, _ = inputs(kernel_device, torch.float32, (2, 5, 3, 3))
    for wrong in ((x, bias[:4]), (x, bias.double()), (x.double(), bias), (x.half(), bias)):
        with pytest.raises(ValueError, match="bias_relu wants"):
            bias_relu(*wrong)


@pytest.mark.gpu
@needs_bfloat16
def test_learners_in_one_graph_side_by_side() -> None:
    """Captured on one stream and its branches, replayed often: no learner counts the blocks of another."""
    learners = [inputs("cuda", torch.bfloat16, (32, 64, 9, 9)) for _ in range(8)]
    bias_kernels("bias_relu", 64, torch.bfloat16)

    def gradients(learner: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        x, bias, gradient = learner
        return torch.autograd.grad(bias_relu(x, bias), (x, bias), gradient)

    expected = gradients(learners[0])
    streams = [torch.cuda.Stream() for _ in learners]
    graph, found = torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for stream, learner in zip(streams, learners, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                found.append(gradients(learner))
        for stream in streams:
            main.wait_stream(stream)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        for of_x, of_bias in found:
            assert torch.equal(of_x, expected[0])
            assert torch.equal(of_bias, expected[1])
            of_x.zero_()
            of_bias.zero_()


def test_kernels_are_compiled_ahead(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that later calls launch, so that one which does not compile is known before any is needed."""
    kernel, asked = runtime.kernel, []

    def asking(name: str, parts: Sequence[str], defines: Mapping[str, int | str], *shape: int) -> runtime.Launchable:
        asked.append((name, runtime.program_text(parts, defines), *shape))
        return kernel(name, parts, defines, *shape)

    monkeypatch.setattr(runtime, "kernel", asking)
    bias_kernels("bias_relu", 32, torch.bfloat16)
    ahead, asked = asked, []
    x, bias, gradient = inputs(kernel_device, torch.bfloat16, (2, 32, 5, 3))
    torch.autograd.grad(bias_relu(x, bias), (x, bias), gradient)
    assert ahead == asked
    assert len(ahead) == 2


@pytest.mark.gpu
@needs_bfloat16
def test_a_kernel_that_does_not_compile() -> None:
    with pytest.raises(runtime.KernelError, match="does not compile"):
        bias_kernels("bias_relu", 0, torch.float32)
