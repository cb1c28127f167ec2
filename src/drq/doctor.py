"""`drq doctor`: would training work on this machine, and what is in the way?

A *failure* means that `drq train dmc/walker-walk`, the default way to train (the control suite from pixels,
the paper's settings, `--device auto`), would fail here, at once or by the time its replay is full; the exit
code is then 1. Some failures concern the control suite alone: toy and gym tasks train nevertheless, and the
last line says so. A *warning* is what makes a run slower, takes something away from it or changes its images;
the exit code stays 0.

`examine` judges what `machine.probe` found and looks at nothing itself. `python -m drq.doctor` works even
where packages are missing that the command line needs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drq.errors import install_command
from drq.machine import GPU, OPTIONAL, REQUIRED, BrokenGPU, Machine, Renderer, Requirement, probe

Status = Literal["ok", "warning", "failure"]

OLDEST_PYTHON = (3, 11)
PAPER_PAIR = {"dm_control": "1.0.44", "mujoco": "3.11.0"}
"""The newest pair whose images are near the paper's (docs/fidelity.md)."""
GIGABYTE = 10**9
UPDATE_BYTES = 4 * GIGABYTE
"""Estimate: networks, optimisers and one update at batch 512 and K = M = 2, on a GPU beside the replay."""
RUN_FOLDER_BYTES = GIGABYTE // 10
"""Estimate: weights, optimisers, videos and curves in a run folder, beside the replay."""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    message: str
    """What was found and, unless all is well, what to do about it."""
    control_only: bool = False
    """A failure that leaves toy and gym tasks as they are."""


def main(look: Callable[[Path], Machine] = probe) -> int:
    """Prints the report and returns the exit code: 1 if training into `runs` would fail."""
    checks = examine(look(Path("runs")))
    _print(checks)
    print(verdict(checks))
    return int(any(check.status == "failure" for check in checks))


def examine(machine: Machine) -> list[Check]:
    """Every check, in the order of the report."""
    return [
        _check_python(machine),
        Check("drq", "ok", f"{machine.drq or 'not installed'}, commit {machine.commit or 'unknown'}"),
        *(_check_required(name, requirement, machine) for name, requirement in REQUIRED.items()),
        *(_check_optional(name, machine) for name in OPTIONAL),
        *_check_images(machine),
        _check_renderer(machine),
        _check_rays(machine),
        Check("cpu", "ok", f"{machine.cpu_cores} cores, {_size(machine.memory_free)} of memory free"),
        *_check_gpu(machine),
        *_check_compiler(machine),
        *_check_replay_memory(machine),
        *_check_disk(machine),
        _check_ffmpeg(machine),
    ]


def verdict(checks: list[Check]) -> str:
    """The last line."""
    failures = [check for check in checks if check.status == "failure"]
    warnings = sum(check.status == "warning" for check in checks)
    if failures:
        rest = " Toy and gym tasks would train." if all(check.control_only for check in failures) else ""
        count = len(failures)
        return f"`drq train dmc/walker-walk` would fail here: mend the failures above ({count}).{rest}"
    return "Training would work here" + (f"; see the warnings above ({warnings})." if warnings else ".")


def _check_python(machine: Machine) -> Check:
    version = ".".join(map(str, machine.python[:3]))
    if machine.python[:2] < OLDEST_PYTHON:
        return Check("python", "failure", f"{version} is too old: install Python 3.11 or newer.")
    return Check("python", "ok", version)


def _check_required(name: str, requirement: Requirement, machine: Machine) -> Check:
    def failure(fault: str, remedy: str) -> Check:
        return Check(name, "failure", f"{fault}: {remedy}.", control_only=name in PAPER_PAIR)

    bound = f",<{requirement.below}" if requirement.below else ""
    install = f"`pip install '{name}>={requirement.oldest}{bound}'`"
    if name in PAPER_PAIR:
        install = f"`{_install_pair(machine)}`"
    version = machine.versions.get(name)
    if version is None:
        return failure("missing", install)
    if _release(version) < _release(requirement.oldest):
        return failure(f"{version} is too old", install)
    if requirement.below and _release(version) >= _release(requirement.below):
        return failure(f"{version} is too new", install)
    if name in machine.import_errors:
        reason = machine.import_errors[name]
        return failure(f"{version} does not import ({reason})", _mend_import(name, reason, install, machine))
    cuda = f", CUDA {machine.cuda or 'none'}" if name == "torch" else ""
    return Check(name, "ok", version + cuda)


