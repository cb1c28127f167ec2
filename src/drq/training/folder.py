"""The run folder: what is in it, and when a command may go on with it (docs/run-folder.md)."""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from drq.config import (
    DQNConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    ReplayConfig,
    SACConfig,
    TrainConfig,
)
from drq.envs import FAMILIES, EnvSpec, family_of
from drq.errors import UserError

FORMAT = 1
"""Version of the folder's layout."""

AGENTS: dict[str, type[SACConfig] | type[DQNConfig]] = {"sac": SACConfig, "dqn": DQNConfig}

NOT_PART_OF_A_RUN = ("dir", "wandb", "steps")
"""Settings that may change when a run goes on: where it is kept, what else sees it, and how long it shall be."""


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file as a whole: a reader, or a crash, sees the old text or the new."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def config_to_json(config: TrainConfig) -> dict[str, Any]:
    """A configuration as plain data."""
    plain = dataclasses.asdict(config)
    agent = next(name for name, kind in AGENTS.items() if isinstance(config.agent, kind))
    plain["agent"] = {"type": agent, **plain["agent"]}
    plain["imports"] = list(config.imports)
    return plain


def config_from_json(plain: dict[str, Any]) -> TrainConfig:
    """The configuration that `config_to_json` wrote."""
    agent = dict(plain["agent"])
    nested = {
        "agent": AGENTS[agent.pop("type")](**agent),
        "env": EnvConfig(**plain["env"]),
        "replay": ReplayConfig(**plain["replay"]),
        "eval": EvalConfig(**plain["eval"]),
        "engine": EngineConfig(**plain["engine"]),
        "imports": tuple(plain["imports"]),
    }
    return TrainConfig(**{**plain, **nested})


def versions() -> dict[str, str]:
    """Versions of everything that shapes a result."""
    found = {"python": platform.python_version()}
    simulators = [package for family in FAMILIES.values() for package in family.packages]
    for package in ("drq", "torch", "numpy", "gymnasium", *simulators):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the checkout this package runs from, `-dirty` if it was changed.

    Where there is no history, as in a copy on another machine, it is what DRQ_COMMIT says, or None.
    """
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():
        return os.environ.get("DRQ_COMMIT") or None

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.eval_csv = path / "eval.csv"
        self.train_csv = path / "train.csv"
        self.checkpoint = path / "checkpoint"
        self.videos = path / "videos"
        self.tensorboard = path / "tensorboard"
        self.finished_file = path / "finished.json"

    def check(self, config: TrainConfig) -> None:
        """Refuses a folder that holds something else than this run, before anything is written to it."""
        if self.config_file.exists():
            self._check_same(config)
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(f"{self.path} has something in it and is no run folder: choose another --dir.")

    def open(self, config: TrainConfig, spec: EnvSpec, label: str | None = None) -> None:
        """Makes the folder and describes the run in it. The label is the run's name in comparisons."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            described = {
                "format": FORMAT,
                "label": label,
                "config": config_to_json(config),
                "versions": versions(),
                "git_commit": git_commit(),
                "spec": dataclasses.asdict(spec),
            }
            write_atomically(self.config_file, json.dumps(described, indent=2) + "\n")
        except OSError as error:
            raise UserError(
                f"The run folder {self.path} cannot be written ({error.strerror}): choose another --dir."
            ) from error

    def _check_same(self, config: TrainConfig) -> None:
        stored = read_description(self.path)
        before, now = _flat(stored["config"]), _flat(config_to_json(config))
        differing = [
            f"{key}: {before.get(key)!r} there, {now.get(key)!r} now"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and key not in NOT_PART_OF_A_RUN
        ]
        if differing:
            raise UserError(
                f"{self.path} holds a run with other settings ({'; '.join(differing)}): "
                "choose another --dir, or repeat its settings to resume it."
            )
        if config.steps < stored["config"]["steps"]:
            raise UserError(
                f"{self.path} holds a run of {stored['config']['steps']:,} steps, more than the {config.steps:,} "
                "asked for: choose another --dir."
            )
        if config.env.observation == "pixels":
            here = versions()
            for package in family_of(config.task).packages:
                made_with = stored["versions"].get(package)
                if made_with != here.get(package):
                    raise UserError(
                        f"{self.path} was begun with {package} {made_with} and {here.get(package)} is installed, "
                        f"which may draw other pixels: pip install {package}=={made_with}, or choose another --dir."
                    )

    @property
    def finished_steps(self) -> int | None:
        """The budget that this run has completed, if it has."""
        if not self.finished_file.exists():
            return None
        return int(json.loads(self.finished_file.read_text())["steps"])

    def evaluations(self) -> list[dict[str, float]]:
        """Rows of eval.csv."""
        if not self.eval_csv.exists():
            return []
        with open(self.eval_csv, newline="") as file:
            return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def read_description(path: Path) -> dict[str, Any]:
    """config.json of a run folder."""
    try:
        described: dict[str, Any] = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is no run folder (it has no config.json): name the --dir of a `drq train`.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path / 'config.json'} is damaged ({error}): restore it, or choose another folder.") from None
    if described.get("format") != FORMAT:
        raise UserError(
            f"{path} has run-folder format {described.get('format')!r} and this version of drq reads {FORMAT}: "
            "use the version that wrote it (config.json names it)."
        )
    return described


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
