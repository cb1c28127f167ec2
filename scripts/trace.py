"""A determinism trace: what short runs on the CPU end with, to the bit, so that a change of the code can be held to it.

    python scripts/trace.py                            this checkout against the recorded trace
    python scripts/trace.py --commit REV               a commit against the recorded trace
    python scripts/trace.py --compare REV1 REV2        two commits against each other, on any machine
    python scripts/trace.py --commit REV --record      a commit's trace becomes the recorded one
    python scripts/trace.py --commit REV --begin       a commit begins the run that later ones go on with

Sums are rounded as a library orders them, so a recorded trace holds for one version of PyTorch on one kind of CPU
(tests/trace/<key>.json). Runs are described by the command line alone, which old and new commits understand.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "trace"

BEGUN = FOLDER / "begun.tar.xz"
"""A run folder that an earlier commit (its config.json says which) left in the middle of the run."""
BEGUN_RUN = "begun by an earlier commit"

ALL = (
    *("--preset", "cpu", "--device", "cpu", "--engine.precision", "float32", "--eval.no-video"),
    *("--steps", "100", "--checkpoint-every", "17", "--log-every", "10"),
    *("--eval.every", "40", "--eval.episodes", "2", "--replay.capacity", "60"),  # the ring wraps
    *("--agent.batch-size", "8", "--agent.hidden-dim", "16", "--agent.seed-steps", "20"),
)
SAC = ("toy/reach", *ALL, "--env.image-size", "24", "--agent.feature-dim", "8")
DQN = ("toy/catch", "--agent", "dqn", *ALL, "--env.image-size", "36")
RAINBOW = (
    *("toy/catch", "--agent", "rainbow", *ALL, "--env.image-size", "16", "--env.frame-stack", "2"),
    *("--agent.encoder-width", "1", "--agent.atoms", "11", "--agent.value-limit", "2"),
    *("--agent.learning-rate", "0.001", "--agent.tau", "0.05"),  # so that the moving average acts otherwise in time
    *("--agent.n-step", "5", "--agent.n-step-final", "2", "--agent.anneal-updates", "30"),
    *("--agent.reset-every", "30", "--agent.last-reset", "60", "--agent.epsilon-decay-steps", "10"),
)
TINY = ("toy/reach", *ALL, "--env.image-size", "16", "--env.frame-stack", "2", "--agent.encoder", "d4pg")

INTERRUPTED = "sac, interrupted"
RUNS: dict[str, tuple[str, ...]] = {
    "sac": SAC,
    INTERRUPTED: SAC,
    "sac without drq": (*SAC, "--agent.k", "1", "--agent.m", "1", "--agent.augmentation", "none"),
    "sac, [1,1], impala, rotate": (
        *(*SAC, "--agent.k", "1", "--agent.m", "1", "--agent.encoder", "impala", "--agent.augmentation", "rotate"),
    ),
    "sac, [2,1], nature, cutout+intensity": (
        *(*SAC, "--agent.m", "1", "--env.image-size", "36"),
        *("--agent.encoder", "nature", "--agent.augmentation", "cutout+intensity"),
    ),
    "sac, [1,3], d4pg, hflip+vflip, n-step": (
        *(*SAC, "--agent.k", "1", "--agent.m", "3", "--agent.n-step", "3"),
        *("--agent.encoder", "d4pg", "--agent.augmentation", "hflip+vflip"),
    ),
    "sac, dreamer, frozen": (
        *(*SAC, "--agent.freeze-encoder", "--agent.encoder", "dreamer", "--env.image-size", "48"),
    ),
    "sac, two updates a step, action repeat": (
        *(*SAC, "--agent.updates-per-step", "2", "--env.action-repeat", "2", "--agent.target-every", "3"),
    ),
    "sac from state": (
        *(*SAC, "--observation", "state", "--env.frame-stack", "1"),
        *("--agent.k", "1", "--agent.m", "1", "--agent.augmentation", "none"),
    ),
    "dqn": DQN,
    "dqn, [2,2], shift, target network": (
        *(*DQN, "--agent.k", "2", "--agent.m", "2", "--agent.augmentation", "shift"),
        *("--agent.target-every", "7", "--agent.n-step", "3"),
    ),
    "dqn, neither double nor dueling, squared": (
        *(*DQN, "--agent.no-double", "--agent.no-dueling", "--agent.loss", "squared"),
        *("--agent.encoder", "sac-ae", "--agent.augmentation", "none", "--agent.n-step", "1"),
    ),
    "dqn, shared hidden layer, frozen": (*DQN, "--agent.shared-hidden", "--agent.freeze-encoder"),
    "rainbow, [2,2]": (*RAINBOW, "--agent.k", "2", "--agent.m", "2"),
    BEGUN_RUN: (*TINY, "--agent.feature-dim", "2"),
}
"""Name to the arguments of `drq train`, but for its folder."""

Trace = dict[str, dict[str, Any]]


def key() -> str:
    """What recorded bits depend on besides the code: PyTorch's version, and the CPU as its libraries see it."""
    import torch

    known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # PyTorch 2.11 has none
    cpu = str(known.get("cpu_name", "unknown"))
    parts = ("torch", torch.__version__, torch.backends.cpu.get_cpu_capability(), cpu)
    return re.sub(r"[^a-z0-9.+]+", "-", "-".join(parts).lower()).strip("-")


