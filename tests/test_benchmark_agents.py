"""benchmarks/agents.py: several agents in one process learn as each would alone. No time is judged."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drq.agents import make_agent
from drq.agents.protocol import Metrics
from drq.config import DQNConfig, EngineConfig, ReplayConfig
from drq.engine.learner import Learner
from drq.engine.settings import EngineSettings
from drq.errors import UserError
from drq.experiments.speed.results import Timing
from drq.experiments.speed.updates import Effort, Updates, Work
from drq.presets import preset

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "agents.py"
spec = importlib.util.spec_from_file_location("benchmark_agents", SCRIPT)
assert spec is not None
assert spec.loader is not None
agents = importlib.util.module_from_spec(spec)
sys.modules["benchmark_agents"] = agents  # dataclasses look their module up
spec.loader.exec_module(agents)

CPU = torch.device("cpu")
PLAIN = EngineConfig(precision="float32", compile="off")
BRIEF = Effort(blocks=1, block_seconds=0.001, warmup_updates=2)


def tiny(name: str) -> Work:
    """The script's work with small images, batches and networks."""
    config = preset(*agents.PRESETS[name])
    small = dataclasses.replace(config.agent, batch_size=6, hidden_dim=16)
    env = dataclasses.replace(config.env, image_size=36)
    return Work(name, dataclasses.replace(config, agent=small, env=env, replay=ReplayConfig(capacity=300)))


def engine_on(device: torch.device) -> EngineSettings:
    return EngineSettings.resolve(PLAIN, device, DQNConfig())


def weights(learners: Sequence[Learner]) -> list[Tensor]:
    return [torch.cat([p.detach().cpu().flatten() for p in learner.agent.modules.parameters()]) for learner in learners]


@pytest.mark.parametrize("name", ["atari", "planet"])
def test_learners_are_untrained_and_share_nothing(name: str) -> None:
    work = tiny(name)
    learners = agents.make_learners(work, 3, engine_on(CPU))
    assert len({learner.generator.initial_seed() for learner in learners}) == 3
    assert len({learner.replay.frames.data_ptr() for learner in learners}) == 3
    for seed, (learner, found) in enumerate(zip(learners, weights(learners), strict=True)):
        fresh = make_agent(learner.replay.spec, work.config.agent, CPU, seed)
        expected = torch.cat([p.detach().flatten() for p in fresh.modules.parameters()])
        assert torch.equal(found, expected)
        for optimizer in learner.agent.optimizers.values():
            assert optimizer.state
            assert not any(value.any() for state in optimizer.state.values() for value in state.values())


def test_the_works_are_the_presets_with_a_small_replay() -> None:
    for name, agent in (("atari", "DQNConfig"), ("planet", "SACConfig")):
        config = agents.work_called(name).config
        assert type(config.agent).__name__ == agent
        assert config.agent == preset(*agents.PRESETS[name]).agent
        assert config.replay.capacity == agents.REPLAY_TRANSITIONS


# The check. Each of these is a way of training that the script might have got wrong.


def in_reverse(learners: Sequence[Learner]) -> Updates:
    return agents.one_after_another(learners[::-1])


def forgets_the_last(learners: Sequence[Learner]) -> Updates:
    return agents.one_after_another(learners[:-1])


def skips_a_round(learners: Sequence[Learner]) -> Updates:
    run = agents.one_after_another(learners)
    return lambda rounds: run(rounds - 1)


def trains_one_twice(learners: Sequence[Learner]) -> Updates:
    return agents.one_after_another([learners[0], *learners])


def repeats_its_random_numbers(learners: Sequence[Learner]) -> Updates:
    def run(rounds: int) -> None:
        for _ in range(rounds):
            for learner in learners:
                learner.generator.manual_seed(3)
                learner.update()

    return run


def breaks_half_way(learners: Sequence[Learner]) -> Updates:
    def run(rounds: int) -> None:
        learners[0].update()
        raise RuntimeError("out of luck\nand a long explanation")

    return run


