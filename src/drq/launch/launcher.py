"""`drq suite`: the runs of a suite, some at a time, until all are finished. Run again, it goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from rich.live import Live
from rich.table import Table
from tyro.conf import Positional, arg

from drq.config import TrainConfig
from drq.envs import family_of
from drq.errors import UserError
from drq.launch.claims import State as ClaimState
from drq.launch.dry_run import print_plan
from drq.launch.pools import Ended, Job, Jobs, LocalPool, plan_here
from drq.launch.process import STOPPED
from drq.launch.ray_pool import RayPool
from drq.launch.rungs import drop_losers, due, refuse_blind_rungs, write_best
from drq.launch.status import RunStatus, counts, read_status, seconds_left, table, what_is_counted, wide_console
from drq.launch.stores import StoredPool, shown_at, store_at, stored
from drq.launch.suite_folder import SuiteFolder
from drq.launch.transfer import RunStore
from drq.suites import SUITES, Run, Suite, find_suite, slug
from drq.training.checkpoint import drop_replay
from drq.training.folder import write_atomically
from drq.training.progress import duration, return_text
from drq.training.schedule import Schedule
from drq.training.stopping import handled_by

POLL_SECONDS = 0.2
REDRAW_SECONDS = 1.0
PLAIN_SECONDS = 60.0
"""Between two lines about everything, where there is no terminal to draw a table on."""
LOOK_SECONDS = 2.0
"""Between two looks at runs that other commands have."""
MOST_JOBS = 10_000
ATTEMPTS = 3
"""So many failures of a run are enough. Neither a machine that is lost nor one that cannot make the run counts."""

Pool = LocalPool | RayPool


@dataclass(frozen=True)
class SuiteRunArguments:
    """Runs a suite, or what is left of it: finished runs are left alone, unfinished ones go on."""

    suite: Annotated[str, Positional, arg(metavar="SUITE")]
    """Its name (`drq suite list`), or a TOML file of your own (docs/suites.md)."""
    seeds: int | str | None = None
    """Seeds 1 to this number, or from one to another: 4-7. Unset: the suite's own."""
    steps: int | None = None
    """Env steps (Atari: agent steps) of each run. Unset: the suite's own."""
    tasks: str | None = None
    """Tasks joined by commas, with or without their family: cartpole-swingup,cheetah-run. Unset: the suite's own."""
    settings: str | None = None
    """Some of its settings joined by commas, as their folders are called: sac,k2-m2. Unset: all."""
    dir: Path | None = None
    """Folder of the runs, or where to copy them: s3://bucket/runs (docs/scale.md). Unset: runs/<suite>."""
    jobs: Jobs = "auto"
    """Runs at a time. auto: as many as the GPUs and cores of this machine carry."""
    launcher: Literal["local", "ray"] = "local"
    """local: processes on this machine. ray: on a Ray cluster (docs/scale.md)."""
    address: str | None = None
    """Of the Ray cluster: auto, or host:port. Unset: a Ray of its own is started on this machine."""
    gpus_per_run: float | None = None
    """Share of a GPU that a run asks Ray for. Unset: as many runs to a GPU as it carries."""
    imports: Annotated[tuple[str, ...], arg(aliases=["--import"])] = ()
    """Modules that a suite of your own may import: no other is. Their source travels to the nodes of a cluster."""
    keep_replay: bool = False
    """Keep the replays of finished runs (2.2 GB each with the paper's settings): more steps need them."""
    dry_run: bool = False
    """Only print the runs and the expected time."""


def list_suites() -> int:
    """`drq suite list`: what there is, and how much it takes."""
    view = Table(header_style="bold")
    view.add_column("suite", no_wrap=True)
    view.add_column("shows")
    for heading in ("tasks x settings x seeds", "runs", "env steps"):
        view.add_column(heading, justify="right", no_wrap=True)
    for suite in SUITES.values():
        parts = len(suite.tasks), len(suite.settings), len(suite.seeds)
        runs = suite.runs()
        env_steps = sum(run.steps * family_of(run.task).env_steps_per_count for run in runs)
        view.add_row(suite.name, suite.shows, " x ".join(map(str, parts)), f"{len(runs):,}", f"{env_steps / 1e6:,.0f}M")
    wide_console().print(view)
    return 0


