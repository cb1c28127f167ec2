"""Learners on random pictures, to be held against each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from drq.agents import make_agent
from drq.config import AgentConfig, DQNConfig, EngineConfig, SACConfig
from drq.engine import EngineSettings, FastBackend, Learner, kernels
from drq.engine.kernels import runtime
from drq.envs.protocol import EnvSpec
from drq.replay import Replay

CONTROL = EnvSpec("toy/control", (3, 32, 32), 3, "continuous", 2, 1, 20)
LARGE_IMAGES = dataclasses.replace(CONTROL, frame_shape=(3, 84, 84))
GAME = EnvSpec("toy/game", (1, 44, 44), 4, "discrete", 5, 1, 20)
SAC_SETTINGS = SACConfig(batch_size=16, hidden_dim=64, seed_steps=20)
DQN_SETTINGS = DQNConfig(batch_size=16, hidden_dim=64, seed_steps=20, n_step=3)
PLAIN = EngineConfig(precision="float32", compile="off", cuda_graphs="off", kernels="off")


def make_learner(
    spec: EnvSpec, agent: AgentConfig, engine: EngineConfig | EngineSettings, device: str, streams: int = 1
) -> Learner:
    """A learner with a replay of random pictures; the same for the same arguments."""
    if isinstance(engine, EngineConfig):
        engine = EngineSettings.resolve(engine, torch.device(device), agent)
    backend = FastBackend(engine)
    replay = Replay(spec, streams * 150, n_step=agent.n_step, discount=agent.discount, streams=streams, backend=backend)
    learner = Learner(make_agent(spec, agent, backend, seed=5), replay, backend, seed=11)
    fill(replay)
    return learner


def fill(replay: Replay) -> None:
    spec, rng = replay.spec, np.random.default_rng(3)
    for stream in range(len(replay.streams)):
        for _ in range(10 - stream):
            replay.begin(rng.integers(0, 256, spec.frame_shape, dtype=np.uint8), stream)
            for t in range(20):
                action = (
                    rng.uniform(-1, 1, spec.action_size).astype(np.float32)
                    if spec.action_kind == "continuous"
                    else int(rng.integers(spec.action_size))
                )
                frame = rng.integers(0, 256, spec.frame_shape, dtype=np.uint8)
                replay.add(action, float(rng.normal()), float(rng.random() > 0.1), t == 19, frame, stream)


def weights_after(learner: Learner, updates: int) -> dict[str, torch.Tensor]:
    for _ in range(updates):
        learner.update()
    return {name: value.detach().double().cpu() for name, value in learner.agent.modules.state_dict().items()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of all weights."""
    return float(
        torch.stack([(one[name] - other[name]).norm() for name in one]).norm()
        / torch.stack([value.norm() for value in one.values()]).norm()
    )


CASES = [(CONTROL, SAC_SETTINGS), (GAME, DQN_SETTINGS)]
EMULATED = EngineSettings(torch.device("cpu"), "float32", False, False, kernels=True, eval_process=False)


def emulate(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> list[str]:
    """Has FastBackends use emulated kernels; gives the names of those that are asked for, as they are."""
    asked: list[str] = []

    def asking(name: str, *args: Any) -> Any:
        asked.append(name)
        return kernel(name, *args)

    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(runtime, "kernel", asking)
    return asked


def gradients_of(learner: Learner) -> dict[str, torch.Tensor]:
    """What an update has found for all that it trains."""
    learner.update()
    rounded = learner.backend.rounded
    given = ((name, rounded.get(p, p).grad) for name, p in learner.agent.modules.named_parameters())
    return {name: gradient.double().cpu() for name, gradient in given if gradient is not None}


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, within: float) -> None:
    """But for bfloat16. Weights say less after a few steps of Adam: without the encoder's gradient they are as near."""
    assert found.keys() == expected.keys()
    for name, exact in expected.items():
        assert float((found[name] - exact).norm() / exact.norm()) < within, name
