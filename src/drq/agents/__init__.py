"""Agents: plain PyTorch that reads like the paper."""

from __future__ import annotations

import torch

from drq.agents.protocol import Agent
from drq.agents.sac import SAC
from drq.config import AgentConfig, SACConfig
from drq.envs.protocol import EnvSpec
from drq.errors import UserError

__all__ = ["SAC", "Agent", "make_agent"]


def make_agent(spec: EnvSpec, config: AgentConfig, device: torch.device, seed: int) -> Agent:
    """The agent that a configuration describes, with weights that follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(config, SACConfig):
            if spec.action_kind != "continuous":
                raise UserError(f"{spec.task} has discrete actions and SAC needs continuous ones: use --agent dqn.")
            return SAC(spec, config, device)
        from drq.agents.dqn import DQN

        if spec.action_kind != "discrete":
            raise UserError(f"{spec.task} has continuous actions and DQN needs discrete ones: use --agent sac.")
        return DQN(spec, config, device)
