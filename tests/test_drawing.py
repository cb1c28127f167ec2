"""Frames that are drawn where the networks are: the same run, and none of them visits the host."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drq import envs, train
from drq.agents import make_agent
from drq.config import EngineConfig, EnvConfig, EvalConfig, ReplayConfig, SACConfig, TrainConfig
from drq.engine import DrawnStack, EngineSettings, FastBackend, HostActor, KernelError
from drq.engine.kernels import runtime
from drq.envs.raycast import Scene
from drq.envs.stack import FrameStack
from drq.presets import preset
from drq.replay import Replay
from drq.training.run import Trainer
from emulation import Emulator
from environments import needs_compiler
from runs import assert_same_run, small, state

pytestmark = needs_compiler
CARTPOLE = "dmc/cartpole-swingup"


def env_of(render: Any) -> Any:
    return envs.make(CARTPOLE, EnvConfig(render=render, image_size=24), 8)


def run_of(folder: Path, render: Any, **changes: Any) -> TrainConfig:
    """120 agent steps of Cartpole: the second episode begins before the end, the replay's ring is full before that."""
    env = EnvConfig(image_size=24, action_repeat=16, render=render)
    evaluations = EvalConfig(every=960, episodes=1, video=False)
    return small(folder, CARTPOLE, steps=1920, env=env, eval=evaluations, **changes)


