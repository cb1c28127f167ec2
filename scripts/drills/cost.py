"""What a checkpoint costs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from drq.engine import EngineSettings
from drq.envs import EnvSpec
from drq.presets import preset
from drq.training.checkpoint import Checkpoints
from drq.training.checkpoint_files import Description
from drq.training.components import make_learner, names_that_act
from drq.training.policy_file import PolicyFile
from drq.training.state import Best, RunState

ROWS = {3: 1, 10: 8, 100: 98}
"""Thousands of transitions at the last checkpoint of a row, and at its first."""


def checkpoint_cost(work: Path) -> None:
    """What a checkpoint after 1,000 new transitions and a new best evaluation costs, by how many transitions the replay
    holds: 84x84x3, the paper's networks. The medians of three."""
    spec = EnvSpec("toy/reach", (3, 84, 84), 3, "continuous", 2, 1, 1000)
    config = preset("planet", "toy/reach")
    config = replace(config, agent=replace(config.agent, batch_size=8))  # updates are not what is measured
    engine = EngineSettings.resolve(config.engine, torch.device("cpu"), config.agent, 0)
    learner = make_learner(config, spec, engine, 100_000)
    frames = np.random.default_rng(0).integers(0, 256, (64, 3, 84, 84), dtype=np.uint8)
    folder = work / "cost"
    checkpoints = Checkpoints(folder)
    learner.replay.begin(frames[0])
    print("| transitions | replay | networks | best policy | training waits | on the disk after |\n" + "|---" * 6 + "|")
    measured: list[tuple[float, ...]] = []
    for number in range(1, 100_001):
        learner.replay.add(np.zeros(2, np.float32), 0.0, 1.0, number % 1000 == 0, frames[number % 64])
        if number % 1000:
            continue
        learner.replay.begin(frames[0])
        thousands = number // 1000
        if thousands == 1:  # so that the optimisers have their moments
            for _ in range(2):
                learner.update()
        if not any(first - 1 <= thousands <= last for last, first in ROWS.items()):
            continue
        weights = learner.agent.modules.state_dict()
        acting = {name: weights[name].clone() for name in names_that_act(config, spec, learner)}
        best = Best(number, 0.0, PolicyFile(config, spec, number, acting))
        began = time.perf_counter()
        checkpoints.save(learner, RunState(agent_step=number, episode=thousands, best=best))
        waited = time.perf_counter() - began
        checkpoints.wait()
        written = time.perf_counter() - began
        described = Description.from_text((folder / "latest.json").read_text())
        assert described.best is not None
        files = described.segments[-1].file, described.state, described.best.file
        measured.append((*((folder / name).stat().st_size / 1e6 for name in files), waited, written))
        if thousands in ROWS:
            replay, networks, policy, waited, written = (median(each) for each in zip(*measured[-3:], strict=True))
            sizes = f"{replay:.1f} MB | {networks:.1f} MB | {policy:.1f} MB"
            held = f"{ROWS[thousands]},000 to {number:,}"
            print(f"| {held} | {sizes} | {waited:.2f} s | {written:.2f} s |", flush=True)
    checkpoints.close()
