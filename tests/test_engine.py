"""Every way of running an update computes the same function, within what its precision allows."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from drq.agents import Returns, make_agent
from drq.agents.sac import SAC
from drq.backend import Backend
from drq.config import AgentConfig, DQNConfig, EngineConfig, SACConfig
from drq.engine import EngineSettings, FastBackend, Learner, kernels
from drq.engine.graphs import without_a_trace
from drq.engine.kernels import encoder, runtime
from drq.engine.staging import StagedStore
from drq.envs.protocol import EnvSpec
from drq.errors import UserError
from drq.replay import Batch, Choice, Replay, UniformSampler
from emulation import Emulator

CONTROL = EnvSpec("toy/control", (3, 32, 32), 3, "continuous", 2, 1, 20)
LARGE_IMAGES = dataclasses.replace(CONTROL, frame_shape=(3, 84, 84))
GAME = EnvSpec("toy/game", (1, 44, 44), 4, "discrete", 5, 1, 20)
SAC_SETTINGS = SACConfig(batch_size=16, hidden_dim=64, seed_steps=20)
DQN_SETTINGS = DQNConfig(batch_size=16, hidden_dim=64, seed_steps=20, n_step=3)
PLAIN = EngineConfig(precision="float32", compile="off", cuda_graphs="off", kernels="off")


def make_learner(
    spec: EnvSpec, agent: AgentConfig, engine: EngineConfig | EngineSettings, device: str, streams: int = 1
) -> Learner:
    """A learner with a replay of random pictures; the same for the same arguments."""
    if isinstance(engine, EngineConfig):
        engine = EngineSettings.resolve(engine, torch.device(device), agent)
    backend = FastBackend(engine)
    replay = Replay(spec, streams * 150, n_step=agent.n_step, discount=agent.discount, streams=streams, backend=backend)
    learner = Learner(make_agent(spec, agent, backend, seed=5), replay, backend, seed=11)
    fill(replay)
    return learner


def fill(replay: Replay) -> None:
    spec, rng = replay.spec, np.random.default_rng(3)
    for stream in range(len(replay.streams)):
        for _ in range(10 - stream):
            replay.begin(rng.integers(0, 256, spec.frame_shape, dtype=np.uint8), stream)
            for t in range(20):
                action = (
                    rng.uniform(-1, 1, spec.action_size).astype(np.float32)
                    if spec.action_kind == "continuous"
                    else int(rng.integers(spec.action_size))
                )
                frame = rng.integers(0, 256, spec.frame_shape, dtype=np.uint8)
                replay.add(action, float(rng.normal()), float(rng.random() > 0.1), t == 19, frame, stream)


def weights_after(learner: Learner, updates: int) -> dict[str, torch.Tensor]:
    for _ in range(updates):
        learner.update()
    return {name: value.detach().double().cpu() for name, value in learner.agent.modules.state_dict().items()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of all weights."""
    return float(
        torch.stack([(one[name] - other[name]).norm() for name in one]).norm()
        / torch.stack([value.norm() for value in one.values()]).norm()
    )


CASES = [(CONTROL, SAC_SETTINGS), (GAME, DQN_SETTINGS)]


