"""Adam, fused into one kernel, and free of the seconds that loading PyTorch's compiler takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drq.backend import Average, decays


class Moments(NamedTuple):
    """Parameters that have gradients, with what Adam keeps of each: one list for every kind."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    """Means of the squared gradients."""
    steps: list[Tensor]
    """How many were made before this one."""
    averages: list[Tensor | None]
    """Which the step moves towards the parameters, where there are any."""
    rounded: list[Tensor | None]
    """Copies of the parameters in bfloat16, which the step writes anew. The gradient of what has one is of it."""
    rounded_averages: list[Tensor | None]


class Rates(NamedTuple):
    """The constants of a step."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """Of matrices, apart from the gradient: they first shrink by the learning rate times this."""
    max_norm: float | None
    """To which the norm of all gradients together is clipped."""
    tau: float
    """How much of the way the averages move."""


Descend = Callable[[Moments, Rates], Tensor | None]
"""Makes one step in place, and counts it. Gives the norm before clipping, where gradients are clipped; they themselves
may be changed or not."""


def descend(moments: Moments, rates: Rates) -> Tensor | None:
    """As PyTorch does it, without rounded copies."""
    assert not any(copy is not None for copy in moments.rounded)
    norm = None if rates.max_norm is None else nn.utils.clip_grad_norm_(moments.parameters, rates.max_norm)
    torch._foreach_add_(moments.steps, 1)
    kinds: list[tuple[Moments, float]] = [(moments, 0.0)]
    if rates.weight_decay:
        kinds = [(_of_kind(moments, True), rates.weight_decay), (_of_kind(moments, False), 0.0)]
    for (parameters, gradients, means, squares, steps, *_), weight_decay in kinds:
        fused = torch._fused_adamw_ if weight_decay else torch._fused_adam_
        fused(
            *(parameters, gradients, means, squares, [], steps),
            lr=rates.learning_rate,
            beta1=rates.betas[0],
            beta2=rates.betas[1],
            eps=rates.eps,
            weight_decay=weight_decay,
            amsgrad=False,
            maximize=False,
        )
    averages = [average for average in moments.averages if average is not None]
    if averages:
        Average(averages, rates.tau).move(moments.parameters)
    return norm


def _of_kind(moments: Moments, decayed: bool) -> Moments:
    rows = [row for row in zip(*moments, strict=True) if decays(row[0]) == decayed]
    return Moments(*(list(column) for column in zip(*rows, strict=True))) if rows else Moments(*([] for _ in moments))


class FusedAdam(Optimizer):
    """`torch.optim.Adam(fused=True)`, bit for bit where `descend` is what steps; with a weight decay, `AdamW` whose
    decay is for matrices alone.

    That one imports torch._dynamo when it is made and again when it steps, only to keep it out: 1 to 6 seconds of
    every start. The step count of each parameter lives beside it, so that a CUDA graph can hold the update. All
    parameters are one group. Clipping is part of the step, because what reads the gradients can scale them too.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        choose: Callable[[], Descend] = lambda: descend,
        weight_decay: float = 0.0,
        average: Average | None = None,
        rounded: Mapping[Tensor, Tensor] = MappingProxyType({}),
    ) -> None:
        """`choose` is asked at the first step which way to make it. `rounded` may be filled until then."""
        super().__init__(parameters, {"lr": learning_rate, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.average = average
        self._averages = dict(zip(parameters, average.weights, strict=True)) if average else {}
        self._rounded = rounded
        self._choose = choose
        self._descend: Descend | None = None
        self._descend_ahead: Descend | None = None
        self._stepped: set[Tensor] = set()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append(self.defaults | param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = self.leaf(parameter).grad = None

    def leaf(self, parameter: Tensor) -> Tensor:
        """What a parameter's gradient is taken of: its rounded copy, where it has one."""
        return self._rounded.get(parameter, parameter)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.clip_and_step(None)

    @torch.no_grad()
    def step_ahead(self, parameter: nn.Parameter) -> None:
        """The step of one parameter, whose gradient is there before the others': `step` leaves it out then."""
        self._descend_ahead = self._descend_ahead or self._choose()
        self._step([parameter], self._descend_ahead, None)
        self._stepped.add(parameter)

    @torch.no_grad()
    def clip_and_step(self, max_norm: float | None) -> Tensor | None:
        """One step. With `max_norm` gradients are clipped to it, and the result is the norm that they had before."""
        self._descend = self._descend or self._choose()
        left = [parameter for parameter in self.param_groups[0]["params"] if parameter not in self._stepped]
        self._stepped.clear()
        return self._step(left, self._descend, max_norm)

    def _step(self, asked: Sequence[nn.Parameter], way: Descend, max_norm: float | None) -> Tensor | None:
        (group,) = self.param_groups
        given = [(parameter, self.leaf(parameter).grad) for parameter in asked]
        parameters = [parameter for parameter, gradient in given if gradient is not None]
        states = [self._state_of(parameter) for parameter in parameters]
        averages = [self._averages.get(parameter) for parameter in parameters]
        moments = Moments(
            [*parameters],
            [gradient for _, gradient in given if gradient is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
            averages,
            [self._rounded.get(parameter) for parameter in parameters],
            [None if average is None else self._rounded.get(average) for average in averages],
        )
        tau = self.average.tau if self.average else 0.0
        rates = Rates(group["lr"], group["betas"], group["eps"], group["weight_decay"], max_norm, tau)
        norm = way(moments, rates)
        left = [parameter for parameter, gradient in given if gradient is None and parameter in self._averages]
        if left:
            Average([self._averages[parameter] for parameter in left], tau).move(left)
        return norm

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
