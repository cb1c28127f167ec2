"""Installs DrQ from its folder, with the pinned versions, into .venv; does nothing where that is already so.

python scripts/install.py [EXTRA ...]     such as: python scripts/install.py dev atari
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "drq-installed.json"
LOG = VENV / "drq-install.log"
CONSTRAINTS = ROOT / "constraints.txt"

# From the words of pip's log to the cause and the remedy. The first that matches is said; an index that
# cannot be reached also ends in "no matching distribution", so it comes before.
CAUSES = (
    (r"No space left on device", "the disk is full: free about 8 GB"),
    (
        r"NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|Temporary failure in name",
        "the package index cannot be reached: check the network and pip's settings (`pip config list`)",
    ),
    (
        r"No matching distribution",
        "a pinned version has no wheel for this Python or system: name another Python (`PYTHON=python3.12`)",
    ),
)


def fingerprint() -> str:
    """Changes with everything that an installation depends on."""
    digest = hashlib.sha256(f"{ROOT} {sys.version_info[:2]}".encode())
    for file in (ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def installed_extras() -> set[str] | None:
    """The extras of the installation in .venv, or None when there is none or it is out of date."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return None
    return set(stamp["extras"]) if stamp.get("fingerprint") == fingerprint() else None


def venv_is_ours() -> bool:
    """Whether .venv works, has pip, and was made with the version of Python that runs this."""
    probe = "import sys, pip; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([PYTHON, "-c", probe], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.returncode == 0 and tuple(map(int, done.stdout.split())) == sys.version_info[:2]


def pip_install(*arguments: str) -> None:
    """Runs pip in .venv; on failure, ends the program with one sentence."""
    # A user-wide `user = true` would make pip refuse to install into a virtual environment.
    environment = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    command = [str(PYTHON), "-m", "pip", "install", "-c", str(CONSTRAINTS), *arguments]
    with LOG.open("a") as log:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False)
    if done.returncode != 0:
        sys.exit("\n" + explain(LOG.read_text()))


def explain(log: str) -> str:
    """One sentence about a failed pip, from its log."""
    for pattern, cause in CAUSES:
        if re.search(pattern, log):
            return f"The installation failed because {cause} and repeat the command (pip's words: {LOG})."
    return f"The installation failed: read why at the end of {LOG}, mend it and repeat the command."


def install(extras: set[str]) -> None:
    if not venv_is_ours():
        venv.create(VENV, clear=True, with_pip=True)
    STAMP.unlink(missing_ok=True)
    LOG.unlink(missing_ok=True)
    # With the build tool in place, pip needs no build environment of its own, which would not be pinned.
    pip_install("setuptools")
    target = f".[{','.join(sorted(extras))}]" if extras else "."
    pip_install("--no-build-isolation", "--editable", target)
    if sys.version_info >= (3, 13):
        # dm_control asks for labmaze, which has no wheel from Python 3.13 on and which the control suite does
        # not import. pyproject.toml names dm_control's other requirements for these Pythons.
        pip_install("--no-deps", "dm_control")
    STAMP.write_text(json.dumps({"fingerprint": fingerprint(), "extras": sorted(extras)}))


def main(extras: set[str]) -> None:
    present = installed_extras() if venv_is_ours() else None
    if present is not None and extras <= present:
        return
    begun = time.monotonic()
    print("Installing DrQ and what it needs into .venv (once, some minutes) ...", end="", flush=True)
    try:
        install(extras | (present or set()))
    except KeyboardInterrupt:
        sys.exit(" stopped: the same command again installs what is missing.")
    print(f" done in {time.monotonic() - begun:.0f} s.", flush=True)


if __name__ == "__main__":
    main(set(sys.argv[1:]))
