"""Runs read from disk: run folders of this package, and tables of other people's results.

Nothing here stops at a bad file: what cannot be read is named in a warning, and the rest is returned.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from drq.envs import FAMILIES, family_of
from drq.errors import UserError
from drq.launch import SuiteFolder, SuiteRecord
from drq.report.benchmarks import Benchmark, benchmark_of, canonical_task
from drq.report.labels import label_runs, one_line
from drq.report.statistics import Array
from drq.training.folder import RunFolder, csv_rows, finite, run_folders

CSV_COLUMNS = ("task", "seed", "env_step", "return", "system")
Status = Literal["finished", "unfinished", "failed"]


class Place(NamedTuple):
    """What tells a run from all others: of one that is there, or that is missing."""

    benchmark: Benchmark
    task: str
    system: str
    seed: int


@dataclass(frozen=True)
class RunResult:
    """One run with its evaluations. `steps` are in its benchmark's unit: env steps, agent steps for Atari."""

    task: str
    benchmark: Benchmark
    system: str
    seed: int
    steps: Array
    returns: Array
    path: Path
    """The run folder, or the CSV that the run was read from."""
    status: Status = "finished"
    error: str = ""
    """What went wrong, in a line, for a run that failed."""
    seconds: float | None = None
    """Wall-clock time from the start to the end, or to the last evaluation."""
    record: dict[str, Any] = field(default_factory=dict)
    """The whole of config.json; empty for a run out of a CSV."""
    videos: tuple[Path, ...] = ()
    training: tuple[Array, Array] | None = None
    """Steps and returns of training episodes, for a run that was evaluated at its end alone."""

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.record.get("config", {})
        return config

    @property
    def place(self) -> Place:
        return Place(self.benchmark, self.task, self.system, self.seed)

    @property
    def ours(self) -> bool:
        """A run of this package, not a row of somebody's CSV."""
        return bool(self.record)

    @property
    def from_state(self) -> bool:
        """Of an agent that sees the simulator's state, not images."""
        return bool(self.config.get("env", {}).get("observation") == "state")

    @property
    def budget(self) -> int | None:
        """Steps the run was asked for, where it is known."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def suite(self) -> Path | None:
        """The suite that it is a run of: <suite>/<task>/<setting>/seed-<n>."""
        above = self.path.resolve().parents[2:3]
        return above[0] if self.ours and above and (above[0] / "suite.json").exists() else None

    @property
    def last_step(self) -> float:
        return float(self.steps[-1]) if len(self.steps) else 0.0

    def evaluation_at(self, budget: int | None) -> tuple[float, float] | None:
        """Step and return of the last evaluation at or before the budget, as the paper reads its table.

        None if the run stopped too early: if another evaluation was due before the budget (one within 1% of
        it counts as being there). Without a budget, the last evaluation."""
        index = len(self.steps) - 1
        if budget is not None:
            index = int(np.searchsorted(self.steps, budget, side="right")) - 1
        if index < 0:
            return None
        step = float(self.steps[index])
        if budget is not None and self.last_step <= budget:
            interval = float(np.median(np.diff(self.steps))) if len(self.steps) > 1 else 0.0
            if budget - step >= max(interval, 0.01 * budget):
                return None
        return step, float(self.returns[index])


def read_results(paths: Sequence[Path]) -> tuple[list[RunResult], list[str]]:
    """Every run under the given folders and CSV files, each system named, no run twice; and the warnings."""
    warnings: list[str] = []
    folders: dict[Path, RunFolder] = {}
    tables: dict[Path, None] = {}
    for path in paths:
        if path.suffix.lower() == ".csv":
            tables[path] = None
        elif not path.is_dir():
            what = "a file, and no .csv: name its run's folder" if path.exists() else "no such folder; check the name"
            warnings.append(f"{path}: {what}")
        elif found := run_folders(path):
            folders |= {folder.path.resolve(): folder for folder in found}
        else:
            warnings.append(f"{path}: no run in it (no config.json at any depth)")
    runs = [run for folder in folders.values() if (run := _read_run(folder, warnings))]
    labels = label_runs([(run.benchmark.key, run.record) for run in runs])
    runs = [replace(run, system=label) for run, label in zip(runs, labels, strict=True)]
    for table in tables:
        runs += _join(_read_csv(table, warnings), runs, table.name)
    runs = _without_duplicates(runs, warnings)
    warnings += _unfinished(runs)
    warnings += [
        f"{benchmark}: {system} has no run of {', '.join(sorted(tasks))} with seed {seeds}"
        for (benchmark, system, seeds), tasks in by_seeds(missing_runs(runs, paths)).items()
    ]
    warnings += _mixed_versions(runs) + _other_presets(runs) + _mixed_drawing(runs)
    return runs, warnings


def _read_run(folder: RunFolder, warnings: list[str]) -> RunResult | None:
    try:
        record = folder.description
    except UserError as error:
        warnings.append(f"{error} It is left out.")
        return None
    task, seed = canonical_task(record["config"]["task"]), record["config"]["seed"]
    benchmark = benchmark_of(task, record["config"]["preset"])
    evaluations = folder.evaluations(warnings)
    # An evaluation that was written twice counts once, as last written.
    steps, returns = _in_order({row[benchmark.counts]: row["return_mean"] for row in evaluations})
    budget, finished = record["config"].get("steps"), folder.finished
    if finished and isinstance(budget, int) and finished.steps < budget:
        finished = None  # it has been given more steps since, as the runs of a search are
    problem = "" if finished else folder.error or ""
    return RunResult(
        task,
        benchmark,
        "",
        seed,
        steps,
        returns,
        folder.path,
        status="finished" if finished else "failed" if problem else "unfinished",
        error=problem,
        seconds=finished.seconds if finished else evaluations[-1]["seconds"] if evaluations else None,
        record=record,
        videos=tuple(sorted(folder.videos.glob("*.mp4"))),
        training=_training(folder, benchmark) if len(steps) == 1 else None,
    )


def _training(folder: RunFolder, benchmark: Benchmark) -> tuple[Array, Array] | None:
    """The training episodes that train.csv names; it is no result, so that what cannot be read of it is passed over."""
    scores: dict[float, float] = {}
    for _, row in csv_rows(folder.train_csv, (benchmark.counts, "episode_return"), []):
        with contextlib.suppress(ValueError):  # no episode has ended yet
            scores[finite(row[benchmark.counts] or "")] = finite(row["episode_return"] or "")
    return _in_order(scores) if scores else None


def _in_order(scores: dict[float, float]) -> tuple[Array, Array]:
    steps = sorted(scores)
    return np.array(steps, dtype=np.float64), np.array([scores[at] for at in steps], dtype=np.float64)


def _read_csv(path: Path, warnings: list[str]) -> list[RunResult]:
    """Runs out of somebody's table. `env_step` counts env steps everywhere, which in Atari are frames."""
    scores: dict[tuple[str, str, int], dict[float, float]] = defaultdict(dict)
    for line, row in csv_rows(path, CSV_COLUMNS, warnings):
        try:
            task, system = canonical_task((row["task"] or "").strip()), one_line(row["system"] or "")
            if not task or not system:
                raise ValueError("task or system is empty")
            key = (task, system, int(row["seed"] or ""))
            at, score = finite(row["env_step"] or ""), finite(row["return"] or "")
        except ValueError as problem:
            warnings.append(f"{path}, line {line}: broken row ({problem}); skipped")
            continue
        if at in scores[key]:
            warnings.append(
                f"{path}, line {line}: a second return for {task}, {system}, seed {key[2]} at env_step {at:.0f}; "
                "it replaces the first"
            )
        scores[key][at] = score
    runs = []
    for (task, system, seed), points in scores.items():
        benchmark = benchmark_of(task)
        steps, returns = _in_order(points)
        steps = steps / family_of(task).env_steps_per_count
        runs.append(RunResult(task, benchmark, system, seed, steps, returns, path))
    if short := {run.task for run in runs if run.benchmark.key == "atari" and run.last_step == 25_000}:
        warnings.append(
            f"{path}: {', '.join(sorted(short))} end at env_step 100,000, in Atari 25,000 agent steps; "
            "if they are agent steps, multiply them by 4"
        )
    return runs


