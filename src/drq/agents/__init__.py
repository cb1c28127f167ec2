"""Agents: plain PyTorch that reads like the paper. One file an agent, one table of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from drq.agents.protocol import Agent, Metrics, Returns, UpdateResult
from drq.augment import parse, try_out
from drq.backend import Backend
from drq.config import AgentConfig, DQNConfig, RainbowConfig, SACConfig
from drq.envs.protocol import EnvSpec
from drq.errors import UserError
from drq.networks import check_encoder
from drq.priorities import PrioritisedSampler
from drq.replay import Replay

__all__ = [
    "AGENTS",
    "Agent",
    "AgentKind",
    "Metrics",
    "Returns",
    "UpdateResult",
    "agent_kind",
    "agent_name",
    "check_agent",
    "make_agent",
    "make_replay",
]


class AgentKind(NamedTuple):
    """One agent."""

    config: type[AgentConfig]
    """Its settings, a frozen dataclass."""
    made_by: str
    """`module:Class`, called with a task's `EnvSpec`, the settings and a backend; imported when it is first used."""
    actions: Literal["continuous", "discrete"]


AGENTS: dict[str, AgentKind] = {
    "sac": AgentKind(SACConfig, "drq.agents.sac:SAC", "continuous"),
    "dqn": AgentKind(DQNConfig, "drq.agents.dqn:DQN", "discrete"),
    "rainbow": AgentKind(RainbowConfig, "drq.agents.rainbow:Rainbow", "discrete"),
}
"""By the name that `--agent` and config.json give it."""


def agent_name(config: AgentConfig) -> str:
    """The name of the agent with these settings; for one that is in no row, from the name of their class."""
    for name, kind in AGENTS.items():
        if type(config) is kind.config:
            return name
    return type(config).__name__.removesuffix("Config").lower()


def agent_kind(name: str) -> AgentKind:
    """The row of an agent."""
    if name not in AGENTS:
        raise UserError(
            f"There is no agent {name!r}: choose from {', '.join(AGENTS)}. "
            "One of your own needs a row in drq.agents.AGENTS, or is handed in (`agent=...`)."
        )
    return AGENTS[name]


def check_agent(config: AgentConfig) -> None:
    """Refuses names that no augmentation or encoder has, before anything else is begun."""
    parse(config.augmentation)
    check_encoder(config.encoder)


def make_agent(spec: EnvSpec, config: AgentConfig, backend: Backend, seed: int) -> Agent:
    """The agent that a configuration describes, with weights that follow from the seed."""
    name = agent_name(config)
    kind = agent_kind(name)
    if spec.action_kind != kind.actions:
        suited = " or ".join(other for other, each in AGENTS.items() if each.actions == spec.action_kind)
        raise UserError(
            f"{spec.task} has {spec.action_kind} actions and {name.upper()} needs {kind.actions} ones: "
            f"use --agent {suited}."
        )
    if spec.pixels and ":" in config.augmentation:
        try_out(config.augmentation, spec.observation_shape)
    module, _, made_by = kind.made_by.partition(":")
    make: Any = getattr(importlib.import_module(module), made_by)
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        agent: Agent = make(spec, config, backend)
        return agent


def make_replay(spec: EnvSpec, config: AgentConfig, backend: Backend, capacity: int, streams: int = 1) -> Replay:
    """An empty replay of so many transitions of so many environments, with what an agent's settings ask of one."""
    sampler = None
    if isinstance(config, RainbowConfig) and config.prioritised:
        sampler = PrioritisedSampler(
            capacity, backend, exponent=config.priority_exponent, correction=config.priority_correction
        )
    return Replay(
        spec,
        capacity,
        n_step=config.n_step,
        discount=config.discount,
        early_bootstrap=isinstance(config, RainbowConfig) and config.early_bootstrap,
        streams=streams,
        sampler=sampler,
        backend=backend,
    )


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
