"""The examples, run as a reader would run them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]
TD3 = ROOT / "examples" / "td3_drq.py"
RANDOM, PERFECT = 8.91, 47.84


@pytest.fixture
def td3() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("td3_drq", TD3)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


def test_td3_with_drq_learns(td3: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    mean = td3.train(steps=2_000)
    assert (mean - RANDOM) / (PERFECT - RANDOM) > 0.5
    assert capsys.readouterr().out == (
        f"return {mean:.1f} after 2,000 agent steps (random {RANDOM}, perfect {PERFECT})\n"
    )


@pytest.mark.parametrize("options", [[], ["--augmentation", "none"], ["--k", "1", "--m", "3"]])
def test_td3_from_the_command_line(options: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, str(TD3), "--steps", "310", "--episodes", "2", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said = re.fullmatch(r"return (\d+\.\d) after 310 agent steps \(random 8\.91, perfect 47\.84\)\n", ran.stdout)
    assert said, ran.stdout
    assert 0 <= float(said[1]) <= 50


def test_every_line_that_drq_adds_to_td3_is_marked() -> None:
    called = [line for line in TD3.read_text().splitlines() if re.search(r"(regularize|augment)\.\w+\(", line)]
    assert len(called) == 7
    assert all("# DrQ" in line for line in called)
