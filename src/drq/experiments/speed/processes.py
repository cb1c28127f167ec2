"""How much several learners do at once, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import NamedTuple

import torch

from drq.config import TrainConfig
from drq.engine.settings import EngineSettings
from drq.experiments.speed.results import ProcessesSpeed, host_memory
from drq.experiments.speed.updates import Effort, Work, make_learner, seconds_for, updates_of

START_TIMEOUT = 600.0
"""Seconds that warm processes wait for the others."""


def measure_processes(work: Work, engine: EngineSettings, processes: int, effort: Effort) -> ProcessesSpeed:
    """Learners that begin together once all are warm, and learn for the time of all blocks."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    begin = context.Barrier(processes)
    with ProcessPoolExecutor(processes, context, _enter, (begin, processes)) as pool:
        tasks = [pool.submit(_learn, work.config, engine, effort) for _ in range(processes)]
        errors = [error for task in tasks if (error := task.exception()) is not None]
    # Those that only waited for the one that failed have nothing to tell.
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    parts = [task.result() for task in tasks]
    device_bytes = [part.device_bytes for part in parts if part.device_bytes is not None]
    host_bytes = [part.host_bytes for part in parts if part.host_bytes is not None]
    return ProcessesSpeed(
        work=work.name,
        processes=processes,
        updates_per_second=sum(part.updates / part.seconds for part in parts),
        device_bytes=sum(device_bytes) if device_bytes else None,
        host_bytes_each=max(host_bytes, default=None),
    )


class _Part(NamedTuple):
    updates: int
    seconds: float
    device_bytes: int | None
    host_bytes: int | None


_begin: Barrier
"""In a process of `measure_processes`: where it waits for the others."""


def _enter(begin: Barrier, processes: int) -> None:
    global _begin
    _begin = begin
    # On the CPU the cores are shared out: threads of several learners on one core slow each other down.
    torch.set_num_threads(max(torch.get_num_threads() // processes, 1))


def _learn(config: TrainConfig, engine: EngineSettings, effort: Effort) -> _Part:
    try:
        run = updates_of(make_learner(config, engine))
        seconds_for(run, effort.warmup_updates, engine.device)
        pair = seconds_for(run, 2, engine.device)
        _begin.wait(START_TIMEOUT)
    except BaseException:
        _begin.abort()  # the others need not wait for this one
        raise
    count = 2 * min(max(round(effort.block_seconds / pair), 1), 500)
    updates, seconds = 0, 0.0
    while seconds < effort.blocks * effort.block_seconds:
        seconds += seconds_for(run, count, engine.device)
        updates += count
    on_gpu = engine.device.type == "cuda"
    device_bytes = torch.cuda.max_memory_reserved(engine.device) if on_gpu else None
    return _Part(updates, seconds, device_bytes, host_memory("VmHWM"))
