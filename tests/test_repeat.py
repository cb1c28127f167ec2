"""A run trained again has the digits of the first, and one digit that differs is found.

By scripts/repeat.py; scripts/jumps.py takes jumps of its loss apart on the way.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import drq
from drq.config import DQNConfig
from runs import small

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def repeat(folder: Path, *args: str, script: str = "repeat.py") -> subprocess.CompletedProcess[str]:
    command, threads = [sys.executable, str(SCRIPTS / script), *args], str(torch.get_num_threads())
    environment = os.environ | {"OMP_NUM_THREADS": threads}  # as many as here: sums depend on it
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in it."""
    folder = tmp_path_factory.mktemp("published")
    drq.train(small(folder / "results" / "toy" / "drq" / "seed-1"), quiet=True)
    return folder


def test_a_run_trained_again_has_the_same_digits(published: Path) -> None:
    done = repeat(published, "results/toy/drq/seed-1", "--until", "60")
    assert (done.returncode, done.stdout) == (0, "4 rows, to 60 env steps, agree in every digit.\n"), done.stderr
    again = published / "runs" / "again" / "results" / "toy" / "drq" / "seed-1"
    assert drq.load(again).agent_step == 61  # the row of 60 is logged when the next step begins
    # The same command goes on, and one digit of another row is found.
    csv = published / "results" / "toy" / "drq" / "seed-1" / "train.csv"
    rows = csv.read_text().splitlines()
    place = next(n for n, row in enumerate(rows) if row.startswith("80,"))
    *others, alpha = rows[place].split(",")
    csv.write_text("\n".join([*rows[:place], ",".join([*others, alpha[:-1]]), *rows[place + 1 :], ""]))
    done = repeat(published, "results/toy/drq/seed-1", "--until", "90")
    assert "Resuming at 61 env steps." in done.stderr
    assert done.returncode == 1
    assert done.stdout == f"5 rows agree; then, at 80 env steps, alpha is {alpha}, not {alpha[:-1]}.\n"


def test_what_a_run_was_made_with_is_said_where_it_differs(published: Path) -> None:
    config = published / "results" / "toy" / "drq" / "seed-1" / "config.json"
    before = config.read_text()
    config.write_text(before.replace(f'"numpy": "{__import__("numpy").__version__}"', '"numpy": "1.0"'))
    try:
        done = repeat(published, "results/toy/drq/seed-1", "--until", "30", "--dir", "elsewhere")
    finally:
        config.write_text(before)
    assert done.stdout.startswith("numpy: 1.0 there, "), done.stderr
    assert done.stdout.endswith("1 row, to 30 env steps, agree in every digit.\n")


def test_a_folder_without_a_run_is_refused(published: Path) -> None:
    done = repeat(published, "results")
    assert (done.returncode, done.stderr) == (2, "results has no train.csv: name the folder of a run.\n")


def test_an_update_whose_loss_jumps_is_taken_apart(published: Path) -> None:
    """By the weights and random numbers that it had: the loss comes out again, and no digit of the run changes."""
    run = published / "results" / "another" / "drq" / "seed-1"
    drq.train(small(run), quiet=True)
    asked = ("results/another/drq/seed-1", "--factor", "1", "--least", "0", "--most", "2", "--every", "40")
    done = repeat(published, *asked, script="jumps.py")
    assert done.returncode == 0, done.stderr
    jumps = re.findall(r"loss (\S+), .*\n.*\n  again without graphs (\S+), in float32 (\S+)\n", done.stdout)
    assert len(jumps) == 2
    assert all(again == loss and float(exact) == pytest.approx(float(loss), rel=0.05) for loss, again, exact in jumps)
    assert [done.stdout.count(f"update {number}, as every 40th: loss ") for number in (40, 80)] == [1, 1]
    places = re.findall(r"by one transition: .* agent step (\d+) of its episode, (\d+) ago\n", done.stdout)
    assert len(places) == 16
    # Episodes have 50 agent steps, so that the two tell when the update was made.
    for update in range(0, 16, 4):
        assert len({(int(step) + int(ago)) % 50 for step, ago in places[update : update + 4]}) == 1
    cosines = re.findall(r"gradients by layer: (\S+) \(encoder.layers.\d.(?:weight|bias)\) and more", done.stdout)
    assert len(cosines) == 4
    assert min(map(float, cosines)) > 0.95
    assert done.stdout.endswith("agree in every digit.\n")


def test_jumps_are_of_control_alone(published: Path) -> None:
    run = published / "results" / "catch" / "drq" / "seed-1"
    agent = DQNConfig(batch_size=8, hidden_dim=16, encoder="sac-ae", seed_steps=20)
    drq.train(small(run, "toy/catch", steps=30, agent=agent), quiet=True)
    done = repeat(published, "results/catch/drq/seed-1", script="jumps.py")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "Only SAC has a critic's loss: name the folder of a control run.",
    )