def _join(theirs: list[RunResult], ours: list[RunResult], file: str) -> list[RunResult]:
    """Other people's runs, in every benchmark where ours have the task (PlaNet's and Dreamer's settings share
    tasks), under a name that is not already one of ours."""
    taken = {run.system for run in ours}
    joined = []
    for run in theirs:
        name = f"{run.system} ({file})" if run.system in taken else run.system
        same_task = [other for other in ours if other.ours and other.task == run.task]
        found = dict.fromkeys(other.benchmark for other in same_task) or [run.benchmark]
        joined += [replace(run, system=name, benchmark=where) for where in found]
    return joined


def _name(run: RunResult) -> str:
    return f"{run.task}, {run.system}, seed {run.seed}"


def _without_duplicates(runs: list[RunResult], warnings: list[str]) -> list[RunResult]:
    kept: dict[Place, RunResult] = {}
    for run in runs:
        other = kept.setdefault(run.place, run)
        if other is not run:
            further, shorter = (run, other) if run.last_step > other.last_step else (other, run)
            kept[run.place] = further
            warnings.append(
                f"{_name(run)}: two runs; {further.path} went at least as far and is used, not {shorter.path}"
            )
    return list(kept.values())


def _unfinished(runs: list[RunResult]) -> list[str]:
    warnings = []
    for run in runs:
        where = f"{run.path} ({_name(run)})"
        if run.status == "failed":
            warnings.append(f"{where}: failed at {run.last_step:,.0f} steps: {run.error}")
        elif run.ours and not len(run.steps):
            warnings.append(f"{where}: no evaluation yet")
        elif run.status == "unfinished":
            of = f" of {run.budget:,}" if run.budget else ""
            warnings.append(f"{where}: unfinished, {run.last_step:,.0f}{of} steps")
    return warnings


