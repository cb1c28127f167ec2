"""Times `drq suite status` on a suite of many runs, made for it in a temporary folder.

    python benchmarks/suite_status.py --runs 10_000

Six of ten runs are finished, two have stopped in the middle, one in ten has failed and one has not begun. Each has the
logs of a run of 500,000 env steps: 50 evaluations and 500 lines of training. What a disk costs that has to be read
first is not in the time: the files were written just before.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from drq.launch import SuiteFolder
from drq.suites import Setting, Suite
from drq.training.folder import versions

EVALUATIONS = [f"{10_000 * n},{5_000 * n},{15.0 * n},30.0,10,{21.0 * n}" for n in range(1, 51)]
TRAINING = [f"{1_000 * n},{500 * n},{500 * n},{n},{1.5 * n},0.1,0.2,0.1,-3.5,{2.1 * n:.1f}" for n in range(1, 501)]
EVAL_HEADER = "env_step,agent_step,return_mean,return_std,episodes,seconds"
TRAIN_HEADER = "env_step,agent_step,updates,episode,episode_return,critic_loss,actor_loss,temperature,entropy,seconds"


@dataclass(frozen=True)
class Arguments:
    """How large the suite is."""

    runs: int = 10_000
    times: int = 3


def make(folder: Path, runs: int) -> None:
    rates = [number * 1e-5 for number in range(1, runs // 10 + 1)]
    settings = tuple(Setting(f"lr {number}", {"agent.learning_rate": rate}) for number, rate in enumerate(rates))
    suite = Suite("many", "", "planet", ("dmc/walker-walk",), settings, tuple(range(1, 11)), 500_000)
    SuiteFolder(folder).open(suite)
    for number, run in enumerate(suite.runs()):
        path, kind = folder / run.folder, number % 10
        if kind == 9:
            continue
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        done = 1.0 if kind < 6 else 0.4
        (path / "eval.csv").write_text("\n".join([EVAL_HEADER, *EVALUATIONS[: int(done * 50)]]) + "\n")
        (path / "train.csv").write_text("\n".join([TRAIN_HEADER, *TRAINING[: int(done * 500)]]) + "\n")
        if kind < 6:
            (path / "finished.json").write_text(json.dumps({"steps": 500_000, "seconds": 1_060.0}))
        if kind == 8:
            (path / "error.txt").write_text("Traceback (most recent call last):\nRuntimeError: out of memory\n")


def main(args: Arguments) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "many"
        make(folder, args.runs)
        print(f"{args.runs:,} runs, Python {versions()['python']}, torch {versions()['torch']}")
        for _ in range(args.times):
            began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [sys.executable, "-m", "drq", "suite", "status", str(folder)]
            said = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[-1]
            seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
            computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(f"{seconds:.2f} s, {computed:.2f} s of it on a core. {said}")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
