"""Evaluations beside training are those that training would have made itself."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
import torch

import drq
from drq import envs
from drq.agents import make_agent
from drq.agents.protocol import Agent
from drq.backend import Backend
from drq.config import EngineConfig, EvalConfig, TrainConfig
from drq.engine.settings import EngineSettings
from drq.envs import EnvironmentGroup
from drq.settings import config_to_json
from drq.training import evaluation_service
from drq.training.checkpoint_reader import newest_agent_step
from drq.training.evaluation_service import (
    EvaluationRequest,
    InlineEvaluation,
    SubprocessEvaluation,
    packed,
    receive_weights,
    settings_beside_training,
)
from runs import assert_same_run, rows, small

BESIDE = EngineConfig(eval_process="on")


def test_a_finished_run_has_a_checkpoint_of_its_last_step(whole: Path, tmp_path: Path) -> None:
    assert newest_agent_step(whole / "checkpoint") == int(rows(whole / "eval.csv")[-1]["agent_step"])
    assert newest_agent_step(tmp_path / "checkpoint") is None


def test_a_process_of_its_own_changes_nothing(whole: Path, tmp_path: Path) -> None:
    drq.train(small(tmp_path / "run", engine=BESIDE), quiet=True)
    assert_same_run(whole, tmp_path / "run")


def test_a_dead_process_is_replaced_by_this_one(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = SubprocessEvaluation.submit

    def submit(self: SubprocessEvaluation, agent: Agent, request: EvaluationRequest) -> None:
        if request.agent_step == 80:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        original(self, agent, request)

    monkeypatch.setattr(SubprocessEvaluation, "submit", submit)
    drq.train(small(tmp_path / "run", engine=BESIDE), quiet=True)
    assert rows(whole / "eval.csv") == rows(tmp_path / "run" / "eval.csv")
    assert "The evaluation process has ended; this process evaluates instead." in capfd.readouterr().err


def test_it_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services: list[SubprocessEvaluation] = []
    original = SubprocessEvaluation.__init__

    def remember(self: SubprocessEvaluation, *args: object) -> None:
        original(self, *args)  # type: ignore[arg-type]
        services.append(self)

    monkeypatch.setattr(SubprocessEvaluation, "__init__", remember)
    drq.train(small(tmp_path / "run", engine=BESIDE, steps=40), quiet=True)
    assert services[0]._process.poll() is not None
    assert len(rows(tmp_path / "run" / "eval.csv")) == 1


KILLED = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
import drq
from drq.config import EvalConfig
from drq.training.evaluation_service import SubprocessEvaluation
from pathlib import Path
from runs import small
from test_evaluation_service import BESIDE

original = SubprocessEvaluation.submit

def submit(self, agent, request):
    original(self, agent, request)
    time.sleep(1.0)  # it is playing by now
    print(self._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

SubprocessEvaluation.submit = submit
endless = EvalConfig(every=40, episodes=10**6, video=False)
drq.train(small(Path({folder!r}), engine=BESIDE, eval=endless), quiet=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end it")
def test_it_ends_when_training_is_killed(tmp_path: Path) -> None:
    program = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "run"))
    # One that lives on would keep the pipe open.
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 20
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("task", "at_once", "until_enough"), [("toy/reach", 10, 10), ("dmc/walker-walk", 10, 10), ("atari/pong", 50, 16)]
)
def test_games_are_played_more_at_once_than_tasks_of_control(
    task: str, at_once: int, until_enough: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        """With the number of environments."""

    def refuse(config: TrainConfig, count: int) -> EnvironmentGroup:
        raise Asked(count)

    config = dataclasses.replace(small(tmp_path), task=task)
    engine = EngineSettings.resolve(config.engine, torch.device("cpu"), config.agent)
    spec = envs.make("toy/reach", config.env, 1).spec
    agent = make_agent(spec, config.agent, Backend(), seed=0)
    monkeypatch.setattr(evaluation_service, "make_group", refuse)
    evaluator = evaluation_service.make_evaluator(config, agent, engine)
    for episodes, min_agent_steps, count in ((3, 0, 3), (120, 0, at_once), (3, 125_000, until_enough)):
        with pytest.raises(Asked, match=f"^{count}$"):
            evaluator.evaluate(0, episodes=episodes, min_agent_steps=min_agent_steps)


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("task", ["dmc/walker-walk", "toy/reach", "gym/Pendulum-v1"])
@pytest.mark.parametrize(("usable", "threads"), [(1, 1), (2, 1), (3, 1), (8, 4), (15, 7), (16, 8), (64, 8)])
def test_beside_a_run_on_a_gpu_the_cpu_acts(
    task: str, usable: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the engine of training is asked to be: tf32 and CUDA graphs are a GPU's."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: usable)
    asked = EngineConfig(precision="tf32", compile="on", cuda_graphs="on", kernels="on")
    config = dataclasses.replace(small(tmp_path, engine=asked), task=task)
    engine, used = settings_beside_training(config, GPU)
    assert (engine.device, engine.precision, used) == (CPU, "float32", threads)
    assert (engine.compile, engine.cuda_graphs, engine.kernels) == (False, False, False)


def test_games_beside_a_run_on_a_gpu_are_acted_for_on_the_gpu(tmp_path: Path) -> None:
    config = dataclasses.replace(small(tmp_path, engine=EngineConfig(precision="tf32")), task="atari/pong")
    engine, threads = settings_beside_training(config, GPU)
    training = EngineSettings.resolve(config.engine, GPU, config.agent)
    assert engine == dataclasses.replace(training, compile=False)
    assert threads == 1


@pytest.mark.parametrize("task", ["dmc/walker-walk", "atari/pong"])
def test_beside_a_run_on_the_cpu_one_thread_acts_as_training_does(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    asked = EngineConfig(precision="bf16", compile="on")
    engine, threads = settings_beside_training(dataclasses.replace(small(tmp_path, engine=asked), task=task), CPU)
    assert engine == dataclasses.replace(EngineSettings.resolve(asked, CPU, small(tmp_path).agent), compile=False)
    assert threads == 1


def test_training_that_is_killed_while_it_sends_weights_has_ended(tmp_path: Path) -> None:
    config = small(tmp_path)
    agent = make_agent(envs.make(config.task, config.env, 1).spec, config.agent, Backend(), seed=3)
    ours, theirs = Pipe()
    os.write(ours.fileno(), struct.pack("!i", 1000) + b"half of them")
    ours.close()
    with theirs, pytest.raises(EOFError):
        receive_weights(theirs, agent)


def test_the_process_beside_a_run_on_a_gpu_never_opens_cuda(tmp_path: Path) -> None:
    """Played by a process that takes the run to be on a GPU and refuses to open one."""
    config = small(tmp_path, engine=EngineConfig(precision="float32"), eval=EvalConfig(episodes=2, video=False))
    spec = envs.make(config.task, config.env, 1).spec
    agent = make_agent(spec, config.agent, Backend(), seed=3)
    request = EvaluationRequest(agent_step=1, env_step=1, seed=5, video=None)
    ours, theirs = Pipe()
    program = f"""
import torch
from multiprocessing.connection import Connection
from drq.training import evaluation_process

def refuse(*args):
    raise AssertionError("CUDA was asked for")

for name in ("_lazy_init", "current_device", "get_device_properties", "is_bf16_supported"):
    assert hasattr(torch.cuda, name)
    setattr(torch.cuda, name, refuse)
evaluation_process.choose_device = lambda wanted: torch.device("cuda")
torch.set_num_threads(6)
try:
    evaluation_process.serve(Connection({theirs.fileno()}))
except EOFError:
    print(torch.get_num_threads())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    with ours:
        ours.send_bytes(json.dumps(config_to_json(config)).encode())
        ours.send_bytes(json.dumps(dataclasses.asdict(request)).encode())
        ours.send_bytes(packed(dict(agent.modules.state_dict())))
        while isinstance(answer := json.loads(ours.recv_bytes()), dict):
            assert answer.keys() == {"done", "of", "unit"}  # how far it is
        scores, info = answer
    assert process.communicate(timeout=60) == ("3\n", None)
    here = InlineEvaluation(config, EngineSettings.resolve(config.engine, CPU, config.agent))
    assert (scores, info) == (pytest.approx(here.play(agent, request)[0], rel=1e-3), {})
    here.close()