def missing_runs(runs: Sequence[RunResult], paths: Sequence[Path]) -> list[Place]:
    """What the suites inside the given folders asked for (suite.json) and is not there. And a system with a seed on one
    task of a benchmark is expected to have it on every task it was run on."""
    systems: dict[tuple[Benchmark, str], list[RunResult]] = defaultdict(list)
    for run in runs:
        systems[run.benchmark, run.system].append(run)
    expected = [
        Place(benchmark, task, system, seed)
        for (benchmark, system), members in systems.items()
        for task in dict.fromkeys(run.task for run in members)
        for seed in sorted({run.seed for run in members})
    ]
    roots = [path.resolve() for path in paths]
    settings: dict[tuple[Path | None, Any], dict[Benchmark, str]] = defaultdict(dict)
    for run in runs:
        settings[run.suite, run.record.get("label")][run.benchmark] = run.system
    for (suite, label), names in settings.items():
        if suite and any(suite.is_relative_to(root) for root in roots) and (record := suite_record(suite)):
            for asked in (run for run in record.runs if run.label == label):
                task = canonical_task(asked.task)
                benchmark = benchmark_of(task, record.preset)
                system = names.get(benchmark, next(iter(names.values())))
                expected.append(Place(benchmark, task, system, asked.seed))
    there = {run.place for run in runs}
    return [place for place in dict.fromkeys(expected) if place not in there]


def suite_record(suite: Path) -> SuiteRecord | None:
    """None for one that is damaged, or of another version: the runs themselves can still be read."""
    try:
        return SuiteFolder(suite).read()
    except UserError:
        return None


def by_seeds(missing: Iterable[Place]) -> dict[tuple[str, str, str], list[str]]:
    """Benchmark, system and seeds, as text -> the tasks that lack them."""
    seeds: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for benchmark, task, system, seed in missing:
        seeds[benchmark.title, system, task].append(seed)
    tasks: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (title, system, task), lacking in seeds.items():
        tasks[title, system, ", ".join(map(str, sorted(lacking)))].append(task)
    return tasks


def _mixed_versions(runs: list[RunResult]) -> list[str]:
    """The simulators decide what the pixels look like: scores across versions are not quite comparable."""
    warnings = []
    simulators = [package for family in FAMILIES.values() for package in family.packages]
    for package in ("drq", *simulators):
        found = {str(run.record["versions"][package]) for run in runs if package in run.record.get("versions", {})}
        if len(found) > 1:
            warnings.append(f"the runs were made with different versions of {package}: {', '.join(sorted(found))}")
    return warnings


def _other_presets(runs: list[RunResult]) -> list[str]:
    """Runs that stand beside published figures of other settings without a name that says so."""
    systems: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for run in runs:
        if run.config.get("preset") in ("ablation", "cpu", "toy") and run.task in run.benchmark.tasks:
            systems[run.benchmark.title, run.config["preset"]][run.system] = None
    return [
        f"{benchmark}: the settings of the preset {preset} ({', '.join(names)}) are not those of the published figures"
        for (benchmark, preset), names in systems.items()
    ]


def _mixed_drawing(runs: list[RunResult]) -> list[str]:
    """Seeds of a task that are averaged although their images were not drawn in the same way."""
    ways: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for run in runs:
        if run.ours and family_of(run.task).has_suite_settings and not run.from_state:
            # Runs of earlier versions, which name none, had one way. Rays give the same pixels on either device.
            way = str(run.config.get("env", {}).get("render", "fast"))
            ways[run.benchmark.title, run.system][run.task].add("ray or cuda" if way in ("ray", "cuda") else way)
    mixed = {place: {task: found for task, found in tasks.items() if len(found) > 1} for place, tasks in ways.items()}
    return [
        f"{benchmark}: {system} averages runs drawn in different ways (--env.render "
        f"{', '.join(sorted(set().union(*tasks.values())))}) on {', '.join(sorted(tasks))}"
        for (benchmark, system), tasks in mixed.items()
        if tasks
    ]
