"""The drills by their names, and their table.

python scripts/drills [--quick] [--only NAME] [--seed N] [--count N] [--skip N] [--cost]
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from drills import TESTS, Outcome, train
from drills.cost import checkpoint_cost
from drills.crashes import full_disks, kills_at_random, kills_at_writes, races
from drills.folders import damaged_files, hostile_folders
from drills.mutations import mutated_inputs


def by_tests(*arguments: str) -> Callable[..., Outcome]:
    """Drills that are tests as well."""

    def run(whole: Path, work: Path, count: int, chance: random.Random) -> Outcome:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
        dots = "".join(re.findall(r"^[.FEsx]+", done.stdout, re.MULTILINE))
        failed = re.findall(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.MULTILINE)
        if done.returncode and not failed:
            failed = [f"pytest ended with {done.returncode}"]
        return Outcome(dots.count(".") + dots.count("F") + dots.count("E"), 0, failed)

    return run


DRILLS: dict[str, tuple[str, Callable[..., Outcome], int]] = {
    "kills": ("SIGKILL at random moments", kills_at_random, 50),
    "writes": ("SIGKILL at every write", kills_at_writes, 200),
    "damage": ("damaged files", damaged_files, 200),
    "mutations": ("mutated command lines, suites, CSVs, JSONs", mutated_inputs, 1200),
    "environments": ("misbehaving environments, NaN weights", by_tests("test_misbehaving.py"), 0),
    "strangers": ("hostile folders", hostile_folders, 100),
    "modules": ("suites and exported files that ask for modules", by_tests("test_strangers.py", "test_export.py"), 0),
    "races": ("two processes on one folder", races, 20),
    "locks": ("locks that others left, or that no file system has", by_tests("test_lock.py"), 0),
    "disks": ("full disks", full_disks, 20),
    "faults": ("damaged logs, absurd sizes, GPU faults", by_tests("test_faults.py", "test_gpu_faults.py"), 0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Breaks small runs on purpose, and counts what was lost.")
    parser.add_argument("--quick", action="store_true", help="a tenth of each")
    parser.add_argument("--only", choices=DRILLS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="so many of each, instead of all")
    parser.add_argument("--skip", type=int, default=0, help="of the writes: begin after so many")
    parser.add_argument("--cost", action="store_true", help="measure what checkpoints cost instead")
    options = parser.parse_args()
    lost = 0
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        if options.cost:
            checkpoint_cost(work)
            return 0
        whole = work / "whole"
        train(whole)
        print(f"| {'drill':51} | tried | refused | lost | seconds |\n|---|---|---|---|---|", flush=True)
        for name in options.only or DRILLS:
            title, drill, count = DRILLS[name]
            began = time.monotonic()
            count = options.count or (max(count // 10, 1) if options.quick else count)
            more = {"skip": options.skip} if name == "writes" else {}
            outcome = drill(whole, work, count, random.Random(options.seed), **more)
            took = time.monotonic() - began
            print(f"| {title:51} | {outcome.tried:5} | {outcome.refused:7} | {len(outcome.lost):4} | {took:7.0f} |")
            for line in outcome.lost:
                print(f"    lost: {line}")
            sys.stdout.flush()
            lost += len(outcome.lost)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
