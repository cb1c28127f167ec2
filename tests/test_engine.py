"""Every way of running an update computes the same function, within what its precision allows."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import types
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from drq.agents import make_agent
from drq.config import AgentConfig, DQNConfig, EngineConfig, SACConfig
from drq.engine import kernels
from drq.engine.aligned import align
from drq.engine.fused import StackedEncoding
from drq.engine.graphs import without_a_trace
from drq.engine.kernels import runtime
from drq.engine.learner import Learner
from drq.engine.settings import EngineSettings
from drq.envs.protocol import EnvSpec
from drq.errors import UserError
from drq.networks.encoders import ConvReLU
from drq.replay import Replay
from emulation import Emulator

CONTROL = EnvSpec("toy/control", (3, 32, 32), 3, "continuous", 2, 1, 20)
GAME = EnvSpec("toy/game", (1, 44, 44), 4, "discrete", 5, 1, 20)
SAC_SETTINGS = SACConfig(batch_size=16, hidden_dim=64, seed_steps=20)
DQN_SETTINGS = DQNConfig(batch_size=16, hidden_dim=64, seed_steps=20, n_step=3)
PLAIN = EngineConfig(precision="float32", compile="off", cuda_graphs="off", kernels="off")


def make_learner(spec: EnvSpec, agent: AgentConfig, engine: EngineConfig, device: str) -> Learner:
    """A learner with a replay of random pictures; the same for the same arguments."""
    place = torch.device(device)
    rng = np.random.default_rng(3)
    replay = Replay(spec, 150, n_step=agent.n_step, device=place)
    for _ in range(10):
        replay.begin(rng.integers(0, 256, spec.frame_shape, dtype=np.uint8))
        for t in range(20):
            action = (
                rng.uniform(-1, 1, spec.action_size).astype(np.float32)
                if spec.action_kind == "continuous"
                else int(rng.integers(spec.action_size))
            )
            frame = rng.integers(0, 256, spec.frame_shape, dtype=np.uint8)
            replay.add(action, float(rng.normal()), float(rng.random() > 0.1), t == 19, frame)
    return Learner(
        make_agent(spec, agent, place, seed=5), replay, EngineSettings.resolve(engine, place, agent), seed=11
    )


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


def test_equal_learners_do_equal_things() -> None:
    one, other = (make_learner(CONTROL, SAC_SETTINGS, PLAIN, "cpu") for _ in range(2))
    first, second = weights_after(one, 3), weights_after(other, 3)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_warm_up_leaves_no_trace() -> None:
    """What capturing a graph does beforehand must not be part of the run."""
    plain, warmed = (make_learner(CONTROL, SAC_SETTINGS, PLAIN, "cpu") for _ in range(2))
    for learner in (plain, warmed):
        learner.update()
    with without_a_trace(warmed.agent, warmed.generator):
        for _ in range(3):
            warmed.update()
    warmed.updates = plain.updates
    first, second = weights_after(plain, 2), weights_after(warmed, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [({}, "float32"), ({"avx512_f": True}, "float32"), ({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16")],
)
def test_settings_by_device(
    capabilities: dict[str, bool], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    cpu = EngineSettings.resolve(EngineConfig(), torch.device("cpu"), SAC_SETTINGS)
    assert cpu.precision == precision
    assert not any((cpu.compile, cpu.cuda_graphs, cpu.kernels, cpu.eval_process))
    monkeypatch.delattr("torch.cpu.get_capabilities")  # as in PyTorch 2.11
    assert EngineSettings.resolve(EngineConfig(), torch.device("cpu"), SAC_SETTINGS).precision == "float32"
    with pytest.raises(UserError, match="tf32 is a GPU's arithmetic"):
        EngineSettings.resolve(EngineConfig(precision="tf32"), torch.device("cpu"), SAC_SETTINGS)


GPU_ENGINES = {
    "graphs": (dataclasses.replace(PLAIN, cuda_graphs="on"), 1e-4),
    "compiled": (dataclasses.replace(PLAIN, compile="on"), 1e-4),
    "compiled graphs": (dataclasses.replace(PLAIN, compile="on", cuda_graphs="on"), 1e-4),
    "tf32 graphs": (dataclasses.replace(PLAIN, precision="tf32", cuda_graphs="on"), 5e-3),
    "bf16": (dataclasses.replace(PLAIN, precision="bf16"), 0.02),
    "kernels": (dataclasses.replace(PLAIN, precision="bf16", kernels="on"), 0.02),
    "default": (EngineConfig(), 0.02),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_ENGINES)
@pytest.mark.parametrize(("spec", "agent"), CASES, ids=["sac", "dqn"])
def test_every_engine_on_the_gpu(spec: EnvSpec, agent: AgentConfig, name: str) -> None:
    engine, tolerance = GPU_ENGINES[name]
    plain, fast = make_learner(spec, agent, PLAIN, "cuda"), make_learner(spec, agent, engine, "cuda")
    assert distance(weights_after(plain, 4), weights_after(fast, 4)) < tolerance
    if name in ("kernels", "default") and spec is CONTROL:
        assert fast.fused


@pytest.mark.gpu
def test_targets_computed_beside_are_the_same() -> None:
    """A branch that read what the other has not written yet, or wrote where it still reads, would show in some bit."""
    agent = dataclasses.replace(SAC_SETTINGS, batch_size=256, hidden_dim=1024)
    beside = make_learner(CONTROL, agent, EngineConfig(compile="off"), "cuda")
    after = make_learner(CONTROL, agent, EngineConfig(compile="off"), "cuda")
    assert beside.agent.beside is not nullcontext
    after.agent.beside = nullcontext
    first, second = weights_after(beside, 40), weights_after(after, 40)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("spec", "agent"), CASES, ids=["sac", "dqn"])
def test_kernels_in_a_learner_equal_plain_pytorch(
    spec: EnvSpec, agent: AgentConfig, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated; convolutions are PyTorch's on both sides."""
    plain = weights_after(make_learner(spec, agent, PLAIN, "cpu"), 3)
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(runtime, "kernel", emulator.kernel)
    monkeypatch.setattr(
        EngineSettings, "resolve", lambda *_: EngineSettings(torch.device("cpu"), "float32", False, False, True, False)
    )
    ours = make_learner(spec, agent, PLAIN, "cpu")
    assert isinstance(ours.agent.encoding, StackedEncoding)
    assert isinstance(ours.replay.write, kernels.Store)
    convolutions = [module for module in ours.agent.modules.modules() if isinstance(module, ConvReLU)]
    assert {module.bias_relu for module in convolutions} == {kernels.bias_relu}
    assert distance(plain, weights_after(ours, 3)) < 1e-5