def test_what_trains_otherwise_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = (forgets_the_last, skips_a_round, trains_one_twice, repeats_its_random_numbers, breaks_half_way)
    ways: dict[str, Callable[[Sequence[Learner]], Updates]] = {agents.REFERENCE: agents.one_after_another}
    ways |= {way.__name__: way for way in (*wrong, in_reverse)}  # the last is right, whatever those before it did
    monkeypatch.setattr(agents, "WAYS", ways)
    group = agents.measure(tiny("atari"), 2, engine_on(CPU), BRIEF)
    assert [(found.way, found.difference) for found in group.measurements] == [(agents.REFERENCE, 0), ("in_reverse", 0)]
    for found in group.measurements:
        assert found.agents == 2
        assert found.ms == pytest.approx(found.rounds.ms / 2)
        assert found.updates_per_second == pytest.approx(1e3 / found.ms)
    assert set(group.failed) == {way.__name__ for way in wrong}
    assert "did not change the weights of agent 2" in group.failed["forgets_the_last"]
    assert group.failed["breaks_half_way"] == "RuntimeError: out of luck"


def test_weights_that_are_no_numbers_fail_the_check() -> None:
    right = agents.Trained([[torch.ones(3)]], [torch.zeros(2)])
    assert agents.check(right, right) == 0.0
    with pytest.raises(ValueError, match="agent 1 otherwise"):
        agents.check(agents.Trained([[torch.tensor([1.0, 1.0, torch.nan])]], [torch.zeros(2)]), right)
    with pytest.raises(ValueError, match="random numbers of agent 1"):
        agents.check(agents.Trained([[torch.ones(3)]], [torch.ones(2)]), right)


def test_without_the_reference_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {agents.REFERENCE: breaks_half_way, "in_reverse": in_reverse}
    monkeypatch.setattr(agents, "WAYS", ways)
    group = agents.measure(tiny("atari"), 1, engine_on(CPU), BRIEF)
    assert not group.measurements
    assert list(group.failed) == [agents.REFERENCE]


# Streams and branches on a CUDA that only remembers what is launched.


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def wait_stream(self, other: FakeStream) -> None:
        if self.cuda.capturing is not None:
            self.cuda.capturing.recorded.append(("wait", self, other))


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.generators: list[torch.Generator] = []
        self.recorded: list[tuple[Any, ...]] = []
        cuda.graphs.append(self)

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        self.cuda.replayed_on.append(self.cuda.current)
        for kind, _, work in self.recorded:
            if kind == "update":
                work()


