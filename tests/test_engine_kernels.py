"""A learner with our kernels computes what plain PyTorch does, whatever chooses its transitions and returns."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from drq.agents import Returns, make_agent
from drq.backend import Backend
from drq.config import AgentConfig, DQNConfig, EngineConfig, RainbowConfig
from drq.engine import EngineSettings, FastBackend, Learner, kernels
from drq.engine.kernels import encoder, runtime
from drq.engine.staging import StagedStore
from drq.envs.protocol import EnvSpec
from drq.replay import Choice, Replay, UniformSampler
from emulation import Emulator, needs_hopper
from learners import (
    CASES,
    CONTROL,
    DQN_SETTINGS,
    EMULATED,
    GAME,
    PLAIN,
    SAC_SETTINGS,
    assert_same_gradients,
    distance,
    emulate,
    fill,
    gradients_of,
    make_learner,
    weights_after,
)


def test_gradients_straight_from_frames(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all networks, from views that are never written out: one of the sixteen lost, or the wrong ones for the actor,
    would show."""
    spec = dataclasses.replace(CONTROL, frame_shape=(3, 20, 23))
    agent = dataclasses.replace(SAC_SETTINGS, batch_size=8, encoder="d4pg")
    expected = gradients_of(make_learner(spec, agent, PLAIN, "cpu"))
    emulate(monkeypatch, emulator.kernel)
    monkeypatch.setattr(encoder, "_on_the_current_gpu", lambda _: True)
    monkeypatch.setattr(runtime, "shared_bytes_per_block", lambda: 227 * 1024)
    monkeypatch.setattr(runtime, "compile_together", lambda _: None)
    ours = make_learner(spec, agent, dataclasses.replace(EMULATED, precision="bf16"), "cpu")
    assert ours.backend.fused
    assert_same_gradients(gradients_of(ours), expected, within=0.1)


