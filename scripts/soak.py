"""Hours at a stretch: a toy run and a toy suite at once, and whether memory, files, threads and speed stay flat.

    python scripts/soak.py FOLDER [--minutes 120]     # works, samples every 30 s into FOLDER/soak.csv, prints the table
    python scripts/soak.py FOLDER --table             # the table of a soak under way, or of one that is over

Linux: processes are read from /proc. Speed is judged per CPU second as well, for a machine that others use.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

SMALL = {
    "agent.batch-size": 8,
    "agent.hidden-dim": 64,
    "agent.seed-steps": 100,
    "env.image-size": 32,
    "replay.capacity": 2000,  # full, and overwritten, within minutes
    "eval.every": 1000,
    "eval.episodes": 2,
    "checkpoint-every": 500,
    "log-every": 100,
}
RUN_OF_SUITE = 1500
"""Env steps of each run of the suite: a minute or so, so that it begins dozens of them."""
WARM_UP = 600.0
"""Seconds that do not count: imports, the first evaluation, a replay that fills."""
TICKS = os.sysconf("SC_CLK_TCK")
MEASURES = ("megabytes", "files", "threads")


def tree(root: int) -> list[int]:
    """A process and all below it."""
    found = [root]
    for process in found:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue  # it ended meanwhile
    return found


def sample(processes: list[int]) -> dict[str, float]:
    """Resident memory, open files and threads of these processes, and the CPU seconds of them and their dead."""
    total = dict.fromkeys((*MEASURES, "cpu_seconds"), 0.0)
    for process in processes:
        try:
            about = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            files = len(os.listdir(f"/proc/{process}/fd"))
        except OSError:
            continue
        total["megabytes"] += int(about[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6
        total["files"] += files
        total["threads"] += int(about[17])
        total["cpu_seconds"] += sum(map(int, about[11:15])) / TICKS  # with those of children that have ended
    return total


def agent_steps(folder: Path) -> int:
    """Agent steps of all runs below a folder, by their train.csv."""
    steps = 0
    for log in folder.rglob("train.csv"):
        lines = log.read_text().splitlines()
        if len(lines) > 1:
            steps += int(dict(zip(lines[0].split(","), lines[-1].split(","), strict=False))["agent_step"])
    return steps


def work(folder: Path, minutes: float, every: float) -> None:
    folder.mkdir(parents=True)
    suite = folder / "soak.toml"
    common = "".join(f'"{name.replace("-", "_")}" = {value}\n' for name, value in SMALL.items())
    suite.write_text(
        f'preset = "cpu"\ntasks = ["toy/reach"]\nseeds = 1000\nsteps = {RUN_OF_SUITE}\n'
        f'[common]\n{common}[[settings]]\nlabel = "small"\n'
    )
    flags = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    drq = [sys.executable, "-m", "drq"]
    commands = {
        "run": [*drq, "train", "toy/reach", "--dir", str(folder / "run"), "--steps", "50_000_000", *flags],
        "suite": [*drq, "suite", "run", str(suite), "--jobs", "1", "--dir", str(folder / "suite")],
    }
    started = {
        name: subprocess.Popen(command, stdout=(folder / f"{name}.txt").open("w"), stderr=subprocess.STDOUT)
        for name, command in commands.items()
    }
    began = time.monotonic()
    rows = csv.writer((folder / "soak.csv").open("w", buffering=1))
    rows.writerow(["seconds", "what", *MEASURES, "cpu_seconds", "agent_steps"])
    while time.monotonic() - began < minutes * 60:
        for name, process in started.items():
            if process.poll() is not None:
                raise SystemExit(f"The {name} ended by itself: see {folder / name}.txt.")
            steps = agent_steps(folder / name)
            watched = {name: tree(process.pid)} | ({"launcher": [process.pid]} if name == "suite" else {})
            for what, processes in watched.items():
                values = [round(value, 2) for value in sample(processes).values()]
                rows.writerow([round(time.monotonic() - began, 1), what, *values, steps])
        time.sleep(every)
    for process in started.values():
        process.send_signal(signal.SIGTERM)
    for name, process in started.items():
        print(f"{name}: asked to stop, exit code {process.wait(120)}")


def table(file: Path) -> None:
    """The first quarter after the warm-up beside the last quarter."""
    rows = list(csv.DictReader(file.open()))
    last = max(float(row["seconds"]) for row in rows)
    quarter = (last - WARM_UP) / 4
    if quarter <= 0:
        raise SystemExit(f"The first {WARM_UP / 60:.0f} minutes do not count: wait.")
    print(f"{last / 60:.0f} minutes, the first {WARM_UP / 60:.0f} left out, quarters of {quarter / 60:.0f}\n")
    print("| | first quarter | last quarter | last/first |\n|---|---|---|---|")

    def line(title: str, measure: Callable[[list[dict[str, str]]], float], what: str) -> None:
        values = [
            measure([row for row in rows if row["what"] == what and begin <= float(row["seconds"]) <= begin + quarter])
            for begin in (WARM_UP, last - quarter)
        ]
        print(f"| {title} | {values[0]:.4g} | {values[1]:.4g} | {values[1] / values[0]:.3f} |")

    def gained(of: str, by: str) -> Callable[[list[dict[str, str]]], float]:
        return lambda part: (float(part[-1][of]) - float(part[0][of])) / (float(part[-1][by]) - float(part[0][by]))

    for what in ("run", "suite", "launcher"):
        for name in MEASURES:
            line(f"{what}: {name}, median", lambda part, name=name: median(float(row[name]) for row in part), what)
            line(f"{what}: {name}, most", lambda part, name=name: max(float(row[name]) for row in part), what)
        if what != "launcher":
            line(f"{what}: agent steps per CPU second", gained("agent_steps", "cpu_seconds"), what)
            line(f"{what}: agent steps per second", gained("agent_steps", "seconds"), what)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--every", type=float, default=30, help="seconds between samples")
    parser.add_argument("--table", action="store_true", help="only print the table of a soak in this folder")
    options = parser.parse_args()
    if not options.table:
        work(options.folder, options.minutes, options.every)
    table(options.folder / "soak.csv")


if __name__ == "__main__":
    main()
