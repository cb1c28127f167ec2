"""Times the updates of several agents in one process on one GPU; `drq speed --only processes` is one process each.

    python benchmarks/agents.py --work atari --agents 1 5 16 --out agents.json
    python benchmarks/agents.py --work planet --agents 1 2 4

Three ways: each agent's CUDA graph after the other's on one stream, as training launches it; each graph on a stream of
its own; one graph with an update of every agent as parallel branches. The agents learn nothing from each other. Before
a way is timed, its agents' weights are checked against those of the same agents trained one after another.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor

from drq.agents.protocol import Metrics
from drq.config import EngineConfig, ReplayConfig
from drq.engine.graphs import WARMUPS, without_a_trace
from drq.engine.learner import Learner
from drq.engine.settings import EngineSettings
from drq.errors import UserError
from drq.experiments.speed.plan import ATARI, CONTROL
from drq.experiments.speed.results import Timing
from drq.experiments.speed.updates import Effort, Updates, Work, make_learner, seconds_for, time_in_turns
from drq.presets import preset
from drq.training.folder import git_commit, versions

PRESETS = {"atari": ("atari100k", ATARI), "planet": ("planet", CONTROL)}
REPLAY_TRANSITIONS = 5_000
"""Of each agent. The presets' 100,000 would take 35 GB for 16 agents of control; an update does the same work."""
STREAMS = 32
"""As many as PyTorch has; a further one is an earlier one again."""
EFFORT = Effort(blocks=9, block_seconds=0.15, warmup_updates=10)

PAIRS = 2
"""Pairs of rounds that are checked: every second update of SAC trains the actor too."""
TOLERANCE = 0.25
"""Of the change of the weights over a pair of rounds. On a CPU, bfloat16 sums in another order make 0.03 (DQN) to 0.12
(SAC, with Adam's tiny ε), an update left out 0.4 to 0.5, other random numbers 0.55 to 0.8."""


@dataclass(frozen=True)
class Arguments:
    """Times several agents in one process on one GPU."""

    work: Literal["atari", "planet"] = "atari"
    """atari: DQN as in the preset atari100k. planet: SAC as in the preset planet."""
    agents: tuple[int, ...] = (1, 5, 16)
    """How many agents; several numbers are measured one after the other."""
    compile: bool = False
    """Compile every agent's losses first: many seconds for each."""
    out: Path | None = None
    """File for everything measured, as JSON."""


@dataclass(frozen=True)
class Measurement:
    """So many agents in one way. A round is one update of each."""

    agents: int
    way: str
    ms: float
    """Milliseconds of a round over the number of agents."""
    updates_per_second: float
    """Of all together."""
    device_bytes: int
    """What PyTorch keeps reserved for the agents, their replays and this way's graphs."""
    difference: float
    """Largest among the agents: how far its weights changed otherwise than one after another, over their change."""
    rounds: Timing


@dataclass
class Group:
    """All ways for one number of agents."""

    agents: int
    measurements: list[Measurement] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Way to what went wrong."""


class Branches:
    """One update of each learner as parallel branches of a CUDA graph, with a graph for each phase of the updates."""

    def __init__(self, learners: Sequence[Learner], streams: Sequence[torch.cuda.Stream]) -> None:
        self._learners = learners
        self._streams = streams
        self._rounds = 0
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Metrics]]] = {}
        """The metrics lie in the graph's memory, and are kept so that no one else gets their place."""

    def launch(self) -> None:
        """A round, on the current stream. All learners are of one kind, so one phase is that of all."""
        phase = self._learners[0].agent.phase(self._rounds)
        if phase not in self._graphs:
            with untouched(self._learners):
                self._graphs[phase] = self._capture(phase)
        self._graphs[phase][0].replay()
        self._rounds += 1

    def _capture(self, phase: Hashable) -> tuple[torch.cuda.CUDAGraph, list[Metrics]]:
        """Every learner's work is warmed up and captured on its own stream.

        cuBLAS has a workspace for each stream and PyTorch's allocator free blocks for each, so that branches share
        none. Graphs captured on one stream, as the engine's are, share the workspace, and may not run side by side.
        """
        here = torch.cuda.current_stream()
        work = list(zip([learner._update_of(phase) for learner in self._learners], self._streams, strict=True))
        for update, stream in work:
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                for _ in range(WARMUPS):
                    update()
            here.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        for learner in self._learners:
            graph.register_generator_state(learner.generator)
        results = []
        try:
            with torch.cuda.graph(graph):
                trunk = torch.cuda.current_stream()
                for stream in self._streams:  # all before any work: one of them may be the trunk
                    stream.wait_stream(trunk)
                for update, stream in work:
                    with torch.cuda.stream(stream):
                        results.append(update())
                for stream in self._streams:
                    trunk.wait_stream(stream)
        finally:
            torch.cuda.set_stream(here)  # a capture that fails leaves its own stream in place
        return graph, results


