"""Where the runs of a suite are executed: processes on this machine. `ray_pool.py` is the same on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from drq.config import RainbowConfig, TrainConfig
from drq.cores import usable_cores
from drq.envs import family_of
from drq.launch.mps import CLIENTS_PER_GPU, if_it_still_works, mps_if_possible
from drq.launch.process import GPU_ORDER, MISTAKE, STOPPED, UNFIT, UNLIKE, error_of, start_worker
from drq.launch.suite_folder import SuiteFolder
from drq.machine import free_memory
from drq.settings import config_to_json
from drq.suites import Run
from drq.training.checkpoint_reader import exists, newest_agent_step
from drq.training.folder import RunFolder, git_commit, versions
from drq.training.schedule import Schedule

CORES_PER_CPU_RUN = 2
PROCESSES_PER_GPU_RUN = 2
"""Its loop and its evaluation."""
BYTES_PER_RUN = 4 * 1024**3
"""The replay of the paper's settings, networks and images under way."""
RAINBOWS_PER_GPU = 4
"""On an H200 three of the preset `strong` make 572 to 586 updates/s together, one alone 526."""
LOOK_SECONDS = 1.0
"""Between two looks at which runs are trained."""

Jobs = int | Literal["auto"]
Why = Literal["", "failed", "mistake", "lost", "unfit"]
"""Why a run ended: of itself; a failure, which may not happen again; a mistake, which will; its machine was lost, or
cannot make it, which is no fault of the run."""


@dataclass(frozen=True)
class Job:
    """A run with all its settings."""

    run: Run
    config: TrainConfig


def job_to_json(
    config: TrainConfig, label: str | None, *, on_gpu: bool = False, check: bool = False, keep_replay: bool = True
) -> str:
    """What a worker is told. The label is the run's name in comparisons. `on_gpu`: it has a place on a GPU, and shall
    not do without. `check`: it shall see to it first that what is installed on its machine is what is installed here.
    `keep_replay`: else it drops the replay at the end."""
    here = {"installed": installed(config.task)} if check else {}
    told = {"label": label, "config": config_to_json(config), "on_gpu": on_gpu, "keep_replay": keep_replay}
    return json.dumps(told | here)


@cache
def installed(task: str) -> dict[str, str | None]:
    """What has to be the same on all machines that work on one suite."""
    found = versions()
    names = ("drq", "torch", "numpy", "gymnasium", *family_of(task).packages)
    # PyTorch's builds for CPUs and for GPUs differ in what follows the plus.
    return {name: found.get(name, "missing").partition("+")[0] for name in names} | {"commit": git_commit()}


@dataclass(frozen=True)
class Ended:
    """A run whose process is over."""

    run: Run
    error: str
    """The last lines it printed, if it failed; empty if it finished."""
    why: Why = ""


@dataclass(frozen=True)
class FreeGPU:
    """A GPU for runs to share."""

    name: str
    """As CUDA_VISIBLE_DEVICES calls it."""
    free: int
    """Bytes."""


@cache
def this_machines_gpus() -> list[FreeGPU]:
    """GPUs that training would use, as they were before any of ours began. Another process looks, so that this one
    takes no memory of theirs."""
    count = torch.cuda.device_count()
    if not count:
        return []
    look = "import torch; print([torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())])"
    looked = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, env=os.environ | GPU_ORDER)
    if looked.returncode:
        return []  # what is there does not work: training says why, or uses the CPU
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return [FreeGPU(name.strip(), free) for name, free in zip(names, json.loads(looked.stdout), strict=False)]


def most_per_gpu(configs: Sequence[TrainConfig]) -> int:
    """Runs that a GPU with memory enough carries."""
    large = any(isinstance(config.agent, RainbowConfig) for config in configs)
    most = min(family_of(config.task).runs_per_gpu for config in configs)
    return min(most, RAINBOWS_PER_GPU) if large else most