def run_suite(args: SuiteRunArguments) -> int:
    """`drq suite run`. 0: every run is finished. 1: one has failed. 130: stopped by Ctrl-C."""
    if args.jobs != "auto" and not 1 <= args.jobs <= MOST_JOBS:
        raise UserError(f"--jobs is {args.jobs}: set it between 1 and {MOST_JOBS:,}, or to auto.")
    suite = find_suite(args.suite, args.imports).narrowed(
        tasks=_names("--tasks", args.tasks, "cartpole-swingup,cheetah-run"),
        settings=_names("--settings", args.settings, "sac,k2-m2"),
        seeds=args.seeds,
        steps=args.steps,
    )
    refuse_blind_rungs(suite)
    store = store_at(args.dir)
    folder = SuiteFolder(shown_at(store) if store else args.dir or Path("runs") / slug(suite.name))
    if args.launcher != "ray" and (args.address is not None or args.gpus_per_run is not None):
        raise UserError("--address and --gpus-per-run are for a Ray cluster: add --launcher ray, or leave them out.")
    share = args.gpus_per_run
    if share is not None and not (0 < share <= 1 or (share > 1 and share == int(share))):
        raise UserError(f"--gpus-per-run is {share:g}: set it to a part of a GPU, such as 0.25, or to a whole number.")
    if args.dry_run:
        if store:
            store.fetch("", folder.path, checkpoints=False)
        part, later = due(suite, folder)
        _say_rung(part, later)
        folder.joined(part)
        print_plan(part, folder, _jobs(part, folder), None if args.launcher == "ray" else args.jobs)
        return 0
    with stored(store, folder) if store else nullcontext():
        return _run_rungs(suite, folder, args, store)


def _names(flag: str, said: str | None, example: str) -> list[str] | None:
    names = None if said is None else [name.strip() for name in said.split(",") if name.strip()]
    if names == []:
        raise UserError(f"{flag} is empty: name some, as in {flag} {example}, or leave it out.")
    return names


def _run_rungs(suite: Suite, folder: SuiteFolder, args: SuiteRunArguments, store: RunStore | None) -> int:
    """All runs of the suite; of a search rung after rung."""
    code = steps = 0
    while True:
        part, later = due(suite, folder)
        if part.steps == steps:  # every setting has failed
            return code
        if not args.keep_replay:
            drop_losers(suite, part, folder)
        code, steps = _run_part(part, folder, args, store, later), part.steps
        if not later or code == STOPPED:
            break
    if best := write_best(part, folder):
        print(f"The best settings: {best}, for `drq train TASK --config {best}`.")
    return code


def _say_rung(part: Suite, later: int) -> None:
    if later:
        print(f"{part.name}: {len(part.settings)} settings up to {part.steps:,} steps; then the worst stop.")


def _jobs(suite: Suite, folder: SuiteFolder) -> list[Job]:
    return [Job(run, suite.config(run, folder.path)) for run in suite.runs()]


def _run_part(suite: Suite, folder: SuiteFolder, args: SuiteRunArguments, store: RunStore | None, later: int) -> int:
    """The runs of a suite, or of one rung of its search, after which `later` others come."""
    _say_rung(suite, later)
    if later:
        args = replace(args, keep_replay=True)  # who goes on needs it
    jobs = _jobs(suite, folder)
    folder.open(suite)
    try:
        statuses = {job.run: read_status(folder, job.run) for job in jobs}
        left = longest_first([job for job in jobs if statuses[job.run].state != "finished"])
        pool = _pool(args, folder, [job.config for job in left], store)
        return Launch(suite, folder, statuses, left, pool, args.keep_replay, waits=later > 0).run()
    finally:
        folder.close()


def _pool(args: SuiteRunArguments, folder: SuiteFolder, configs: Sequence[TrainConfig], store: RunStore | None) -> Pool:
    """Where the runs are executed."""
    if args.launcher == "ray" and configs:
        keep = args.keep_replay or store is None  # where the copies are in a store, nothing can be dropped here
        return RayPool(folder, args.jobs, configs, args.gpus_per_run, args.address, args.imports, store, keep)
    slots = plan_here(args.jobs, configs) if configs else []  # none: there is nothing to do
    return StoredPool(folder, slots, store) if store else LocalPool(folder, slots)


def longest_first(jobs: Sequence[Job]) -> list[Job]:
    """Seed by seed as they were, of each the longest first: so that none is left to run alone at the end."""
    places = {seed: place for place, seed in enumerate(dict.fromkeys(job.run.seed for job in jobs))}
    return sorted(jobs, key=lambda job: (places[job.run.seed], -Schedule(job.config).agent_steps))


