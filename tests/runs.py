"""Small runs for tests: seconds on one core."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drq import cli
from drq.config import EnvConfig, EvalConfig, ReplayConfig, SACConfig, TrainConfig
from drq.presets import preset_values
from drq.training.callbacks import Callback, RunView
from drq.training.checkpoint_files import Description

OWN_ENV = str(Path(__file__).with_name("own_env.py"))
"""The module to import for gym/Lamp-v0 and the other environments of a user."""


def small(directory: Path, task: str = "toy/reach", **changes: Any) -> TrainConfig:
    """A SAC run of 120 agent steps that crosses everything: seed steps, ring wrap, evaluations, checkpoints."""
    config = dataclasses.replace(
        preset_values("cpu", task),
        dir=str(directory),
        device="cpu",
        steps=120,
        checkpoint_every=17,
        log_every=10,
        agent=SACConfig(batch_size=8, hidden_dim=16, feature_dim=8, seed_steps=20),
        env=EnvConfig(image_size=24),
        replay=ReplayConfig(capacity=60),
        eval=EvalConfig(every=40, episodes=2, video=False),
    )
    return dataclasses.replace(config, **changes)


class StopAt(Callback):
    """Stops a run at this agent step; the same run goes on from there."""

    def __init__(self, agent_step: int) -> None:
        self.agent_step = agent_step

    def on_step(self, run: RunView) -> bool:
        return run.agent_step != self.agent_step


FLAGS = [
    *("--preset", "cpu", "--device", "cpu", "--steps", "120", "--checkpoint-every", "17", "--log-every", "10"),
    *("--agent.batch-size", "8", "--agent.hidden-dim", "16", "--agent.feature-dim", "8", "--agent.seed-steps", "20"),
    *("--env.image-size", "24", "--replay.capacity", "60", "--eval.every", "40", "--eval.episodes", "2"),
    "--eval.no-video",
]
"""The same run on the command line."""


def drq(*args: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "drq", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Runs a command that must fail, in this process; gives the one sentence it says."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(args))
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.err.strip().splitlines()[-1]


def script(name: str) -> ModuleType:
    """A file of scripts/ as a module, a new one every time."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Everything the latest checkpoint holds of networks, optimisers and random numbers."""
    latest = json.loads((folder / "checkpoint" / "latest.json").read_text())
    return load_file(folder / "checkpoint" / latest["state"])


def edit_checkpoint(folder: Path, **changes: Any) -> None:
    """Changes what a run's checkpoint and the one before it say, and their checksums with it."""
    for name in ("latest.json", "previous.json"):
        file = folder / "checkpoint" / name
        if file.exists():
            described = Description.from_text(file.read_text())
            file.write_text(dataclasses.replace(described, **changes).to_text())


def rows(path: Path) -> list[dict[str, str]]:
    """A CSV without the one column that a clock writes."""
    with open(path, newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


def assert_same_run(one: Path, other: Path) -> None:
    """Bit-identical weights, optimisers, random numbers and logs."""
    a, b = state(one), state(other)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert rows(one / "eval.csv") == rows(other / "eval.csv")
    assert rows(one / "train.csv") == rows(other / "train.csv")
