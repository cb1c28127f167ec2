"""All passes of an update through residual encoders (`impala-same`), there and back.

Passes of one network are one batch, and two networks go through a launch together: a small batch alone would leave much
of a GPU without work. What stands around a convolution, bias, ReLU, the sum of a residual block and the gradients of
these, is part of its launch. Gradients of the weights are the library's, beside those that the next layer waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from . import runtime
from .activation import _bias_pool_gradient, _bias_relu_gradient, _new, bias_pool_into
from .conv_pool import conv_pool_into, conv_pool_suits
from .conv_pool_weight import _conv_pool_weight, conv_pool_weight_suits
from .conv_same import Weights, block_size, conv_same_suits, convolve
from .many import Packing, packed, sums_of_rows

STAGES, LAYERS = 3, 5
"""Of the encoder; convolutions of a stage: one before the pool, and two of each of two blocks."""


class Side(Protocol):
    """Where work goes that nothing which is launched next waits for."""

    def apart(self) -> AbstractContextManager[None]:
        """Within it, work comes after what has been launched so far, and beside what is launched next."""
        ...

    def join(self) -> None:
        """Has what is launched from here on wait for all that was launched apart. What that reads must live until then:
        nobody else knows that it is still read."""
        ...


class InTurn:
    """Has everything done where it is launched, one after the other."""

    def apart(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass


class Passes(NamedTuple):
    """Images through a network, and behind them others through another one."""

    own: Sequence[Tensor]
    """[N, C, H, W] each. Gradients are of the first alone."""
    others: Sequence[Tensor]
    """Of these, each may be among the first ones too."""
    weights_of_others: Sequence[Weights]
    trained: bool
    """Whether gradients are asked for."""
    side: Side


class Kept(NamedTuple):
    """What the way back needs of the pass that has one, from the first stage on."""

    inputs: list[Tensor]
    """Of the convolution before the pool, and behind those of all stages the features."""
    places: list[Tensor]
    """Where in its window the pool found what it passed on."""
    blocks: list[tuple[Tensor, Tensor]]
    """What a residual block began with, and its middle."""


def most_together(weights: Sequence[Tensor], height: int, width: int) -> int:
    """How many images all passes may have, of this size, with weights [O, C, 3, 3] like these; 0 where the kernels
    cannot do it, or not on this GPU."""
    first, *rest = weights
    _, *sizes = _sizes(height, width)
    suits = runtime.multiplies_wide() and conv_pool_suits(first, height, width)
    suits = suits and conv_pool_weight_suits(first.shape[1], len(first), height, width)
    suits = suits and len(rest) == len(sizes) and all(weight.shape[2:] == (3, 3) for weight in rest)
    for weight, size in zip(rest, sizes, strict=False):
        outputs, channels = weight.shape[:2]
        suits = suits and conv_same_suits(channels, outputs, *size) and conv_same_suits(outputs, channels, *size)
    height, width = sizes[0]
    return runtime.MOST_ELEMENTS // (max(map(len, weights)) * height * width) if suits else 0


def launch_all(image: Tensor, weights: Sequence[Weights]) -> None:
    """What one image there and back launches."""
    passes = Passes([image], [image], weights, True, InTurn())
    packs = _pack(passes, weights)
    features, kept = there(passes, weights, packs)
    back(features[:1], kept, weights, packs.turned, passes.side)


def encode_passes(passes: Passes, weights: Sequence[Weights]) -> tuple[Tensor, ...]:
    """The features [N, C, H, W] of every pass."""
    parameters = [part for each in weights for part in each]
    with torch.set_grad_enabled(passes.trained):
        features: tuple[Tensor, ...] = _Encoding.apply(passes, *parameters)  # type: ignore[no-untyped-call]
    return features


class _Encoding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: Passes, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights = [Weights(*pair) for pair in zip(parameters[::2], parameters[1::2], strict=True)]
        with passes.side.apart():
            packs = _pack(passes, weights)
        features, kept = there(passes, weights, packs)
        ctx.given = kept, weights, packs.turned, passes.side
        sizes = [len(images) for images in (*passes.own, *passes.others)]
        outputs: tuple[Tensor, ...] = features.split(sizes)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * (1 + 2 * STAGES * LAYERS)
        return None, *back(gradient, *ctx.given)


class Packs(NamedTuple):
    """Weights of all layers but the first, as their kernel multiplies with them."""

    own: list[Weights]
    others: list[Weights]
    turned: list[Weights]
    """For the gradients of the inputs."""


def _pack(passes: Passes, weights: Sequence[Weights]) -> Packs:
    _, *sizes = _sizes(*passes.own[0].shape[2:])

    def asked(layers: Sequence[Weights], *, turned: bool = False) -> list[Packing]:
        found = []
        for (weight, _), size in zip(layers[1:], sizes, strict=True):
            outputs, channels = reversed(weight.shape[:2]) if turned else weight.shape[:2]
            found.append(Packing(weight, block_size(channels, outputs, *size).channels, turned))
        return found

    back_too = asked(weights, turned=True) if passes.trained else []
    parts = asked(weights), asked(passes.weights_of_others) if passes.others else [], back_too
    found = iter(packed([each for part in parts for each in part]))
    own, others, turned = ([next(found) for _ in part] for part in parts)

    def biased(packs: list[Tensor], layers: Sequence[Weights]) -> list[Weights]:
        return [Weights(pack, layer.bias) for pack, layer in zip(packs, layers[1:], strict=False)]

    back_again = [Weights(pack, None) for pack in turned]
    return Packs(biased(own, weights), biased(others, passes.weights_of_others), back_again)


def there(passes: Passes, weights: Sequence[Weights], packs: Packs) -> tuple[Tensor, Kept]:
    """The features of all images, and what the way back needs of the first pass."""
    total, mine = sum(map(len, (*passes.own, *passes.others))), sum(map(len, passes.own))
    kept, keeping = len(passes.own[0]) if passes.trained else 0, Kept([], [], [])
    own, others = [weights[0], *packs.own], [*passes.weights_of_others[:1], *packs.others] or [weights[0], *packs.own]

    def convolved(number: int, x: Tensor, out: Tensor, plus: Tensor | None = None, *, first: bool = False) -> Tensor:
        convolve(x, out, own[number], others[number], mine, plus=plus, relu_first=first, relu=first)
        return out

    images = [*passes.own, *(each for each in passes.others if not any(each is known for known in passes.own))]
    begins = {id(each): at for each, at in zip(images, _begins(images), strict=True)}
    x = _new(own[0].weight, (sum(map(len, images)), *images[0].shape[1:]))
    for each in images:
        x[begins[id(each)] :][: len(each)].copy_(each)
    out = _new(x, (total, len(own[0].weight), *_pooled(*x.shape[2:])))
    place = _new(out, dtype=torch.uint8)
    conv_pool_into(out[:mine], place[:mine], x[:mine], own[0].weight, _bias(own[0]))
    for each, at in zip(passes.others, _begins(passes.others, mine), strict=True):
        part, seen = slice(at, at + len(each)), x[begins[id(each)] :][: len(each)]
        conv_pool_into(out[part], place[part], seen, others[0].weight, _bias(others[0]))
    passes.side.join()  # the packs are there
    for stage in range(STAGES):
        if stage:
            x, number = out, stage * LAYERS
            wide = _new(x, (total, len(weights[number].weight), *x.shape[2:]))
            first, second = (each[number]._replace(bias=None) for each in (own, others))
            convolve(x, wide, first, second, mine)
            out = _new(x, (total, wide.shape[1], *_pooled(*x.shape[2:])))
            place = _new(out, dtype=torch.uint8)
            for part, layers in ((slice(mine), own), (slice(mine, total), others)):
                if len(out[part]):
                    bias_pool_into(out[part], place[part], wide[part], _bias(layers[number]))
        keeping.inputs.append(x[:kept])
        keeping.places.append(place[:kept])
        for number in range(stage * LAYERS + 1, (stage + 1) * LAYERS, 2):
            middle = convolved(number, out, _new(out), first=True)
            keeping.blocks.append((out[:kept], middle[:kept]))
            out = convolved(number + 1, middle, _new(out), plus=out)
    features = F.relu(out)
    keeping.inputs.append(features[:kept])
    return features, keeping


def back(
    gradient: Tensor, kept: Kept, weights: Sequence[Weights], turned: Sequence[Weights], side: Side
) -> list[Tensor]:
    """The gradients of weights and biases, of each layer behind each other, from that of the features. `turned`: the
    packed weights of all layers but the first."""
    of_weights: dict[int, Tensor] = {}
    held: list[Tensor] = []
    """Until what reads it apart has been waited for, its memory must not be used anew."""
    sums: dict[int, Tensor] = {}
    """The gradients of biases, in parts."""

    def of_weight(number: int, gradient: Tensor, x: Tensor, *, relu_first: bool = False) -> None:
        held.append(gradient)
        with side.apart():
            seen, weight, once = F.relu(x) if relu_first else x, weights[number].weight, [1, 1]
            only_weight = [False, True, False]
            of_weights[number] = torch.ops.aten.convolution_backward(
                gradient, seen, weight, None, once, once, once, False, [0, 0], 1, only_weight
            )[1]

    def of_input(
        number: int, gradient: Tensor, like: Tensor, gate: Tensor | None = None, plus: Tensor | None = None
    ) -> Tensor:
        """Of a layer's, which is that of the output of the layer before it, or of its pool."""
        found = _new(like)
        parts = convolve(gradient, found, turned[number - 1], gate=gate, plus=plus, sums=True)
        assert parts is not None
        sums[number - 1] = parts
        return found

    counter = torch.zeros(1, dtype=torch.int32, device=gradient.device)
    gradient, of_last_bias = _bias_relu_gradient(gradient, kept.inputs[STAGES], counter)
    for stage in reversed(range(STAGES)):
        x, place = kept.inputs[stage], kept.places[stage]
        for block in (1, 0):
            number = stage * LAYERS + 1 + block * 2
            before, middle = kept.blocks[stage * 2 + block]
            of_weight(number + 1, gradient, middle)
            of_middle = of_input(number + 1, gradient, middle, gate=middle)
            of_weight(number, of_middle, before, relu_first=True)
            gradient = of_input(number, of_middle, before, gate=before, plus=gradient)
        if stage:
            # Each of the pool's gradients goes to one pixel, so that their sum is that of all pixels.
            of_convolved = _bias_pool_gradient(gradient, place, *x.shape[2:])
            of_weight(stage * LAYERS, of_convolved, x)
            gradient = of_input(stage * LAYERS, of_convolved, x)
    of_weights[0], of_first_bias = _conv_pool_weight(gradient, place, x)
    of_biases = [of_first_bias, *sums_of_rows([sums[number] for number in range(1, len(weights) - 1)]), of_last_bias]
    side.join()
    return [part for number, of_bias in enumerate(of_biases) for part in (of_weights[number], of_bias)]


def _bias(weights: Weights) -> Tensor:
    assert weights.bias is not None
    return weights.bias


def _pooled(height: int, width: int) -> tuple[int, int]:
    return (height + 1) // 2, (width + 1) // 2


def _sizes(height: int, width: int) -> list[tuple[int, int]]:
    """Of the images that each layer convolves."""
    size, found = (height, width), []
    for _ in range(STAGES):
        pooled = _pooled(*size)
        found += [size, *[pooled] * (LAYERS - 1)]
        size = pooled
    return found


def _begins(parts: Sequence[Tensor], at: int = 0) -> list[int]:
    """Where in a batch each part begins, the first one here."""
    return [at + sum(map(len, parts[:number])) for number in range(len(parts))]
