"""The runs of a suite on a Ray cluster, each held by an actor (node.py) on whatever node Ray finds room on.

Runs work on their node's own disk. What is new comes back with every answer of the actor and is written here, so that
the suite's folder is the same as with processes on this machine, and no file system has to be shared.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import socket
import sysconfig
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drq.config import TrainConfig
from drq.envs import family_of
from drq.errors import UserError, install_command
from drq.launch import node, process, transfer
from drq.launch.pools import CORES_PER_CPU_RUN, Ended, Job, Jobs, begun_with, how_it_ended, job_to_json, most_per_gpu
from drq.launch.suite_folder import SuiteFolder
from drq.launch.transfer import Outbox, Piece, RunStore, batches, below, receive
from drq.suites import Run
from drq.training.schedule import Schedule

LOOK_SECONDS = 2.0
"""Between two looks at which nodes there are."""
BYTES_BESIDE_REPLAY = 1_500_000_000
"""What a run takes of the host's memory: PyTorch, networks, images under way, its evaluation."""
RESOURCES = {"num_gpus": "GPU", "num_cpus": "CPU", "memory": "memory"}
"""What is asked for -> what Ray says that a node has."""
CONNECT_SECONDS = 10.0
LOST_SECONDS = 60.0
"""After so long without a word of an actor its run is begun again elsewhere."""


def memory_of(config: TrainConfig, *, on_gpu: bool) -> int:
    """Bytes of the host's memory that a run asks for. On a GPU the replay lies there."""
    frames = 0 if on_gpu or config.env.observation != "pixels" else Schedule(config).capacity
    return BYTES_BESIDE_REPLAY + frames * family_of(config.task).channels * config.env.image_size**2


