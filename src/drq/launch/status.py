"""How far the runs of a suite are, read from their folders; and how long the rest will take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drq.envs import family_of
from drq.launch.suite_folder import SuiteFolder
from drq.suites import Run
from drq.training.folder import RunFolder
from drq.training.lock import Holder
from drq.training.progress import duration, return_text

State = Literal["finished", "running", "failed", "stopped", "waiting"]
STYLES: dict[State, str] = {
    "finished": "green",
    "running": "cyan",
    "failed": "red",
    "stopped": "yellow",
    "waiting": "dim",
}
MOST_ROWS = 500
"""Of a table that is printed once; a larger one takes seconds to lay out, and nobody reads it."""


@dataclass(frozen=True)
class RunStatus:
    """Where a run is. Steps are in the unit of its budget."""

    run: Run
    state: State
    done: int = 0
    rate: float | None = None
    """Steps a second: of the recent past, or of the whole run once it is finished."""
    last_return: float | None = None
    """Of the last evaluation, or of the last training episode before the first."""
    seconds: float | None = None
    """Wall-clock time so far."""
    error: str = ""
    """Why it failed, in a line."""
    by: Holder | None = None
    """The command that works on it."""

    @property
    def left(self) -> int:
        return 0 if self.state == "finished" else max(self.run.steps - self.done, 0)


def unit(tasks: Iterable[str]) -> str:
    """What budgets count."""
    counted = {family_of(task).budget_counts for task in tasks}
    if len(counted) > 1:
        return "steps (env, Atari: agent)"
    return "agent steps" if counted == {"agent_step"} else "env steps"


def read_status(folder: SuiteFolder, run: Run, by: Holder | None = None) -> RunStatus:
    """A run's status from its folder, and the command that works on it, if one does."""
    return folder_status(folder.run_folder(run), run, by)


def folder_status(on_disk: RunFolder, run: Run, by: Holder | None) -> RunStatus:
    """The same of a run folder anywhere."""
    if not by and not on_disk.path.exists():
        return RunStatus(run, "waiting")
    column = family_of(run.task).budget_counts
    evaluation, finished = on_disk.last_evaluation(), on_disk.finished
    last_return = evaluation.get("return_mean")
    if finished is not None and finished.steps >= run.steps:
        rate = finished.steps / finished.seconds if finished.seconds > 0 else None
        return RunStatus(run, "finished", run.steps, rate, last_return, finished.seconds)
    train = on_disk.recent_training(column, "seconds", "episode_return")
    points = [(row[column], row["seconds"]) for row in train if column in row and "seconds" in row]
    if last_return is None and train:
        last_return = train[-1].get("episode_return")
    newest = max([*points, *([(evaluation[column], evaluation["seconds"])] if evaluation else [])], default=(0.0, 0.0))
    error = on_disk.error
    state: State = "running" if by else "failed" if error else "stopped"
    rate = None  # a single row would count the time to begin
    if len(points) > 1 and points[-1] > points[0] and points[-1][1] > points[0][1]:
        rate = (points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1])
    reason = error if error and state == "failed" else ""
    return RunStatus(run, state, int(newest[0]), rate, last_return, newest[1] or None, reason, by)


def seconds_needed(statuses: Sequence[RunStatus]) -> list[float]:
    """Expected seconds of each run, none for those that are finished; an empty list where no speed is known.

    A run without a speed of its own takes that of others with its setting, else that of all. Where one of its setting
    is finished, it is expected to take as long in all: the last evaluation comes after the last step.
    """
    paces = [1 / status.rate for status in statuses if status.rate]
    if not paces:
        return []
    overall, by_setting = fmean(paces), _paces(statuses)
    whole = _paces([status for status in statuses if status.state == "finished"])

    def needed(status: RunStatus) -> float:
        label = status.run.label
        per_step = 1 / status.rate if status.rate else by_setting.get(label, overall)
        in_all = status.run.steps * whole.get(label, 0.0)
        return 0.0 if status.state == "finished" else max(status.left * per_step, in_all - (status.seconds or 0.0))

    return [needed(status) for status in statuses]


