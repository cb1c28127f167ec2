"""`drq speed`: how fast this machine trains, against a plain implementation in the same run.

What each figure means and how it is made: benchmarks/README.md. The plain implementation: plain_reference.py.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch

from drq.config import EngineConfig
from drq.cores import usable_cores
from drq.engine.settings import EngineSettings, choose_device
from drq.envs import family_of
from drq.envs.rendering import renderer_name
from drq.errors import UserError
from drq.launch import daemon_of_others
from drq.speed.environments import measure_environment
from drq.speed.plan import Plan, plan_for
from drq.speed.processes import measure_processes
from drq.speed.results import SpeedReport, UpdateSpeed, host_memory
from drq.speed.table import table
from drq.speed.updates import Work, compare, measure_acting, measure_updates
from drq.training.folder import git_commit, versions

T = TypeVar("T")
Section = Literal["reference", "presets", "acting", "environments", "growth", "processes"]
ENVIRONMENT_BLOCKS = 5
NO_ROOM = "it does not fit into the memory of this GPU."


@dataclass(frozen=True)
class SpeedArguments:
    """Measures how fast this machine trains and prints a table; close other programs first."""

    quick: bool = False
    """Only the comparison with the plain implementation, acting and environments: about a minute."""
    full: bool = False
    """Everything, on a CPU too, where it takes long."""
    only: tuple[Section, ...] = ()
    """Only these parts of the table."""
    json: str | None = None
    """Write all figures to this file (`-`: to the terminal, instead of the table)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to learn."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The engine to measure."""


def speed(arguments: SpeedArguments) -> None:
    """Measures, prints the table, writes the file. Exits with 1 if something could not be measured."""
    if arguments.quick and arguments.full:
        raise UserError("--quick and --full contradict each other: choose one.")
    file = None if arguments.json in (None, "-") else _checked_file(Path(str(arguments.json)))
    device = choose_device(arguments.device)
    plan = plan_for(device, quick=arguments.quick, full=arguments.full)

    def save(report: SpeedReport) -> None:
        if file is not None:
            file.write_text(to_json(report))

    report = measure(plan, arguments.engine, device, arguments.only, save)
    print(to_json(report) if arguments.json == "-" else table(report), end="")
    if report.failed:
        sys.exit(1)