def _mend_import(name: str, reason: str, install: str, machine: Machine) -> str:
    """The remedy for an installed package that does not import."""
    lacking = re.search(r"No module named '(\w+)", reason)
    modules = {required.module.split(".")[0]: other for other, required in REQUIRED.items()}
    if lacking and modules.get(lacking[1], name) not in machine.versions:
        return f"install {modules[lacking[1]]} first"
    if name in PAPER_PAIR:
        return install
    # Without more options pip brings what the package lacks, but does not touch the package itself.
    again = "" if lacking else "--force-reinstall --no-deps "
    return f"`pip install {again}{name}=={machine.versions[name]}`"


def _check_optional(name: str, machine: Machine) -> Check:
    extra, purpose = OPTIONAL[name]
    absent = f"not installed; {purpose}: `{install_command(extra)}`."
    return Check(name, "ok", machine.versions.get(name, absent))


def _check_images(machine: Machine) -> Iterator[Check]:
    """Whether the simulator draws the paper's images. A pair that does not run at all is found elsewhere."""
    pair = {name: machine.versions[name] for name in PAPER_PAIR if name in machine.versions}
    if len(pair) < len(PAPER_PAIR) or _release(pair["mujoco"]) >= (4,):
        return
    if pair == PAPER_PAIR:
        yield Check("images", "ok", "near the paper's, with this dm_control and mujoco")
        return
    fault = "how near this pair of dm_control and mujoco comes to the paper's images is not known"
    if _release(pair["mujoco"]) >= (3, 12):
        fault = "from mujoco 3.12 on the floor is drawn differently, up to 17 of 255 in the mean"
    yield Check("images", "warning", f"{fault}: for images near the paper's `{_install_pair(machine)}`.")


def _check_renderer(machine: Machine) -> Check:
    """OpenGL, which draws what rays cannot, and all where they are not cast."""
    renderer = machine.renderer
    if not isinstance(renderer, Renderer):
        if machine.rays is None:
            return Check("renderer", "failure", renderer, control_only=True)
        only = "Only `--env.render paper` and `fast`, dog and quadruped-escape need it"
        return Check("renderer", "ok", f"no OpenGL; `{machine.rays}` draws without. {only}. {renderer}")
    if machine.rays or not renderer.software:
        return Check("renderer", "ok", renderer.name + (", software" if renderer.software else ""))
    if machine.nvidia_device:
        remedy = (
            "install the EGL part of NVIDIA's driver (Ubuntu: libnvidia-gl-VERSION; in a container set "
            "NVIDIA_DRIVER_CAPABILITIES=all)"
        )
        return Check("renderer", "warning", f"{renderer.name} is software, beside an idle GPU: {remedy}.")
    remedy = "`apt-get install g++` draws several times as fast"
    return Check("renderer", "warning", f"{renderer.name} is software, 6 to 30 ms a frame: {remedy}.")


def _check_rays(machine: Machine) -> Check:
    """What draws, unless the user says otherwise."""
    if machine.rays is None:
        needed = "a C++ compiler (`apt-get install g++`), on a GPU one with bfloat16 too"
        return Check("ray caster", "ok", f"`--env.render auto` is OpenGL: drawing without it needs {needed}.")
    who = {"cuda": "the GPU's own program", "ray": "the CPU"}[machine.rays]
    return Check("ray caster", "ok", f"`--env.render auto` takes `{machine.rays}`: {who} draws, without OpenGL")


def _check_gpu(machine: Machine) -> Iterator[Check]:
    gpu = machine.gpu
    if "torch" not in machine.versions or "torch" in machine.import_errors:
        return  # only torch can tell
    if isinstance(gpu, GPU):
        bf16 = "bf16" if gpu.bf16 else "no bf16, hence float32"
        yield Check("gpu", "ok", f"{gpu.name}, {_size(gpu.free)} of {_size(gpu.total)} free, {bf16}")
    elif isinstance(gpu, BrokenGPU):
        remedy = "install the build of torch made for it (docs/install.md) or train with `--device cpu`"
        yield Check("gpu", "failure", f"{gpu.name} does not work ({gpu.reason}): {remedy}.")
    elif machine.nvidia_device and machine.cuda is None:
        fault = "there is an NVIDIA GPU, but this torch is built for the CPU alone"
        yield Check("gpu", "warning", f"{fault}: install a CUDA build of torch (docs/install.md).")
    elif machine.nvidia_device:
        reason = machine.cuda_warning or "no reason given"
        fault = f"there is an NVIDIA GPU, but torch cannot use it ({reason})"
        remedy = f"update its driver, or install torch for a CUDA older than {machine.cuda} (docs/install.md)"
        yield Check("gpu", "warning", f"{fault}: {remedy}.")
    else:
        yield Check("gpu", "warning", "none: the paper's settings take many days on a CPU; use `--preset cpu`.")


