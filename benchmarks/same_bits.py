"""Does a seed give the same bits in every process? Updates from one start, each time in a process of its own.

    python benchmarks/same_bits.py                            a GPU: two minutes
    python benchmarks/same_bits.py --only strong --processes 5

Each line: a hash of all weights after 30 updates in each process, and what an update takes in the last of them. Beside
other work is a harder test: what a library chooses by timing it chooses otherwise there.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import statistics
import subprocess
import sys

import torch

from drq.config import ReplayConfig
from drq.engine import EngineSettings
from drq.presets import configure
from drq.speed.updates import make_learner, seconds_for, updates_of
from drq.training.schedule import Schedule

UPDATES, TRANSITIONS = 30, 5_000
GAME, CONTROL = "atari/pong", "dmc/walker-walk"
WAYS = {
    "planet": (CONTROL, {"preset": "planet"}),
    "ablation": (CONTROL, {"preset": "ablation"}),
    "planet, float32": (CONTROL, {"preset": "planet", "engine.precision": "float32"}),
    "planet, IMPALA": (CONTROL, {"preset": "planet", "agent.encoder": "impala"}),
    "atari100k-eps": (GAME, {"preset": "atari100k-eps"}),
    "atari100k-eps, IMPALA": (GAME, {"preset": "atari100k-eps", "agent.encoder": "impala"}),
    "strong, not compiled": (GAME, {"preset": "strong", "engine.compile": "off"}),
    "strong": (GAME, {"preset": "strong"}),
}
FIT_FOR_A_CPU = "cpu", "atari100k-eps"
WAYS["cpu"] = (CONTROL, {"preset": "cpu"})


def updated(way: str) -> None:
    """Prints the hash of a learner's weights after its updates, and milliseconds for each of some more."""
    task, settings = WAYS[way]
    config = dataclasses.replace(configure(task, settings), replay=ReplayConfig(capacity=TRANSITIONS))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    total = Schedule(dataclasses.replace(config, replay=ReplayConfig())).total_updates
    torch.manual_seed(0)  # of the replay's contents
    learner = make_learner(config, EngineSettings.resolve(config.engine, device, config.agent, total))
    run = updates_of(learner)
    seconds_for(run, UPDATES, device)
    weights = b"".join(value.detach().cpu().float().numpy().tobytes() for value in learner.agent.modules.parameters())
    count = 100 if device.type == "cuda" else 2
    ms = statistics.median(1e3 * seconds_for(run, count, device) / count for _ in range(3))
    print(hashlib.sha1(weights).hexdigest()[:10], f"{ms:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WAYS, help="some of the settings")
    parser.add_argument("--processes", type=int, default=3, help="of each (3)")
    parser.add_argument("--in-this-process", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_this_process:
        return updated(args.in_this_process)
    ways = args.only or [way for way in WAYS if (way in FIT_FOR_A_CPU) or (torch.cuda.is_available() and way != "cpu")]
    differ = False
    for way in ways:
        command = [sys.executable, __file__, "--in-this-process", way]
        found = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(args.processes)]
        hashes, times = zip(*(each.stdout.split()[-2:] for each in found), strict=True)
        same = len(set(hashes)) == 1
        differ = differ or not same
        print(f"{way}: {'the same bits' if same else 'OTHER BITS'} ({', '.join(hashes)}), {times[-1]} ms", flush=True)
    sys.exit(differ)


if __name__ == "__main__":
    main()
