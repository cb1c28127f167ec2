"""scripts/repeat.py: a run trained again has the digits of the first, and one digit that differs is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import drq
from runs import small

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "repeat.py"


def repeat(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *args], cwd=folder, capture_output=True, text=True)


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
