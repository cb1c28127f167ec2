"""A search under way: which part of its suite is due, read off the run folders, so that every command finds the same.

Rungs are growing budgets of the same runs, and going on with a run is exact: what reaches the last rung has the bits
of a run that was given the whole budget at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from drq.envs import family_of
from drq.errors import UserError
from drq.launch.suite_folder import SuiteFolder
from drq.suites import Run, Suite, as_toml, ranking
from drq.training.checkpoint import drop_replay, replay_files
from drq.training.folder import write_atomically
from drq.training.schedule import Schedule


def refuse_blind_rungs(suite: Suite) -> None:
    """Before a run's first update its settings make no difference, and a rung would choose among them by chance."""
    first = suite.search.rungs(suite.steps)[0] if suite.search else suite.steps
    for run in suite.runs() if first < suite.steps else ():
        schedule = Schedule(dataclasses.replace(suite.config(run, Path()), steps=first))
        if not schedule.total_updates:
            raise UserError(
                f"The worst would stop after first = {first:,} {schedule.unit}, before {run} has made an update: "
                "raise `first` in [search], or lower agent.seed_steps."
            )


def due(suite: Suite, folder: SuiteFolder) -> tuple[Suite, int]:
    """The settings and the budget of the first rung that is not over, and how many rungs come after it."""
    if suite.search is None:
        return suite, 0
    part, (*rungs, last) = suite, suite.search.rungs(suite.steps)
    for at, steps in enumerate(rungs):
        part = dataclasses.replace(part, steps=steps)
        results = _results(part, folder) if all(_over(folder, run) for run in part.runs()) else {}
        through = [label for label in ranking(results) if _through(results[label])]
        if not through:  # it is under way, or every setting has failed
            return part, len(rungs) - at
        best = through[: max(len(part.settings) // suite.search.keep, 1)]
        part = dataclasses.replace(part, settings=tuple(each for each in part.settings if each.label in best))
    return dataclasses.replace(part, steps=last), 0


def drop_losers(suite: Suite, part: Suite, folder: SuiteFolder) -> None:
    """Drops the replays of settings that do not go on."""
    going_on = {setting.label for setting in part.settings}
    for run in [run for run in suite.runs() if run.label not in going_on]:
        checkpoint = folder.run_folder(run).checkpoint
        with suppress(OSError, UserError):  # `drq suite prune` can do it later
            if replay_files(checkpoint) and folder.claim(run):
                drop_replay(checkpoint)
        folder.release(run)


def write_best(part: Suite, folder: SuiteFolder) -> Path | None:
    """Writes the best setting of a last rung that is over, for `drq train --config`; none where every one failed."""
    if part.search is None or not all(_over(folder, run) for run in part.runs()):
        return None
    results = _results(part, folder)
    best = ranking(results)[0]
    if not _through(results[best]):
        return None
    overrides = next(setting.overrides for setting in part.settings if setting.label == best)
    path = folder.path / "best.toml"
    with suppress(FileNotFoundError):  # another command has just moved the same into place
        write_atomically(path, as_toml(part.preset, part.tasks, part.steps, overrides))
    return path


def _over(folder: SuiteFolder, run: Run) -> bool:
    """Finished, or failed: settings with which an agent diverges are part of a search."""
    on_disk = folder.run_folder(run)
    return on_disk.finished_steps >= run.steps or on_disk.error_file.exists()


def _through(of_tasks: dict[str, tuple[float, float]]) -> bool:
    """Whether a setting has failed with no seed of any task."""
    return all(budget for budget, _ in of_tasks.values())


def _results(part: Suite, folder: SuiteFolder) -> dict[str, dict[str, tuple[float, float]]]:
    runs: dict[str, dict[str, list[Run]]] = {}
    for run in part.runs():
        runs.setdefault(run.label, {}).setdefault(run.task, []).append(run)
    return {label: {task: _mean(folder, seeds) for task, seeds in tasks.items()} for label, tasks in runs.items()}


def _mean(folder: SuiteFolder, seeds: Sequence[Run]) -> tuple[float, float]:
    """The budget, and the mean over seeds of the last evaluation within it; nothing where a seed has failed."""
    scores = []
    for run in seeds:
        on_disk, counts = folder.run_folder(run), family_of(run.task).budget_counts
        rows = [row for row in on_disk.evaluations([]) if row[counts] <= run.steps]
        if not rows or on_disk.finished_steps < run.steps:
            return 0.0, -math.inf
        scores.append(rows[-1]["return_mean"])
    return seeds[0].steps, fmean(scores)
