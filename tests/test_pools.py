"""How many runs there are at a time, on which GPUs, and which comes next."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drq.launch import pools
from drq.launch.launcher import longest_first
from drq.launch.pools import FreeGPU, Job, LocalPool, plan_slots, share_gpus
from drq.presets import action_repeat_for, preset, preset_values
from drq.suites import Run, find_suite
from drq.training.folder import RunFolder

GB = 1024**3
H200, SMALL, FULL = FreeGPU("0", 139 * GB), FreeGPU("1", 9 * GB), FreeGPU("2", 1 * GB)


@pytest.mark.parametrize(
    ("jobs", "task", "gpus", "cores", "memory", "devices", "threads"),
    [
        ("auto", "dmc/walker-walk", [H200], 16, 100, "0 0 0 0", 4),
        ("auto", "gym/Mine-v0", [H200], 16, 100, "0 0", 8),
        ("auto", "atari/pong", [H200], 32, 100, 16 * "0 ", 2),
        ("auto", "atari/pong", [H200], 5, 100, "0 0 0 0 0", 1),  # a core a run
        ("auto", "dmc/walker-walk", [H200], 4, 100, "0", 4),  # 3 cores a run
        ("auto", "atari/pong", [H200, SMALL, FULL], 64, 100, "0 1 0 1" + 14 * " 0", 3),  # 4 GB a run
        ("auto", "dmc/walker-walk", [FULL], 64, 100, "2", 64),
        (3, "dmc/walker-walk", [H200, SMALL], 4, 100, "0 1 0", 1),
        (6, "dmc/walker-walk", [SMALL], 16, 100, "1 1 1 1 1 1", 2),
        ("auto", "dmc/walker-walk", [], 16, 100, "- - - - - - - -", 2),
        ("auto", "dmc/walker-walk", [], 16, 9, "- -", 8),
        ("auto", "dmc/walker-walk", [], 1, 100, "-", 1),
        (5, "dmc/walker-walk", [], 2, 1, "- - - - -", 1),
    ],
)
def test_runs_at_a_time(
    jobs: int | str, task: str, gpus: list[FreeGPU], cores: int, memory: int, devices: str, threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    configs = [preset_values("planet", task)]
    slots = plan_slots(jobs, configs, gpus=gpus, cores=cores, memory=memory * GB)  # type: ignore[arg-type]
    assert [slot.get("CUDA_VISIBLE_DEVICES", "-") for slot in slots] == devices.split()
    assert {slot["OMP_NUM_THREADS"] for slot in slots} == {str(threads)}


def test_large_networks_share_a_gpu_with_fewer_runs() -> None:
    small, large = (preset_values(name, "atari/pong") for name in ("atari100k", "strong"))
    for configs, runs in (([small], 16), ([large], 4), ([small, large], 4)):
        assert len(plan_slots("auto", configs, gpus=[H200], cores=32, memory=None)) == runs


@pytest.mark.parametrize(
    ("devices", "shared"),
    [("0 0", True), ("0 1", False), ("0 1 0", True), ("0", False), ("- -", False), ("", False),
     (24 * "0 ", True), (25 * "0 ", False)],  # MPS admits 48 processes, and a run is two
)  # fmt: skip
def test_when_runs_share_a_gpu(devices: str, shared: bool) -> None:
    slots = [{} if name == "-" else {"CUDA_VISIBLE_DEVICES": name} for name in devices.split()]
    assert share_gpus(slots) is shared


def test_the_longest_runs_of_a_seed_begin_first(tmp_path: Path) -> None:
    suite = find_suite("planet").narrowed(tasks=None, seeds=2, steps=100_000)
    jobs = longest_first([Job(run, suite.config(run, tmp_path)) for run in suite.runs()])
    repeats = [action_repeat_for(job.config) for job in jobs]
    assert repeats == [2, 2, 4, 4, 4, 8] * 2
    assert [job.run.seed for job in jobs] == [1] * 6 + [2] * 6


def test_a_run_that_only_evaluates_gives_its_place_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the GPU has memory for one more."""
    agent_steps: dict[str, int] = {}
    monkeypatch.setattr(pools, "newest_agent_step", lambda checkpoint: agent_steps.get(checkpoint.parent.name))
    monkeypatch.setattr(pools, "this_machines_gpus", lambda: [SMALL])
    monkeypatch.setattr(pools, "LOOK_SECONDS", 0.0)
    sleeping = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    monkeypatch.setattr(
        *(pools, "start_worker"), lambda *_, **__: subprocess.Popen(sleeping, stdin=subprocess.PIPE, text=True)
    )
    folder: Any = SimpleNamespace(
        run_folder=lambda run: RunFolder(tmp_path / run.label), log=lambda run: tmp_path / "log", lock=0
    )
    (tmp_path / "log").touch()
    pool = LocalPool(folder, [{"CUDA_VISIBLE_DEVICES": SMALL.name}])
    runs = [Run("atari/pong", label, 1, 100) for label in ("first", "second", "third")]
    jobs = [Job(run, dataclasses.replace(preset("atari100k", run.task), steps=100)) for run in runs]
    try:
        pool.start(jobs[0])
        agent_steps["first"] = 99
        assert pool.size == 1
        agent_steps["first"] = 100
        assert pool.size == 2
        pool.start(jobs[1])
        agent_steps["second"] = 100
        assert pool.size == 2  # 9 GB are no place for three
        first, _ = pool._processes[runs[0]]
        first.kill()
        first.wait()
        assert [ended.run for ended in pool.ended()] == [runs[0]]
        assert pool.size == 2
        pool.start(jobs[2])
        assert pool.running == runs[1:]
    finally:
        pool.kill()