def _check_compiler(machine: Machine) -> Iterator[Check]:
    """torch.compile builds small C programs as it goes; on the CPU it is not used."""
    if not isinstance(machine.gpu, GPU):
        return
    if not machine.compiler:
        fault = "missing, so that torch.compile fails and updates of long runs stay slower"
        yield Check("C compiler", "warning", f"{fault}: `apt-get install gcc python3-dev`.")
    elif not machine.python_headers:
        fault = "Python.h is missing, without which torch.compile may fail and updates of long runs stay slower"
        yield Check("C compiler", "warning", f"{fault}: `apt-get install python3-dev`.")
    else:
        yield Check("C compiler", "ok", "found")


def _check_replay_memory(machine: Machine) -> Iterator[Check]:
    """The replay lives beside the agent: on the GPU if there is one."""
    if machine.replay is None:
        return
    capacity, needed = machine.replay.transitions, machine.replay.bytes
    on_gpu = isinstance(machine.gpu, GPU)
    free = machine.gpu.free if isinstance(machine.gpu, GPU) else machine.memory_free
    place = "on the GPU" if on_gpu else "of memory"
    replay = f"the default replay ({capacity:,} transitions)"
    found = f"{replay} takes {_size(needed)}, {_size(free)} {place} is free"
    if free is None or free >= needed + (UPDATE_BYTES if on_gpu else 0):
        yield Check("replay memory", "ok", found)
    elif free >= needed:
        remedy = "if memory runs out, lower `--replay.capacity`"
        yield Check("replay memory", "warning", f"{found}, and an update takes some as well: {remedy}.")
    else:
        fits = max(1000, int(0.8 * capacity * free / needed) // 1000 * 1000)
        elsewhere = "train on the CPU (`--device cpu`) or " if on_gpu else ""
        remedy = f"{elsewhere}shrink it (`--replay.capacity {fits}`)"
        yield Check("replay memory", "failure", f"{found}: {remedy}.")


def _check_disk(machine: Machine) -> Iterator[Check]:
    if not machine.writable:
        fault = f"{machine.directory} cannot be written to"
        yield Check("disk", "failure", f"{fault}: choose another folder with `--dir`.")
    elif machine.replay is not None:
        needed = machine.replay.bytes + RUN_FOLDER_BYTES
        found = f"a run's checkpoint takes {_size(needed)}, {_size(machine.disk_free)} is free"
        if machine.disk_free >= needed:
            yield Check("disk", "ok", found)
        else:
            remedy = "free some, or choose a folder on another disk with `--dir`"
            yield Check("disk", "failure", f"{found}: {remedy}.")


def _check_ffmpeg(machine: Machine) -> Check:
    if machine.ffmpeg is not None:
        return Check("ffmpeg", "ok", machine.ffmpeg)
    remedy = "`pip install imageio-ffmpeg` or `apt-get install ffmpeg`"
    return Check("ffmpeg", "warning", f"missing, so no videos are recorded: {remedy}.")


def _install_pair(machine: Machine) -> str:
    # From Python 3.13 on labmaze, which dm_control requires and the suite does not use, cannot be installed.
    alone = "--no-deps " if machine.python[:2] >= (3, 13) else ""
    return f"pip install {alone}" + " ".join(f"{name}=={version}" for name, version in PAPER_PAIR.items())


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) for 2.13.0+cpu."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def _size(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{count / GIGABYTE:.1f} GB"


def _print(checks: list[Check]) -> None:
    """As a table, or as plain lines where even rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Column, Table
        from rich.text import Text
    except ImportError:
        for check in checks:
            print(f"{check.name:<15}{check.status:<9}{check.message}")
        return
    styles = {"ok": "green", "warning": "yellow", "failure": "bold red"}
    table = Table("name", "status", Column("message", overflow="fold"), box=None, show_header=False)
    for check in checks:
        # Text, since a message may hold the square brackets of an extra, which markup would swallow.
        table.add_row(check.name, Text(check.status, styles[check.status]), Text(check.message))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
