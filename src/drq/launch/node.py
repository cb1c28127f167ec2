"""The far end of a run on a Ray cluster: an actor on the node, which has the run's process work on the node's own disk
and hands over what is new there whenever the launcher asks.

Like process.py and transfer.py this imports nothing but the standard library, and is carried to the nodes by Ray: the
run's process itself finds out whether the drq that is installed there is the launcher's.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from drq.launch.process import GPU_ORDER, STOPPED, error_of, start_worker
from drq.launch.transfer import Outbox, Piece, RunStore, batches, below, receive

WAIT_SECONDS = 2.0
"""How long an answer waits for something new."""
LOOK_SECONDS = 0.25
WORKER = ".worker"
"""Beside a run: the number of its process."""
TAKEN = "The run is somebody else's by now: another launcher has it, or this node was given up for lost.\n"


def _prefix() -> str:
    """Of the folders that runs work in on this machine; the process that watches over one comes next."""
    return f"drq-run-{socket.gethostname()}-"


def sweep(folder: Path) -> None:
    """Removes what runs left there whose processes were killed before they could do so."""
    for path in folder.glob(f"{_prefix()}*-*"):
        pids = [path.name.removeprefix(_prefix()).partition("-")[0]]
        with suppress(OSError):
            pids.append((path / WORKER).read_text())
        if not any(pid.isdecimal() and Path("/proc", pid).exists() for pid in pids):
            shutil.rmtree(path, ignore_errors=True)


class RunHost:
    """One run on a node. An answer that got lost is given again: it is numbered, and the next question names it."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self.work = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-"))
        self._process: subprocess.Popen[str] | None = None
        self._store: RunStore | None = None
        self._answer: tuple[int, list[Piece], int | None, str] = (0, [], None, "")

    def where(self) -> tuple[str, str]:
        """The node's id in Ray, and what people call it."""
        ray: Any = importlib.import_module("ray")
        return ray.get_runtime_context().get_node_id(), f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"

    def put(self, pieces: list[Piece]) -> None:
        """Takes a part of what the run left elsewhere."""
        receive(self.work, pieces)

    def begin(
        self,
        job: str,
        run: str,
        log: str,
        variables: Mapping[str, str],
        shared: Mapping[str, str],
        modules: Mapping[str, bytes],
        store: RunStore | None,
        owner: str,
    ) -> None:
        """Starts the run. `shared`: variables of all runs on the node (MPS). `modules`: source files of the user's, by
        their paths from the current folder.

        With a store, copies go there and come from there, and the launcher is sent only what it shows.
        """
        self._run, self._owner, self._store = run, owner, store
        if store is not None:
            store.fetch(run, self.work, checkpoints=True)
        self._outbox = Outbox(self.work, arrived=True)
        self._stored = Outbox(self.work / run, appends=False, arrived=True) if store is not None else None
        self._log = self.work / log
        told = json.loads(job)
        told["config"]["dir"] = str(self.work / run)
        told["remove"] = str(self.work)
        variables = {**variables, **shared, **GPU_ORDER}
        self._process = start_worker(json.dumps(told), self._log, variables, cwd=self._lay_out(modules))
        (self.work / WORKER).write_text(str(self._process.pid))
        self._answers = self._collect()

    def _lay_out(self, modules: Mapping[str, bytes]) -> Path:
        """The folder in which the process starts, with the user's modules around it as they are around theirs."""
        up = max((path.count("../") for path in modules), default=0)
        top = self.work / ".modules"
        here = top.joinpath(*up * ["here"])
        here.mkdir(parents=True, exist_ok=True)
        for path, source in modules.items():
            file = Path(os.path.normpath(here / path))
            if not file.is_relative_to(top):
                raise ValueError(f"{path} leads out of its folder")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(source)
        return here

    def poll(self, received: int) -> tuple[int, list[Piece], int | None, str]:
        """What is new since the answer of that number; once all has been said, the exit code and the last words."""
        if received == self._answer[0]:
            pieces, code, error = next(self._answers)
            self._answer = self._answer[0] + 1, pieces, code, error
        return self._answer

    def _collect(self) -> Iterator[tuple[list[Piece], int | None, str]]:
        process = self._process
        assert process is not None
        code = None
        while code is None:
            code = process.poll()  # before looking: a process that has ended has written all that it will
            any_news = False
            try:
                self._copy()
            except PermissionError:
                process.kill()
                process.wait()
                yield [], STOPPED, TAKEN
                return
            for batch in batches(self._shown()):
                any_news = True
                yield batch, None, ""
            if code is None and not any_news:
                until = time.monotonic() + WAIT_SECONDS
                while time.monotonic() < until and process.poll() is None:
                    time.sleep(LOOK_SECONDS)
                yield [], None, ""
        error = error_of(code, self._log)
        shutil.rmtree(self.work, ignore_errors=True)
        while True:
            yield [], code, error

    def _shown(self) -> Iterator[Piece]:
        for piece in self._outbox.pieces():
            if self._store is None or "/checkpoint/" not in piece[1]:
                yield piece

    def _copy(self) -> None:
        if self._store is None or self._stored is None:
            return
        pieces = self._stored.pieces()
        first = next(pieces, None)
        if first is None:
            return
        if self._store.owner(self._run) != self._owner:
            raise PermissionError(TAKEN)
        self._store.write(below(self._run, chain([first], pieces)))

    def stop(self) -> None:
        """Asks the run to write its checkpoint and end."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)


class MpsKeeper:
    """The MPS daemon of a node, for as long as this actor lives."""

    def __init__(self) -> None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides all GPUs from what asks for none
        from drq.launch.mps import mps_if_possible

        self._context = mps_if_possible()
        self._variables = self._context.__enter__()

    def variables(self) -> dict[str, str]:
        """Those with which the processes of a run share a GPU."""
        return self._variables

    def try_out(self) -> None:
        """After a run has failed, which may have taken the daemon along: then the next ones go without."""
        from drq.launch.mps import if_it_still_works

        if self._variables:
            self._variables = dict(if_it_still_works(self._variables))
