"""What a checkpoint costs."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from drq.engine import EngineSettings
from drq.envs import EnvSpec
from drq.presets import preset
from drq.training.checkpoint import Checkpoints
from drq.training.checkpoint_files import Description
from drq.training.components import make_learner
from drq.training.state import RunState


def checkpoint_cost(work: Path) -> None:
    """What 1,000 new transitions cost a checkpoint, by how many the replay holds: 84x84x3, the paper's networks."""
    spec = EnvSpec("toy/reach", (3, 84, 84), 3, "continuous", 2, 1, 1000)
    config = preset("planet", "toy/reach")
    engine = EngineSettings.resolve(config.engine, torch.device("cpu"), config.agent, 0)
    learner = make_learner(config, spec, engine, 100_000)
    frames = np.random.default_rng(0).integers(0, 256, (64, 3, 84, 84), dtype=np.uint8)
    checkpoints = Checkpoints(work / "cost")
    learner.replay.begin(frames[0])
    print("| transitions | new | snapshot, training waits | written beside training |\n|---|---|---|---|")
    for number in range(1, 100_001):
        learner.replay.add(np.zeros(2, np.float32), 0.0, 1.0, number % 1000 == 0, frames[number % 64])
        if number % 1000 == 0:
            learner.replay.begin(frames[0])
        if number in (1000, 9000, 10_000, 99_000, 100_000):
            began = time.perf_counter()
            checkpoints.save(learner, RunState(agent_step=number, episode=number // 1000))
            taken = time.perf_counter() - began
            checkpoints.wait()
            written = time.perf_counter() - began
            described = Description.from_text((work / "cost" / "latest.json").read_text())
            new = [work / "cost" / name for name in (described.state, described.segments[-1].file)]
            if number in (1000, 10_000, 100_000):
                size = sum(file.stat().st_size for file in new) / 1e6
                print(f"| {number:,} | {size:.0f} MB | {taken:.2f} s | {written:.2f} s |", flush=True)
    checkpoints.close()
