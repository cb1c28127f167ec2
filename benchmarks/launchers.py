"""What starting a run costs, with processes on this machine and with Ray on this machine, one after the other.

    python benchmarks/launchers.py --runs 100 --jobs 2
    python benchmarks/launchers.py --hear 1 8           # instead: what it costs to hear of so many runs on Ray

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


SLEEPS = """
import time, torch
class Sleeps:
    columns = 1
    def sample(self, count, image_size, generator):
        time.sleep(0.5)
        return torch.zeros(count, 1)
    def __call__(self, images, nu):
        return images.float()
"""


def hearing(runs: int, address: str, folder: Path, seconds: float = 40.0) -> float:
    """Milliseconds of processor time a second that the command takes while so many runs on Ray mostly sleep."""
    (folder / "sleeps.py").write_text(SLEEPS)
    suite, out = folder / "hear.toml", folder / f"hear-{runs}"
    text = SUITE.format(runs=runs).replace("steps = 40", "steps = 10_000")
    suite.write_text(text + 'agent.augmentation = "sleeps:Sleeps"\n')
    command = [sys.executable, "-m", "drq", "suite", "run", str(suite), "--import", "sleeps", "--jobs", str(runs),
               "--launcher", "ray", "--address", address, "--dir", str(out)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True, cwd=folder)
    watched = Watched(process)
    while len(list(out.glob("*/*/*/train.csv"))) < runs:
        if process.poll() is not None:
            raise SystemExit("The command ended too early.")
        time.sleep(0.5)
    before = watched.cpu_seconds
    time.sleep(seconds)
    spent = watched.cpu_seconds - before
    process.terminate()
    process.wait()
    return 1e3 * spent / seconds


def print_hearing(counts: list[int], folder: Path) -> None:
    from ray.cluster_utils import Cluster

    # As many cores as runs, on paper: they sleep.
    node = {"num_cpus": max(counts), "memory": 10**11, "include_dashboard": False, "object_store_memory": 10**8}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for runs in counts:
            milliseconds = hearing(runs, cluster.address, folder)
            print(f"{runs} runs under way: {milliseconds:.1f} ms of processor time a second", flush=True)
    finally:
        cluster.shutdown()


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
    parser.add_argument("--hear", type=int, nargs="+", help="only measure what hearing of so many runs costs")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.hear:
            print_hearing(args.hear, folder)
            return
        print(f"A run alone: {alone(folder, args.alone):.2f} s (median of {args.alone}).", flush=True)
        print(f"\n{args.runs} runs, {args.jobs} at a time:\n")
        print("| launcher | begins after | first result after | a run holds its slot | command's processor time a run "
              "| command's memory, peak | all |\n|---|---|---|---|---|---|---|")  # fmt: skip
        for launcher in ("local", "ray"):
            print(launched(launcher, args.runs, args.jobs, folder), flush=True)


if __name__ == "__main__":
    main()
