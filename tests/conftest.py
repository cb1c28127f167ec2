"""Shared by all tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import drq
from drq.engine.kernels import runtime
from emulation import Emulator, needs_bfloat16, needs_hopper
from runs import small

torch.set_num_threads(1)  # two workers share two cores
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: commands under test would too
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What torch.compile was killed while writing, in a place that all processes share, it reads again.
COMPILED = tempfile.TemporaryDirectory(prefix="drq-compiled-", ignore_cleanup_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = COMPILED.name


LONG = ("ray", "envs_group", "learning", "trace", "launcher", "drawing", "claims", "dqn", "rainbow", "speed", "nvrtc")
"""Files that take longest, some of them waiting: they begin first, so that no worker is left alone with one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def emulator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    cache: pytest.Cache | None = getattr(request.config, "cache", None)  # none with -p no:cacheprovider
    return Emulator(cache.mkdir("emulated_kernels") if cache else tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run, left alone: what others are held against. Nobody writes to it."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    drq.train(small(folder), quiet=True)
    return folder


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=[pytest.mark.gpu, needs_bfloat16])])
def kernel_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where a test of kernels has its tensors. New ones start as NaNs: what no kernel writes fails the test."""
    yield from _kernel_device(request, monkeypatch)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=[pytest.mark.gpu, needs_hopper])])
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same for kernels that no other architecture has."""
    yield from _kernel_device(request, monkeypatch)


def _kernel_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    torch.manual_seed(0)
    if request.param == "emulated":
        monkeypatch.setattr(runtime, "kernel", request.getfixturevalue("emulator").kernel)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield "cpu" if request.param == "emulated" else "cuda"
    torch.use_deterministic_algorithms(False)
