"""One run of a suite in a process of its own: `python -m drq.launch.worker`, told what to do on standard input.

The first line of the input is the job. Its end means that the launcher has ended: the run is then left as by Ctrl-C,
so that nothing goes on in secret when a launcher is killed. A folder that was lent to the run alone goes with it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from drq.errors import DeviceLost, ProcessEnded, UserError, end_at_once
from drq.launch.process import FAILED, MISTAKE, STOPPED, UNFIT, UNLIKE


class Unfit(UserError):
    """Another machine may make this run, but not this one; says why."""

    code = UNFIT


class Unlike(Unfit):
    """This machine computes otherwise than the one on which the run was begun."""

    code = UNLIKE


def main() -> int:
    """Trains one run; a user's mistake is one sentence and exit code 2. A lost GPU is none: it is raised."""
    # Training turns the first signal into a checkpoint; before and after, it unwinds and finishes what it writes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    alone = threading.Event()
    job: dict[str, Any] = {}
    try:
        job = json.loads(sys.stdin.readline())
        threading.Thread(target=_stop_at_end_of_input, args=(alone,), daemon=True).start()
        from drq.settings import config_from_json
        from drq.training.checkpoint import drop_replay
        from drq.training.folder import RunFolder
        from drq.training.run import train

        config = config_from_json(job["config"])
        _check_machine(job, config)
        result = train(config, label=job["label"])
        if not job.get("keep_replay", True):
            with suppress(OSError, UserError):  # `drq suite prune` can do it later
                drop_replay(RunFolder(result.dir).checkpoint)
    except DeviceLost:
        raise
    except Unfit as error:
        print(error, file=sys.stderr)
        return error.code
    except UserError as error:
        print(error, file=sys.stderr)
        return FAILED if isinstance(error, ProcessEnded) else MISTAKE
    except KeyboardInterrupt:
        return STOPPED
    finally:
        if alone.is_set() and "remove" in job:
            shutil.rmtree(job["remove"], ignore_errors=True)
    return 0


def _check_machine(job: dict[str, Any], config: Any) -> None:
    """Refuses a machine on which the run would not be the same."""
    from drq.engine import EngineSettings, choose_device
    from drq.launch.pools import begun_with, installed
    from drq.training.folder import RunFolder

    here, wanted, folder = installed(config.task), job.get("installed", {}), RunFolder(Path(config.dir or ""))
    if others := [name for name in wanted if here.get(name) != wanted[name]]:
        said = ", ".join(f"{name} {here.get(name)} instead of {wanted[name]}" for name in others)
        raise Unfit(f"{socket.gethostname()} has {said}: install there what the launcher's machine has.")
    device = choose_device(config.device)
    if device.type == "cpu" and (job.get("on_gpu") or folder.computed_with.get("device") == "cuda"):
        raise (Unfit if job.get("on_gpu") else Unlike)(
            f"This run belongs on a GPU, and {socket.gethostname()} has none any more: nvidia-smi and the system's log "
            "(Xid) say what became of it; run the same command again when it is back."
        )
    before = begun_with(folder)
    if before.get("device") == "cpu":
        precision = EngineSettings.resolve(config.engine, device, config.agent).precision
        if precision != before["precision"]:
            raise Unlike(
                f"The run was begun in {before['precision']} and {socket.gethostname()} would go on in "
                f"{precision}: go on with it on a CPU like the first."
            )


def _stop_at_end_of_input(alone: threading.Event) -> None:
    # A thread that waits inside a buffered reader would hold its lock at the interpreter's exit.
    while os.read(sys.stdin.fileno(), 1):
        pass
    alone.set()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DeviceLost as error:
        print(error, file=sys.stderr)
        end_at_once(FAILED)
