"""A GPU without memory, or lost, or taken along under MPS: a sentence, the last checkpoint, and a suite that goes on.

What PyTorch raises then is raised here by hand; on a machine with a GPU it is made to happen there as well.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import drq
import runs
from drq.engine import KernelError, Learner, Snapshot, in_words
from drq.errors import DeviceLost, UserError
from drq.launch import mps, pools
from drq.launch.launcher import SuiteRunArguments, run_suite
from drq.training import components
from fake_mps import FakeMPS, pretend_gpu
from runs import FLAGS, assert_same_run, fails, small

OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB.")


def during_a_capture() -> Exception:
    """Ending a capture that an error has broken off raises another."""
    error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    error.__context__ = OUT
    return error


MEMORY = {
    "allocator": OUT,
    "context": torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "capture": during_a_capture(),
    "host": RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
}
LOST = {
    "launch": torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel errors might be"),
    "ecc": torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    "mps": RuntimeError("CUDA error: the remote procedural call between the MPS server and the MPS client failed"),
    "kernel": KernelError("launching conv: an illegal memory access was encountered"),
}


def failing_at(update: int, error: Exception) -> Callable[[Learner], None]:
    original = Learner.update

    def fails(self: Learner) -> None:
        if self.updates == update:
            raise error
        original(self)

    return fails


@pytest.mark.parametrize("name", [*MEMORY, *LOST])
def test_what_pytorch_raises_is_recognised(name: str) -> None:
    error = (MEMORY | LOST)[name]
    said = in_words(error) or ""
    assert said.startswith("There is no memory left (" if name in MEMORY else "The GPU failed (")
    assert str(error).partition("\n")[0].partition(". GPU")[0] in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["capture", "launch"])
def test_the_last_checkpoint_stays(name: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = (MEMORY | LOST)[name]
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", failing_at(50, error))
        with pytest.raises(UserError) as raised:
            drq.train(small(tmp_path / "run"), quiet=True)
    said = str(raised.value)
    assert "\n" not in said
    assert "The last checkpoint stays: run the same command again" in said
    assert ("--replay.capacity, --agent.batch-size" in said) == (name in MEMORY)
    assert ("the replay alone takes 0.00 GB" in said) == (name in MEMORY)
    assert ("nvidia-smi" in said) == (name in LOST)
    assert "in fails" in (tmp_path / "run" / "error.txt").read_text()  # where it came from
    drq.train(small(tmp_path / "run"), quiet=True)
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("after", [17, 120])  # the next checkpoint waits for it, or the end of the run
def test_a_gpu_that_is_lost_while_a_checkpoint_is_fetched(
    after: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, latest = Snapshot.on_host, tmp_path / "run" / "checkpoint" / "latest.json"

    def on_host(self: Snapshot) -> dict[str, torch.Tensor]:
        beside = threading.current_thread() is not threading.main_thread()
        if beside and latest.exists() and f'"agent_step": {after},' in latest.read_text():
            raise LOST["launch"]
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "on_host", on_host)
        with pytest.raises(UserError, match=r"The GPU failed .* The last checkpoint stays"):
            drq.train(small(tmp_path / "run"), quiet=True)
    drq.train(small(tmp_path / "run"), quiet=True)
    assert_same_run(whole, tmp_path / "run")


def test_memory_that_is_missing_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_replay(*args: Any) -> None:
        raise OUT

    monkeypatch.setattr(components, "make_replay", make_replay)
    run = str(tmp_path / "run")
    said = fails(capsys, "train", "toy/reach", "--device", "cpu", "--dir", run, "--steps", "2000")
    assert said.startswith("drq: There is no memory left (CUDA out of memory. Tried to allocate 2.00 GiB); the replay")
    assert "There is no checkpoint yet" in said
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_pytorch_is_not_built_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying again would not help, and the GPU is in order."""
    text = "CUDA error: no kernel image is available for execution on the device\nSearch for"
    monkeypatch.setattr(Learner, "update", failing_at(0, torch.AcceleratorError(text)))
    with pytest.raises(UserError, match=r"is not built for this GPU .* --device cpu") as raised:
        drq.train(small(tmp_path / "run"), quiet=True)
    assert not isinstance(raised.value, DeviceLost)