@dataclass
class Launch:
    """A suite under way."""

    suite: Suite
    folder: SuiteFolder
    statuses: dict[Run, RunStatus]
    left: list[Job]
    pool: Pool
    keep_replay: bool
    waits: bool = False
    """Whether to wait for the runs of other commands: there is something to do after them."""

    def __post_init__(self) -> None:
        self.console = wide_console()
        # A run that failed before is tried again, so it waits like any other.
        self.statuses = {run: _without_failure(status) for run, status in self.statuses.items()}
        self.failed_before = {job.run: self._failed_at(job.run) for job in self.left}
        self.jobs = {job.run: job for job in self.left}
        self.by_folder = {str(job.run.folder): job.run for job in self.left}
        self.failures: Counter[Run] = Counter()
        self.interrupts = 0
        self.others: dict[Run, ClaimState] = {}
        """Runs that are left and that other commands have."""
        self.look_at = 0.0
        """When to look again what they have."""

    def run(self) -> int:
        """Runs what is left."""
        done = len(self.statuses) - len(self.left)
        if not self.left:
            self._say(f"{self.suite.name}: all {done} runs are finished. Nothing to do. {self.folder.path}")
            return 0
        self._say(f"{self.suite.name}: {len(self.statuses)} runs, {done} finished before, {self.pool.size} at a time.")
        # The signals first: what begins with the pool is to end with it, not by Ctrl-C in the middle of it.
        with handled_by(self._count_interrupt), self.pool.at_work():
            try:
                if self.console.is_terminal:
                    with Live(console=self.console, auto_refresh=False, transient=True) as live:
                        self._work(live)
                else:
                    self._work(None)
            finally:
                if self.pool.running:  # something went wrong here: leave no run behind
                    self.pool.kill()
        return self._sum_up()

    def _work(self, live: Live | None) -> None:
        asked = 0
        due = time.monotonic() + (0.0 if live else PLAIN_SECONDS)
        while self.pool.running or self._more():
            while not self.interrupts and len(self.pool.running) < self.pool.size and (job := self._next()):
                self._start(job)
            if self.interrupts > asked:
                asked = self.interrupts
                self._interrupt()
            for ended in self.pool.ended():
                self._end(ended)
            while self.pool.notices:
                self._say(self.pool.notices.pop(0))
            if time.monotonic() >= due:
                self._refresh_running()
                if live:
                    rows = self.console.height - 8  # title, heading, borders, captions
                    shown = table(list(self.statuses.values()), title=self._summary(), rows=rows, live=True)
                    live.update(shown, refresh=True)
                else:
                    self._say(self._summary())
                due = time.monotonic() + (REDRAW_SECONDS if live else PLAIN_SECONDS)
            time.sleep(POLL_SECONDS)

    def _more(self) -> bool:
        """Whether there is, or may be, a run for this command: one that another certainly works on is not."""
        return not self.interrupts and any(self.waits or self.others.get(job.run) != "taken" for job in self.left)

    def _next(self) -> Job | None:
        """The first of the runs left that no other command has, or has ended since; it is this command's now."""
        if not self.left or time.monotonic() < self.look_at:
            return None
        claimed = self.folder.claimed().items()
        self.others = {self.by_folder[name]: state for name, state in claimed if name in self.by_folder}
        for job in list(self.left):
            if job.run in self.others or self._ended_elsewhere(job) or not self.folder.claim(job.run):
                continue
            if not self._ended_elsewhere(job):  # now that nobody else changes it
                self.left.remove(job)
                return job
            self.folder.release(job.run)
        self.look_at = time.monotonic() + LOOK_SECONDS
        return None

    def _ended_elsewhere(self, job: Job) -> bool:
        """Whether another command has finished the run, or has failed with it, since this one began."""
        finished = self.folder.run_folder(job.run).finished_steps >= job.run.steps
        if not finished and self._failed_at(job.run) in (None, self.failed_before[job.run]):
            return False
        self.left.remove(job)
        self.statuses[job.run] = read_status(self.folder, job.run)
        return True

    def _failed_at(self, run: Run) -> int | None:
        """Tells one failure from another."""
        with suppress(OSError):
            return self._error_file(run).stat().st_mtime_ns
        return None

    def _start(self, job: Job) -> None:
        # What an earlier attempt left; a folder with nothing but this file would not pass for a run's.
        self._error_file(job.run).unlink(missing_ok=True)
        self.pool.start(job)
        self.statuses[job.run] = replace(self.statuses[job.run], state="running")
        if not self.console.is_terminal:
            self._say(f"Begun: {job.run}.")

    def _end(self, ended: Ended) -> None:
        run = ended.run
        status = read_status(self.folder, run)
        if status.state != "finished" and not self.interrupts:
            self.failures[run] += ended.why not in ("lost", "unfit")
            if ended.why != "mistake" and self.failures[run] < ATTEMPTS:
                self._again(ended)
                return
            path = self._error_file(run)
            if not path.exists():  # what the run itself wrote there says more
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, ended.error or "The run ended before its last step and gave no reason.\n")
            status = read_status(self.folder, run)
        if status.state == "finished" and not self.keep_replay:
            with suppress(OSError, UserError):  # `drq suite prune` can do it later
                drop_replay(self.folder.run_folder(run).checkpoint)
        self.folder.release(run)
        self.look_at = 0.0
        self.statuses[run] = status
        if status.state == "finished":
            score = "" if status.last_return is None else f" with return {return_text(status.last_return)}"
            self._say(f"Finished: {run}{score} after {duration(status.seconds or 0.0)}.")
        elif status.state == "failed":
            self._say(f"Failed: {run}: {status.error} ({self._error_file(run)})")
        else:
            self._say(f"Stopped: {run} at {status.done:,} of {run.steps:,}.")

    def _again(self, ended: Ended) -> None:
        """Puts a run back among those that are left: first where it was its machine, last where it failed."""
        run = ended.run
        lines = ended.error.strip().splitlines() or ["it ended before its last step"]
        if ended.why in ("lost", "unfit"):
            self.left.insert(0, self.jobs[run])
            self._say(f"Again: {run}: {lines[-1].rstrip('.')}. It starts elsewhere from its last checkpoint.")
        else:
            self.left.append(self.jobs[run])
            attempt = f"attempt {self.failures[run]} of {ATTEMPTS}"
            self._say(f"Failed, {attempt}: {run}: {lines[-1]} ({self.folder.log(run)})")
        self._error_file(run).unlink(missing_ok=True)  # else other commands would take it for one that has ended
        self.failed_before[run] = None
        self.folder.release(run)
        self.look_at = 0.0
        self.statuses[run] = _without_failure(read_status(self.folder, run))

    def _interrupt(self) -> None:
        if self.interrupts == 1:
            self.pool.stop()
            running = len(self.pool.running)
            self._say(
                f"Stopping: {running} run{'s' * (running != 1)} still to write a checkpoint. "
                "Ctrl-C again stops them at once, back to the checkpoints before."
            )
        else:
            self.pool.kill()

    def _error_file(self, run: Run) -> Path:
        return self.folder.run_folder(run).error_file

    def _refresh_running(self) -> None:
        under_way = self.folder.under_way()
        for run in [*self.pool.running, *self.others]:
            self.statuses[run] = read_status(self.folder, run, under_way.get(str(run.folder)))

    def _summary(self) -> str:
        statuses = list(self.statuses.values())
        expected = seconds_left(statuses, self.pool.size)
        left = f" About {duration(expected[0])} left, {what_is_counted(statuses)}." if expected else ""
        return f"{self.suite.name}: {counts(statuses)}.{left}"

    def _sum_up(self) -> int:
        self._refresh_running()
        statuses = list(self.statuses.values())
        failed = [status for status in statuses if status.state == "failed"]
        self._say(f"{self.suite.name}: {counts(statuses)}. {self.folder.path}")
        if self.interrupts:
            self._say("Run the same command again to go on.")
            return STOPPED
        for status in failed:
            self._say(
                f"Failed: {status.run}: {status.error} ({self._error_file(status.run)}, {self.folder.log(status.run)})"
            )
        if failed:
            self._say("Run the same command again to try what failed once more.")
        elif any(status.state == "running" for status in statuses):
            self._say(f"Other commands work on what is left: `drq suite status {self.folder.path}` shows it.")
        return 1 if failed else 0

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _count_interrupt(self, number: int, frame: object) -> None:
        """Ctrl-C, or a scheduler's SIGTERM, is answered by the loop and ends nothing by itself."""
        self.interrupts += 1


def _without_failure(status: RunStatus) -> RunStatus:
    return replace(status, state="waiting", error="") if status.state == "failed" else status
