"""What `drq speed` finds out, as plain data: the JSON file is these classes field by field."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Timing:
    """Milliseconds an update."""

    ms: float
    """The median over the blocks."""
    blocks_ms: list[float]
    updates_per_block: int

    @property
    def per_second(self) -> float:
        return 1e3 / self.ms


@dataclass(frozen=True)
class UpdateSpeed:
    """One learner, alone."""

    name: str
    batch_size: int
    k: int
    m: int
    replay_capacity: int
    timing: Timing
    ready_seconds: float
    """From nothing to the end of the warm-up: compilation and capture are in it."""
    device_bytes: int | None
    """The most that PyTorch held on the GPU, replay included; what CUDA itself takes is not."""
    host_bytes: int | None
    """Memory of the measuring process at that time."""


@dataclass(frozen=True)
class Contender:
    """One line of a comparison made in turns."""

    name: str
    timing: Timing
    ratio: float
    """How many times longer an update takes than the first contender's: of the medians."""
    ratio_range: tuple[float, float]
    """Least and greatest ratio of one turn."""


@dataclass(frozen=True)
class Comparison:
    """The same work by drq and by the plain reference."""

    work: str
    batch_size: int
    k: int
    m: int
    plain_capacity: int
    """Transitions in the plain reference's memory."""
    contenders: list[Contender]


@dataclass(frozen=True)
class ActingSpeed:
    """From observations on the host to actions on the host."""

    observations: int
    ms: float
    calls: int


@dataclass(frozen=True)
class EnvironmentSpeed:
    """One environment with random actions, in one thread."""

    task: str
    render: str
    """`paper`, `fast` or `ray` for the control suite, else empty."""
    agent_steps_per_second: float
    env_steps_per_second: float
    frames_per_second: float | None
    """Frames that the renderer alone would draw. None where drawing is part of the emulation."""
    agent_steps: int
    """Timed in all."""


@dataclass(frozen=True)
class ProcessesSpeed:
    """Several learners, each in a process of its own, at the same time; not compiled."""

    work: str
    processes: int
    mps: bool
    """Under NVIDIA's MPS, by which they compute at the same time on one GPU; else they take turns on it."""
    updates_per_second: float
    """Of all together."""
    device_bytes: int | None
    """Of all together."""
    host_bytes_each: int | None
    """The most that one of them held."""


@dataclass
class SpeedReport:
    """Everything of one `drq speed`; what was not measured is empty and named in `left_out` or `failed`."""

    machine: dict[str, str]
    """device, cpu, cores, renderer, versions, commit."""
    engine: str
    """The engine's settings in words."""
    growth_from: str
    """Preset whose settings `growth` changes one at a time."""
    presets: list[UpdateSpeed] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    acting: list[ActingSpeed] = field(default_factory=list)
    environments: list[EnvironmentSpeed] = field(default_factory=list)
    growth: dict[str, list[UpdateSpeed]] = field(default_factory=dict)
    """What grows, to the measurements for its values. All else is as in `growth_from`."""
    processes: list[ProcessesSpeed] = field(default_factory=list)
    host_peak_bytes: int | None = None
    """Of the measuring process, the plain reference's memory included."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What was not measured, and why."""
    failed: dict[str, str] = field(default_factory=dict)
    """What could not be measured, and the error."""


def host_memory(field: Literal["VmRSS", "VmHWM"], pid: int | str = "self") -> int | None:
    """Bytes of host memory that a process holds (VmRSS) or held at most (VmHWM). None off Linux."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
    except (OSError, StopIteration):
        return None
