"""`drq suite run --dry-run`: the runs of a suite, and how long they would take."""

from __future__ import annotations

from collections.abc import Sequence

from drq.config import TrainConfig
from drq.launch.pools import Job, Jobs, plan_here
from drq.launch.probe import Cost, cost_of, costs_as
from drq.launch.status import counts, read_status, seconds_left, unit, what_is_counted
from drq.launch.suite_folder import SuiteFolder
from drq.suites import Suite
from drq.training.progress import duration


def print_plan(suite: Suite, folder: SuiteFolder, jobs: Sequence[Job], at_once: Jobs | None) -> None:
    """Every run, and how long all would take `at_once`; None: that is up to a Ray cluster."""
    statuses = [read_status(folder, job.run) for job in jobs]
    for job, status in zip(jobs, statuses, strict=True):
        print(f"{job.config.dir}  {job.run}  {status.state}")
    left = [job for job, status in zip(jobs, statuses, strict=True) if status.state != "finished"]
    steps = sum(status.left for status in statuses)
    print(f"{len(jobs)} run{'s' * (len(jobs) != 1)}: {counts(statuses)}. {steps:,} {unit(suite.tasks)} to go.")
    if not left:
        print("Nothing to do.")
        return
    if at_once is None:
        print("How many run at a time, and so the expected time, is up to the Ray cluster.")
        return
    at_a_time = len(plan_here(at_once, [job.config for job in left]))
    expected = seconds_left(statuses, at_a_time)
    if expected is None:
        total = _print_costs(left)
        print(
            f"{at_a_time} at a time. Expected time: about {duration(total / at_a_time)}, evaluations included, from a "
            "few updates and the beginning of an evaluation of each setting's first run, timed now."
        )
    else:
        seconds, measured = expected
        print(
            f"{at_a_time} at a time. Expected time: about {duration(seconds)}, "
            f"from the speed of {measured} {'run' if measured == 1 else 'runs'} in {folder.path}, "
            f"{what_is_counted(statuses)}."
        )


def _print_costs(jobs: Sequence[Job]) -> float:
    """Says what a run of each setting takes, and returns the seconds of all runs, one after the other."""
    settings: dict[str, list[TrainConfig]] = {}
    for job in jobs:
        settings.setdefault(job.run.label, []).append(job.config)
    costs: dict[TrainConfig, Cost] = {}
    total = 0.0
    for label, configs in settings.items():
        alike = costs_as(configs[0])
        cost = costs[alike] = costs.get(alike) or cost_of(configs[0])
        times = [cost.of_run(config) for config in configs]
        total += sum(times)
        print(
            f"{label}: {len(times)} x about {duration(sum(times) / len(times))}: {cost.agent_step * 1e3:.1f} ms an "
            f"agent step, {duration(cost.evaluation)} an evaluation{cost.assumed}.",
            flush=True,
        )
    return total
