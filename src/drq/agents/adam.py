"""Adam, fused into one kernel, and free of the seconds that loading PyTorch's compiler takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Moments(NamedTuple):
    """Parameters that have gradients, with what Adam keeps of each: one list for every kind."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    """Means of the squared gradients."""
    steps: list[Tensor]
    """Counted from 1."""


class Rates(NamedTuple):
    """The constants of a step."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float


Descend = Callable[[Moments, Rates], None]
"""Makes one step in place."""


def descend(moments: Moments, rates: Rates) -> None:
    """As PyTorch does it."""
    *tensors, steps = moments
    torch._fused_adam_(
        *(*tensors, [], steps),
        lr=rates.learning_rate,
        beta1=rates.betas[0],
        beta2=rates.betas[1],
        eps=rates.eps,
        weight_decay=0.0,
        amsgrad=False,
        maximize=False,
    )


class FusedAdam(Optimizer):
    """`torch.optim.Adam(fused=True)`, bit for bit unless the engine puts another `descend` in its place.

    That one imports torch._dynamo when it is made and again when it steps, only to keep it out: 1 to 6 seconds of
    every start. The step count of each parameter lives beside it, so that a CUDA graph can hold the update.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, {"lr": learning_rate, "betas": betas, "eps": eps})
        self.descend: Descend = descend

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append(self.defaults | param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in parameters]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            moments = Moments(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                steps,
            )
            self.descend(moments, Rates(group["lr"], group["betas"], group["eps"]))

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
