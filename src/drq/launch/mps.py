"""NVIDIA's Multi-Process Service: processes that share a GPU compute on it at the same time, instead of by turns.

A control daemon of our own is started in a private folder, so that nobody else's processes meet it, and is gone when
the context is left or this process ends in whatever way.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from drq.errors import UserError
from drq.launch.process import GPU_ORDER

PROGRAM = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
"""Where a CUDA program looks for a daemon if nobody tells it."""
CLIENTS_PER_GPU = 48
"""Processes that one GPU takes under MPS, from Volta to Hopper; one more would be refused."""
START_SECONDS, CLIENT_SECONDS = 20.0, 20.0
"""For the daemon to start, and for a first client to compute."""
CLIENT_ATTEMPTS = 20
QUIT_SECONDS = 5
"""How long the daemon waits for its clients when it is asked to quit, before it ends them."""

KEEPER = f"""
read -r seconds || seconds=120
echo "quit -t $seconds" | {PROGRAM} && rm -rf "$1"
"""
"""Outlives the process that starts the daemon. That one writes a line when it has done; if it is killed, the input ends
without one, and the daemon waits for runs that write their checkpoints."""

CLIENT = f"""
import ctypes, subprocess, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
for call in (
    lambda: cuda.cuInit(0),
    lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
    lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
):
    if code := call():
        sys.exit(f"CUDA error {{code}}")
subprocess.run(["{PROGRAM}"], input="get_server_list\\n", text=True, check=True)
"""
"""A small CUDA program: takes a context, and prints the process ids of the servers that the daemon has by then."""


class NoMPS(UserError):
    """Processes cannot share a GPU under MPS here; says why."""


class DaemonFailed(NoMPS):
    """Everything for MPS is here, but it does not work."""


@contextmanager
def mps_if_possible() -> Iterator[dict[str, str]]:
    """The environment variables by which processes compute under MPS; none where they cannot, or do so anyway."""
    with ExitStack() as stack:
        variables: dict[str, str] = {}
        try:
            variables = stack.enter_context(start_mps())
        except DaemonFailed as error:
            print(f"Going on without MPS: {error}", file=sys.stderr, flush=True)
        except NoMPS:
            pass  # as on every machine without it
        yield variables


def if_it_still_works(variables: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of `mps_if_possible` after a run under them has failed: none where it took MPS along."""
    try:
        _try_out({**os.environ, **variables})
    except DaemonFailed as error:
        print(f"Going on without MPS, which has died: {error}", file=sys.stderr, flush=True)
        return {}
    return variables


@contextmanager
def start_mps() -> Iterator[dict[str, str]]:
    """Processes that are started with these variables compute under MPS. Raises NoMPS where they cannot.

    A daemon that is running already is somebody else's: it is used (no variables are needed then) and left alone.
    """
    if daemon_of_others():
        yield {}
        return
    if named := os.environ.get(PIPES):
        raise NoMPS(f"{PIPES} names {named}, where no daemon runs: unset it, and one is started.")
    if not torch.cuda.device_count():
        raise NoMPS("MPS needs an NVIDIA GPU, and PyTorch sees none: drq doctor shows what is here.")
    if shutil.which(PROGRAM) is None:
        raise NoMPS(f"{PROGRAM} is not on the PATH: install the utilities of NVIDIA's driver.")
    with _daemon() as variables:
        yield variables


def daemon_of_others() -> bool:
    """Whether processes started from here compute under a daemon that is not ours."""
    return (Path(os.environ.get(PIPES) or DEFAULT_PIPES) / "control").exists()


@contextmanager
def _daemon() -> Iterator[dict[str, str]]:
    # Not where TMPDIR says: the path of a socket has at most 107 characters.
    try:
        folder = Path(tempfile.mkdtemp(prefix="drq-mps-", dir="/tmp"))
        pipes, logs = folder / "pipe", folder / "log"
        pipes.mkdir()
        logs.mkdir()
    except OSError as error:
        raise DaemonFailed(f"its daemon needs a folder in /tmp ({error.strerror}).") from error
    variables = {PIPES: str(pipes), LOGS: str(logs)}
    environment = _of_daemon({**os.environ, **variables})
    # A session of its own, like the daemon's: Ctrl-C in the terminal is not for them.
    keeper = subprocess.Popen(
        ["sh", "-c", KEEPER, "sh", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        text=True,
    )
    try:
        _start(environment, logs)
        _try_out({**os.environ, **variables})
        yield variables
    finally:
        _stop(keeper, folder)


def _of_daemon(environment: dict[str, str]) -> dict[str, str]:
    """The daemon's environment, with which a GPU has the same name for its clients as for everybody else.

    A daemon offers its clients the GPUs it sees, numbered anew from 0: started with CUDA_VISIBLE_DEVICES=2,3, it would
    have a client look for its "2" among two. So it sees all GPUs, and a client's number means what it always means. A
    UUID means the same under any numbering; where the GPUs are named so, the daemon keeps to those that are ours.
    """
    names = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not all(name.strip().startswith(("GPU-", "MIG-")) for name in names):
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment | GPU_ORDER


def _start(environment: dict[str, str], logs: Path) -> None:
    said = logs / "start.txt"  # a file: the daemon would keep a pipe open
    try:
        with open(said, "w") as output:
            code = subprocess.run(
                [PROGRAM, "-d"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                timeout=START_SECONDS,
            ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DaemonFailed(f"{PROGRAM} -d did not start ({error}).") from error
    if code:
        raise DaemonFailed(f"{PROGRAM} -d failed ({_last_line(said.read_text(errors='replace')) or code}).")


def _try_out(environment: dict[str, str]) -> None:
    """Runs a client. A daemon starts where its server cannot, and then CUDA fails in every client, or goes without."""
    why = ""
    for attempt in range(CLIENT_ATTEMPTS):
        time.sleep(0.5 if attempt else 0.0)  # a daemon or a server that is still starting refuses its clients
        try:
            client = subprocess.run(
                [sys.executable, "-c", CLIENT],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=environment,
                timeout=CLIENT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise DaemonFailed(f"a first process under it hung for {CLIENT_SECONDS:.0f} s.") from None
        if client.returncode == 0 and client.stdout.strip():
            return
        why = _last_line(client.stderr) or "its daemon has started no server"
    raise DaemonFailed(f"a first process could not compute under it ({why}).")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _stop(keeper: subprocess.Popen[str], folder: Path) -> None:
    """Has the keeper ask the daemon to quit; kills it where that does not help."""
    try:
        keeper.communicate(f"{QUIT_SECONDS}\n", timeout=3 * QUIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()
    if keeper.returncode == 0:
        return
    with suppress(OSError, ValueError):  # it never ran, or has ended
        daemon = int((folder / "pipe" / f"{PROGRAM}.pid").read_text())
        # One that died leaves its number, which may be anybody's by now.
        if str(folder).encode() in Path(f"/proc/{daemon}/environ").read_bytes():
            os.killpg(os.getpgid(daemon), signal.SIGKILL)  # its servers too
    shutil.rmtree(folder, ignore_errors=True)
