"""Run folders as the training loop leaves them, with made-up scores, for the tests of the report."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from drq.config import DQNConfig, EnvConfig, RainbowConfig, ReplayConfig, SACConfig, TrainConfig
from drq.report.results import RunResult, read_results

HEADER = ("env_step", "agent_step", "return_mean", "return_std", "episodes", "seconds")


def fake_run(
    root: Path,
    task: str = "dmc/walker-walk",
    seed: int = 1,
    *,
    preset: str = "planet",
    steps: int = 100_000,
    every: int = 10_000,
    reached: int | None = None,
    level: float = 600.0,
    status: str = "finished",
    label: str | None = None,
    env: dict[str, Any] | None = None,
    capacity: int | None = 100_000,
    folder: str | None = None,
    videos: int = 0,
    **agent: Any,
) -> Path:
    """Writes one run whose returns rise towards `level` with seeded noise; returns its folder.

    `steps`, `every` and `reached` count what the benchmark counts: agent steps for Atari, env steps elsewhere.
    """
    atari = task.startswith("atari/")
    repeat = 4 if atari else 2
    kind = "sac" if not atari else "rainbow" if preset.startswith("strong") else "dqn"
    settings = {"sac": SACConfig, "dqn": DQNConfig, "rainbow": RainbowConfig}[kind](**agent)
    rooms = {"env": EnvConfig(**(env or {})), "replay": ReplayConfig(capacity=capacity)}
    config = TrainConfig(task, preset, settings, seed=seed, steps=steps, **rooms)
    document = dataclasses.asdict(config)
    document["agent"]["type"] = kind
    record = {
        "format": 1,
        "config": document,
        "versions": {"drq": "0.1.0", "mujoco": "3.11.0"},
        "git_commit": None,
        "spec": {"action_repeat": repeat, "random_return": None, "perfect_return": None},
    }
    if label is not None:
        record["label"] = label
    path = root / (folder or f"{task.replace('/', '-')}-{preset}-{label or len(list(root.glob('*')))}-{seed}")
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(record))
    rng = np.random.default_rng([seed, sum(map(ord, task))])
    rows = []
    for at in range(0, (steps if reached is None else reached) + 1, every):
        mean = level * (1 - np.exp(-3 * at / steps)) * (1 + 0.1 * rng.standard_normal())
        env_step, agent_step = (at * repeat, at) if atari else (at, at // repeat)
        rows.append((env_step, agent_step, round(float(mean), 3), 30.0, 10, round(at * 0.02, 2)))
    with (path / "eval.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])
    if status == "finished":
        (path / "finished.json").write_text(json.dumps({"steps": steps, "seconds": rows[-1][-1] + 5.0}))
    if status == "failed":
        (path / "error.txt").write_text("Traceback (most recent call last):\nRuntimeError: out of memory\n")
    for number in range(videos):
        (path / "videos").mkdir(exist_ok=True)
        (path / "videos" / f"{number:07d}.mp4").write_bytes(b"")
    return path


def evaluations(folder: Path, counts: str = "env_step") -> dict[int, float]:
    """What eval.csv of a run says, read without the package."""
    with (folder / "eval.csv").open(newline="") as file:
        return {int(row[counts]): float(row["return_mean"]) for row in csv.DictReader(file)}


def write_table(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    """Somebody's results: task, seed, env_step, return, system."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("task", "seed", "env_step", "return", "system"), *rows])
    return path


def runs_of(*paths: Path) -> list[RunResult]:
    """The runs that a report of these paths is about."""
    return read_results(paths)[0]