class FakeCuda:
    """Streams, captures that do not run, replays that do: what the script uses of `torch.cuda`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs: list[FakeGraph] = []
        self.capturing: FakeGraph | None = None
        self.replayed_on: list[FakeStream] = []
        self.home = self.current = FakeStream(self)
        self.trunk = FakeStream(self)
        for name, fake in {
            "Stream": lambda: FakeStream(self),
            "CUDAGraph": lambda: FakeGraph(self),
            "current_stream": lambda: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "stream": self.stream,
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        update_of = Learner._update_of

        def recorded(learner: Learner, phase: Hashable) -> Callable[[], Metrics]:
            update = update_of(learner, phase)

            def run() -> Metrics:
                if self.capturing is None:
                    return update()
                self.capturing.recorded.append(("update", self.current, update))
                return {}

            return run

        monkeypatch.setattr(Learner, "_update_of", recorded)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: FakeGraph) -> Iterator[None]:
        self.capturing = graph
        with self.stream(self.trunk):
            yield
        self.capturing = None


@pytest.mark.parametrize("name", ["atari", "planet"])
def test_every_way_trains_every_agent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    group = agents.measure(tiny(name), 2, engine_on(CPU), BRIEF)
    assert not group.failed
    assert [(found.way, found.difference) for found in group.measurements] == [(way, 0) for way in agents.WAYS]


@pytest.mark.parametrize(("name", "phases"), [("atari", 1), ("planet", 2)])
def test_branches_fork_run_and_join(name: str, phases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    learners = agents.make_learners(tiny(name), 3, engine_on(CPU))
    agents.as_branches(learners)(4)
    assert len(cuda.graphs) == phases
    assert cuda.replayed_on == [cuda.home] * 4
    for graph in cuda.graphs:
        assert graph.generators == [learner.generator for learner in learners]
        forks, updates, joins = graph.recorded[:3], graph.recorded[3:6], graph.recorded[6:]
        branches = [stream for _, stream, _ in updates]
        assert len(set(branches)) == 3
        assert cuda.trunk not in branches
        assert [kind for kind, _, _ in updates] == ["update"] * 3
        assert forks == [("wait", branch, cuda.trunk) for branch in branches]
        assert joins == [("wait", cuda.trunk, branch) for branch in branches]


def test_each_agent_has_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    learners = agents.make_learners(tiny("atari"), 3, engine_on(CPU))
    agents.on_streams(learners)(2)
    assert [graph.generators for graph in cuda.graphs] == [[learner.generator] for learner in learners]
    assert len(set(cuda.replayed_on)) == 3
    assert cuda.replayed_on[:3] == cuda.replayed_on[3:]
    assert [graph.recorded[1][1] for graph in cuda.graphs] == cuda.replayed_on[:3]  # captured where it is replayed
    assert cuda.current is cuda.home


def test_a_capture_that_fails_gives_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    @contextmanager
    def graph(graph: FakeGraph) -> Iterator[None]:
        torch.cuda.set_stream(cuda.trunk)  # type: ignore[arg-type]
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    group = agents.measure(tiny("atari"), 2, engine_on(CPU), BRIEF)
    assert set(group.failed) == {"streams", "branches"}
    assert [found.way for found in group.measurements] == [agents.REFERENCE]
    assert cuda.current is cuda.home


# What is printed and written.


def measured(count: int, way: str, ms: float) -> Any:
    return agents.Measurement(count, way, ms, 1e3 / ms, 2_500_000_000, 0.0123, Timing(ms * count, [ms * count], 2))


def test_table() -> None:
    single = agents.Group(1, [measured(1, agents.REFERENCE, 0.8)])
    both = [measured(4, agents.REFERENCE, 0.8), measured(4, "branches", 0.2)]
    several = agents.Group(4, both, {"streams": "Error: no"})
    first, second, checked, failed = agents.lines("atari", several, agents.alone([single, several]))
    assert first.split("  ")[0] == "atari"
    assert first.split()[1:] == ["4", "one", "after", "another", "0.800", "1,250", "1.00", "2.50", "GB"]
    assert second.split() == ["atari", "4", "branches", "0.200", "5,000", "4.00", "2.50", "GB"]
    assert checked.startswith("  checked: all agents learn as one after another in branches (differs by 1.2% ")
    assert failed.strip() == "FAILED with 4 agents, streams: Error: no"
    assert len(first) == len(second) == len(agents.HEAD)
    assert agents.alone([several]) is None
    assert agents.lines("atari", several, None)[0].split()[-3] == "-"


def test_json_holds_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    file = tmp_path / "new" / "agents.json"
    group = agents.Group(2, [measured(2, "streams", 0.5)])
    agents.write(file, agents.Arguments(work="planet"), engine_on(CPU), [group])
    written = json.loads(file.read_text())
    assert (written["preset"], written["task"], written["gpu"]) == ("planet", "dmc/cheetah-run", "a GPU")
    assert written["replay_transitions"] == agents.REPLAY_TRANSITIONS
    assert written["groups"][0]["measurements"][0]["rounds"]["blocks_ms"] == [1.0]
    with pytest.raises(UserError, match="choose another --out"):
        agents.write(tmp_path, agents.Arguments(), engine_on(CPU), [])


@pytest.mark.parametrize(
    ("options", "remedy"), [([], "drq speed --full --only processes"), (["--agents", "0"], "1 to 32")]
)
def test_mistakes_are_one_sentence(options: list[str], remedy: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert remedy in done.stderr
    assert not done.stdout


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["streams", "branches"])
@pytest.mark.parametrize("name", ["atari", "planet"])
def test_agents_on_the_gpu_learn_as_one_after_another(name: str, way: str) -> None:
    """Against fresh agents of the same seeds on the same replays, trained by the engine."""
    engine = engine_on(torch.device("cuda"))
    work = tiny(name)
    learners = agents.make_learners(work, 2, engine)
    alone = [
        Learner(make_agent(learner.replay.spec, work.config.agent, engine.device, seed), learner.replay, engine, seed)
        for seed, learner in enumerate(learners)
    ]
    before = weights(alone)
    assert all(torch.equal(one, other) for one, other in zip(before, weights(learners), strict=True))
    agents.WAYS[way](learners)(6)
    agents.one_after_another(alone)(6)
    for start, one, other in zip(before, weights(alone), weights(learners), strict=True):
        assert (other - start).any()
        assert (one - other).norm() < 0.05 * (one - start).norm()


@pytest.mark.gpu
def test_every_way_is_measured_on_the_gpu() -> None:
    engine = EngineSettings.resolve(EngineConfig(compile="off"), torch.device("cuda"), DQNConfig())
    agents.give_every_stream_its_workspaces()
    group = agents.measure(tiny("atari"), 2, engine, BRIEF)
    assert not group.failed
    assert [found.way for found in group.measurements] == list(agents.WAYS)
    assert all(found.device_bytes > 0 for found in group.measurements)