def shipped_modules(imports: Sequence[str]) -> dict[str, bytes]:
    """Source of the modules that the command names, by path from the current folder. What is installed is not sent."""
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
    files: dict[str, Path] = {}
    for name in imports:
        if name.endswith(".py"):
            if os.path.isabs(name):
                raise UserError(f"--import {name} cannot travel to other machines: name it from the current folder.")
            files[name] = Path(name)
            continue
        top = name.partition(".")[0]
        spec = importlib.util.find_spec(top)
        source = Path(spec.origin or "").resolve() if spec is not None else Path()
        if spec is None or not source.is_file() or any(source.is_relative_to(path) for path in installed):
            continue
        if spec.submodule_search_locations:
            inner = [path for path in source.parent.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
            files |= {f"{top}/{path.relative_to(source.parent).as_posix()}": path for path in inner}
        else:
            files[f"{top}.py"] = source
    return {name: path.read_bytes() for name, path in files.items()}


def connect(address: str | None) -> Any:
    """Ray, connected to the cluster at the address, or to one of its own on this machine."""
    try:
        if address is None:
            # Read when ray is imported: a Ray for this command alone listens to this machine alone, and tells nobody.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            os.environ.setdefault("RAY_worker_niceness", "0")  # else its runs wait for everybody else's work
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A node that is gone is a line of ours, not a page of its last words.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise UserError(
            f"--launcher ray needs its package: {install_command('ray')}, or leave --launcher out."
        ) from None
    if address not in (None, "auto") and not re.fullmatch(r"[^/]+:\d+", str(address)):
        raise UserError(f"--address is {address}: say auto, or host:port, such as 10.0.0.1:6379.")
    if not ray.is_initialized():
        logging.getLogger("ray").setLevel(logging.ERROR)  # its greetings are not what this command has to say
        try:
            if address not in (None, "auto"):  # where nobody answers, Ray would try for many minutes
                host, _, port = str(address).rpartition(":")
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            ray.init(address=address or "local", include_dashboard=False if address is None else None,
                     log_to_driver=False, configure_logging=False)  # fmt: skip
        except Exception as error:  # it raises that itself where a node of its own does not start in time
            reason = str(error).partition("\n")[0].rstrip(".")
            if address is None:
                raise UserError(f"Ray did not start here ({reason}): try again when the machine is idle.") from error
            raise UserError(
                f"There is no Ray cluster at --address {address} ({reason}): start one (`ray start --head`), name "
                "another, or leave --address out for one on this machine."
            ) from None
    for module in (process, transfer, node):
        ray.cloudpickle.register_pickle_by_value(module)
    return ray


@dataclass
class _Hosted:
    """A run and the actor that holds it."""

    job: Job
    actor: Any
    asked: Any
    """The answer that is awaited."""
    sending: Iterator[list[Piece]]
    owner: str
    node: str | None = None
    """None: it waits for a place."""
    name: str = ""
    begun: bool = False
    received: int = 0
    unavailable_since: float | None = None


@dataclass
class RayPool:
    """What `LocalPool` is, with as many runs at a time as the cluster has room for."""

    folder: SuiteFolder
    jobs: Jobs
    configs: Sequence[TrainConfig]
    """Of all runs that are left, one at least."""
    gpus_per_run: float | None = None
    address: str | None = None
    imports: Sequence[str] = ()
    store: RunStore | None = None
    keep_replay: bool = True
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ray = ray = connect(self.address)
        self._modules = shipped_modules(self.imports)
        self._hosted: dict[Run, _Hosted] = {}
        self._refused: set[str] = set()
        """Nodes that cannot make these runs."""
        self._unlike: dict[Run, set[str]] = {}
        """Nodes on which one run cannot go on."""
        self._keepers: dict[str, Any] = {}
        self._looked, self._nodes = 0.0, list[dict[str, Any]]()
        self._host: Any = ray.remote(max_restarts=0, concurrency_groups={"control": 1})(node.RunHost)
        self._share = self.gpus_per_run or 1 / most_per_gpu(self.configs)
        self._gpus = bool(self.gpus_per_run) or any(each["Resources"].get("GPU") for each in self._alive())

    def _needs(self, config: TrainConfig, begun_on: Mapping[str, Any]) -> dict[str, Any]:
        """What a run asks Ray for."""
        if self._gpus and config.device != "cpu" and begun_on.get("device") != "cpu":
            cores = family_of(config.task).cores_per_gpu_run
            with_gpus = [each["Resources"] for each in self._alive() if each["Resources"].get("GPU")]
            shares = [int(each.get("CPU", 0.0) / each["GPU"] * self._share) for each in with_gpus]
            cores = max(min([cores, *shares]), 1)  # the GPU decides how many runs there are
            return {"num_gpus": self._share, "num_cpus": cores, "memory": memory_of(config, on_gpu=True)}
        if begun_on.get("device") == "cpu":
            cores = begun_on["threads"]
        else:
            most = max((int(each["Resources"].get("CPU", 0)) for each in self._alive()), default=CORES_PER_CPU_RUN)
            cores = max(min(int(os.environ.get("OMP_NUM_THREADS") or CORES_PER_CPU_RUN), most), 1)
        return {"num_cpus": cores, "memory": memory_of(config, on_gpu=False)}

    def _alive(self, run: Run | None = None) -> list[dict[str, Any]]:
        """The nodes that runs, or this one, may be placed on."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked, self._nodes = time.monotonic(), [each for each in self._ray.nodes() if each["Alive"]]
        out = self._out(run)
        return [each for each in self._nodes if each["NodeID"] not in out]

    def _out(self, run: Run | None) -> set[str]:
        return self._refused | (self._unlike.get(run, set()) if run else set())

    @property
    def size(self) -> int:
        """Grows and shrinks with the cluster; never 0, so that one run waits for the first node with room."""
        if self.jobs != "auto":
            return self.jobs
        needs = self._needs(self.configs[0], {})
        return max(sum(_room(each, needs) for each in self._alive()), 1)

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext()  # each node has its own MPS

    @property
    def running(self) -> list[Run]:
        return list(self._hosted)

    def start(self, job: Job) -> None:
        begun_with = self._begun_with(job.run)
        needs = self._needs(job.config, begun_with)
        if not any(_room(each, needs) for each in self._alive(job.run)):
            amounts = ", ".join(f"{name} {value:,.4g}" for name, value in needs.items())
            self.notices.append(f"No node of the cluster has room for {job.run} ({amounts}): it waits for one.")
        out = self._out(job.run)
        labels = {"label_selector": {"ray.io/node-id": f"!in({','.join(out)})"}} if out else {}
        actor = self._host.options(**needs, **labels).remote()
        owner = uuid.uuid4().hex
        sending: Iterator[list[Piece]] = iter(())
        if self.store is not None:
            self.store.take(job.run.folder.as_posix(), owner)
        else:
            sending = batches(below(job.run.folder.as_posix(), Outbox(self.folder.path / job.run.folder).pieces()))
        self._hosted[job.run] = _Hosted(job, actor, actor.where.remote(), sending, owner)

    def _begun_with(self, run: Run) -> dict[str, Any]:
        folder = self.folder.run_folder(run)
        return begun_with(folder) if self.store is None else folder.computed_with  # the checkpoint is in the store

    def ended(self) -> list[Ended]:
        if not self._hosted:
            return []
        by_answer = {hosted.asked: hosted for hosted in self._hosted.values()}
        done, _ = self._ray.wait(list(by_answer), num_returns=len(by_answer), timeout=0, fetch_local=False)
        return [ended for answer in done if (ended := self._hear(by_answer[answer])) is not None]

    def _hear(self, hosted: _Hosted) -> Ended | None:
        """Takes an answer of a run's actor and asks the next question."""
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(hosted.asked)
        except errors.ActorUnavailableError:
            now = time.monotonic()
            hosted.unavailable_since = hosted.unavailable_since or now
            if now - hosted.unavailable_since > LOST_SECONDS or not hosted.begun:
                return self._lost(hosted, "its node does not answer")
            hosted.asked = hosted.actor.poll.remote(hosted.received)
            return None
        except errors.RayActorError as error:
            return self._died(hosted, error)
        except errors.ObjectLostError:  # the actor had answered, and its node died with the answer
            return self._lost(hosted, "its node is gone")
        except errors.RayTaskError as error:  # what the actor itself raised: a full disk, a store that is not there
            reason = f"{hosted.name or 'Ray'}: {error.cause!r}"
            return self._over(hosted, Ended(hosted.job.run, f"{reason}\n", "failed"))
        hosted.unavailable_since = None
        if hosted.node is None:
            hosted.node, hosted.name = answer
        elif answer is not None:
            hosted.received, pieces, code, said = answer
            receive(self.folder.path, pieces)
            if code is not None:
                return self._exit(hosted, code, said)
        if (batch := next(hosted.sending, None)) is not None:
            hosted.asked = hosted.actor.put.remote(batch)
        elif not hosted.begun:
            hosted.asked = self._begin(hosted)
            hosted.begun = True
        else:
            hosted.asked = hosted.actor.poll.remote(hosted.received)
        return None

    def _begin(self, hosted: _Hosted) -> Any:
        run, config = hosted.job.run, hosted.job.config
        begun_with = self._begun_with(run)
        needs = self._needs(config, begun_with)
        on_gpu = "num_gpus" in needs
        variables = {"OMP_NUM_THREADS": str(needs["num_cpus"])} | ({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
        shared: Any = {}
        if on_gpu and needs["num_gpus"] < 1 and hosted.node is not None:
            shared = self._keeper(hosted.node).variables.remote()
        log = self.folder.log(run).relative_to(self.folder.path).as_posix()
        job = job_to_json(config, run.label, on_gpu=on_gpu, check=True, keep_replay=self.keep_replay)
        return hosted.actor.begin.remote(
            job, run.folder.as_posix(), log, variables, shared, self._modules, self.store, hosted.owner
        )

    def _keeper(self, node_id: str) -> Any:
        """The actor that has an MPS daemon on a node; one for all runs there."""
        if node_id not in self._keepers:
            here = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
            keeper = self._ray.remote(num_cpus=0, scheduling_strategy=here)(node.MpsKeeper)
            self._keepers[node_id] = keeper.remote()
        return self._keepers[node_id]

    def _exit(self, hosted: _Hosted, code: int, said: str) -> Ended:
        ended = how_it_ended(hosted.job.run, code, said)
        if ended.why == "failed" and hosted.node in self._keepers:
            self._keepers[hosted.node].try_out.remote()
        if ended.why == "unfit" and hosted.node is not None:
            last = said.strip().splitlines()[-1]
            if code == process.UNLIKE:
                self._unlike.setdefault(ended.run, set()).add(hosted.node)
            elif hosted.node not in self._refused:
                self._refused.add(hosted.node)
                self.notices.append(f"No run goes to the node {hosted.name}: {last}")
            needs = self._needs(hosted.job.config, self._begun_with(ended.run))
            if not any(_room(each, needs) for each in self._alive(ended.run)):
                ended = Ended(ended.run, f"No other node of the cluster has room for it. {last}\n", "mistake")
        return self._over(hosted, ended)

    def _died(self, hosted: _Hosted, error: Exception) -> Ended:
        """A node that is gone does not count as a failure of the run; a process that died on one that lives does."""
        self._looked = 0.0
        alive = {each["NodeID"] for each in self._alive()} | self._refused
        first = str(error).strip().splitlines()
        reason = next((line for line in first if line.startswith("The actor")), first[0] if first else "")
        if hosted.unavailable_since is not None or hosted.node is None or hosted.node not in alive:
            return self._lost(hosted, "its node is gone")
        said = f"The process that held it on {hosted.name} died. {reason}\n"
        return self._over(hosted, Ended(hosted.job.run, said, "failed"))

    def _lost(self, hosted: _Hosted, why: str) -> Ended:
        return self._over(hosted, Ended(hosted.job.run, f"{hosted.name or 'Ray'}: {why}\n", "lost"))

    def _over(self, hosted: _Hosted, ended: Ended) -> Ended:
        del self._hosted[hosted.job.run]
        self._ray.kill(hosted.actor)
        return ended

    def stop(self) -> None:
        for hosted in self._hosted.values():
            if hosted.begun:
                hosted.actor.stop.options(concurrency_group="control").remote()  # heard while it waits for news
            else:
                self._ray.kill(hosted.actor)

    def kill(self) -> None:
        for hosted in self._hosted.values():
            self._ray.kill(hosted.actor)


def _room(node: Mapping[str, Any], needs: Mapping[str, Any]) -> int:
    """For how many runs, if it did nothing else."""
    return min(int(node["Resources"].get(RESOURCES[key], 0.0) / amount + 1e-9) for key, amount in needs.items())
