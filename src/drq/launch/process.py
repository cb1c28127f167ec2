"""One run in a process of its own: how it is started, asked to stop, and what its exit code says.

Like transfer.py and node.py this imports nothing but the standard library: Ray carries the three to its nodes, where
a process that only watches over a run shall not wait for PyTorch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

FAILED = 1
"""Exit code of a run that another attempt may finish: an error nobody foresaw, a GPU that was lost."""
MISTAKE = 2
"""Exit code of a run whose settings, data or disk are at fault: another attempt would end the same way."""
UNFIT, UNLIKE = 3, 4
"""Exit codes of a run that another machine may make, but not this one: it could make none of the suite's, or computes
otherwise than the one on which this run was begun."""
STOPPED = 130
"""Exit code of a run that was asked to stop."""
GPU_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Has CUDA number GPUs as nvidia-smi, Ray and EGL do, and not the fastest first: each run draws where it computes."""
ERROR_LINES = 40
"""How much of what a failed run printed is kept in its error.txt."""


def start_worker(job: str, log: Path, environment: Mapping[str, str], cwd: Path | None = None) -> subprocess.Popen[str]:
    """Begins a run in a process of its own that prints into `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # What Ray sets for its own processes, a token among it, is none of a run's business.
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "drq.launch.worker"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**own, **environment},
            # Ctrl-C in the terminal is for the launcher, which asks each run once: a second signal ends it at once.
            start_new_session=True,
            text=True,
            cwd=cwd,
        )
    assert process.stdin is not None
    try:
        process.stdin.write(job + "\n")
        process.stdin.flush()  # and stays open: its end would tell the run to stop
    except BrokenPipeError:
        pass  # it has ended already; its log says why
    return process


def error_of(code: int, log: Path) -> str:
    """The last lines of a run that failed, and what its exit code adds to them."""
    if code == 0:
        return ""
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = said.splitlines()[-ERROR_LINES:]
    if code == -signal.SIGKILL:
        lines.append("The run was killed, as the system does when memory runs out: try a smaller --jobs.")
    elif code < 0:
        lines.append(f"The run was ended by {signal.Signals(-code).name}.")
    return "\n".join(lines or [f"The run ended with exit code {code} and said nothing."]) + "\n"
