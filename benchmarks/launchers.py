"""What starting a run costs, with processes on this machine and with Ray on this machine, one after the other.

    python benchmarks/launchers.py --runs 100 --jobs 2

Every run is a real one of `toy/reach`, and short: most of it is starting Python with PyTorch. `alone` is such a run as
a bare process, without a launcher: what a launcher's slot takes longer for a run than that is the launcher's cost.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SUITE = """
tasks = ["toy/reach"]
preset = "cpu"
seeds = {runs}
steps = 40
[common]
device = "cpu"
env.image_size = 24
agent.hidden_dim = 16
agent.feature_dim = 8
agent.batch_size = 8
agent.seed_steps = 20
replay.capacity = 100
eval.episodes = 1
eval.video = false
[[settings]]
label = "tiny"
"""
FLAGS = (
    "--preset cpu --device cpu --steps 40 --env.image-size 24 --agent.hidden-dim 16 --agent.feature-dim 8 "
    "--agent.batch-size 8 --agent.seed-steps 20 --replay.capacity 100 --eval.episodes 1 --eval.no-video"
)


def alone(folder: Path, times: int) -> float:
    """Seconds of a run without a launcher."""
    seconds = []
    for number in range(times):
        began = time.monotonic()
        command = [sys.executable, "-m", "drq", "train", "toy/reach", *FLAGS.split()]
        subprocess.run([*command, "--dir", str(folder / str(number))], check=True, capture_output=True)
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


class Watched(threading.Thread):
    """Peak memory and processor time of one process, its children not counted."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self._process = process
        self.megabytes = self.cpu_seconds = 0.0
        self.start()

    def run(self) -> None:
        folder = Path("/proc", str(self._process.pid))
        while self._process.poll() is None:
            try:
                lines = (folder / "status").read_text().splitlines()
                peak = next((line.split()[1] for line in lines if line.startswith("VmHWM")), "0")
                self.megabytes = max(self.megabytes, int(peak) / 1024)
                ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
                self.cpu_seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            except (OSError, IndexError):
                return
            time.sleep(0.2)


def launched(launcher: str, runs: int, jobs: int, folder: Path) -> str:
    """A row of the table."""
    suite = folder / "launchers.toml"
    suite.write_text(SUITE.format(runs=runs))
    out = folder / launcher
    command = [sys.executable, "-m", "drq", "suite", "run", str(suite), "--launcher", launcher, "--dir", str(out)]
    began = time.monotonic()
    process = subprocess.Popen([*command, "--jobs", str(jobs)], stdout=subprocess.PIPE, text=True)
    watched = Watched(process)
    first, begun, finished, started_with = 0.0, 0.0, [], 0.0
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Begun:") and not begun:
            begun, started_with = time.monotonic(), watched.cpu_seconds
        elif line.startswith("Finished:"):
            finished.append(time.monotonic())
            first = first or time.monotonic() - began
    if process.wait() or len(finished) != runs:
        raise SystemExit(f"{launcher}: {len(finished)} of {runs} runs finished.")
    watched.join()
    slot = jobs * (finished[-1] - begun) / runs
    cpu = 1e3 * (watched.cpu_seconds - started_with) / runs
    return (
        f"| {launcher} | {begun - began:.1f} s | {first:.1f} s | {slot:.2f} s | {cpu:.0f} ms "
        f"| {watched.megabytes:.0f} MB | {finished[-1] - began:.0f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--alone", type=int, default=5, help="runs without a launcher, one at a time")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"A run alone: {alone(folder, args.alone):.2f} s (median of {args.alone}).", flush=True)
        print(f"\n{args.runs} runs, {args.jobs} at a time:\n")
        print("| launcher | begins after | first result after | a run holds its slot | command's processor time a run "
              "| command's memory, peak | all |\n|---|---|---|---|---|---|---|")  # fmt: skip
        for launcher in ("local", "ray"):
            print(launched(launcher, args.runs, args.jobs, folder), flush=True)


if __name__ == "__main__":
    main()
