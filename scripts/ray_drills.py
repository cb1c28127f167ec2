"""Breaks suites on a Ray cluster on purpose, and counts what was lost.

    python scripts/ray_drills.py [--only nodes driver stop poison]

The cluster is a real one of several nodes on this machine. Each node has a temporary folder of its own, so that no file
is shared. Every result is held, bit by bit, against that of the same runs as processes on this machine, left alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

SUITE = """
tasks = ["toy/reach"]
preset = "cpu"
seeds = {seeds}
steps = 600
[common]
device = "cpu"
log_every = 20
checkpoint_every = 50
env.image_size = 24
agent.hidden_dim = 16
agent.feature_dim = 8
agent.batch_size = 8
agent.seed_steps = 20
replay.capacity = 2000
eval.episodes = 1
[[settings]]
label = "tiny"
"""
POISON = '[[settings]]\nlabel = "poisoned"\nagent.augmentation = "poison:Poison"\n'
POISON_MODULE = """
import os
class Poison:
    columns = 1
    def sample(self, count, image_size, generator):
        print("poisoned", flush=True)
        os._exit(9)
    def __call__(self, images, nu):
        return images
"""


class Drill:
    """A cluster, a folder, and the suite in it."""

    def __init__(self, folder: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.folder = folder
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._ray: Any = ray
        self._nodes = 0

    def add(self) -> Any:
        self._nodes += 1
        own = self.folder / f"node-{self._nodes}"
        own.mkdir()
        given = {"num_cpus": 1, "memory": 8 * 10**9, "object_store_memory": 10**8, "env_vars": {"TMPDIR": str(own)}}
        for attempt in range(4):
            try:
                return self.cluster.add_node(**given)
            except Exception as error:  # Ray gives a node 30 s to start, which a busy machine may need longer for
                if attempt == 3 or "timed out during startup" not in str(error):
                    raise
        return None

    def suite(self, name: str, seeds: int, more: str = "") -> Path:
        path = self.folder / f"{name}.toml"
        path.write_text(SUITE.format(seeds=seeds) + more)
        return path

    def begin(self, suite: Path, out: Path, *args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "drq", "suite", "run", str(suite), "--dir", str(out), *args]
        paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        with open(out.with_suffix(".txt"), "a") as said:
            return subprocess.Popen(command, stdout=said, stderr=said, text=True, cwd=self.folder, env=environment)

    def on_ray(self, suite: Path, out: Path, *args: str) -> subprocess.Popen[str]:
        return self.begin(suite, out, "--launcher", "ray", "--address", self.cluster.address, *args)

    def close(self) -> None:
        self.cluster.shutdown()


def wait(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    while not ready():
        if process.poll() is not None:
            raise SystemExit("The command ended too early.")
        time.sleep(0.1)


def checkpoints(out: Path) -> int:
    return len(list(out.rglob("checkpoint/latest.json")))


def lost(drill: Drill, suite: Path, out: Path) -> int:
    """Runs that are missing, or are not what they are when nothing happens."""
    from drq.suites import find_suite
    from runs import assert_same_run

    alone = out.with_name(out.name + "-alone")
    if drill.begin(suite, alone, "--jobs", "2").wait():
        raise SystemExit("The runs failed where nothing was broken.")
    count = 0
    for run in find_suite(str(suite)).runs():
        try:
            assert_same_run(out / run.folder, alone / run.folder)
        except (AssertionError, OSError) as error:
            print(f"lost: {run}: {error}")
            count += 1
    return count


def nodes(drill: Drill) -> str:
    """Two nodes, six runs, a node killed in the middle; another joins."""
    doomed = drill.add()
    drill.add()
    suite, out = drill.suite("nodes", seeds=6), drill.folder / "nodes"
    command = drill.on_ray(suite, out)
    wait(command, lambda: checkpoints(out) >= 3)
    drill.cluster.remove_node(doomed, allow_graceful=False)
    drill.add()
    code = command.wait()
    said = out.with_suffix(".txt").read_text()
    report = drill.folder / "report.csv"
    subprocess.run(
        [sys.executable, "-m", "drq", "report", str(out), "--format", "csv", "--out", str(report)],
        check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    again, size = said.count("Again:"), report.stat().st_size
    return f"exit code {code}, {again} begun again, {lost(drill, suite, out)} of 6 lost, a report of {size} bytes"


def driver(drill: Drill) -> str:
    """The command is killed in the middle, and typed again."""
    suite, out = drill.suite("driver", seeds=3), drill.folder / "driver"
    command = drill.on_ray(suite, out)
    wait(command, lambda: checkpoints(out) >= 2)
    command.send_signal(signal.SIGKILL)
    command.wait()
    code = drill.on_ray(suite, out).wait()
    left = [path for path in drill.folder.glob("node-*/drq-run-*") if path.parent.name != "node-1"]
    return f"exit code {code}, {lost(drill, suite, out)} of 3 lost, {len(left)} temporary folders left"


def stop(drill: Drill) -> str:
    """Ctrl-C in the middle; processes on this machine go on."""
    suite, out = drill.suite("stop", seeds=2), drill.folder / "stop"
    command = drill.on_ray(suite, out)
    wait(command, lambda: checkpoints(out) >= 2)
    command.send_signal(signal.SIGINT)
    code, again = command.wait(), drill.begin(suite, out, "--jobs", "2").wait()
    return f"exit code {code}, then {again} with the local launcher, {lost(drill, suite, out)} of 2 lost"


def poison(drill: Drill) -> str:
    """A run that dies whenever it learns."""
    (drill.folder / "poison.py").write_text(POISON_MODULE)
    suite, out = drill.suite("poison", seeds=1, more=POISON), drill.folder / "poison"
    code = drill.on_ray(suite, out, "--import", "poison").wait()
    said = out.with_suffix(".txt").read_text()
    attempts = 1 + said.count("Failed, attempt")
    error = (out / "toy-reach" / "poisoned" / "seed-1" / "error.txt").read_text().strip()
    finished = (out / "toy-reach" / "tiny" / "seed-1" / "finished.json").exists()
    return f"exit code {code}, {attempts} attempts, the other run finished: {finished}, error.txt ends: {error[-8:]!r}"


DRILLS = {"nodes": nodes, "driver": driver, "stop": stop, "poison": poison}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=DRILLS, default=list(DRILLS))
    args = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    with tempfile.TemporaryDirectory() as name:
        drill = Drill(Path(name))
        try:
            if "nodes" not in args.only:
                drill.add(), drill.add()
            for each in args.only:
                began = time.monotonic()
                print(f"{each}: {DRILLS[each](drill)} ({time.monotonic() - began:.0f} s)", flush=True)
        finally:
            drill.close()


if __name__ == "__main__":
    main()
