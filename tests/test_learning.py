"""Agents that must learn a toy task from pixels, and one that must not when its reward is taken away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import drq
from drq import envs
from drq.config import (
    AgentConfig,
    DQNConfig,
    EnvConfig,
    EvalConfig,
    RainbowConfig,
    ReplayConfig,
    SACConfig,
    TrainConfig,
)
from drq.envs.protocol import Action, Environment, Step
from drq.training import components

AGENT_STEPS = 1_700


def small(folder: Path) -> TrainConfig:
    """DrQ with K = M = 2, made small: about ten seconds on one core. It need not look far ahead to come nearer."""
    return replace(
        drq.preset("cpu", "toy/reach"),
        dir=str(folder),
        steps=AGENT_STEPS,
        agent=SACConfig(
            batch_size=32,
            hidden_dim=128,
            encoder="d4pg",
            pad=1,
            discount=0.5,
            tau=0.05,
            init_temperature=0.02,
            seed_steps=300,
        ),
        env=EnvConfig(image_size=16, frame_stack=1),  # nothing in this task moves by itself
        replay=ReplayConfig(capacity=AGENT_STEPS),
        eval=EvalConfig(every=0, episodes=20, video=False),
    )


def share_closed(config: TrainConfig) -> float:
    """How much of the distance from random to perfect play the trained agent has closed."""
    result = drq.train(config, quiet=True)
    spec = envs.make(config.task, config.env, 1).spec
    assert spec.random_return is not None
    assert spec.perfect_return is not None
    assert [row["agent_step"] for row in result.evaluations] == [AGENT_STEPS]
    return (result.final_return - spec.random_return) / (spec.perfect_return - spec.random_return)


def test_learns_to_reach(tmp_path: Path) -> None:
    assert share_closed(small(tmp_path)) > 0.6


class WithoutReward:
    """An environment whose agent never sees a reward; its score still counts in what is reported."""

    def __init__(self, env: Environment) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, action: Action) -> Step:
        return self._env.step(action)._replace(reward=0.0)


def test_does_not_learn_without_its_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_env = components.make_env
    monkeypatch.setattr(components, "make_env", lambda config: WithoutReward(make_env(config)))
    assert -0.3 < share_closed(small(tmp_path)) < 0.3


CATCHERS: dict[str, tuple[AgentConfig, int]] = {
    "dqn": (
        DQNConfig(
            encoder="d4pg",
            batch_size=32,
            learning_rate=1e-3,
            hidden_dim=64,
            n_step=3,
            seed_steps=300,
            epsilon_decay_steps=300,
            epsilon_eval=0.0,
            pad=1,
        ),
        3_000,
    ),
    "rainbow": (  # with every part, and a reset on the way
        RainbowConfig(
            batch_size=16,
            encoder_width=1,
            hidden_dim=64,
            atoms=21,
            value_limit=1.5,
            learning_rate=1e-3,
            tau=0.05,
            n_step=5,
            anneal_updates=300,
            seed_steps=300,
            epsilon_decay_steps=300,
            updates_per_step=1,
            reset_every=600,
            last_reset=600,
            epsilon_eval=0.0,
            pad=1,
        ),
        1_700,
    ),
}
"""Agent, and agent steps."""


@pytest.mark.parametrize("name", CATCHERS)
def test_learns_to_catch(name: str, tmp_path: Path) -> None:
    agent, steps = CATCHERS[name]
    config = TrainConfig(
        task="toy/catch",
        preset="cpu",
        dir=str(tmp_path),
        steps=steps,
        agent=agent,
        env=EnvConfig(image_size=16, frame_stack=1),
        replay=ReplayConfig(capacity=None),
        eval=EvalConfig(every=0, episodes=40, video=False),
        device="cpu",
    )
    # Random play gives -0.75, perfect play 1.
    assert drq.train(config, quiet=True).final_return > 0.6
