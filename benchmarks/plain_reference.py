"""Times the plain reference alone: `python benchmarks/plain_reference.py --batch-size 512 --tf32`.

The implementation is src/drq/speed/plain_reference.py, where `drq speed` finds it after an installation too.
For a ratio use `drq speed`, which times drq and the reference in turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tyro

from drq.engine.settings import choose_device
from drq.speed.plain_reference import HostReplay, PlainDrQ
from drq.speed.updates import Effort, seconds_for, time_in_turns, updates_of


@dataclass(frozen=True)
class Arguments:
    """Times updates of a plain DrQ on random images of 9 x 84 x 84."""

    batch_size: int = 512
    k: int = 2
    m: int = 2
    tf32: bool = False
    """Let a GPU round to TF32."""
    copy_per_view: bool = True
    """Copy an observation to the device for each of its views."""
    capacity: int = 10_000
    """Transitions in host memory, 127 kB each."""
    blocks: int = 9
    """Timed blocks of updates, of which the median counts."""


def main() -> None:
    arguments = tyro.cli(Arguments)
    device = choose_device("auto")
    memory = HostReplay((9, 84, 84), action_size=6, capacity=arguments.capacity)
    memory.fill(np.random.default_rng(1))
    plain = PlainDrQ(
        memory,
        device,
        batch_size=arguments.batch_size,
        k=arguments.k,
        m=arguments.m,
        tf32=arguments.tf32,
        copy_per_view=arguments.copy_per_view,
    )
    run = updates_of(plain)
    seconds_for(run, 4, device)
    effort = Effort(arguments.blocks, block_seconds=0.25, warmup_updates=0)
    timing = time_in_turns({"plain": run}, effort, device)["plain"]
    print(
        f"{timing.ms:.2f} ms an update: median of {arguments.blocks} blocks of {timing.updates_per_block} "
        f"({min(timing.blocks_ms):.2f} to {max(timing.blocks_ms):.2f}) on {device.type}"
    )


if __name__ == "__main__":
    main()