def measure(
    plan: Plan,
    engine_config: EngineConfig,
    device: torch.device,
    only: tuple[Section, ...] = (),
    save: Callable[[SpeedReport], None] = lambda report: None,
) -> SpeedReport:
    """Carries a plan out. `save` sees the report grow, so that an interrupted measurement leaves what it has."""

    def engine_for(work: Work) -> EngineSettings:
        return EngineSettings.resolve(engine_config, device, work.config.agent)

    engine = engine_for(plan.reference)
    report = SpeedReport(_machine(device), _describe(engine), growth_from=plan.reference.name)
    in_full = {"presets": plan.presets, "growth": plan.growth, "processes": plan.processes}
    if not only or any(not in_full.get(section, True) for section in only):
        report.left_out |= plan.left_out
    known: dict[Hashable, UpdateSpeed] = {}

    def attempt(what: str, results: list[T], function: Callable[..., T], *args: Any) -> None:
        with watched(what):
            results.append(function(*args))

    @contextmanager
    def watched(what: str) -> Iterator[None]:
        print(f"measuring {what} ...", file=sys.stderr, flush=True)
        try:
            yield
        except UserError as error:
            report.left_out[what] = str(error)
        except torch.OutOfMemoryError:
            report.left_out[what] = NO_ROOM
        except Exception as error:  # one broken measurement should not cost the others
            report.failed[what] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        report.host_peak_bytes = host_memory("VmHWM")
        save(report)

    def title(work: Work) -> str:
        """With its precision, where that is not the one of the engine's line: a small agent may choose another."""
        precision = engine_for(work).precision
        return work.name if precision == engine.precision else f"{work.name}, {precision}"

    def updates(work: Work) -> UpdateSpeed:
        """Presets and growth meet in some settings, which are measured once."""
        settings = work.config.agent, work.config.env, work.config.replay
        if settings not in known:
            known[settings] = measure_updates(work, engine_for(work), plan.effort)
        return dataclasses.replace(known[settings], name=title(work))

    def together(work: Work, counts: tuple[int, ...], under_mps: bool) -> None:
        """All processes are there from the beginning: where the largest set does not fit, a smaller one may."""
        name = f"{work.name} at once{', MPS' if under_mps else ''}"
        measured: set[int] = set()
        while counts:
            with watched(f"{', '.join(map(str, counts))} x {name}"):
                try:
                    options = work, engine_for(work), counts, plan.processes_effort
                    for found in measure_processes(*options, under_mps=under_mps):
                        report.processes.append(dataclasses.replace(found, work=title(work)))
                        measured.add(found.processes)
                        save(report)
                except torch.OutOfMemoryError:
                    report.left_out[f"{counts[-1]} x {name}"] = NO_ROOM
                    counts = tuple(count for count in counts[:-1] if count not in measured)
                    continue
            return

    wanted = only or get_args(Section)
    if "presets" in wanted:
        for work in plan.presets:
            attempt(f"updates of {work.name}", report.presets, updates, work)
    if "reference" in wanted:
        engines = _engines(engine, engine_config, plan)
        options = plan.reference, engines, plan.plain, plan.plain_capacity, plan.effort
        attempt("drq and the plain implementation in turns", report.comparisons, compare, *options)
    if "acting" in wanted:
        for count, calls in plan.acting.items():
            attempt(f"acting on {count}", report.acting, measure_acting, plan.reference, engine, count, calls)
    if "environments" in wanted:
        for task, config in plan.environments:
            what = f"{task} {config.render}" if family_of(task).has_suite_settings else task
            blocks = ENVIRONMENT_BLOCKS, plan.environment_block_seconds
            attempt(what, report.environments, measure_environment, task, config, *blocks)
    if "growth" in wanted:
        for what, works in plan.growth.items():
            for work in works:
                attempt(f"{what} {work.name}", report.growth.setdefault(what, []), updates, work)
    if "processes" in wanted:
        choices = _mps_choices(device)
        if plan.processes and False not in choices:
            report.left_out["agents at once without MPS"] = "an MPS daemon runs on this machine: stop it to compare."
        for work, counts in plan.processes:
            for under_mps in choices:
                together(work, counts, under_mps)
    return report


def _mps_choices(device: torch.device) -> tuple[bool, ...]:
    """Several processes on a GPU without and with MPS; a daemon that runs already leaves no choice."""
    if device.type != "cuda":
        return (False,)
    return (True,) if daemon_of_others() else (False, True)


def _engines(engine: EngineSettings, config: EngineConfig, plan: Plan) -> dict[str, EngineSettings]:
    """The engine that is measured and, where it reduces precision, the one that does not."""
    engines = {f"drq, {engine.precision}": engine}
    if plan.float32_beside and engine.precision != "float32":
        whole = dataclasses.replace(config, precision="float32", kernels="auto")
        engines["drq, float32"] = EngineSettings.resolve(whole, engine.device, plan.reference.config.agent)
    return engines


def to_json(report: SpeedReport) -> str:
    """The report as JSON; the fields are those of results.py."""
    return json.dumps(dataclasses.asdict(report), indent=1) + "\n"


def _checked_file(file: Path) -> Path:
    """Refuses a place that cannot be written to, before minutes are spent."""
    try:
        file.touch()
    except OSError as error:
        raise UserError(
            f"--json {file} cannot be written ({error.strerror}): name a file in a folder that exists."
        ) from None
    return file


def _machine(device: torch.device) -> dict[str, str]:
    try:
        renderer = renderer_name()
    except UserError as error:
        renderer = str(error)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
        "cpu": _cpu_name(),
        "cores": str(usable_cores()),
        "torch_threads": str(torch.get_num_threads()),
        "renderer": renderer,
        "commit": git_commit() or "unknown",
        "drq": "not installed",
        **versions(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _describe(engine: EngineSettings) -> str:
    words = [engine.precision, "compiled" if engine.compile else "eager"]
    words += ["CUDA graphs"] if engine.cuda_graphs else []
    words += ["own kernels"] if engine.kernels else []
    return ", ".join(words)
