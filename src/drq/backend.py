"""How an agent and a replay compute: plainly, in PyTorch's own words, unless the engine puts its backend in this one's
place.

An agent and a replay are constructed with a backend and call it for what a machine can do faster than the plain way:
convolutions, augmented views, gradient steps, storing and fetching transitions. This one is the definition of each; the
engine's (`drq.engine.FastBackend`) gives the same numbers but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from drq.augment import Augmentation
from drq.envs.protocol import Frame

P = ParamSpec("P")
T = TypeVar("T")


class StackedFrames(NamedTuple):
    """N observations as references into the replay's frames, so that gathering can fuse with what comes next."""

    frames: Tensor
    """[slots, *frame_shape]."""
    slots: Tensor
    """[N, frame_stack], oldest first."""

    def tensor(self) -> Tensor:
        """The observations: [N, frame_stack * channels, ...]."""
        return self.frames[self.slots].flatten(1, 2)


class Views(Protocol):
    """Perturbed observations, [copies * N, ...]: a tensor, or whatever a backend has that stands for one."""

    def chunk(self, chunks: int, /) -> Sequence[Views]:
        """So many equal parts, in order: of M views of N states, the first of M chunks is every state's first view."""
        ...


Encoder = Callable[[Tensor], Tensor]
"""Observations to flat feature vectors."""


class Pass(NamedTuple):
    """Of views through an encoder."""

    encoder: Encoder
    views: Views
    trained: bool
    """Whether a gradient is wanted."""


class Rings(NamedTuple):
    """What a replay keeps on its device."""

    frames: Tensor
    """[slots, *frame_shape]."""
    rows: Tensor
    """[capacity, 3 + action columns]: reward, discount, done, action."""
    places: Tensor
    """[capacity, 2]: frame slot and age of each transition's observation."""
    window: Tensor
    """[streams, 2]: slot of the oldest transition of a stream, and how many of it may be sampled."""


class Entry(NamedTuple):
    """What is new in a replay: a frame, its stream's window and, unless an episode begins, a transition."""

    stream: int
    frame_slot: int
    frame: Frame | Tensor
    """On the host, or on the device already."""
    window: tuple[int, int]
    slot: int | None
    """Of the transition."""
    place: tuple[int, int]
    row: NDArray[np.float32] | None


class Average(NamedTuple):
    """A moving average of an optimiser's parameters: every step of the optimiser moves it too."""

    weights: Sequence[Tensor]
    """One for each parameter, in order."""
    tau: float
    """How much of the way it goes."""

    @torch.no_grad()
    def move(self, towards: Sequence[Tensor]) -> None:
        torch._foreach_lerp_(list(self.weights), list(towards), self.tau)


def decays(parameter: Tensor) -> bool:
    """Whether weight decay, where there is one, is for this parameter."""
    return parameter.ndim > 1


def same_pool(x: Tensor) -> Tensor:
    """Max-pooling, 3 with stride 2, padded as TensorFlow and JAX do for "same": an even side at its end alone."""
    height, width = x.shape[2:]
    # Windows that reach past the end count what is there.
    return F.max_pool2d(x, 3, 2, padding=(height % 2, width % 2), ceil_mode=True)


class Backend:
    """Plain PyTorch on one device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def __deepcopy__(self, memo: object) -> Backend:
        return self  # a copied network computes where the original does

    # Networks.

    def convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        *,
        stride: int = 1,
        padding: int = 0,
        relu_first: bool = False,
        relu: bool = False,
        pool: bool = False,
        plus: Tensor | None = None,
    ) -> Tensor:
        """A convolution, with the ReLU before it, the ReLU or the `same_pool` after it, and the sum with `plus` if
        there is one. The engine may use fewer digits."""
        result = F.conv2d((F.relu(x) if relu_first else x).to(weight.dtype), weight, bias, stride, padding)
        if relu or pool:
            result = same_pool(result) if pool else F.relu(result)
        return result if plus is None else plus + result

    def wide_linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The linear layer after the convolutions, whose input is long. The engine may use fewer digits; the result has
        those of the weights. Every layer after it is ordinary: float32."""
        return F.linear(x.to(weight.dtype), weight, bias)

    # Views.

    def augmentation(self, f: Augmentation) -> Augmentation:
        """Told of the augmentation that an agent will make views with, so that it may be prepared."""
        return f

    def views(self, f: Augmentation, states: Tensor | StackedFrames, nu: Tensor) -> Views:
        """f(s, ν) of all perturbed copies of the states: [N, ...] and ν of [copies * N] give [copies * N, ...].

        The first N are every state's first view, the next N its second.
        """
        states = states.tensor() if isinstance(states, StackedFrames) else states
        copies = nu.shape[0] // states.shape[0]
        return f(states.repeat(copies, *(1 for _ in states.shape[1:])), nu)

    def encode(self, encoder: Encoder, observations: Views) -> Tensor:
        """The features of views, or of observations as they are."""
        assert isinstance(observations, Tensor)
        return encoder(observations)

    @torch.no_grad()
    def encode_with_both(self, encoder: Encoder, other: Encoder, views: Views) -> tuple[Tensor, Tensor]:
        """The features of the same views by two encoders, without gradient."""
        return self.encode(encoder, views), self.encode(other, views)

    def encode_each(self, passes: Sequence[Pass]) -> list[Tensor]:
        """The features of every pass of an update, which need nothing but the batch, the random numbers and the weights
        as they were when it began: a GPU may compute them beside each other."""
        found = []
        for encoder, views, trained in passes:
            with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
                found.append(self.encode(encoder, views))
        return found

    # Updates.

    def adam(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        average: Average | None = None,
    ) -> Optimizer:
        """Adam; with `weight_decay` AdamW, which here decays matrices (and kernels) and leaves vectors alone."""
        parameters = list(parameters)
        optimizer: Optimizer = torch.optim.Adam(parameters, learning_rate, betas, eps)
        if weight_decay:
            matrices, vectors = ([p for p in parameters if decays(p) == does] for does in (True, False))
            groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, learning_rate, betas, eps, weight_decay)
        if average is not None:
            optimizer.register_step_post_hook(lambda *_: average.move(parameters))
        return optimizer

    def descend(
        self, optimizer: Optimizer, loss: Tensor, parameters: Sequence[nn.Parameter], max_norm: float | None = None
    ) -> Tensor | None:
        """One step down the gradient of a loss, first scaled down to `max_norm` if it is longer.

        Gives the norm that it had before, where it is clipped.
        """
        optimizer.zero_grad(set_to_none=True)
        loss.backward(inputs=parameters)
        norm = None if max_norm is None else nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        return norm

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a pure function of tensors, which the engine may compile."""
        return function(*args, **kwargs)

    def run_beside(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """`run` for a part of an update that needs nothing but the batch, the random numbers, what `encode_each` gave,
        and the weights as they were when the update began: a GPU may compute it beside what was launched since."""
        return function(*args, **kwargs)

    # The replay.

    def store(self, rings: Rings) -> Callable[[Entry], None]:
        """What writes entries into these rings."""

        def write(new: Entry) -> None:
            rings.frames[new.frame_slot] = torch.as_tensor(new.frame)
            if new.slot is not None:
                rings.rows[new.slot] = torch.as_tensor(new.row)
                rings.places[new.slot] = torch.tensor(new.place)
            rings.window[new.stream] = torch.tensor(new.window)

        return write