def draw_by_emulation(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An engine on the CPU that draws frames itself. The list grows each time it is asked whether it can."""
    asked: list[int] = []
    monkeypatch.setattr(runtime, "kernel", emulator.kernel)
    monkeypatch.setattr("drq.training.components.draws_frames", lambda _: not asked.append(1))
    return asked


@pytest.fixture
def drawing_engine(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return draw_by_emulation(emulator, monkeypatch)


@pytest.fixture(scope="module")
def whole(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that draws by itself, without a pause."""
    folder = tmp_path_factory.mktemp("drawn") / "whole"
    with pytest.MonkeyPatch.context() as monkeypatch:
        asked = draw_by_emulation(emulator, monkeypatch)
        trainer = Trainer(run_of(folder, "cuda"), quiet=True)
        trainer.run()
    assert asked
    assert isinstance(trainer.loop.episodes.stacks[0], DrawnStack)
    return folder


def test_a_stack_holds_what_the_host_would_have_drawn(kernel_device: str) -> None:
    drawn, undrawn = env_of("ray"), env_of("cuda")
    assert undrawn.simulator.leave_undrawn()
    host, device = FrameStack(drawn.spec), DrawnStack(undrawn.spec, torch.device(kernel_device))
    kept: list[tuple[torch.Tensor, np.ndarray]] = []

    def check() -> None:
        np.testing.assert_array_equal(device.on_host(), host.observation)
        np.testing.assert_array_equal(device.newest.cpu(), host.newest)
        for tensor, before in kept[-1:]:  # it may still be read: the newest is not drawn over it
            np.testing.assert_array_equal(tensor.cpu(), before)
        kept.append((device.observation, host.observation.copy()))

    for seed in range(2):
        host.reset(drawn.reset(seed))
        device.reset(undrawn.reset(seed))
        check()
        for number in range(4):
            action = np.array([1 - number % 2 * 2], np.float32)
            scene = undrawn.step(action).frame
            assert isinstance(scene, Scene)
            host.push(drawn.step(action).frame)
            device.push(scene)  # type: ignore[arg-type]
            check()


@pytest.mark.gpu
def test_a_busy_gpu_draws_over_nothing_that_is_still_read() -> None:
    """What reads an observation comes to it late, while the host hands over the next scenes."""
    drawn, undrawn = env_of("ray"), env_of("cuda")
    assert undrawn.simulator.leave_undrawn()
    host, device = FrameStack(drawn.spec), DrawnStack(undrawn.spec, torch.device("cuda"))
    busy = torch.randn(4096, 4096, device="cuda")
    read: list[tuple[torch.Tensor, np.ndarray]] = []
    for seed in range(3):
        host.reset(drawn.reset(seed))
        device.reset(undrawn.reset(seed))
        for number in range(20):
            for _ in range(number % 3):  # so that some are waited for and some are not
                torch.mm(busy, busy)
            read.append((device.observation.clone(), host.observation.copy()))
            action = np.array([1 - number % 2 * 2], np.float32)
            host.push(drawn.step(action).frame)
            device.push(undrawn.step(action).frame)
    for found, expected in read:
        np.testing.assert_array_equal(found.cpu(), expected)


def test_what_opengl_draws_is_drawn_as_before() -> None:
    env = env_of("fast")
    assert not envs.leave_undrawn(env)
    assert not envs.leave_undrawn(envs.make("toy/reach", EnvConfig(), 1))


def test_a_run_that_draws_by_itself_is_the_same_run(tmp_path: Path, whole: Path, drawing_engine: list[int]) -> None:
    """But for who draws: to the bit, as the emulated kernel's pixels are the CPU's."""
    trainer = Trainer(run_of(tmp_path / "ray", "ray"), quiet=True)
    trainer.run()
    assert isinstance(trainer.loop.episodes.stacks[0], FrameStack)
    assert_same_run(tmp_path / "ray", whole)


def test_a_kernel_that_does_not_compile_leaves_drawing_to_the_cpu(
    tmp_path: Path, drawing_engine: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise KernelError("a kernel does not compile for sm_00:\nand why")

    monkeypatch.setattr(runtime, "kernel", refuse)
    trainer = Trainer(dataclasses.replace(run_of(tmp_path, "cuda"), steps=320), quiet=True)
    trainer.run()
    assert isinstance(trainer.loop.episodes.stacks[0], FrameStack)
    assert "The CPU draws: a kernel does not compile for sm_00.\n" in capsys.readouterr().err


class Crash(BaseException):
    """Stands for the power going out: nothing catches it."""


def test_it_resumes_exactly(
    tmp_path: Path, whole: Path, drawing_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        original = Replay.add

        def add(self: Replay, *args: Any) -> None:
            original(self, *args)
            if self.streams[0].transitions_added == 100:
                raise Crash

        patch.setattr(Replay, "add", add)
        with pytest.raises(Crash):
            train(run_of(tmp_path / "run", "cuda"), quiet=True)
    train(run_of(tmp_path / "run", "cuda"), quiet=True)
    assert drawing_engine
    assert_same_run(whole, tmp_path / "run")


def test_a_gpus_run_goes_on_without_one(
    tmp_path: Path, drawing_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    half = dataclasses.replace(run_of(tmp_path / "run", "cuda"), steps=960)
    train(half, quiet=True)
    monkeypatch.undo()  # no engine that draws
    trainer = Trainer(run_of(tmp_path / "run", "cuda"), quiet=True)
    trainer.run()
    assert isinstance(trainer.loop.episodes.stacks[0], FrameStack)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_acting_on_a_gpu_reads_either(graphs: Any) -> None:
    """An observation on the GPU gives the action that the same one on the host gives."""
    config = preset("cpu", CARTPOLE)
    env = env_of("cuda")
    engine = EngineSettings.resolve(EngineConfig(cuda_graphs=graphs), torch.device("cuda"), config.agent, 0)
    agent = make_agent(env.spec, SACConfig(hidden_dim=16), FastBackend(engine), 0)
    noise = agent.evaluation(1, torch.Generator())
    for seed in range(3):
        images = np.random.default_rng(seed).integers(0, 256, (1, *env.spec.observation_shape), dtype=np.uint8)
        host, device = HostActor(agent, engine), HostActor(agent, engine)
        for shift in range(3):
            pictures = np.roll(images, shift)
            np.testing.assert_array_equal(
                host.act(pictures, noise), device.act(torch.from_numpy(pictures).cuda(), noise)
            )


@pytest.mark.gpu
def test_a_whole_run_on_a_gpu(tmp_path: Path) -> None:
    """`auto` draws on the GPU; interrupted by a budget and gone on with, the run is the uninterrupted one."""
    changes = {"device": "cuda", "replay": ReplayConfig(capacity=60)}
    whole = Trainer(run_of(tmp_path / "whole", "auto", **changes), quiet=True)
    whole.run()
    assert whole.config.env.render == "cuda"
    assert isinstance(whole.loop.episodes.stacks[0], DrawnStack)
    host = Trainer(run_of(tmp_path / "host", "ray", **changes), quiet=True)
    host.run()
    frames = [run.loop.learner.replay.rings.frames.cpu().int() for run in (whole, host)]
    # Actions follow from pixels: only until an update could see a last bit need they agree, the seed steps.
    assert (frames[0][:20] - frames[1][:20]).abs().max() <= 1
    train(dataclasses.replace(run_of(tmp_path / "run", "auto", **changes), steps=960), quiet=True)
    train(run_of(tmp_path / "run", "auto", **changes), quiet=True)
    assert state(tmp_path / "run").keys() == state(tmp_path / "whole").keys()
