"""How much several learners do at once, each in a process of its own."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import torch

from drq.config import TrainConfig
from drq.engine.settings import EngineSettings
from drq.launch import start_mps
from drq.speed.results import ProcessesSpeed, host_memory
from drq.speed.updates import Effort, Updates, Work, make_learner, seconds_for, updates_of

ANSWER_TIMEOUT = 300.0
"""Seconds that a process may take to be warm, or to learn for the time it is asked to."""
END_TIMEOUT = 10.0
MOST_PAIRS = 500
"""Of updates in a block."""


def measure_processes(
    work: Work, engine: EngineSettings, counts: Sequence[int], effort: Effort, *, under_mps: bool = False
) -> Iterator[ProcessesSpeed]:
    """For each count, so many learners at the same time, for the time of all blocks.

    As many processes as the greatest count are started and warmed up once; for smaller ones the rest wait. They are not
    compiled: each would compile for itself, and a control run of 100k env steps is too short to be compiled as well.
    """
    with ExitStack() as stack:
        variables = stack.enter_context(start_mps()) if under_mps else {}
        uncompiled = dataclasses.replace(engine, compile=False)
        started = time.perf_counter()
        members = stack.enter_context(_members(max(counts), variables, work.config, uncompiled, effort))
        _answers(members)
        _say(f"{len(members)} processes are warm after {time.perf_counter() - started:.0f} s")
        for count in counts:
            learning = members[:count]
            for member in learning:
                with suppress(BrokenPipeError):  # it has died, and has no answer
                    member.pipe.send(count)
            found = _together(work.name, _answers(learning), under_mps=under_mps)
            _say(f"{count} at once: {found.updates_per_second:,.1f} updates/s together")
            yield found


class _Part(NamedTuple):
    """What one process has done."""

    updates: int
    seconds: float
    device_bytes: int | None
    host_bytes: int | None


class _Member(NamedTuple):
    """A process, seen from the one that measures."""

    process: BaseProcess
    pipe: Connection[int, _Part | BaseException | None]


def _together(work: str, parts: Sequence[_Part | None], *, under_mps: bool) -> ProcessesSpeed:
    done = [part for part in parts if part is not None]
    device_bytes = [part.device_bytes for part in done if part.device_bytes is not None]
    host_bytes = [part.host_bytes for part in done if part.host_bytes is not None]
    return ProcessesSpeed(
        work=work,
        processes=len(done),
        mps=under_mps,
        updates_per_second=sum(part.updates / part.seconds for part in done),
        device_bytes=sum(device_bytes) if device_bytes else None,
        host_bytes_each=max(host_bytes, default=None),
    )


@contextmanager
def _members(
    count: int, variables: Mapping[str, str], config: TrainConfig, engine: EngineSettings, effort: Effort
) -> Iterator[list[_Member]]:
    """Processes that warm up and then learn whenever they are told. They end with this context."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    members: list[_Member] = []
    try:
        with _environment(variables):
            for _ in range(count):
                here, there = context.Pipe()
                process = context.Process(target=_learn_when_told, args=(there, count, config, engine, effort))
                process.daemon = True
                process.start()
                members.append(_Member(process, here))
                there.close()  # so that the pipe ends with the process
        yield members
    except BaseException:
        for member in members:
            member.process.kill()
        raise
    finally:
        for member in members:
            member.pipe.close()  # which ends a process that waits
        for member in members:
            member.process.join(END_TIMEOUT)
            member.process.kill()
            member.process.join()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started within this context inherit these variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _answers(members: Sequence[_Member]) -> list[_Part | None]:
    """Waits for all. They do not wait for each other, so one that died or failed keeps nobody."""
    answers = []
    for member in members:
        if not member.pipe.poll(ANSWER_TIMEOUT):
            raise TimeoutError(f"A process did not answer for {ANSWER_TIMEOUT:.0f} s.")
        try:
            answer = member.pipe.recv()
        except (EOFError, ConnectionError):
            member.process.join(END_TIMEOUT)
            raise ChildProcessError(f"A process died (exit code {member.process.exitcode}).") from None
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


def _learn_when_told(
    pipe: Connection[_Part | BaseException | None, int],
    processes: int,
    config: TrainConfig,
    engine: EngineSettings,
    effort: Effort,
) -> None:
    """In a process of its own: says when it is warm, then learns each time it hears how many share the cores."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that measures, which ends this one
    threads = torch.get_num_threads()

    def share_cores(learning: int) -> None:
        # On the CPU threads of several learners on one core slow each other down.
        torch.set_num_threads(max(threads // learning, 1))

    try:
        share_cores(processes)
        run = updates_of(make_learner(config, engine))
        seconds_for(run, effort.warmup_updates, engine.device)
        pipe.send(None)
        while True:
            share_cores(pipe.recv())
            pipe.send(_learn(run, engine.device, effort))
    except (EOFError, ConnectionError):
        pass  # the end of the measurement
    except Exception as error:
        pipe.send(error)


def _learn(run: Updates, device: torch.device, effort: Effort) -> _Part:
    """Blocks of updates until their time is over; the first is a pair, from which the length of the others follows."""
    count, updates, seconds = 2, 0, 0.0
    while seconds < effort.blocks * effort.block_seconds:
        seconds += seconds_for(run, count, device)
        updates += count
        count = 2 * min(max(round(effort.block_seconds * updates / seconds / 2), 1), MOST_PAIRS)
    device_bytes = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return _Part(updates, seconds, device_bytes, host_memory("VmHWM"))


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