def plan_slots(
    jobs: Jobs, configs: Sequence[TrainConfig], *, gpus: Sequence[FreeGPU], cores: int, memory: int | None
) -> list[Mapping[str, str]]:
    """The environment variables of each run at a time.

    auto: on GPUs 2 runs each (control suite: 4, Atari: 16, Rainbow: 4), within their memory and 3 cores a run (Atari:
    1); on a CPU one run for 2 cores, within the host's memory.
    """
    if gpus:
        fits = [min(most_per_gpu(configs), gpu.free // BYTES_PER_RUN) for gpu in gpus]
        places = [gpu for level in range(max(fits)) for gpu, most in zip(gpus, fits, strict=True) if level < most]
        places = places or [max(gpus, key=lambda gpu: gpu.free)]
        cores_each = max(family_of(config.task).cores_per_gpu_run for config in configs)
        wanted = min(len(places), cores // cores_each) if jobs == "auto" else jobs
        wanted = max(wanted, 1)
        names = [places[number % len(places)].name for number in range(wanted)]
        chosen = [{"CUDA_VISIBLE_DEVICES": name, **GPU_ORDER} for name in names]
    else:
        in_memory = cores if memory is None else memory // BYTES_PER_RUN
        wanted = max(min(cores // CORES_PER_CPU_RUN, in_memory), 1) if jobs == "auto" else jobs
        chosen = [{} for _ in range(wanted)]
    # More threads than cores would make every run slower.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(cores // wanted, 1))
    return [{**place, "OMP_NUM_THREADS": threads} for place in chosen]


def plan_here(jobs: Jobs, configs: Sequence[TrainConfig]) -> list[Mapping[str, str]]:
    """`plan_slots` for this machine; never more than there are runs."""
    on_gpu = any(config.device != "cpu" for config in configs)
    gpus = this_machines_gpus() if on_gpu else []
    slots = plan_slots(jobs, configs, gpus=gpus, cores=usable_cores(), memory=free_memory())
    if len(slots) > len(configs):  # fewer runs have more cores each
        slots = plan_slots(max(len(configs), 1), configs, gpus=gpus, cores=usable_cores(), memory=None)
    return slots


def share_gpus(slots: Sequence[Mapping[str, str]]) -> bool:
    """Whether several runs meet on one GPU, and are no more there than MPS admits."""
    runs = Counter(slot["CUDA_VISIBLE_DEVICES"] for slot in slots if "CUDA_VISIBLE_DEVICES" in slot)
    return 1 < max(runs.values(), default=0) <= CLIENTS_PER_GPU // PROCESSES_PER_GPU_RUN


def begun_with(folder: RunFolder) -> dict[str, Any]:
    """Device, precision and threads of a run that has a checkpoint; nothing of one that has none, or does not say."""
    return folder.computed_with if exists(folder.checkpoint) else {}


def how_it_ended(run: Run, code: int, error: str) -> Ended:
    """What an exit code means for another attempt."""
    known: dict[int, Why] = {0: "", MISTAKE: "mistake", UNFIT: "unfit", UNLIKE: "unfit"}
    return Ended(run, error, known.get(code, "failed"))


class LocalPool:
    """Processes on this machine, each with a slot's environment variables."""

    def __init__(self, folder: SuiteFolder, slots: Sequence[Mapping[str, str]]) -> None:
        self._folder = folder
        self._free = list(slots)
        self._processes: dict[Run, tuple[subprocess.Popen[str], Mapping[str, str]]] = {}
        self._training: dict[Run, int] = {}
        """Runs that hold their slot, with the agent steps they have to make."""
        self._look_at = 0.0
        self._shared: Mapping[str, str] = {}
        """Further variables, the same for every run."""
        self.notices: list[str] = []
        """What there is to say; who says it empties the list."""

    @property
    def size(self) -> int:
        """How many runs at a time: one for each slot, and one for each that only evaluates and has lent its slot."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            for run, agent_steps in list(self._training.items()):
                _, slot = self._processes[run]
                checkpoint = self._folder.run_folder(run).checkpoint
                if self._carries_more(slot) and newest_agent_step(checkpoint) == agent_steps:
                    del self._training[run]
                    self._free.append(slot)
        return len(self._free) + len(self._processes)

    def _carries_more(self, slot: Mapping[str, str]) -> bool:
        """Whether the GPU of a slot has memory, and MPS a place, for one more run than are there or may begin."""
        name = slot.get("CUDA_VISIBLE_DEVICES")
        if name is None:
            return False  # a CPU evaluates with the cores it trained with
        fits = next((gpu.free // BYTES_PER_RUN for gpu in this_machines_gpus() if gpu.name == name), 0)
        slots = [*self._free, *(slot for _, slot in self._processes.values())]
        there = sum(slot.get("CUDA_VISIBLE_DEVICES") == name for slot in slots)
        return there < min(fits, CLIENTS_PER_GPU // PROCESSES_PER_GPU_RUN)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Runs begin within this context. Those that meet on a GPU compute on it at the same time, where it has MPS."""
        if not share_gpus(self._free):
            yield
            return
        with mps_if_possible() as self._shared:
            yield

    @property
    def running(self) -> list[Run]:
        return list(self._processes)

    def start(self, job: Job) -> None:
        slot = self._free.pop(0)
        environment = {**slot, **self._shared}
        before = begun_with(self._folder.run_folder(job.run))
        if before.get("device") == "cpu":  # with as many threads as it began with: others would round otherwise
            environment["OMP_NUM_THREADS"] = str(before["threads"])
        on_gpu = "CUDA_VISIBLE_DEVICES" in slot and job.config.device != "cpu"
        told = job_to_json(job.config, job.run.label, on_gpu=on_gpu)
        process = start_worker(told, self._folder.log(job.run), environment)
        self._processes[job.run] = process, slot
        self._training[job.run] = Schedule(job.config).agent_steps

    def ended(self) -> list[Ended]:
        """Runs that are over since the last call."""
        over = []
        for run, (process, slot) in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                if process.stdin is not None:
                    process.stdin.close()
                del self._processes[run]
                if self._training.pop(run, None) is not None:
                    self._free.append(slot)
                ended = how_it_ended(run, code, error_of(code, self._folder.log(run)))
                over.append(replace(ended, why="mistake") if ended.why == "unfit" else ended)  # there is no other
                if self._shared and code not in (0, STOPPED):
                    self._shared = if_it_still_works(self._shared)
        return over

    def stop(self) -> None:
        """Asks every run to write its checkpoint and end."""
        for process, _ in self._processes.values():
            process.terminate()

    def kill(self) -> None:
        """Ends every run at once; each goes on from its last checkpoint another time."""
        for process, _ in self._processes.values():
            process.kill()