def one_after_another(learners: Sequence[Learner]) -> Updates:
    """As training does it: each learner's own graph, on the current stream."""

    def run(rounds: int) -> None:
        for _ in range(rounds):
            for learner in learners:
                learner.update()

    return run


def on_streams(learners: Sequence[Learner]) -> Updates:
    """Each learner's graph on a stream of its own, launched in turns by one thread."""
    streams = [torch.cuda.Stream() for _ in learners]
    graphs = [Branches([learner], [stream]) for learner, stream in zip(learners, streams, strict=True)]

    def run(rounds: int) -> None:
        here = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(here)
        for _ in range(rounds):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.launch()
        for stream in streams:
            here.wait_stream(stream)

    return run


def as_branches(learners: Sequence[Learner]) -> Updates:
    """One graph with a branch for each learner, on the current stream."""
    graph = Branches(learners, [torch.cuda.Stream() for _ in learners])

    def run(rounds: int) -> None:
        for _ in range(rounds):
            graph.launch()

    return run


REFERENCE = "one after another"
WAYS: dict[str, Callable[[Sequence[Learner]], Updates]] = {
    REFERENCE: one_after_another,  # the first: the others are checked against it
    "streams": on_streams,
    "branches": as_branches,
}


def work_called(name: str) -> Work:
    """A preset's updates, with a small replay."""
    config = dataclasses.replace(preset(*PRESETS[name]), replay=ReplayConfig(capacity=REPLAY_TRANSITIONS))
    return Work(name, config)


@contextmanager
def untouched(learners: Sequence[Learner]) -> Iterator[None]:
    """Undoes what happened to weights, optimisers and random numbers; not if an exception leaves it."""
    with ExitStack() as stack:
        for learner in learners:
            stack.enter_context(without_a_trace(learner.agent, learner.generator))
        yield


def make_learners(work: Work, count: int, engine: EngineSettings) -> list[Learner]:
    """Learners with weights, replays and random numbers of their own, whose optimisers have all their memory."""
    learners = [make_learner(dataclasses.replace(work.config, seed=seed), engine) for seed in range(count)]
    with untouched(learners):
        for learner in learners:
            learner._update_of(learner.agent.phase(0))()
    for learner in learners:
        for optimizer in learner.agent.optimizers.values():
            optimizer.zero_grad()
    return learners


@dataclass(frozen=True)
class Trained:
    """What a few rounds did, on the host."""

    changes: list[list[Tensor]]
    """For each pair of rounds and each learner, its weights after less its weights before."""
    random_states: list[Tensor]
    """Of each learner's generator in the end."""


def train(run: Updates, learners: Sequence[Learner]) -> Trained:
    def weights() -> list[Tensor]:
        return [
            torch.cat([parameter.detach().flatten() for parameter in learner.agent.modules.parameters()]).cpu()
            for learner in learners
        ]

    changes = []
    before = weights()
    for _ in range(PAIRS):
        run(2)
        after = weights()
        changes.append([new - old for new, old in zip(after, before, strict=True)])
        before = after
    return Trained(changes, [learner.generator.get_state() for learner in learners])


def check(found: Trained, expected: Trained) -> float:
    """How far an agent at most changed otherwise, over its change; raises if one did not learn, or otherwise."""
    largest = 0.0
    for pair, (ours, theirs) in enumerate(zip(found.changes, expected.changes, strict=True)):
        rounds = f"rounds {2 * pair + 1} and {2 * pair + 2}"
        for agent, (our, their) in enumerate(zip(ours, theirs, strict=True), start=1):
            if not our.any():
                raise ValueError(f"{rounds} did not change the weights of agent {agent}")
            difference = float((our - their).norm() / their.norm())
            if not difference < TOLERANCE:  # NaN is not
                raise ValueError(
                    f"{rounds} changed agent {agent} otherwise than {REFERENCE}, "
                    f"by {difference:.2f} of the change; rounding explains no more than {TOLERANCE}"
                )
            largest = max(largest, difference)
    for agent, (our, their) in enumerate(zip(found.random_states, expected.random_states, strict=True), start=1):
        if not torch.equal(our, their):
            raise ValueError(f"the random numbers of agent {agent} did not advance as {REFERENCE}")
    return largest


def measure(work: Work, count: int, engine: EngineSettings, effort: Effort) -> Group:
    """Builds and checks every way, then times in turns those that passed."""
    group = Group(count)
    try:
        _measure(group, work, engine, effort)
    except Exception as error:  # such as too little memory: fewer agents may still fit
        group.failed["agents"] = explain(error)
    return group


