"""Times whole training runs, one or several at once, each in a process of its own as a user would start it.

    python benchmarks/runs.py dmc/cheetah-run --preset planet --steps 100_000 --at-once 1 2 4 8 --out runs.json

Evaluations, videos and checkpoints are in the time, and so is starting Python. Options of `drq train` that are not
named here follow a `--`. What is printed and written grows as runs end, so that a time limit leaves what is done.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tyro
from tyro.conf import Positional

from drq.envs import family_of
from drq.errors import UserError
from drq.speed.results import host_memory
from drq.training.folder import RunFolder, git_commit, versions

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Arguments:
    """Times `drq train` from start to end."""

    task: Positional[str]
    """Such as dmc/cheetah-run or atari/pong."""
    preset: str | None = None
    """Unset: the one `drq train` chooses."""
    steps: int = 100_000
    """Env steps (Atari: agent steps) of a run."""
    at_once: tuple[int, ...] = (1,)
    """How many runs at the same time; several numbers are measured one after the other."""
    limit: float | None = None
    """Seconds after which everything is stopped, runs under way included."""
    out: Path | None = None
    """File for everything measured, as JSON."""
    dir: Path | None = None
    """Where the run folders go. Unset: a temporary folder, removed at the end."""
    train_options: Positional[tuple[str, ...]] = ()
    """After `--`: further options of `drq train`, such as --engine.precision float32."""


@dataclass
class Run:
    """One run of a group."""

    seed: int
    finished: bool = False
    seconds: float | None = None
    """From the start of the process to its end."""
    exit_code: int | None = None
    final_return: float | None = None
    host_peak_bytes: dict[str, int] = field(default_factory=dict)
    """The most memory of each of its processes (the evaluation's is one of its own), by process id."""
    host_together_bytes: int = 0
    """The most that its processes held at one time; pages they share count for each."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Rows of eval.csv."""
    output: str = ""
    """The last lines of a run that failed."""


@dataclass
class Group:
    """Runs that were started together."""

    at_once: int
    runs: list[Run]
    seconds: float | None = None
    """Until the last one ended."""
    gpu_bytes: int | None = None
    """The most that the GPU held beyond what it held before."""


class Child:
    """A run under way."""

    def __init__(self, arguments: Arguments, folder: Path, seed: int) -> None:
        self.run = Run(seed)
        self.folder = folder
        self._log = open(f"{folder}.log", "w+")  # noqa: SIM115  closed by `end`
        command = [sys.executable, "-m", "drq", "train", arguments.task]
        command += ["--preset", arguments.preset or family_of(arguments.task).preset]
        command += ["--steps", str(arguments.steps), "--seed", str(seed), "--dir", str(folder)]
        command += arguments.train_options
        self._started = time.perf_counter()
        # A session of its own: stopping it stops its evaluation process too.
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True)

    def watch(self) -> bool:
        """Notes the memory of its processes; True while it goes on."""
        together = 0
        for pid in process_tree(self.process.pid):
            now = host_memory("VmRSS", pid) or 0
            peak = host_memory("VmHWM", pid) or now  # not every kernel keeps the peak
            together += now
            self.run.host_peak_bytes[str(pid)] = max(self.run.host_peak_bytes.get(str(pid), 0), peak)
        self.run.host_together_bytes = max(self.run.host_together_bytes, together)
        return self.process.poll() is None

    def end(self) -> None:
        """Takes the results of a run that has ended, or stops it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        run = self.run
        run.seconds = time.perf_counter() - self._started
        run.exit_code = self.process.returncode
        folder = RunFolder(self.folder)
        run.finished = folder.finished is not None
        run.evaluations = folder.evaluations()
        if run.evaluations:
            run.final_return = run.evaluations[-1]["return_mean"]
        if not run.finished:
            self._log.seek(0)
            run.output = self._log.read()[-2000:]
        self._log.close()


def process_tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [root]
    for pid in found:  # grows as it goes
        found += children.get(pid, [])
    return found


def gpu_bytes_used() -> int | None:
    """Memory in use on the first GPU, by whomever. None without one."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return int(answer.stdout.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def measure_group(arguments: Arguments, at_once: int, folder: Path, deadline: float) -> Group:
    """Starts so many runs together and waits for all of them, or for the deadline."""
    before = gpu_bytes_used()
    most = before or 0
    started = time.perf_counter()
    children = [Child(arguments, folder / f"{at_once}-{seed}", seed) for seed in range(1, at_once + 1)]
    going = list(children)
    polls = 0
    try:
        while going and time.perf_counter() < deadline:
            time.sleep(POLL_SECONDS)
            for child in [child for child in going if not child.watch()]:
                child.end()
                going.remove(child)
            if before is not None and polls % 4 == 0:
                most = max(most, gpu_bytes_used() or 0)
            polls += 1
    finally:
        for child in going:
            child.end()
    return Group(
        at_once,
        [child.run for child in children],
        seconds=time.perf_counter() - started,
        gpu_bytes=None if before is None else most - before,
    )


def line(group: Group) -> str:
    """A group as a row of the table."""
    finished = [run for run in group.runs if run.finished]
    returns = " ".join(f"{run.final_return:.0f}" for run in finished if run.final_return is not None)
    together = max(run.host_together_bytes for run in group.runs)
    largest = max(max(run.host_peak_bytes.values(), default=0) for run in group.runs)
    gpu = "-" if group.gpu_bytes is None else f"{group.gpu_bytes / 1e9:.1f} GB"
    slowest = max(run.seconds or 0.0 for run in group.runs)
    return ROW.format(
        group.at_once,
        len(finished),
        f"{slowest:.1f} s",
        f"{slowest / group.at_once:.1f} s",
        f"{largest / 1e9:.2f} GB",
        f"{together / 1e9:.2f} GB",
        gpu,
        returns,
    )


ROW = "{:>7}  {:>8}  {:>10}  {:>9}  {:>15}  {:>13}  {:>10}  {}"
HEAD = ROW.format(
    "at once",
    "finished",
    "wall-clock",
    "a run",
    "largest process",
    "whole run",
    "GPU memory",
    "final returns",
)


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    if any(count < 1 for count in arguments.at_once):
        raise UserError("--at-once counts runs: 1 or more.")
    if arguments.dir is not None:
        measure_in(arguments, arguments.dir)
        return
    with tempfile.TemporaryDirectory(prefix="drq-runs-") as folder:
        measure_in(arguments, Path(folder))


def measure_in(arguments: Arguments, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    deadline = float("inf") if arguments.limit is None else time.perf_counter() + arguments.limit
    groups: list[Group] = []
    print(f"{arguments.task}, {arguments.steps:,} steps, memory at its peak\n{HEAD}", flush=True)
    for at_once in arguments.at_once:
        if time.perf_counter() >= deadline:
            print(f"{at_once:>7}  not begun: the limit of {arguments.limit:.0f} s was reached")
            break
        groups.append(measure_group(arguments, at_once, folder, deadline))
        print(line(groups[-1]), flush=True)
        for run in groups[-1].runs:
            if not run.finished:
                print(f"  seed {run.seed} did not finish (exit code {run.exit_code}); the end of its output:")
                print("\n".join(f"    {text}" for text in run.output.splitlines()[-8:]))
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            found = {
                "task": arguments.task,
                "preset": arguments.preset or family_of(arguments.task).preset,
                "steps": arguments.steps,
                "train_options": list(arguments.train_options),
                "versions": versions(),
                "commit": git_commit(),
                "groups": [asdict(group) for group in groups],
            }
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
