"""The runs of a suite as Ray tasks, on this machine or a cluster whose machines share the suite's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drq.config import TrainConfig
from drq.errors import UserError
from drq.launch.pools import CORES_PER_CPU_RUN, Ended, Job, Jobs, error_of, most_per_gpu, start_worker
from drq.launch.suite_folder import SuiteFolder
from drq.suites import Run

POLL_SECONDS = 0.5


def _execute(job: str, log: str, threads: int) -> str:
    """A Ray task: one run in a process of its own. Ray has chosen its GPU."""
    process = start_worker(job, Path(log), {"OMP_NUM_THREADS": str(threads)})
    try:
        while process.poll() is None:  # a cancellation is noticed between two calls, not inside one that waits
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:  # the task was cancelled
        process.terminate()
        process.wait()
    return error_of(process.returncode, Path(log))


class RayPool:
    """As many runs at a time as the cluster has room for."""

    def __init__(self, folder: SuiteFolder, jobs: Jobs, configs: Sequence[TrainConfig]) -> None:
        try:
            import ray
        except ImportError:
            raise UserError(
                "--launcher ray needs its package: pip install -e '.[ray]', or leave --launcher out."
            ) from None
        self._ray: Any = ray
        self._folder = folder
        self._tasks: dict[Any, Run] = {}
        if not ray.is_initialized():
            ray.init(log_to_driver=False, configure_logging=False)
        resources = self._ray.cluster_resources()
        gpus = resources.get("GPU", 0.0) if any(config.device != "cpu" for config in configs) else 0.0
        per_gpu = most_per_gpu([config.task for config in configs]) if configs else 1
        room = int(gpus * per_gpu) if gpus else int(resources.get("CPU", 1.0)) // CORES_PER_CPU_RUN
        self.size = max(room, 1) if jobs == "auto" else jobs
        needs = {"num_gpus": 1 / per_gpu, "num_cpus": 1} if gpus else {"num_cpus": min(CORES_PER_CPU_RUN, room or 1)}
        self._threads = 1 if gpus else CORES_PER_CPU_RUN
        self._execute = ray.remote(max_retries=0, **needs)(_execute)

    @property
    def running(self) -> list[Run]:
        return list(self._tasks.values())

    def start(self, job: Job) -> None:
        log = os.path.abspath(self._folder.log(job.run))
        self._tasks[self._execute.remote(job.to_json(), log, self._threads)] = job.run

    def ended(self) -> list[Ended]:
        if not self._tasks:
            return []
        done, _ = self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)
        over = []
        for task in done:
            run = self._tasks.pop(task)
            try:
                over.append(Ended(run, self._ray.get(task)))
            except Exception as error:  # a lost machine, a cancelled task: the run is not finished
                over.append(Ended(run, f"Ray could not finish the run ({type(error).__name__}): {error}\n"))
        return over

    def stop(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task)

    def kill(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task, force=True)