def _measure(group: Group, work: Work, engine: EngineSettings, effort: Effort) -> None:
    before = reserved_bytes()
    learners = make_learners(work, group.agents, engine)
    of_learners = reserved_bytes() - before
    runs: dict[str, Updates] = {}
    device_bytes: dict[str, int] = {}
    differences: dict[str, float] = {}
    expected: Trained | None = None
    for way, build in WAYS.items():
        with untouched(learners):
            try:
                before = reserved_bytes()
                runs[way] = build(learners)
                found = train(runs[way], learners)
                device_bytes[way] = of_learners + reserved_bytes() - before
                expected = expected or found
                differences[way] = check(found, expected)
            except Exception as error:  # the other ways may still work
                group.failed[way] = explain(error)
                if expected is None:
                    return  # there is nothing to check the others against
    # What failed stays in `runs`: freeing a graph can free workspaces that graphs captured on the same stream use.
    passed = {way: runs[way] for way in differences}
    for run in passed.values():
        seconds_for(run, effort.warmup_updates, engine.device)
    for way, timing in time_in_turns(passed, effort, engine.device).items():
        ms = timing.ms / group.agents
        group.measurements.append(
            Measurement(group.agents, way, ms, 1e3 / ms, device_bytes[way], differences[way], timing)
        )


def reserved_bytes() -> int:
    """What PyTorch holds on the GPU once everything unused is given back."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def give_every_stream_its_workspaces() -> None:
    """cuBLAS keeps one for each stream and thread it was called from: made now, no way is charged for them."""
    for _ in range(STREAMS):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.ones(64, 64, device="cuda", requires_grad=True)
            (x @ x).sum().backward()
    torch.cuda.synchronize()


def explain(error: BaseException) -> str:
    """In one line, with what led to it: a failure during a capture comes wrapped into that of the capture's end."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return text if error.__context__ is None else f"{explain(error.__context__)}; then {text}"


ROW = "{:<7}  {:>6}  {:<17}  {:>12}  {:>9}  {:>15}  {:>10}"
HEAD = ROW.format("work", "agents", "way", "ms an update", "updates/s", "times one agent", "GPU memory")


def lines(work: str, group: Group, single: float | None) -> list[str]:
    """A group as rows of the table, and what became of the checks. `single`: updates/s of one agent alone."""
    rows = [
        ROW.format(
            work,
            found.agents,
            found.way,
            f"{found.ms:.3f}",
            f"{found.updates_per_second:,.0f}",
            "-" if single is None else f"{found.updates_per_second / single:.2f}",
            f"{found.device_bytes / 1e9:.2f} GB",
        )
        for found in group.measurements
    ]
    checked = [
        f"{found.way} (differs by {found.difference:.1%} of the change)"
        for found in group.measurements
        if found.way != REFERENCE
    ]
    if checked:
        rows.append(f"  checked: all agents learn as {REFERENCE} in {', '.join(checked)}")
    rows += [f"  FAILED with {group.agents} agents, {way}: {error}" for way, error in group.failed.items()]
    return rows


def alone(groups: Sequence[Group]) -> float | None:
    """Updates per second of one agent alone."""
    found = [m for group in groups for m in group.measurements if m.agents == 1 and m.way == REFERENCE]
    return found[0].updates_per_second if found else None


def write(file: Path, arguments: Arguments, engine: EngineSettings, groups: Sequence[Group]) -> None:
    name, task = PRESETS[arguments.work]
    found = {
        "task": task,
        "preset": name,
        "replay_transitions": REPLAY_TRANSITIONS,
        "gpu": torch.cuda.get_device_name(),
        "hardware_queues": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "engine": asdict(engine) | {"device": str(engine.device)},
        "versions": versions(),
        "commit": git_commit(),
        "groups": [asdict(group) for group in groups],
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}): choose another --out.") from error


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    if not arguments.agents or not all(1 <= count <= STREAMS for count in arguments.agents):
        raise UserError(f"--agents counts agents, each with a stream of PyTorch's {STREAMS}: 1 to {STREAMS}.")
    # Before CUDA starts. With the usual 8, agents on different streams wait in the same queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(STREAMS))
    if not torch.cuda.is_available():
        raise UserError(
            "Agents share a process on a CUDA GPU, and this PyTorch sees none: run this on a machine with one, "
            "or measure one process each here with `drq speed --full --only processes`."
        )
    work = work_called(arguments.work)
    switches = EngineConfig(compile="on" if arguments.compile else "off")
    engine = EngineSettings.resolve(switches, torch.device("cuda"), work.config.agent)
    if arguments.compile:
        torch._dynamo.config.recompile_limit = 4 * STREAMS  # with the usual 8, later agents would run uncompiled
    groups: list[Group] = []
    if arguments.out is not None:
        write(arguments.out, arguments, engine, groups)  # a name that cannot be written is better known now
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {engine.precision}, "
        f"{'compiled' if engine.compile else 'not compiled'}, replays of {REPLAY_TRANSITIONS:,} transitions\n{HEAD}",
        flush=True,
    )
    give_every_stream_its_workspaces()
    for count in sorted(set(arguments.agents)):
        groups.append(measure(work, count, engine, EFFORT))
        print("\n".join(lines(work.name, groups[-1], alone(groups))), flush=True)
        if arguments.out is not None:
            write(arguments.out, arguments, engine, groups)
        if arguments.compile:
            torch.compiler.reset()  # compiled code keeps its agent alive
    if any(group.failed for group in groups):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
