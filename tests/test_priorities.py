"""Prioritised replay against a plain sum-tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drq.agents import make_agent
from drq.backend import Backend
from drq.config import DQNConfig, EngineConfig, SACConfig
from drq.engine import EngineSettings, FastBackend, Learner
from drq.engine.graphs import Captured
from drq.envs.protocol import EnvSpec
from drq.priorities import LARGEST, UNIT, PrioritisedSampler
from drq.replay import Replay

SPEC = EnvSpec("toy/state", (2,), 1, "discrete", 3, 1, 50)
CAPACITY = 50


class SumTree:
    """As textbooks have it: each node is the sum of its two children, and a number is followed down to a leaf."""

    def __init__(self, leaves: int) -> None:
        self.first = 1
        while self.first < leaves:
            self.first *= 2
        self.nodes = [0.0] * (2 * self.first)

    def set(self, leaf: int, value: float) -> None:
        node = self.first + leaf
        self.nodes[node] = value
        while node > 1:
            node //= 2
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    @property
    def total(self) -> float:
        return self.nodes[1]

    def leaf(self, number: float) -> int:
        node = 1
        while node < self.first:
            node *= 2
            if number >= self.nodes[node]:
                number -= self.nodes[node]
                node += 1
        return node - self.first


class Oracle:
    """What the sampler should do, one transition at a time."""

    def __init__(self, exponent: float = 0.5, correction: float = 0.5) -> None:
        self.exponent, self.correction = exponent, correction
        self.priority = [0.0] * CAPACITY
        self.largest = 1.0

    def stored(self, slot: int) -> None:
        self.priority[slot] = self.largest

    def choose(self, allowed: list[bool], random: list[int]) -> tuple[list[int], list[float]]:
        tree = SumTree(CAPACITY)
        for slot, priority in enumerate(self.priority):
            tree.set(slot, priority if allowed[slot] else 0.0)
        n = len(random)
        slots = [tree.leaf((part + bits / 2**62) / n * tree.total) for part, bits in enumerate(random)]
        weights = [(tree.total / self.priority[slot]) ** self.correction for slot in slots]
        return slots, [weight / max(weights) for weight in weights]

    def learnt(self, slots: list[int], errors: list[float]) -> None:
        new: dict[int, float] = {}
        for slot, error in zip(slots, errors, strict=True):
            new[slot] = max((error + 1e-10) ** self.exponent, new.get(slot, 0.0))
        for slot, priority in new.items():
            self.priority[slot] = priority
            self.largest = max(self.largest, priority)


def step(replay: Replay, random: np.random.Generator, stream: int = 0) -> int:
    """Plays one agent step, and gives the slot of its transition."""
    own = replay.streams[stream]
    if own.age < 0:
        replay.begin(random.normal(size=2).astype(np.float32), stream)
    slot = stream * replay.stream_capacity + own.transitions_added % replay.stream_capacity
    frame = random.normal(size=2).astype(np.float32)
    replay.add(int(random.integers(3)), 0.0, 1.0, bool(random.random() < 0.1), frame, stream)
    return slot


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("powers", [(0.5, 0.5), (1.0, 1.0), (0.4, 0.0)], ids=str)
def test_choices_weights_and_priorities_are_those_of_a_sum_tree(
    powers: tuple[float, float], streams: int, device: str
) -> None:
    """Through twice the ring, with returns of three steps, so that the newest transitions may not be chosen yet."""
    backend = Backend(device)
    sampler = PrioritisedSampler(CAPACITY, backend, exponent=powers[0], correction=powers[1])
    replay = Replay(SPEC, CAPACITY, n_step=3, streams=streams, sampler=sampler, backend=backend)
    oracle = Oracle(*powers)
    random = np.random.default_rng(0)
    generator = torch.Generator(device).manual_seed(0)
    seen = set()
    for update in range(60):
        for _ in range(2):
            for stream in range(streams):
                oracle.stored(step(replay, random, stream))
        if not replay.sampleable:
            continue
        bits = replay.draw(8, generator)
        choice = sampler.choose(replay, bits)
        assert choice.weights is not None
        slots, weights = oracle.choose(replay.may_sample().tolist(), bits.tolist())
        assert choice.slots.tolist() == slots
        assert choice.weights.tolist() == pytest.approx(weights, rel=1e-5)
        assert float(choice.weights.max()) == 1.0
        seen |= set(slots)
        errors = torch.rand(8, generator=generator, device=device) * 3 ** (update % 4)
        sampler.learnt(choice.slots, errors)
        oracle.learnt(slots, errors.tolist())
        assert (sampler.priorities.double() / UNIT).tolist() == pytest.approx(oracle.priority, rel=1e-5, abs=1e-6)
        assert float(sampler.largest) / UNIT == pytest.approx(oracle.largest, rel=1e-5)
    assert oracle.largest > 1
    assert seen == set(range(CAPACITY))


def filled(priorities: list[float], **options: float) -> tuple[Replay, PrioritisedSampler]:
    sampler = PrioritisedSampler(len(priorities), **options)  # type: ignore[arg-type]
    replay = Replay(SPEC, len(priorities), sampler=sampler)
    replay.begin(np.zeros(2, np.float32))
    for _ in priorities:
        replay.add(0, 0.0, 1.0, False, np.zeros(2, np.float32))
    sampler.priorities.copy_((torch.tensor(priorities, dtype=torch.float64) * UNIT).long())
    return replay, sampler


def test_transitions_are_chosen_as_often_as_their_priorities_say() -> None:
    priorities = [1.0, 0.0, 3.0, 0.5, 2.0, 0.01]
    replay, sampler = filled(priorities)
    bits = replay.draw(60_000, torch.Generator().manual_seed(0))
    # In batches, as updates draw; the parts of a batch's sum make it more even than independent draws would be.
    counts = torch.zeros(6)
    for batch in bits.split(30):
        counts += torch.bincount(sampler.choose(replay, batch).slots, minlength=6)
    shares = [priority / sum(priorities) for priority in priorities]
    assert (counts / 60_000).tolist() == pytest.approx(shares, abs=2e-3)
    assert counts[1] == 0


def test_a_batch_takes_one_from_each_part_of_the_sum() -> None:
    replay, sampler = filled([1.0] * 32)
    for seed in range(5):
        slots = sampler.choose(replay, replay.draw(32, torch.Generator().manual_seed(seed))).slots
        assert slots.tolist() == list(range(32))
    # The last bits count too: in float32 this would be the beginning of the next part.
    assert sampler.choose(replay, torch.full((32,), 2**62 - 2**30)).slots.tolist() == list(range(32))


@pytest.mark.parametrize("bits", [0, 2**62 - 1])
def test_the_ends_of_the_sum_are_inside(bits: int) -> None:
    replay, sampler = filled([0.0, 0.3, 0.7, 0.0])
    slots = sampler.choose(replay, torch.full((7,), bits)).slots
    assert set(slots.tolist()) <= {1, 2}


def test_a_transition_chosen_twice_keeps_the_larger_error() -> None:
    _, sampler = filled([1.0] * 4)
    errors = torch.tensor([4.0, 9.0, 2.0]).bfloat16()  # a root has more digits
    sampler.learnt(torch.tensor([2, 2, 0]), errors)
    assert (sampler.priorities / UNIT).tolist() == pytest.approx([2**0.5, 1.0, 3.0, 1.0], rel=1e-6)
    assert float(sampler.largest) / UNIT == pytest.approx(3.0, rel=1e-6)
    sampler.learnt(torch.tensor([0, 1]), torch.tensor([1e8, 1e9]))  # large errors are still told apart
    assert (sampler.priorities[:2] / UNIT).tolist() == pytest.approx([1e4, 10**4.5], rel=1e-6)


def test_by_default_a_weight_is_one_over_the_root_of_a_priority() -> None:
    replay, sampler = filled([1.0, 4.0])
    choice = sampler.choose(replay, torch.zeros(2, dtype=torch.int64))
    assert choice.weights is not None
    assert (choice.slots.tolist(), choice.weights.tolist()) == ([0, 1], [1.0, 0.5])


def test_errors_without_bounds_leave_a_sum() -> None:
    """Training has gone wrong by then; choosing must not."""
    replay, sampler = filled([1.0] * 4)
    sampler.learnt(torch.arange(4), torch.tensor([torch.nan, torch.inf, 0.0, 1.0]))
    assert (sampler.priorities / UNIT).tolist() == pytest.approx([LARGEST, LARGEST, 1e-5, 1.0], rel=0.01)
    choice = sampler.choose(replay, replay.draw(100, torch.Generator().manual_seed(0)))
    assert set(choice.slots.tolist()) <= set(range(4))
    assert choice.weights is not None
    assert bool(choice.weights.isfinite().all())
    assert LARGEST * UNIT * 1_000_000 < 2**63


def test_a_transition_without_error_may_still_be_chosen() -> None:
    sampler = PrioritisedSampler(3, exponent=1.0)
    sampler.learnt(torch.arange(3), torch.zeros(3))
    assert sampler.priorities.tolist() == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_choosing_and_learning_as_a_graph(compiled: Any) -> None:
    """The same numbers as outside of one, from priorities that change between the replays."""
    settings = EngineSettings.resolve(EngineConfig(compile=compiled), torch.device("cuda"), SACConfig())

    def made(backend: Backend) -> tuple[Replay, PrioritisedSampler]:
        sampler = PrioritisedSampler(CAPACITY, backend)
        replay = Replay(SPEC, CAPACITY, n_step=3, sampler=sampler, backend=backend)
        random = np.random.default_rng(0)
        for _ in range(70):
            step(replay, random)
        return replay, sampler

    (eager_replay, eager), (replay, sampler) = made(Backend("cuda")), made(FastBackend(settings))
    bits = torch.zeros(8, dtype=torch.int64, device="cuda")
    errors = torch.zeros(8, device="cuda")

    def update(replay: Replay, sampler: PrioritisedSampler) -> Tensor:
        choice = sampler.choose(replay, bits)
        sampler.learnt(choice.slots, errors)
        assert choice.weights is not None
        return torch.stack([choice.slots.float(), choice.weights])

    kept = {name: value.clone() for name, value in sampler.state().items()}
    graph = Captured(lambda: update(replay, sampler), [])
    for name, value in sampler.state().items():
        value.copy_(kept[name])
    generator = torch.Generator("cuda").manual_seed(0)
    random, others = np.random.default_rng(1), np.random.default_rng(1)
    for _ in range(30):
        step(eager_replay, random)
        step(replay, others)
        bits.copy_(replay.draw(8, generator))
        errors.copy_(torch.rand(8, generator=generator, device="cuda") * 4)
        slots, weights = graph.replay()
        expected_slots, expected_weights = update(eager_replay, eager)
        assert torch.equal(slots, expected_slots)
        torch.testing.assert_close(weights, expected_weights)
        for name, value in eager.state().items():
            torch.testing.assert_close(sampler.state()[name], value, rtol=1e-6, atol=2, msg=name)


def test_an_agent_for_control_learns_from_priorities_too() -> None:
    """SAC knows nothing of them: it weighs its errors and reports them, as every agent does."""
    spec = EnvSpec("toy/state", (4,), 1, "continuous", 2, 1, 50)
    config = SACConfig(batch_size=8, hidden_dim=16, feature_dim=8)
    settings = EngineSettings.resolve(EngineConfig(precision="float32"), torch.device("cpu"), config)
    backend = FastBackend(settings)
    sampler = PrioritisedSampler(100, backend)
    replay = Replay(spec, 100, sampler=sampler, backend=backend)
    learner = Learner(make_agent(spec, config, backend, 0), replay, backend, 0)
    random = np.random.default_rng(0)
    replay.begin(random.normal(size=4).astype(np.float32))
    for _ in range(60):
        action = random.uniform(-1, 1, 2).astype(np.float32)
        replay.add(action, float(random.normal()), 1.0, False, random.normal(size=4).astype(np.float32))
    before = sampler.priorities.clone()
    learner.update()
    changed = (sampler.priorities != before).nonzero()
    assert 1 <= len(changed) <= 8
    assert learner.state()["sampler.priorities"] is sampler.priorities


@pytest.mark.parametrize("added", [10, 14])
def test_priorities_of_all_streams_go_into_a_larger_replay(added: int) -> None:
    """As when a run is given more steps: a stream's slots begin elsewhere then, and transitions that had gone round the
    smaller ring, as those of a replay that came along do, are elsewhere in the larger one."""
    config = DQNConfig(batch_size=8, hidden_dim=16)
    backend = FastBackend(EngineSettings.resolve(EngineConfig(precision="float32"), torch.device("cpu"), config))

    def learner(capacity: int) -> Learner:
        replay = Replay(SPEC, capacity, streams=2, sampler=PrioritisedSampler(capacity, backend), backend=backend)
        return Learner(make_agent(SPEC, config, backend, 0), replay, backend, 0)

    small, large = learner(20), learner(30)
    frame = np.zeros(SPEC.frame_shape, np.float32)
    for stream in range(2):
        small.replay.begin(frame, stream)
        for _ in range(added):
            small.replay.add(0, 0.0, 1.0, False, frame, stream)
    numbers = torch.arange(added - 10, added)  # of the transitions that each stream has
    before = small.replay.sampler.state()["priorities"].view(2, 10)
    before[:, numbers % 10] = torch.stack([numbers + 1, numbers + 101])
    parts = small.replay.written_since([(0, 0), (0, 0)])
    large.replay.restore([(small.replay.marks(), parts)], small.replay.counters())
    large.restore(small.state())
    after = large.replay.sampler.state()["priorities"].view(2, 15)
    assert torch.equal(after[:, numbers % 15], torch.stack([numbers + 1, numbers + 101]))
    assert int((after > 0).sum()) == 20