def _paces(statuses: Sequence[RunStatus]) -> dict[str, float]:
    """Mean seconds a step of each setting."""
    found: dict[str, list[float]] = defaultdict(list)
    for status in statuses:
        if status.rate:
            found[status.run.label].append(1 / status.rate)
    return {label: fmean(each) for label, each in found.items()}


def seconds_left(statuses: Sequence[RunStatus], jobs: int) -> tuple[float, int] | None:
    """Expected seconds with `jobs` runs at a time, and the number of runs whose measured speed that rests on."""
    measured = sum(1 for status in statuses if status.rate)
    times = seconds_needed(statuses)
    return (max(sum(times) / max(jobs, 1), *times), measured) if times else None


def what_is_counted(statuses: Sequence[RunStatus]) -> str:
    """Whether expected seconds count the evaluation at the end of a run: a finished one shows how long it takes."""
    finished = {status.run.label for status in statuses if status.state == "finished"}
    known = all(status.run.label in finished for status in statuses if status.state != "finished")
    return "evaluations included" if known else "the last evaluations not counted"


def counts(statuses: Iterable[RunStatus]) -> str:
    """`3 finished, 2 running, 1 failed`."""
    found = Counter(status.state for status in statuses)
    return ", ".join(f"{found[state]} {state}" for state in STYLES if found[state])


def table(statuses: Sequence[RunStatus], *, title: str, rows: int, live: bool = False) -> Table:
    """One line a run. With fewer `rows` than runs: those under way, then what failed, ended, and comes next."""
    shown, hidden = statuses, 0
    if len(statuses) > rows:
        order = ("running", "failed", "stopped", "finished", "waiting")
        shown = sorted(statuses, key=lambda status: order.index(status.state))[: max(rows, 1)]
        hidden = len(statuses) - len(shown)
    view = Table(title=Text(title), title_justify="left", header_style="bold")
    for heading in ("task", "setting"):
        view.add_column(heading, overflow="fold")
    for heading in ("seed", unit(status.run.task for status in statuses), "", "steps/s", "left", "last return"):
        view.add_column(heading, justify="right", no_wrap=True)
    # A live table has a line for each run; elsewhere a reason has the lines it takes.
    view.add_column("state", no_wrap=live, overflow="ellipsis" if live else "fold")
    needed = {status.run: left for status, left in zip(statuses, seconds_needed(statuses), strict=False)}
    for status in shown:
        left = needed.get(status.run) if status.state == "running" else None
        state = f"failed: {status.error}" if status.state == "failed" else str(status.state)
        if status.by and not live:
            state = f"running: {status.by}"
        view.add_row(
            Text(status.run.task),
            Text(status.run.label),
            str(status.run.seed),
            f"{status.done:,} / {status.run.steps:,}",
            f"{100 * status.done / status.run.steps:.0f}%",
            "" if status.rate is None else f"{status.rate:,.0f}",
            "" if left is None else duration(left),
            "" if status.last_return is None else return_text(status.last_return),
            Text(state, style=STYLES[status.state]),
        )
    if hidden:
        view.caption = f"and {hidden:,} more"
    return view


def wide_console() -> Console:
    """The terminal; into a file or a pipe, lines long enough for a table."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def suite_status(folder: Path) -> int:
    """`drq suite status DIR`: every run of the suite in a folder. 1 if one has failed."""
    suite = SuiteFolder(folder)
    record = suite.read()
    under_way = suite.under_way()
    statuses = [read_status(suite, run, under_way.get(str(run.folder))) for run in record.runs]
    console = wide_console()
    title = f"{record.name}: {record.shows}" if record.shows else record.name
    console.print(table(statuses, title=title, rows=MOST_ROWS))
    console.print(f"{len(statuses)} run{'s' * (len(statuses) != 1)}: {counts(statuses)}.", highlight=False)
    expected = seconds_left(statuses, len(under_way))
    if under_way and expected:
        counted = f"{len(under_way)} at a time, {what_is_counted(statuses)}"
        console.print(f"About {duration(expected[0])} left, {counted}.", highlight=False)
    return 1 if any(status.state == "failed" for status in statuses) else 0
