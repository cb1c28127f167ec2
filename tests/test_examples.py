"""The examples, run as a reader would run them."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import td3_drq as td3

ROOT = Path(__file__).parents[1]
TD3 = ROOT / "examples" / "td3_drq.py"
RANDOM, PERFECT = 8.91, 47.84


def test_td3_with_drq_learns(tmp_path: Path) -> None:
    own = td3.SETTINGS
    smaller = {"env": replace(own.env, image_size=16), "agent": replace(own.agent, pad=1, discount=0.5)}
    mean = td3.train(replace(own, steps=1_500, dir=str(tmp_path), device="cpu", **smaller))
    assert (mean - RANDOM) / (PERFECT - RANDOM) > 0.5


@pytest.mark.parametrize("options", [["--agent.augmentation", "none"], ["--agent.k", "1", "--agent.m", "3"]])
def test_td3_from_the_command_line(options: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "td3"
    small = ["--steps", "310", "--eval.episodes", "2", "--device", "cpu", "--dir", str(folder)]
    ran = subprocess.run(
        [sys.executable, str(TD3), *small, *options],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    with open(folder / "eval.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["agent_step"], row["episodes"]) == ("310", "2")
    assert 0 <= float(row["return_mean"]) <= 50
    assert f"return {float(row['return_mean']):.1f} after 310 env steps" in ran.stdout + ran.stderr


def test_every_line_that_drq_adds_to_td3_is_marked() -> None:
    called = [line for line in TD3.read_text().splitlines() if re.search(r"(regularize\.\w+|\.views|parse)\(", line)]
    assert len(called) == 9
    assert all("# DrQ" in line for line in called)
