"""Agents: plain PyTorch that reads like the paper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drq.agents.protocol import Agent
from drq.agents.sac import SAC
from drq.config import AgentConfig, SACConfig
from drq.envs.protocol import EnvSpec
from drq.errors import UserError

__all__ = ["SAC", "Agent", "make_agent"]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Orthogonal weights take a third of a second on one thread, and seconds on several that wait for each other at
    every small step while other processes start beside them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_agent(spec: EnvSpec, config: AgentConfig, device: torch.device, seed: int) -> Agent:
    """The agent that a configuration describes, with weights that follow from the seed."""
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        if isinstance(config, SACConfig):
            if spec.action_kind != "continuous":
                raise UserError(f"{spec.task} has discrete actions and SAC needs continuous ones: use --agent dqn.")
            return SAC(spec, config, device)
        from drq.agents.dqn import DQN

        if spec.action_kind != "discrete":
            raise UserError(f"{spec.task} has continuous actions and DQN needs discrete ones: use --agent sac.")
        return DQN(spec, config, device)