KERNELS = ["transitions", "store", "adam", "gradient_norm", "bias_relu", "stacked"]


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize(("spec", "agent"), CASES, ids=["sac", "dqn"])
def test_kernels_in_a_learner_equal_plain_pytorch(
    spec: EnvSpec, agent: AgentConfig, streams: int, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated; convolutions are PyTorch's on both sides."""
    plain = weights_after(make_learner(spec, agent, PLAIN, "cpu", streams), 3)
    asked = emulate(monkeypatch, emulator.kernel)
    ours = make_learner(spec, agent, EMULATED, "cpu", streams)
    assert ours.backend.kernels
    assert isinstance(ours.replay._store, StagedStore)
    asked.clear()
    found = weights_after(ours, 3)
    clipped = {"gradient_norm"} if isinstance(agent, DQNConfig) else set()
    assert {*asked} >= {"transitions", "bias_relu", "bias_relu_gradient", "stacked", "adam"} | clipped
    assert distance(plain, found) < 1e-5


def test_an_agent_on_the_plain_backend_learns_the_same() -> None:
    """The engine's optimiser is another, and its weights lie otherwise in memory."""
    ours = make_learner(CONTROL, SAC_SETTINGS, PLAIN, "cpu")
    plain = make_agent(CONTROL, SAC_SETTINGS, Backend(), seed=5)
    generator = torch.Generator().manual_seed(11)
    for update in range(3):
        draws = plain.draw(generator)
        batch = ours.replay.batch(ours.replay.draw(plain.batch_size, generator))
        plain.update(batch, draws, plain.phase(update))
    expected = {name: value.double() for name, value in plain.modules.state_dict().items()}
    assert distance(expected, weights_after(ours, 3)) < 1e-5


@pytest.mark.parametrize("filled_first", [False, True])
@pytest.mark.parametrize("broken", KERNELS)
def test_where_a_kernel_does_not_compile_pytorchs_are_used(
    broken: str,
    filled_first: bool,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where a replay was filled before there was a learner."""

    def kernel(name: str, *args: Any) -> Any:
        if name == broken:
            raise kernels.KernelError("a kernel does not compile for sm_999:\nmany\nlines")
        return emulator.kernel(name, *args)

    plain = weights_after(make_learner(GAME, DQN_SETTINGS, PLAIN, "cpu"), 2)
    emulate(monkeypatch, kernel)
    if filled_first:
        backend = FastBackend(EMULATED)
        replay = Replay(GAME, 150, n_step=DQN_SETTINGS.n_step, backend=backend)
        fill(replay)
        learner = Learner(make_agent(GAME, DQN_SETTINGS, backend, seed=5), replay, backend, seed=11)
    else:
        learner = make_learner(GAME, DQN_SETTINGS, EMULATED, "cpu")
    assert not learner.backend.kernels
    found = weights_after(learner, 2)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    said = "Going on with PyTorch's kernels: a kernel does not compile for sm_999."
    assert capsys.readouterr().err.splitlines() == [said]


def test_a_backend_that_another_agent_was_made_with() -> None:
    """What was chosen for that one may not suit this one."""
    learner = make_learner(CONTROL, SAC_SETTINGS, PLAIN, "cpu")
    learner.backend.fused = learner.backend.kernels = True
    learner.backend.prepare(learner.agent, learner.replay)
    assert not learner.backend.fused
    assert not learner.backend.kernels


class Weighted:
    """Chooses by the plain arithmetic among all transitions, weighs them, and keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[list[int], list[float]]] = []
        self.stored_slots: list[int] = []

    def choose(self, replay: Replay, random: torch.Tensor) -> Choice:
        slots = replay.may_sample().nonzero().flatten()
        slots = slots[random % len(slots)]
        return Choice(slots, 1.0 / (1.0 + slots.float()))

    def stored(self, replay: Replay, slot: int) -> None:
        self.stored_slots.append(slot)

    def learnt(self, slots: torch.Tensor, errors: torch.Tensor) -> None:
        self.heard.append((slots.tolist(), errors.tolist()))

    def state(self) -> dict[str, torch.Tensor]:
        return {}


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(("spec", "agent"), CASES, ids=["sac", "dqn"])
def test_another_sampler_through_kernels(
    spec: EnvSpec, agent: AgentConfig, broken: bool, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It chooses, weighs and hears of errors the same with kernels and without; that the one which fetches a choice
    does not compile is known before it is needed."""

    def kernel(name: str, parts: Any, defines: dict[str, Any], *shape: Any) -> Any:
        if broken and name == "transitions" and not defines["UNIFORM"]:
            raise kernels.KernelError("a kernel does not compile for sm_999:\nmany\nlines")
        return emulator.kernel(name, parts, defines, *shape)

    def learner(engine: EngineSettings) -> Learner:
        backend = FastBackend(engine)
        replay = Replay(spec, 300, n_step=agent.n_step, streams=2, sampler=Weighted(), backend=backend)
        made = Learner(make_agent(spec, agent, backend, seed=5), replay, backend, seed=11)
        fill(replay)
        return made

    plain = learner(dataclasses.replace(EMULATED, kernels=False))
    expected = weights_after(plain, 3)
    asked = emulate(monkeypatch, kernel)
    ours = learner(EMULATED)
    asked.clear()
    assert distance(expected, weights_after(ours, 3)) < 1e-5
    assert ("transitions" in asked) == (not broken)
    samplers = plain.replay.sampler, ours.replay.sampler
    assert isinstance(samplers[0], Weighted)
    assert isinstance(samplers[1], Weighted)
    assert samplers[0].stored_slots == samplers[1].stored_slots
    assert samplers[0].stored_slots[:151] == [*range(150), 0]
    assert samplers[0].stored_slots[200:202] == [150, 151]  # of the second stream
    assert len(samplers[0].heard) == 3
    for (slots, errors), (other_slots, other_errors) in zip(samplers[0].heard, samplers[1].heard, strict=True):
        assert len(slots) == agent.batch_size
        assert slots == other_slots
        assert errors == pytest.approx(other_errors, rel=1e-3, abs=1e-5)


class Derived(UniformSampler):
    """What somebody may make of it: the newest transition alone."""

    def choose(self, replay: Replay, random: torch.Tensor) -> Choice:
        return Choice(torch.full_like(random, replay.streams[0].transitions_added - 1))


def test_a_sampler_derived_from_the_uniform_one_is_asked(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, emulator.kernel)
    backend = FastBackend(EMULATED)
    replay = Replay(GAME, 300, sampler=Derived(), backend=backend)
    fill(replay)
    backend.prepare(make_agent(GAME, DQN_SETTINGS, backend, seed=5), replay)
    assert backend.kernels
    batch = replay.batch(replay.draw(5, torch.Generator()))
    assert batch.slots is not None
    assert batch.slots.tolist() == [199] * 5


def test_a_learner_fetches_in_its_own_way_from_a_replay_that_it_shares(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels or without, whatever the replay was constructed with."""
    plain, expected = (make_learner(GAME, DQN_SETTINGS, PLAIN, "cpu") for _ in range(2))
    asked = emulate(monkeypatch, emulator.kernel)
    backend = FastBackend(EMULATED)
    ours = Learner(make_agent(GAME, DQN_SETTINGS, backend, seed=5), plain.replay, backend, seed=11)
    asked.clear()
    found = weights_after(ours, 2)
    assert asked.count("transitions") == 2
    asked.clear()
    weights_after(plain, 2)
    assert not asked
    assert distance(weights_after(expected, 2), found) < 1e-5


RETURNS = [(3, 0.99), (3, 0.9), (1, 0.9), (2, 0.97), (3, 0.99)]


def with_a_schedule(learner: Learner) -> Learner:
    """Of other returns for every update."""
    learner.agent.returns = lambda update: Returns(*RETURNS[update % len(RETURNS)])  # type: ignore[method-assign]
    return learner


def test_returns_that_follow_a_schedule(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update learns from those of its own, with kernels and without."""
    plain = make_learner(GAME, DQN_SETTINGS, PLAIN, "cpu", streams=2)
    unscheduled = weights_after(plain, len(RETURNS))
    plain = with_a_schedule(make_learner(GAME, DQN_SETTINGS, PLAIN, "cpu", streams=2))
    by_hand = make_agent(GAME, DQN_SETTINGS, Backend(), seed=5)
    generator = torch.Generator().manual_seed(11)
    replay = make_learner(GAME, DQN_SETTINGS, PLAIN, "cpu", streams=2).replay
    for update, returns in enumerate(RETURNS):
        replay.set_returns(*returns)
        draws = by_hand.draw(generator)
        random_bits = replay.draw(by_hand.batch_size, generator)
        by_hand.update(replay.gather(UniformSampler().choose(replay, random_bits)), draws, by_hand.phase(update))
    expected = {name: value.double() for name, value in by_hand.modules.state_dict().items()}
    found = weights_after(plain, len(RETURNS))
    assert distance(expected, found) < 1e-5 < distance(expected, unscheduled)
    emulate(monkeypatch, emulator.kernel)
    ours = with_a_schedule(make_learner(GAME, DQN_SETTINGS, EMULATED, "cpu", streams=2))
    assert distance(expected, weights_after(ours, len(RETURNS))) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("use_kernels", ["off", "on"])
def test_captured_updates_follow_the_schedule_of_returns(use_kernels: Any) -> None:
    """And the streams of a replay that goes on between them."""
    eager = with_a_schedule(make_learner(GAME, DQN_SETTINGS, PLAIN, "cuda", streams=3))
    captured = dataclasses.replace(PLAIN, cuda_graphs="on", kernels=use_kernels)
    ours = with_a_schedule(make_learner(GAME, DQN_SETTINGS, captured, "cuda", streams=3))
    for _ in range(2):
        # A tenth of what the schedule is worth.
        assert distance(weights_after(eager, len(RETURNS)), weights_after(ours, len(RETURNS))) < 1e-4
        fill(eager.replay)
        fill(ours.replay)


@pytest.mark.parametrize("double", [True, False])
def test_gradients_of_a_residual_encoder(double: bool, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """All passes of an update at once, of two networks that differ, from views to the gradients of every weight."""
    spec = dataclasses.replace(GAME, frame_shape=(1, 11, 9))
    agent = RainbowConfig(batch_size=2, hidden_dim=64, seed_steps=20, k=2, double=double, weight_decay=0.0)
    plain = make_learner(spec, agent, PLAIN, "cpu")
    emulate(monkeypatch, emulator.kernel)
    monkeypatch.setattr(runtime, "multiplies_wide", lambda: True)
    monkeypatch.setattr(runtime, "shared_bytes_per_block", lambda: 227 * 1024)
    monkeypatch.setattr(runtime, "compile_together", lambda _: None)
    ours = make_learner(spec, agent, dataclasses.replace(EMULATED, precision="bf16"), "cpu")
    asked = emulate(monkeypatch, emulator.kernel)
    for learner in (plain, ours):
        with torch.no_grad():  # as they are later in training
            g = torch.Generator().manual_seed(0)
            for weight in learner.agent.modules["target"].parameters():
                weight.add_(0.01 * torch.randn(weight.shape, generator=g))
    expected, found = gradients_of(plain), gradients_of(ours)
    assert asked.count("conv_same") == 14 + 14
    assert_same_gradients(found, expected, within=0.15)
    # What acts goes the same way, alone.
    images = torch.randint(256, (2, *spec.observation_shape), dtype=torch.uint8)
    with torch.no_grad():
        features = [each.backend.encode(each.agent.modules["target"].encoder, images) for each in (plain, ours)]
    assert asked.count("conv_same") == 14 + 14 + 14
    assert float((features[1] - features[0]).norm() / features[0].norm()) < 0.02


@pytest.mark.parametrize("broken", ["pack", "stacked"])
def test_where_a_kernel_of_a_residual_encoder_does_not_compile(
    broken: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of them, and one that is compiled after them: none is launched."""

    def kernel(name: str, *args: Any) -> Any:
        if name == broken:
            raise kernels.KernelError("a kernel does not compile for sm_999:\nmany\nlines")
        return emulator.kernel(name, *args)

    spec = dataclasses.replace(GAME, frame_shape=(1, 11, 9))
    agent = RainbowConfig(batch_size=2, hidden_dim=64, seed_steps=20)
    asked = emulate(monkeypatch, kernel)
    monkeypatch.setattr(runtime, "multiplies_wide", lambda: True)
    monkeypatch.setattr(runtime, "shared_bytes_per_block", lambda: 227 * 1024)
    learner = make_learner(spec, agent, dataclasses.replace(EMULATED, precision="bf16"), "cpu")
    assert "Going on with PyTorch's kernels: a kernel does not compile for sm_999." in capsys.readouterr().err
    asked.clear()
    learner.update()
    assert not asked


@pytest.mark.gpu
@needs_hopper
def test_a_captured_update_of_a_residual_encoder_has_the_bits_of_one_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs beside each other there runs one after the other here: packing, gradients of weights, the step of the
    wide layer, the heads."""
    monkeypatch.setattr("drq.engine.backend.WIDE_LAYER", 1000)
    agent = RainbowConfig(batch_size=32, hidden_dim=256, seed_steps=20, k=2, weight_decay=0.1)
    found = []
    for cuda_graphs in ("on", "off"):
        engine = EngineConfig(precision="bf16", compile="off", cuda_graphs=cuda_graphs)
        learner = make_learner(dataclasses.replace(GAME, frame_shape=(1, 84, 84)), agent, engine, "cuda")
        assert learner.backend._most_together
        found.append(weights_after(learner, 20))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