@pytest.mark.parametrize(("spec", "agent"), CASES, ids=["sac", "dqn"])
def test_bf16_on_the_cpu_stays_near_float32(spec: EnvSpec, agent: AgentConfig) -> None:
    plain = make_learner(spec, agent, PLAIN, "cpu")
    short = make_learner(spec, agent, dataclasses.replace(PLAIN, precision="bf16"), "cpu")
    assert distance(weights_after(plain, 4), weights_after(short, 4)) < 0.02
    for name, value in short.agent.modules.state_dict().items():
        assert value.dtype == torch.float32, name
    loss = next(name for name in plain.metrics() if name.endswith("loss"))
    assert short.metrics()[loss] == pytest.approx(plain.metrics()[loss], rel=0.1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs a C++ compiler")
def test_compiled_on_the_cpu_equals_eager() -> None:
    agent = dataclasses.replace(SAC_SETTINGS, batch_size=4, hidden_dim=8, feature_dim=8)
    plain = make_learner(CONTROL, agent, PLAIN, "cpu")
    compiled = make_learner(CONTROL, agent, dataclasses.replace(PLAIN, compile="on"), "cpu")
    assert distance(weights_after(plain, 3), weights_after(compiled, 3)) < 1e-4


NO_COMPILER = RuntimeError("Failed to find C compiler\nmore")
KILLED = ImportError("/tmp/cr6l.main.so: file too short", path="/tmp/cr6l.main.so")


@pytest.mark.parametrize(
    ("gradients_only", "error", "remedy"),
    [(False, NO_COMPILER, ""), (True, KILLED, " Delete that file, and later runs compile again.")],
    ids=["no compiler", "a compiler that was killed"],
)
def test_where_torch_compile_fails_the_update_is_not_compiled(
    gradients_only: bool,
    error: Exception,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*args: Any) -> Any:
        raise error

    backend = aot_autograd(fw_compiler=lambda graph, _: graph if gradients_only else fails(), bw_compiler=fails)
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile(function, backend=backend, **how))
    plain = make_learner(CONTROL, SAC_SETTINGS, PLAIN, "cpu")
    failing = make_learner(CONTROL, SAC_SETTINGS, dataclasses.replace(PLAIN, compile="on"), "cpu")
    expected, found = weights_after(plain, 2), weights_after(failing, 2)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    said = f"Going on without torch.compile: {str(error).splitlines()[0]}.{remedy}"
    assert capsys.readouterr().err.splitlines() == [said]

    def without_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    backend = FastBackend(failing.engine)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with pytest.raises(torch.OutOfMemoryError):  # is no fault of the compiler's
        backend.run(without_memory)
    assert not backend._uncompilable


