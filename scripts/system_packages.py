"""Says in one sentence which system libraries are missing, what works without them, and how to get them.

python scripts/system_packages.py             says it
python scripts/system_packages.py --install   installs them first where it can (Debian or Ubuntu, as root)
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

OPENGL = {"libEGL.so.1": "libegl1", "libOpenGL.so.0": "libopengl0", "libGL.so.1": "libgl1"}
COMPILERS = ("c++", "g++", "clang++")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def library_loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def missing(
    loads: Callable[[str], bool] = library_loads, which: Callable[[str], str | None] = shutil.which
) -> dict[str, list[str]]:
    """What is missing, by what it is for, as the names of Debian packages."""
    wanted = {
        "drawing control-suite images": [] if any(map(which, COMPILERS)) else ["g++"],
        "drawing with OpenGL": [package for file, package in OPENGL.items() if not loads(file)],
        "the tests in a web browser": [] if any(map(which, BROWSERS)) else ["chromium"],
    }
    return {purpose: packages for purpose, packages in wanted.items() if packages}


def sentence(lacking: dict[str, list[str]]) -> str:
    what = "; ".join(f"{', '.join(packages)} for {purpose}" for purpose, packages in lacking.items())
    packages = " ".join(itertools.chain(*lacking.values()))
    return (
        f"Missing on this system: {what}: get it with `apt-get install {packages}` (or your system's like); "
        "all else works without, and the tests that need it are skipped."
    )


def install(lacking: dict[str, list[str]]) -> None:
    """Installs with apt-get, each purpose by itself: one that cannot be had does not stop the other."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    quiet = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
    subprocess.run([*quiet, "update"], env=environment, check=False)
    for packages in lacking.values():
        command = [*quiet, "install", "-y", "--no-install-recommends", *packages]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)


def main(arguments: list[str]) -> None:
    if not sys.platform.startswith("linux"):
        return  # elsewhere OpenGL is part of the system
    lacking = missing()
    if lacking and "--install" in arguments and shutil.which("apt-get") and os.geteuid() == 0:
        install(lacking)
        lacking = missing()
    if lacking:
        print(sentence(lacking), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