@pytest.mark.parametrize("broken", ["transitions", "store", "adam", "gradient_norm", "bias_relu", "stacked"])
def test_where_a_kernel_does_not_compile_pytorchs_are_used(
    broken: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kernel(name: str, *args: Any) -> Any:
        if name == broken:
            raise kernels.KernelError("a kernel does not compile for sm_999:\nmany\nlines")
        return emulator.kernel(name, *args)

    plain = weights_after(make_learner(GAME, DQN_SETTINGS, PLAIN, "cpu"), 2)
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(runtime, "kernel", kernel)
    monkeypatch.setattr(
        EngineSettings, "resolve", lambda *_: EngineSettings(torch.device("cpu"), "float32", False, False, True, False)
    )
    found = weights_after(make_learner(GAME, DQN_SETTINGS, PLAIN, "cpu"), 2)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    said = "Going on with PyTorch's kernels: a kernel does not compile for sm_999."
    assert capsys.readouterr().err.splitlines() == [said]


@pytest.mark.gpu
def test_acting_as_a_graph_equals_acting() -> None:
    plain = make_learner(CONTROL, SAC_SETTINGS, PLAIN, "cuda")
    graph = make_learner(CONTROL, SAC_SETTINGS, dataclasses.replace(PLAIN, cuda_graphs="on"), "cuda")
    rng = np.random.default_rng(0)
    for agent_step in range(5):
        observation = rng.integers(0, 256, CONTROL.observation_shape, dtype=np.uint8)
        np.testing.assert_allclose(
            plain.action(observation, agent_step)(), graph.action(observation, agent_step)(), atol=1e-5
        )


@pytest.mark.parametrize("width", [50, 48])
def test_padding_a_linear_layer_changes_nothing(width: int) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(5000, width, dtype=torch.float64)
    other = copy.deepcopy(plain)
    inputs = torch.randn(3, 5000, dtype=torch.float64)
    agent = types.SimpleNamespace(modules=torch.nn.ModuleDict({"trunk": other, "narrow": torch.nn.Linear(50, 7)}))
    align(agent)  # type: ignore[arg-type]
    assert ("forward" in vars(other)) == (width == 50)
    assert "forward" not in vars(agent.modules["narrow"])
    upstream = torch.randn(3, width, dtype=torch.float64)
    for layer in (plain, other):
        layer(inputs).backward(upstream)
    torch.testing.assert_close(other(inputs), plain(inputs))
    torch.testing.assert_close(other.weight.grad, plain.weight.grad)
    torch.testing.assert_close(other.bias.grad, plain.bias.grad)