def test_equal_learners_do_equal_things() -> None:
    one, other = (make_learner(CONTROL, SAC_SETTINGS, PLAIN, "cpu") for _ in range(2))
    first, second = weights_after(one, 3), weights_after(other, 3)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_warm_up_leaves_no_trace() -> None:
    """What capturing a graph does beforehand must not be part of the run."""
    plain, warmed = (make_learner(CONTROL, SAC_SETTINGS, PLAIN, "cpu") for _ in range(2))
    for learner in (plain, warmed):
        learner.update()
    with without_a_trace(warmed.agent, warmed.replay.sampler, warmed.generator):
        for _ in range(3):
            warmed.update()
    warmed.updates = plain.updates
    first, second = weights_after(plain, 2), weights_after(warmed, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [({}, "float32"), ({"avx512_f": True}, "float32"), ({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16")],
)
def test_settings_by_device(capabilities: dict[str, bool], precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    cpu = EngineSettings.resolve(EngineConfig(), torch.device("cpu"), SAC_SETTINGS)
    assert cpu.precision == precision
    assert not any((cpu.compile, cpu.cuda_graphs, cpu.kernels, cpu.eval_process))
    monkeypatch.delattr("torch.cpu.get_capabilities")  # as in PyTorch 2.11
    assert EngineSettings.resolve(EngineConfig(), torch.device("cpu"), SAC_SETTINGS).precision == "float32"
    with pytest.raises(UserError, match="tf32 is a GPU's arithmetic"):
        EngineSettings.resolve(EngineConfig(precision="tf32"), torch.device("cpu"), SAC_SETTINGS)


def test_kernels_that_were_asked_for_are_not_left_out_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, asked = torch.device("cuda"), EngineConfig(precision="float32", kernels="on")
    monkeypatch.setattr(kernels, "available", lambda: False)  # as on a GPU without bfloat16
    with pytest.raises(UserError, match=r"The kernels need .* leave --engine.kernels at auto"):
        EngineSettings.resolve(asked, gpu, SAC_SETTINGS)
    monkeypatch.setattr(kernels, "available", lambda: True)
    assert EngineSettings.resolve(asked, gpu, SAC_SETTINGS).kernels


GPU_ENGINES = {
    "graphs": (dataclasses.replace(PLAIN, cuda_graphs="on"), 1e-4),
    "compiled": (dataclasses.replace(PLAIN, compile="on"), 1e-4),
    "compiled graphs": (dataclasses.replace(PLAIN, compile="on", cuda_graphs="on"), 1e-4),
    "tf32 graphs": (dataclasses.replace(PLAIN, precision="tf32", cuda_graphs="on"), 0.1),
    "bf16": (dataclasses.replace(PLAIN, precision="bf16"), 0.35),
    "kernels": (dataclasses.replace(PLAIN, precision="bf16", kernels="on"), 0.35),
    "default": (EngineConfig(), 0.35),
}
"""Each with how far a gradient may be from float32's, as a share of it. Of 16 random pictures they were off by up to
2e-6 in float32, 0.05 in TF32 and 0.25 in bfloat16 on an H200; one that is missing is off by 1."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_ENGINES)
@pytest.mark.parametrize(("spec", "agent"), CASES, ids=["sac", "dqn"])
def test_every_engine_on_the_gpu(spec: EnvSpec, agent: AgentConfig, name: str) -> None:
    engine, tolerance = GPU_ENGINES[name]
    if isinstance(agent, DQNConfig):
        agent = dataclasses.replace(agent, max_grad_norm=1e9)  # only PyTorch writes clipped gradients back
    plain = make_learner(spec, agent, PLAIN, "cuda")
    expected, later = gradients_of(plain), weights_after(plain, 3)  # before the other allows TF32
    fast = make_learner(spec, agent, engine, "cuda")
    assert_same_gradients(gradients_of(fast), expected, within=tolerance)
    assert distance(later, weights_after(fast, 3)) < 0.02
    if name in ("kernels", "default") and spec is CONTROL:
        assert fast.backend.fused


@pytest.mark.gpu
def test_targets_computed_beside_are_the_same() -> None:
    """A branch that read what the other has not written yet, or wrote where it still reads, would show in some bit."""
    agent = dataclasses.replace(SAC_SETTINGS, batch_size=256, hidden_dim=1024)
    beside = make_learner(CONTROL, agent, EngineConfig(compile="off"), "cuda")
    after = make_learner(CONTROL, agent, EngineConfig(compile="off"), "cuda")
    assert beside.backend._sides is not None
    after.backend._sides = None
    first, second = weights_after(beside, 40), weights_after(after, 40)
    assert beside.backend._sides._used  # a branch was taken
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
def test_a_busy_gpu_makes_the_same_updates() -> None:
    """Other work moves the time at which each block runs, and nothing else."""
    agent, engine = SACConfig(batch_size=128), EngineConfig(compile="off")
    alone, beside = (make_learner(LARGE_IMAGES, agent, engine, "cuda") for _ in range(2))
    stream, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    expected = weights_after(alone, 40)
    for _ in range(40):
        with torch.cuda.stream(stream):
            for _ in range(20):
                torch.mm(busy, busy)
        beside.update()
    found = weights_after(beside, 0)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


EMULATED = EngineSettings(torch.device("cpu"), "float32", False, False, kernels=True, eval_process=False)


def emulate(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> list[str]:
    """Has FastBackends use emulated kernels; gives the names of those that are asked for, as they are."""
    asked: list[str] = []

    def asking(name: str, *args: Any) -> Any:
        asked.append(name)
        return kernel(name, *args)

    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(runtime, "kernel", asking)
    return asked


def gradients_of(learner: Learner) -> dict[str, torch.Tensor]:
    """What an update has found for all that it trains."""
    learner.update()
    parameters = learner.agent.modules.named_parameters()
    return {name: parameter.grad.double().cpu() for name, parameter in parameters if parameter.grad is not None}


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, within: float) -> None:
    """But for bfloat16. Weights say less after a few steps of Adam: without the encoder's gradient they are as near."""
    assert found.keys() == expected.keys()
    for name, exact in expected.items():
        assert float((found[name] - exact).norm() / exact.norm()) < within, name


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


@pytest.mark.gpu
@pytest.mark.parametrize("update", [0, 1])
@pytest.mark.parametrize("batch_size", [128, 512])
def test_gradients_of_a_batch_of_the_paper(batch_size: int, update: int) -> None:
    """Captured: in an update that trains the actor, and in one that does not."""
    agent = SACConfig(batch_size=batch_size)
    found = []
    for engine in (PLAIN, EngineConfig(compile="off")):
        learner = make_learner(LARGE_IMAGES, agent, engine, "cuda")
        learner.updates = update
        found.append(gradients_of(learner))
    assert learner.backend.fused
    assert_same_gradients(*reversed(found), within=0.15)  # on an H200 0.11 of 128 transitions and 0.04 of 512


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


# Heads compute in float32: bfloat16 has steps of 1 near 200.

LARGE_NETWORKS = dataclasses.replace(SAC_SETTINGS, batch_size=256, hidden_dim=1024)


@pytest.mark.parametrize(
    ("spec", "agent", "engine", "device"),
    [
        (CONTROL, SAC_SETTINGS, dataclasses.replace(PLAIN, precision="bf16"), "cpu"),
        pytest.param(LARGE_IMAGES, LARGE_NETWORKS, EngineConfig(), "cuda", marks=pytest.mark.gpu),
        pytest.param(LARGE_IMAGES, LARGE_NETWORKS, EngineConfig(compile="off"), "cuda", marks=pytest.mark.gpu),
    ],
    ids=["bf16 on the CPU", "default", "default, not compiled"],
)
def test_targets_of_large_values_are_float32s(
    spec: EnvSpec, agent: AgentConfig, engine: EngineConfig, device: str
) -> None:
    """Of the same transitions, views and actions' noise, by the same weights."""

    def targets(engine: EngineConfig) -> tuple[torch.Tensor, Batch]:
        learner = make_learner(spec, agent, engine, device)
        assert isinstance(learner.agent, SAC)
        with torch.no_grad():
            for q in (learner.agent.target.q1, learner.agent.target.q2):
                q[4].bias.fill_(200.0)  # type: ignore[union-attr, operator]
                q[4].weight.mul_(5.0)  # type: ignore[union-attr, operator]
        learner.engine.apply_globally()
        generator = torch.Generator(device).manual_seed(0)
        draws = learner.agent.draw(generator)
        random_bits = learner.replay.draw(learner.agent.batch_size, generator)
        batch = learner.backend.batch(learner.replay, random_bits)
        return learner.backend.run(learner.agent.targets, batch, draws), batch

    found, batch = targets(engine)
    expected, same = targets(PLAIN)
    assert batch.slots is not None
    assert same.slots is not None
    assert torch.equal(batch.slots, same.slots)
    bootstrapped = batch.discount > 0
    assert 190 < float(expected[bootstrapped].mean()) < 210
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)  # it did compute in another precision
    error = (found - expected).double()
    assert abs(float(error.mean())) < 0.01
    assert float(error.square().mean().sqrt()) < 0.05
    # The bound is one that rounded values would break.
    rounded = (expected.bfloat16().float() - expected).double()
    assert float(rounded.square().mean().sqrt()) > 0.1


@pytest.mark.gpu
def test_acting_as_a_graph_equals_acting() -> None:
    plain = make_learner(CONTROL, SAC_SETTINGS, PLAIN, "cuda")
    graph = make_learner(CONTROL, SAC_SETTINGS, dataclasses.replace(PLAIN, cuda_graphs="on"), "cuda")
    rng = np.random.default_rng(0)
    for agent_step in range(5):
        observation = rng.integers(0, 256, CONTROL.observation_shape, dtype=np.uint8)
        np.testing.assert_allclose(
            plain.actions(observation[None], agent_step)(), graph.actions(observation[None], agent_step)(), atol=1e-5
        )


@pytest.mark.parametrize(
    ("inputs", "outputs", "computed"),
    [(5000, 50, 64), (5000, 48, 48), (5000, 64, 64), (5000, 70, 128), (50, 7, 7)],
)
def test_padding_a_linear_layer_changes_nothing(
    inputs: int, outputs: int, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a wide layer with outputs that tensor cores do not like, a few more are computed, and dropped."""
    torch.manual_seed(0)
    backend = FastBackend(EngineSettings(torch.device("cuda"), "tf32", False, False, False, False))
    plain = torch.nn.Linear(inputs, outputs, dtype=torch.float64)
    parameters = plain.weight, plain.bias
    x, upstream = torch.randn(3, inputs, dtype=torch.float64), torch.randn(3, outputs, dtype=torch.float64)
    expected = plain(x)
    gradients = torch.autograd.grad(expected, parameters, upstream)
    linear, rows = torch.nn.functional.linear, []

    def recording(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rows.append(len(weight))
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", recording)
    found = backend.wide_linear(x, *parameters)
    assert rows == [computed]
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(torch.autograd.grad(found, parameters, upstream), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_only_a_gpu_gets_padded_layers() -> None:
    """Bit for bit what PyTorch computes, elsewhere."""
    torch.manual_seed(0)
    backend = FastBackend(EngineSettings(torch.device("cpu"), "float32", False, False, False, False))
    layer, x = torch.nn.Linear(5000, 50), torch.randn(3, 5000)
    assert torch.equal(backend.wide_linear(x, layer.weight, layer.bias), layer(x))