def recorded() -> tuple[Path, Trace | None]:
    """The file of this machine's recorded trace, and what is in it, if there is one."""
    path = FOLDER / f"{key()}.json"
    return path, json.loads(path.read_text())["runs"] if path.exists() else None


def command(*args: str) -> int:
    """`drq ...` in this process: starting Python for each would take longer than the runs."""
    before = sys.argv
    sys.argv = ["drq", *args]
    try:
        runpy.run_module("drq", run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


def train(run: str, folder: Path) -> int:
    return command("train", *RUNS[run], "--dir", str(folder))


def interrupt(run: str, folder: Path, *, after: int) -> None:
    """Trains until a checkpoint of that agent step or later, then has a Ctrl-C come. When exactly must not matter."""
    training = threading.Event()
    training.set()
    latest = folder / "checkpoint" / "latest.json"

    def watch() -> None:
        while training.is_set():
            if latest.exists() and json.loads(latest.read_text())["agent_step"] >= after:
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        code = train(run, folder)
    finally:
        training.clear()
        watcher.join()
    if code != 130 or (folder / "finished.json").exists():
        raise RuntimeError(f"the run that was to be interrupted ended with {code}")


def pack_begun() -> None:
    """Begins the run of the archive with the package that is on Python's path, and packs what it left."""
    with tempfile.TemporaryDirectory() as kept:
        os.chdir(kept)  # its config.json names the folder
        interrupt(BEGUN_RUN, Path("begun"), after=60)

        def shown(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            return None if "tensorboard" in member.name else member  # its files are named after the machine

        with tarfile.open(BEGUN, "w:xz", preset=9) as archive:
            archive.add("begun", ".", filter=shown)


def unpack_begun(folder: Path) -> None:
    """Puts the run that an earlier commit began into this folder."""
    with tarfile.open(BEGUN) as archive:
        archive.extractall(folder, filter="data")


def ended_with(folder: Path) -> dict[str, Any]:
    """What a finished run is compared by: its weights, whatever they are called, and its CSVs without the clock's."""
    from safetensors.torch import load_file

    latest = json.loads((folder / "checkpoint" / "latest.json").read_text())
    state = load_file(folder / "checkpoint" / latest["state"])
    weights = sorted(
        hashlib.sha256(f"{list(value.shape)} {value.dtype}".encode() + value.numpy().tobytes()).hexdigest()
        for name, value in state.items()
        if name.startswith("agent.")
    )
    return {
        "weights": hashlib.sha256("".join(weights).encode()).hexdigest(),
        **{name: csv_without_seconds(folder / f"{name}.csv") for name in ("eval", "train")},
    }


def csv_without_seconds(path: Path) -> list[str]:
    with open(path, newline="") as file:
        header, *rows = list(csv.reader(file))
    clock = header.index("seconds")
    return [",".join(row[:clock] + row[clock + 1 :]) for row in (header, *rows)]


def evaluation_of(folder: Path) -> str:
    """What `drq eval` prints about a run."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = command("eval", str(folder), "--episodes", "3")
    if code != 0:
        raise RuntimeError(f"the evaluation ended with {code}")
    return printed.getvalue().strip()


def trace_in_this_process() -> Trace:
    """Runs everything with the package that is on Python's path."""
    trace: Trace = {}
    with tempfile.TemporaryDirectory() as kept:
        for number, run in enumerate(RUNS):
            folder = Path(kept) / str(number)
            if run == INTERRUPTED:
                interrupt(run, folder, after=34)
            if run == BEGUN_RUN:
                unpack_begun(folder)
                evaluated = evaluation_of(folder)
            if (code := train(run, folder)) != 0:
                raise RuntimeError(f"the run {run!r} ended with {code}")
            trace[run] = ended_with(folder)
    trace[BEGUN_RUN]["evaluation"] = evaluated
    return trace


def in_a_python_of_its_own(source: Path, *options: str) -> None:
    """This script with the package in `source` and one thread."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--in-this-process", *options],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{source} could not be traced:\n{done.stderr[-4000:]}")


def trace_of(source: Path) -> Trace:
    """The trace of the package in `source`."""
    with tempfile.TemporaryDirectory() as kept:
        out = Path(kept) / "trace.json"
        in_a_python_of_its_own(source, str(out))
        trace: Trace = json.loads(out.read_text())
        return trace


def check_out(commit: str, into: Path) -> Path:
    """The package as it was at a commit."""
    archive = into / "src.tar"
    subprocess.run(["git", "-C", str(ROOT), "archive", "-o", str(archive), commit, "src"], check=True)
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
    return into / "src"


def trace_at(commit: str | None) -> Trace:
    """The trace of a commit; None: of this checkout as it is."""
    if commit is None:
        return trace_of(ROOT / "src")
    with tempfile.TemporaryDirectory() as folder:
        return trace_of(check_out(commit, Path(folder)))


def differences(one: Trace, other: Trace) -> list[str]:
    """Where two traces differ, a line for each run and part."""
    found = []
    for run in sorted(one.keys() | other.keys()):
        if run not in one or run not in other:
            found.append(f"{run}: only in one of them")
            continue
        for part in ("eval", "train"):
            pairs = zip(one[run][part], other[run][part], strict=False)
            row = next((number for number, (a, b) in enumerate(pairs) if a != b), None)
            if row is not None:
                found.append(f"{run}: {part}.csv from row {row}: {one[run][part][row]} / {other[run][part][row]}")
            elif len(one[run][part]) != len(other[run][part]):
                found.append(f"{run}: {part}.csv has {len(one[run][part])} / {len(other[run][part])} rows")
        for part in ("weights", "evaluation"):
            if one[run].get(part) != other[run].get(part):
                found.append(f"{run}: {part}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", metavar="REV", help="trace this commit instead of the checkout")
    parser.add_argument("--compare", nargs=2, metavar=("REV1", "REV2"), help="trace two commits and compare them")
    parser.add_argument("--record", action="store_true", help="write the trace to tests/trace")
    parser.add_argument("--begin", action="store_true", help="let the commit begin the run of tests/trace/begun.tar.xz")
    parser.add_argument("--in-this-process", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        out = Path(options.in_this_process)
        if out == BEGUN:
            pack_begun()
        else:
            out.write_text(json.dumps(trace_in_this_process()))
        return
    if options.begin:
        with tempfile.TemporaryDirectory() as folder:
            in_a_python_of_its_own(check_out(options.commit or "HEAD", Path(folder)), str(BEGUN))
        print(f"Packed {BEGUN.relative_to(ROOT)}: {BEGUN.stat().st_size:,} bytes.")
        return
    if options.compare:
        one, other = (trace_at(commit) for commit in options.compare)
        names = " and ".join(options.compare)
    else:
        path, before = recorded()
        other = trace_at(options.commit)
        if options.record:
            described = {"commit": options.commit or "a changed checkout", "runs": other}
            path.write_text(json.dumps(described, indent=1) + "\n")
            print(f"Recorded {len(other)} runs in {path.relative_to(ROOT)}.")
            return
        if before is None:
            sys.exit(f"No trace is recorded for {path.stem}: compare two commits with --compare REV1 REV2.")
        one, names = before, f"{path.relative_to(ROOT)} and {options.commit or 'this checkout'}"
    differing = differences(one, other)
    print("\n".join(differing) or f"{names} agree to the bit in {len(one)} runs.")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
