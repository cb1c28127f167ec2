"""The numbers of presets against those that were published. SAC's own are in test_sac.py, SAC State's in
test_suites.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drq.config import EnvConfig, EvalConfig, ReplayConfig, SACConfig
from drq.presets import PRESETS, preset

ATARI = {
    "augmentation": "shift+intensity",
    "pad": 4,
    "intensity_scale": 0.05,
    "k": 1,
    "m": 1,
    "batch_size": 32,
    "learning_rate": 0.0001,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 0.00015,
    "double": True,
    "dueling": True,
    "n_step": 10,
}
"""What Efficient DQN and the agent after it have alike."""


@pytest.mark.parametrize(
    ("task", "repeat"),
    [("cartpole-swingup", 8), ("reacher-easy", 4), ("cheetah-run", 4),
     ("finger-spin", 2), ("ball_in_cup-catch", 4), ("walker-walk", 2)],
)  # fmt: skip
def test_control_is_the_papers(task: str, repeat: int) -> None:
    planet, dreamer, ablation = (preset(name, f"dmc/{task}") for name in ("planet", "dreamer", "ablation"))
    env = EnvConfig(observation="pixels", image_size=84, frame_stack=3, camera=None, action_repeat=repeat)
    assert planet.env == ablation.env == env
    assert dreamer.env == replace(env, action_repeat=2)
    assert (planet.agent, dreamer.agent, ablation.agent) == (SACConfig(), SACConfig(), SACConfig(batch_size=128))
    for config in (planet, dreamer, ablation):
        assert (config.steps, config.num_envs) == (500_000, 1)
        assert config.replay == ReplayConfig(capacity=100_000)
        assert (config.eval.every, config.eval.episodes, config.eval.min_agent_steps) == (10_000, 10, 0)


def test_atari_100k_is_the_papers_table() -> None:
    """Where it is silent (the loss, epsilons, streams of the head) docs/atari.md says why."""
    paper, later = (preset(name, "atari/pong") for name in ("atari100k", "atari100k-eps"))
    agent = ATARI | {
        "discount": 0.99,
        "encoder": "nature",
        "freeze_encoder": False,
        "hidden_dim": 512,
        "shared_hidden": False,
        "loss": "huber",
        "max_grad_norm": 10,
        "target_every": 1,
        "seed_steps": 1600,
        "updates_per_step": 1,
        "epsilon_decay_steps": 5000,
    }
    assert vars(paper.agent) == agent | {"epsilon_final": 0.1, "epsilon_eval": 0.05}
    assert vars(later.agent) == agent | {"epsilon_final": 0.01, "epsilon_eval": 0.001}
    for config in (paper, later):
        assert config.steps == 100_000
        assert config.env == EnvConfig(
            image_size=84, frame_stack=4, action_repeat=4, no_op_steps=False, zero_stack=False
        )
        assert config.replay == ReplayConfig(capacity=None)
    assert paper.eval == EvalConfig(every=0, min_agent_steps=125_000)
    assert later.eval == EvalConfig(every=0, episodes=100)


def test_the_strong_agent_is_as_published() -> None:
    two, eight = (preset(name, "atari/pong") for name in ("strong", "strong8"))
    agent = ATARI | {
        "discount": 0.97,
        "discount_final": 0.997,
        "n_step_final": 3,
        "anneal_updates": 10_000,
        "early_bootstrap": False,
        "atoms": 51,
        "value_limit": 10,
        "hidden_dim": 2048,
        "encoder": "impala-same",
        "encoder_width": 4,
        "rescale_features": True,
        "weight_decay": 0.1,
        "tau": 0.005,
        "target_acts": True,
        "prioritised": True,
        "priority_exponent": 0.5,
        "priority_correction": 0.5,
        "reset_keep": 0.5,
        "seed_steps": 2000,
        "epsilon_final": 0,
        "epsilon_decay_steps": 2001,
        "epsilon_eval": 0.001,
    }
    assert vars(two.agent) == agent | {"updates_per_step": 2, "reset_every": 20_000, "last_reset": 60_000}
    assert vars(eight.agent) == agent | {"updates_per_step": 8, "reset_every": 5_000, "last_reset": 90_000}
    later = preset("atari100k-eps", "atari/pong")
    for config in (two, eight):
        assert (config.steps, config.env, config.replay, config.eval) == (100_000, later.env, later.replay, later.eval)


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_knows_its_preset(name: str) -> None:
    for task in ("dmc/walker-walk", "toy/reach", "toy/catch"):
        config = preset(name, task)
        assert (config.preset, config.task) == (name, task)
