"""Every kernel that a run may ask for compiles on every architecture and fits on its multiprocessors: NVRTC needs no
GPU. What the kernels compute is tested elsewhere, by emulation."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from drq.agents import AGENTS, agent_name, make_agent, make_replay
from drq.config import TrainConfig
from drq.engine import EngineSettings, FastBackend, kernels
from drq.engine.kernels import encoder, raycast, runtime
from drq.envs.raycast import SOURCES
from drq.networks.encoders import ENCODERS
from drq.presets import PRESETS, configure
from drq.speed.updates import spec_for

SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100": 227, "sm_120": 99}
"""Architectures, and KiB of shared memory that a block may have there (CUDA C++ Programming Guide, "Compute
Capabilities")."""
THOROUGHLY, WELL = "sm_90a", "sm_80"
"""Where all programs are compiled, and where those that differ in more than sizes. Elsewhere it is one of each kernel:
compiling takes time."""
REGISTERS = 65_536
"""Of a multiprocessor; handed out to warps by eights for each thread."""
HOPPERS = "conv_same"
"""The kernel that no other architecture has."""
CALLING = "draw"
"""The kernel that calls functions, around which registers are saved."""
SPILLED = 32
"""Bytes of a thread that may be kept in memory for want of registers: so few the compiler accepts by itself, to have
more threads at a time."""

CONTROL, ATARI = "dmc/cheetah-run", "atari/pong"


def runs() -> Iterator[TrainConfig]:
    """Every preset, and the settings that make kernels differ."""
    own = {name: AGENTS[agent_name(values(CONTROL).agent)].actions for name, values in PRESETS.items()}
    settings: list[tuple[str, dict[str, Any]]] = [
        *((CONTROL if own[name] == "continuous" else ATARI, {"preset": name}) for name in PRESETS),
        *((CONTROL, {"agent.encoder": name}) for name in ENCODERS),
        *((ATARI, {"agent.encoder": name}) for name in ENCODERS),
        *((CONTROL, {"agent.augmentation": name, "agent.encoder": "nature"}) for name in ("none", "none+intensity")),
        (CONTROL, {"engine.precision": "float32"}),
        (ATARI, {"engine.precision": "bf16"}),
        (ATARI, {"num_envs": 3, "env.zero_stack": True}),
        *((ATARI, {"preset": "strong"} | more) for more in STRONG),
    ]
    for task, changes in settings:
        yield configure(task, {"agent.hidden_dim": 8} | changes)  # which no kernel knows, and takes less time


STRONG: list[dict[str, Any]] = [
    {"engine.precision": "float32"},
    {"agent.prioritised": False, "agent.early_bootstrap": True},
    {"agent.weight_decay": 0.0},
    {"agent.encoder_width": 1},  # its second layer, too, convolves and pools at once
    {"env.image_size": 83},
]


class Program(NamedTuple):
    """A kernel as it is asked for."""

    name: str
    parts: Sequence[str]
    defines: Mapping[str, int | str]
    threads: int
    shared_bytes: int

    @property
    def switches(self) -> Hashable:
        """What it is but for its sizes."""
        return self.name, *(each for each in self.defines.items() if each[1] in (0, 1) or isinstance(each[1], str))


@functools.cache
def programs(shared_bytes: int) -> Mapping[str, Program]:
    """Those that runs ask for on a GPU whose blocks have so much shared memory, by their text."""
    asked: dict[str, Program] = {}

    def kernel(*asking: Any) -> runtime.Launchable:
        program = Program(*asking)
        asked[runtime.program_text(program.parts, program.defines)] = program
        return runtime._Unlaunched()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "kernel", kernel)
        patch.setattr(runtime, "shared_bytes_per_block", lambda: shared_bytes)
        patch.setattr(kernels, "available", lambda: True)
        patch.setattr(encoder, "_on_the_current_gpu", lambda _: True)
        patch.setattr(runtime, "multiplies_wide", lambda: True)
        patch.setattr("drq.engine.settings.computes_in_bf16", lambda _: True)
        patch.setattr(EngineSettings, "apply_globally", lambda _: None)
        for config in runs():
            prepare(config)
        raycast.compile_kernels()
    return asked


def prepare(config: TrainConfig) -> None:
    """As a run on a GPU does before it begins; tensors are on the CPU."""
    spec = dataclasses.replace(spec_for(config), zero_stack=config.env.zero_stack)
    if config.env.observation == "state":
        spec = dataclasses.replace(spec, frame_shape=(17,))
    on_gpu = EngineSettings.resolve(config.engine, torch.device("cuda"), config.agent, config.steps)
    backend = FastBackend(dataclasses.replace(on_gpu, device=torch.device("cpu"), cuda_graphs=False))
    replay = make_replay(spec, config.agent, backend, 100 * config.num_envs, config.num_envs)
    backend.prepare(make_agent(spec, config.agent, backend, seed=0), replay)
    assert backend.kernels


@pytest.fixture
def nvrtc() -> None:
    try:
        runtime._nvrtc()
    except runtime.KernelError:
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("architecture", SHARED)
def test_every_program_compiles_and_fits(architecture: str) -> None:
    limit = SHARED[architecture] * 1024
    of_each: dict[Hashable, tuple[str, Program]] = {}
    for text, program in programs(limit).items():
        kind = text if architecture == THOROUGHLY else program.switches if architecture == WELL else program.name
        if architecture == THOROUGHLY or program.name != HOPPERS:
            of_each[kind] = text, program
    for text, program in of_each.values():
        code, log = runtime.compile_with_log(text, architecture, "--ptxas-options=-v")
        what = f"{program.name} on {architecture}:\n{log}"
        assert program.name.encode() in code, what
        assert program.shared_bytes + number(r"(\d+) bytes smem", log, absent=0) <= limit, what
        assert -(-number(r"Used (\d+) registers", log) // 8) * 8 * program.threads <= REGISTERS, what
        assert number(r"(\d+) bytes spill stores", log) <= SPILLED or program.name == CALLING, what


def number(pattern: str, text: str, absent: int | None = None) -> int:
    """The one that the compiler says of the kernel, or the largest where it speaks of its functions too."""
    found = [int(each) for each in re.findall(pattern, text)]
    assert found or absent is not None, text
    return max(found, default=absent or 0)


def test_every_source_is_part_of_a_program() -> None:
    """So that none is left out above."""
    folders = runtime.SOURCES, Path(SOURCES[0]).parent
    sources = {file.name for folder in folders for file in folder.glob("*.cu*")}
    asked = programs(max(SHARED.values()) * 1024)
    assert {Path(part).name for program in asked.values() for part in program.parts} == sources
    assert {program.name for program in asked.values()} == {
        name for text in asked for name in re.findall(r"__launch_bounds__\([^)]*\)\s+(\w+)\(", text)
    }


@pytest.mark.usefixtures("nvrtc")
def test_what_does_not_compile_is_said() -> None:
    with pytest.raises(runtime.KernelError, match=r"a kernel does not compile for sm_80:\n.*drq\.cu\(1\): error"):
        runtime.compile_program("nonsense", "sm_80")