def test_other_commands_say_it_too(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_acting_agent(*args: Any) -> None:
        raise LOST["launch"]

    monkeypatch.setattr("drq.training.policy.make_acting_agent", make_acting_agent)
    monkeypatch.setattr(os, "_exit", sys.exit)
    said = fails(capsys, "eval", str(whole))
    assert said.startswith("drq: The GPU failed (CUDA error: unspecified launch failure): try again")


def test_other_errors_are_not_taken_for_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learner, "update", failing_at(3, RuntimeError("mat1 and mat2 shapes cannot be multiplied")))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        drq.train(small(tmp_path / "run"), quiet=True)
    trace = (tmp_path / "run" / "error.txt").read_text()
    assert "in fails" in trace
    assert trace.splitlines()[-1] == "RuntimeError: mat1 and mat2 shapes cannot be multiplied"


LOST_AND_ABORTING = """
import atexit, os
import torch
from drq.engine import Learner

# PyTorch aborts a process that frees memory of a lost GPU at its end.
atexit.register(os.abort)

update = Learner.update

def lost(self):
    if self.updates == 50:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")
    update(self)

Learner.update = lost
"""


def test_nothing_comes_after_the_sentence(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "lost_gpu.py").write_text(LOST_AND_ABORTING)
    ended = runs.drq("train", "toy/reach", *FLAGS, "--import", "lost_gpu", "--dir", "run", cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("drq: The GPU failed (CUDA error: unspecified launch failure)")
    run = tmp_path / "run"
    assert (run / ".lock").read_text() == ""
    assert "in lost" in (run / "error.txt").read_text()
    logged = runs.rows(run / "train.csv")
    assert logged
    assert logged == runs.rows(whole / "train.csv")[: len(logged)]


FAULTY = """
import atexit, os, pathlib, sys, time
import torch
from drq.training.loop import Loop

train = Loop.train

def fails_once_with_seed_1(self):
    here = pathlib.Path(__file__).parent
    with open(here / f"seed-{self.config.seed}", "a") as pipes:
        print(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "none"), file=pipes)
    if self.config.seed == 1 and not (here / "dead").exists():
        (here / "dead").write_text(str(os.getpid()))
        atexit.register(os.abort)
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    # The other ends after the launcher has seen the first one's end, so that neither's place was free before.
    while self.config.seed == 2 and not gone(here / "dead"):
        time.sleep(0.1)
    train(self)

def gone(dead):
    try:
        os.kill(int(dead.read_text()), 0)
    except (FileNotFoundError, ValueError):
        return False
    except ProcessLookupError:
        return True
    return False

# Not in the test's own process.
if getattr(sys.modules["__main__"].__spec__, "name", None) == "drq.launch.worker":
    Loop.train = fails_once_with_seed_1
"""
SUITE = """
imports = ["faulty_gpu"]
preset = "cpu"
tasks = ["toy/reach"]
seeds = 2
steps = 30
[common]
"agent.batch_size" = 8
"agent.hidden_dim" = 16
"agent.seed_steps" = 20
"env.image_size" = 24
"eval.episodes" = 1
"eval.video" = false
"engine.eval_process" = "off"
[[settings]]
label = "small"
"""


def test_a_suite_tries_the_run_again_without_mps_where_it_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeMPS(tmp_path, servers=f"test -e {tmp_path}/dead || echo 4711")
    pretend_gpu(monkeypatch, fake, tmp_path)
    monkeypatch.setattr(mps, "CLIENT_ATTEMPTS", 2)
    monkeypatch.setattr(pools, "this_machines_gpus", lambda: [pools.FreeGPU("0", 139 * 1024**3)])
    (tmp_path / "faulty_gpu.py").write_text(FAULTY)
    (tmp_path / "suite.toml").write_text(SUITE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty_gpu", raising=False)
    suite = str(tmp_path / "suite.toml")
    arguments = SuiteRunArguments(suite, dir=tmp_path / "out", jobs=2, imports=("faulty_gpu",))
    assert run_suite(arguments) == 0
    captured = capsys.readouterr()
    failed = next(line for line in captured.out.splitlines() if line.startswith("Failed, attempt 1 of 3:"))
    assert "seed 1: The GPU failed (CUDA error: an illegal memory access was encountered)" in failed
    pipes = [(tmp_path / f"seed-{seed}").read_text().split() for seed in (1, 2)]
    assert pipes == [[str(fake.folder / "pipe"), "none"], [str(fake.folder / "pipe")]]
    assert "Going on without MPS, which has died" in captured.err
    assert fake.gone()


@pytest.mark.skipif(torch.cuda.is_available(), reason="its GPU is there")
def test_a_suite_whose_gpu_is_gone_does_not_go_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where it fell off the bus before the first checkpoint: a CPU would take days, and say nothing."""
    monkeypatch.setattr(pools, "this_machines_gpus", lambda: [pools.FreeGPU("0", 139 * 1024**3)])
    (tmp_path / "suite.toml").write_text(SUITE.replace('imports = ["faulty_gpu"]', ""))
    assert run_suite(SuiteRunArguments(str(tmp_path / "suite.toml"), seeds=1, dir=tmp_path / "out", jobs=1)) == 1
    said = capsys.readouterr().out
    assert "Failed: toy/reach, small, seed 1: This run belongs on a GPU, and " in said
    assert not list(tmp_path.rglob("config.json"))


ON_GPU = """
import os, pathlib, signal
import torch
from drq.engine import Learner
from drq.training.loop import Loop

update, train, fault = Learner.update, Loop.train, os.environ.get("FAULT")

def faulty(self):
    if self.updates == 50 and fault == "memory":
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    if self.updates == 50 and fault == "lost":  # reads beyond an array: the GPU refuses this process from then on
        torch.zeros(1, device="cuda")[torch.tensor([1000], device="cuda")].cpu()
    if self.updates == 50 and fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    update(self)

def only_once(self):
    began = pathlib.Path(__file__).with_name("began")
    if self.config.seed == 1 and not began.exists():
        began.touch()
        Learner.update = faulty
    train(self)

Loop.train = only_once
if fault == "full":  # of the GPU a GB is this process's, as if others had taken the rest
    torch.cuda.set_per_process_memory_fraction(1e9 / torch.cuda.get_device_properties(0).total_memory)
"""
GPU_FLAGS = [*FLAGS, "--device", "cuda", "--env.image-size", "84", "--agent.batch-size", "32"]
GPU_FLAGS += ["--engine.precision", "bf16", "--engine.compile", "off", "--engine.eval-process", "off"]


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["memory", "lost"])
def test_a_fault_of_the_gpu_in_the_middle(fault: str, tmp_path: Path) -> None:
    (tmp_path / "on_gpu.py").write_text(ON_GPU)
    train = ["train", "toy/reach", *GPU_FLAGS, "--import", "on_gpu", "--dir"]
    ended = runs.drq(*train, "run", cwd=tmp_path, FAULT=fault)
    print(f"{fault} in the middle: exit code {ended.returncode}: {ended.stderr.splitlines()[-1]}")
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "The last checkpoint stays" in ended.stderr
    assert runs.drq(*train, "run", cwd=tmp_path).returncode == 0
    assert runs.drq(*train, "whole", cwd=tmp_path).returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.gpu
def test_a_gpu_that_others_have_filled(tmp_path: Path) -> None:
    (tmp_path / "on_gpu.py").write_text(ON_GPU)
    train = ["train", "toy/reach", "--preset", "planet", "--device", "cuda", "--import", "on_gpu", "--dir", "run"]
    ended = runs.drq(*train, cwd=tmp_path, FAULT="full")
    print(f"memory at the start: exit code {ended.returncode}: {ended.stderr.splitlines()[-1]}")
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "the replay alone takes 2.16 GB" in ended.stderr
    assert "There is no checkpoint yet" in ended.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["lost", "killed"])
def test_an_mps_client_that_fails(fault: str, tmp_path: Path) -> None:
    """The first of three runs on one GPU fails there, or is killed; whatever becomes of the others, all are tried
    again and finish."""
    (tmp_path / "on_gpu.py").write_text(ON_GPU)
    suite = SUITE.replace("faulty_gpu", "on_gpu").replace("seeds = 2", "seeds = 3").replace("steps = 30", "steps = 400")
    (tmp_path / "suite.toml").write_text(suite)
    command = ["suite", "run", "suite.toml", "--jobs", "3", "--import", "on_gpu", "--dir", "out"]
    ended = runs.drq(*command, cwd=tmp_path, FAULT=fault)
    print(f"{fault} in a suite: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}")
    assert ended.returncode == 0
    assert "Traceback" not in ended.stdout + ended.stderr
    said = {"lost": "The GPU failed (", "killed": "The run was killed"}[fault]
    assert any(line.startswith("Failed, attempt 1 of 3:") and said in line for line in ended.stdout.splitlines())
    assert "3 finished" in ended.stdout
