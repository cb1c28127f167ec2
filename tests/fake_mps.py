"""A stand-in for NVIDIA's MPS control program, which notes what it is asked for. Its daemon is a `sleep`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from drq.launch import mps, pools

CONTROL = """#!/bin/sh
calls={calls}
if [ "$1" = -d ]; then
    echo "start visible=${{CUDA_VISIBLE_DEVICES-unset}} log=$CUDA_MPS_LOG_DIRECTORY" >> $calls
    {start}
    sleep 300 &
    echo $! > $CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
    echo $! >> {daemons}
    touch $CUDA_MPS_PIPE_DIRECTORY/control
    exit 0
fi
read -r command
echo "$command" >> $calls
case "$command" in
    get_server_list) {servers} ;;
    quit*) {quit} ;;
esac
"""
QUITS = "kill $(cat $CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid)"
CLIENT = """
import subprocess
subprocess.run(["nvidia-cuda-mps-control"], input="get_server_list", text=True, check=True)
"""
"""What the real client does, less CUDA."""


class FakeMPS:
    """The program on the PATH, and what has come of it."""

    def __init__(self, folder: Path, *, start: str = "", servers: str = "echo 4711", quit: str = QUITS) -> None:
        self._calls, self._daemons = folder / "calls.txt", folder / "daemons.txt"
        self.path = folder / "bin"
        self.path.mkdir(exist_ok=True)
        program = self.path / mps.PROGRAM
        program.write_text(
            CONTROL.format(calls=self._calls, daemons=self._daemons, start=start, servers=servers, quit=quit)
        )
        program.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    @property
    def folder(self) -> Path:
        """The private folder of the last daemon."""
        started = [call for call in self.calls if call.startswith("start")]
        return Path(started[-1].partition("log=")[2]).parent

    def gone(self) -> bool:
        """Whether no daemon is left, nor its folder; what is just ending is given the time."""
        pids = [int(line) for line in self._daemons.read_text().split()] if self._daemons.exists() else []
        deadline = time.monotonic() + 20
        while any(map(_runs, pids)) or self.folder.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, fake: FakeMPS | None, folder: Path) -> None:
    """This process sees a GPU and, on the PATH, the stand-in; no daemon of somebody else's runs. Runs are not told that
    they belong on the GPU: they find none."""
    told = pools.job_to_json
    monkeypatch.setattr(pools, "job_to_json", lambda *args, on_gpu=False, **given: told(*args, **given))
    for name in (mps.PIPES, mps.LOGS, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mps, "DEFAULT_PIPES", folder / "nobody")
    monkeypatch.setattr(mps, "CLIENT", CLIENT)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("PATH", os.pathsep.join([str(fake.path), os.environ["PATH"]] if fake else [str(folder)]))


def environment_of(pid: int) -> Mapping[str, str]:
    """The variables that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in entries if b"=" in entry)
