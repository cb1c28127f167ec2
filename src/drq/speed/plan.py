"""What `drq speed` measures on which machine, and how thoroughly."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

from drq.config import EnvConfig, Render
from drq.presets import preset
from drq.settings import override
from drq.speed.updates import Effort, Work

CONTROL, ATARI = "dmc/cheetah-run", "atari/pong"
DMC_TASKS = ("dmc/cheetah-run", "dmc/walker-walk")

PLAIN_ON_GPU: dict[str, dict[str, bool]] = {
    "plain, TF32": {"tf32": True},
    "plain, float32": {"tf32": False},
    "plain, TF32, each image copied once": {"tf32": True, "copy_per_view": False},
}
PLAIN_ON_CPU: dict[str, dict[str, bool]] = {"plain, float32": {}}
ONE_VIEW = {"agent.k": 1, "agent.m": 1}
SMALL_REPLAY = {"replay.capacity": 10_000}


@dataclass(frozen=True)
class Plan:
    """Everything that would be measured; sections that are not wanted are empty."""

    effort: Effort
    reference: Work
    """The work that is compared with the plain reference."""
    plain: dict[str, dict[str, bool]]
    """Names and options of the plain reference's variants."""
    plain_capacity: int
    """Transitions in their memory."""
    float32_beside: bool
    """Compare the engine without reduced precision too, where the default reduces it."""
    acting: dict[int, int]
    """Observations at a time, to how many calls."""
    environments: tuple[tuple[str, EnvConfig], ...]
    processes_effort: Effort
    environment_block_seconds: float = 0.3
    presets: tuple[Work, ...] = ()
    growth: dict[str, tuple[Work, ...]] = field(default_factory=dict)
    processes: tuple[tuple[Work, tuple[int, ...]], ...] = ()
    """Work, and how many learners of it at once, from few to many; on a GPU without and with MPS."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What this plan does without, and how to have it."""


def plan_for(device: torch.device, *, quick: bool, full: bool) -> Plan:
    """On a GPU the paper's batch of 512; on a CPU, where that takes seconds, the ablations' 128."""
    return _on_gpu(quick=quick, full=full) if device.type == "cuda" else _on_cpu(quick=quick, full=full)


def _on_gpu(*, quick: bool, full: bool) -> Plan:
    planet = Work("planet", preset("planet", CONTROL))
    atari = Work("atari100k (DQN)", preset("atari100k", ATARI))
    strong = Work("strong (Rainbow)", preset("strong", ATARI))
    plan = Plan(
        effort=Effort(blocks=15 if full else 9, block_seconds=0.25, warmup_updates=10),
        reference=planet,
        plain=PLAIN_ON_GPU,
        plain_capacity=10_000,
        float32_beside=not quick,
        acting={1: 200, 10: 200},
        environments=_environments(quick=quick),
        processes_effort=Effort(blocks=12, block_seconds=0.2, warmup_updates=10),
    )
    if quick:
        what = "other presets, drq in float32, growth, several agents at once"
        return dataclasses.replace(plan, left_out={what: "leave --quick out to measure it."})
    return dataclasses.replace(
        plan,
        presets=(planet, *_other_presets(planet), atari, strong),
        growth=_growth(planet),
        processes=((planet, (1, 2, 4, 8)), (atari, (1, 5, 16))) if full else ((planet, (1, 2, 4)),),
        left_out={} if full else {"8 agents at once, Atari agents at once": "drq speed --full"},
    )


def _on_cpu(*, quick: bool, full: bool) -> Plan:
    planet = Work("planet", preset("planet", CONTROL))
    atari = Work("atari100k (DQN)", preset("atari100k", ATARI))
    ablation = Work("ablation", preset("ablation", CONTROL))
    if not full:  # a larger replay is no slower on a CPU, only larger
        planet, atari, ablation = (_with(work, work.name, SMALL_REPLAY) for work in (planet, atari, ablation))
    plan = Plan(
        # Where an update takes seconds, the pair that a block's size is chosen by is warm-up enough.
        effort=Effort(blocks=5, block_seconds=1.0 if full else 0.2, warmup_updates=0 if quick else 2),
        reference=ablation,
        plain=PLAIN_ON_CPU,
        plain_capacity=2_000,
        float32_beside=not quick,
        acting={1: 50, 10: 20},
        environments=_environments(quick=quick),
        processes_effort=Effort(blocks=20, block_seconds=1.0, warmup_updates=2),
    )
    slow = "an update of planet or strong takes seconds on a CPU: drq speed --full."
    if quick:
        return dataclasses.replace(plan, left_out={"presets, growth, several agents at once": slow})
    cpu = Work("cpu (48 x 48)", preset("cpu", CONTROL))
    one_view = _with(ablation, "ablation, K = M = 1", ONE_VIEW)
    if not full:
        return dataclasses.replace(
            plan,
            presets=(_with(cpu, cpu.name, SMALL_REPLAY), ablation, one_view, atari),
            left_out={"planet, strong, growth, several agents at once": slow},
        )
    return dataclasses.replace(
        plan,
        presets=(planet, *_other_presets(planet), atari, Work("strong (Rainbow)", preset("strong", ATARI))),
        growth=_growth(ablation),
        processes=((Work("cpu", cpu.config), (1, 2, 4, 8)),),
    )


def _other_presets(planet: Work) -> tuple[Work, ...]:
    return (
        Work("ablation", preset("ablation", CONTROL)),
        _with(planet, "planet, K = M = 1", ONE_VIEW),
        Work("cpu (48 x 48)", preset("cpu", CONTROL)),
    )


def _environments(*, quick: bool) -> tuple[tuple[str, EnvConfig], ...]:
    renders: tuple[Render, ...] = ("fast", "ray") if quick else ("paper", "fast", "ray")
    dmc = [(task, EnvConfig(render=render)) for task in DMC_TASKS for render in renders]
    return (*dmc, ("toy/reach", EnvConfig()), *(() if quick else ((ATARI, EnvConfig(frame_stack=4)),)))


def _growth(base: Work) -> dict[str, tuple[Work, ...]]:
    return {
        "batch": tuple(_with(base, str(n), {"agent.batch_size": n}) for n in (128, 256, 512, 1024)),
        "K": tuple(_with(base, str(k), {"agent.k": k}) for k in (1, 2, 3)),
        "M": tuple(_with(base, str(m), {"agent.m": m}) for m in (1, 2, 3)),
        "replay": tuple(_with(base, f"{n:,}", {"replay.capacity": n}) for n in (10_000, 30_000, 100_000)),
    }


def _with(work: Work, name: str, settings: dict[str, int]) -> Work:
    return Work(name, override(work.config, settings))
