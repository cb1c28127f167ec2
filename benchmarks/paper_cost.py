"""What the paper's experiments cost in GPU hours, from measured whole runs on one H200, and how long on many GPUs.

    python benchmarks/paper_cost.py

A control run costs so much of a GPU an agent step as ten runs of the PlaNet tasks took together, four at a time
(results/): 300,000 agent steps in 737 s, from a command's start to its end, evaluations and checkpoints included.
These have the paper's batch of 512, so that suites with a batch of 128, and those from state, are counted too high;
encoders other than the paper's were not measured. Where a step has several updates, their time decides. An Atari run is
the share of one that was made with 21 others.
"""

from __future__ import annotations

import heapq
from pathlib import Path

from drq.envs import family_of
from drq.suites import SUITES, Suite
from drq.training.schedule import Schedule

AT_A_TIME = 4
SECONDS_PER_AGENT_STEP = 737 / 300_000
"""Of a GPU: `drq suite run planet --seeds 2-3 --steps 100_000 --jobs 4`, less two runs that were made alone."""
SECONDS_PER_UPDATE = {128: 1.29e-3, 256: 1.75e-3, 512: 2.68e-3}
"""By batch: `drq speed --full --only growth`."""
ATARI = 1_141 / 38
"""`drq suite run benchmarks/atari26-eps.toml --jobs 22`: 38 runs in 1,141 s."""
GPUS = (1, 8, 64)


def seconds(suite: Suite) -> list[float]:
    """What each run of a suite keeps a GPU busy for."""
    costs = []
    for run in suite.runs():
        config = suite.config(run, Path())
        if family_of(run.task).budget_counts == "agent_step":
            costs.append(ATARI)
            continue
        several = config.agent.updates_per_step > 1
        updates = config.agent.updates_per_step * SECONDS_PER_UPDATE[config.agent.batch_size] if several else 0.0
        costs.append(Schedule(config).agent_steps * max(SECONDS_PER_AGENT_STEP, updates))
    return costs


def hours(costs: list[float], gpus: int) -> float:
    """Until the last run ends, the longest begun first; on each GPU some at a time, each slower for it."""
    free = [0.0] * (gpus * AT_A_TIME)
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(free, free[0] + AT_A_TIME * cost)
    return max(free) / 3600


def main() -> None:
    print(f"Of a GPU: {1e3 * SECONDS_PER_AGENT_STEP:.2f} ms an agent step of control, {ATARI:.0f} s an Atari run.\n")
    print(f"| suite | runs | GPU hours | {' | '.join(f'on {count}' for count in GPUS)} |")
    print(f"|---|---|---|{'---|' * len(GPUS)}")
    rows = [(name, seconds(suite)) for name, suite in SUITES.items()]
    for name, costs in [*rows, ("all", [cost for _, each in rows for cost in each])]:
        times = " | ".join(f"{hours(costs, count):,.1f} h" for count in GPUS)
        print(f"| {name} | {len(costs):,} | {sum(costs) / 3600:,.0f} | {times} |")


if __name__ == "__main__":
    main()
