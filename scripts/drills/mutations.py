"""Command lines, suites, JSONs and CSVs with parts exchanged by anything."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from drills import Outcome
from drq import cli
from drq.errors import UserError
from drq.report.results import read_results
from drq.training.checkpoint_files import Description
from drq.training.checkpoint_reader import DAMAGE
from drq.training.folder import RunFolder
from drq.training.run import Trainer
from runs import FLAGS

COMMANDS = [
    ["train", "toy/reach", *FLAGS, "--seed", "3", "--agent.k", "2", "--agent.augmentation", "shift+cutout"],
    ["train", "toy/catch", "--preset", "cpu", "--agent.n-step", "3", "--agent.learning-rate", "1e-3", "--steps", "90"],
    ["train", "--config", "mutated/config.json", "--dir", "other", "--agent.discount", "0.9", "--eval.every", "10"],
    ["eval", "mutated", "--episodes", "1", "--seed", "4"],
    ["report", "mutated", "whole", "--out", "page.md", "--format", "md"],
    ["export", "mutated", "--out", "policy.drq"],
    ["suite", "run", "whole.toml", "--seeds", "2", "--steps", "100", "--jobs", "1", "--dry-run", "--dir", "suite"],
    ["suite", "status", "whole"],
    ["tasks", "toy"],
    ["completion", "bash"],
]
ODD = ["", "-1", "0", "nan", "1e999", "9" * 30, "--", "-h", "[]", "{}", "pipe", "..", "toy/", "a\0b"]
"""What people and programs put where something else was meant."""
SUITE = {"tasks": ["toy/reach"], "seeds": 2, "steps": 100, "settings": [{"label": "a", "agent.k": 1}], "preset": "cpu"}


class Enough(BaseException):
    """A command that has begun to do what it was told."""


def mutated_inputs(whole: Path, work: Path, count: int, chance: random.Random) -> Outcome:
    """Command lines, suites, JSONs and CSVs with parts exchanged by anything: no traceback."""
    import hypothesis
    from hypothesis import strategies as some

    from drq.launch import launcher
    from drq.suites.file import read_suite
    from drq.training import run as training

    outcome = Outcome()
    plain = some.recursive(
        some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
        lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(), inner, max_size=3),
        max_leaves=5,
    )
    folder = work / "mutated"
    shutil.copytree(whole, folder)
    jsons = {name: json.loads((folder / name).read_text()) for name in ("config.json", "finished.json")}
    latest = json.loads((folder / "checkpoint" / "latest.json").read_text())
    csv = (folder / "eval.csv").read_bytes()

    def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [prefix, *(path for key, each in inner for path in paths(each, (*prefix, key)))]

    def exchanged(value: Any, path: tuple[Any, ...], new: Any) -> Any:
        if not path:
            return new
        copy = value.copy()
        copy[path[0]] = exchanged(value[path[0]], path[1:], new)
        return copy

    def read_folder(name: str, value: Any) -> None:
        (folder / name).write_text(json.dumps(value))
        run = RunFolder(folder)
        reported = partial(read_results, [folder])
        for read in (lambda: run.config, lambda: run.spec, lambda: run.finished, run.evaluations, reported):
            tolerate(read)
        (folder / name).write_text(json.dumps(jsons[name]))

    def tolerate(read: Callable[[], object]) -> None:
        try:
            read()
        except UserError as error:
            outcome.refused += 1
            if "\n" in str(error):
                outcome.lost.append(f"more than a sentence: {error}")
        except SystemExit:
            outcome.refused += 1

    def read_latest(value: Any) -> None:
        try:
            Description.from_text(json.dumps(value))
        except DAMAGE:
            outcome.refused += 1

    def read_csv(content: bytes) -> None:
        (folder / "eval.csv").write_bytes(content)
        tolerate(RunFolder(folder).evaluations)

    def read_toml(value: Any, noise: str) -> None:
        lines = [f"{key} = {json.dumps(part)}" for key, part in value.items()] if isinstance(value, dict) else []
        (work / "suite.toml").write_text("\n".join(lines).replace('{"label": ', "{label=").replace('": ', '"=') + noise)
        tolerate(lambda: read_suite(work / "suite.toml"))

    def command(change: tuple[list[str], int, str, str]) -> None:
        words, at, how, odd = change
        at %= len(words)
        words = {
            "exchange": [*words[:at], odd, *words[at + 1 :]],
            "insert": [*words[:at], odd, *words[at:]],
            "leave out": [*words[:at], *words[at + 1 :]],
            "twice": [*words[: at + 1], *words[at:]],
        }[how]
        with (  # all but the training
            mock.patch.object(training, "train", lambda config: Trainer(config, quiet=True)),
            mock.patch.object(launcher.Launch, "run", return_value=0),
            suppress(Enough),
        ):
            signal.setitimer(signal.ITIMER_REAL, 2.0)  # ten million episodes are no mistake, and no drill either
            try:
                tolerate(lambda: cli.main(words))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)

    def enough(number: int, frame: object) -> None:
        raise Enough

    answered = signal.signal(signal.SIGALRM, enough)
    os.mkfifo(work / "pipe")
    (work / "whole.toml").write_text('tasks = ["toy/reach"]\npreset = "cpu"\n[[settings]]\nlabel = "a"\n')
    hows = some.sampled_from(["exchange", "exchange", "exchange", "insert", "leave out", "twice"])
    odd = some.sampled_from(ODD) | some.text(max_size=8)
    commands = some.tuples(some.sampled_from(COMMANDS), some.integers(0, 99), hows, odd)
    drills: dict[str, Any] = {
        "config": (
            some.sampled_from(paths(jsons["config.json"])),
            lambda at, new: read_folder("config.json", exchanged(jsons["config.json"], at, new)),
        ),
        "finished": (
            some.sampled_from(paths(jsons["finished.json"])),
            lambda at, new: read_folder("finished.json", exchanged(jsons["finished.json"], at, new)),
        ),
        "latest": (some.sampled_from(paths(latest)), lambda at, new: read_latest(exchanged(latest, at, new))),
        "suite": (some.sampled_from(paths(SUITE)), lambda at, new: read_toml(exchanged(SUITE, at, new), "")),
        "csv": (some.binary(max_size=60), lambda noise, new: read_csv(csv[: len(noise) * 3] + noise)),
        "command": (commands, lambda each, new: command(each)),
    }

    def mutation(strategy: Any, drill: Callable[[Any, Any], None]) -> Callable[[], None]:
        @hypothesis.settings(
            max_examples=count // len(drills) + 1,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.seed(chance.randrange(2**32))
        @hypothesis.given(strategy, plain)
        def mutate(at: Any, new: Any) -> None:
            outcome.tried += 1
            said = sys.stdout, sys.stderr
            with open(os.devnull, "w") as nowhere:
                sys.stdout = sys.stderr = nowhere
                try:
                    drill(at, new)
                finally:
                    sys.stdout, sys.stderr = said

        return mutate  # type: ignore[no-any-return]

    before = os.getcwd()
    os.chdir(work)
    try:
        for name, (strategy, drill) in drills.items():
            try:
                mutation(strategy, drill)()
            except Exception as error:
                outcome.lost.append(f"{name}: {type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
    finally:
        os.chdir(before)
        signal.signal(signal.SIGALRM, answered)
    return outcome
