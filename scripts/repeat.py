"""Trains a published run again, and compares: python scripts/repeat.py results/planet/dmc-finger-spin/drq/seed-1

On the same kind of machine, with the same versions, a seed should give the same numbers whatever else runs there; which
runs on a GPU do is in docs/reliability.md. Compared are the rows of train.csv that were kept: losses, Q-values,
entropies and returns of training, in every digit. (What evaluations score hangs on how many threads play them.)
`--until 25_000` is enough for most doubts; the same command with more goes on from there.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import drq
from drq.presets import configure, settings_in

CLOCK = "seconds"


class Until:
    """Stops a run once the rows up to an env step are logged."""

    def __init__(self, env_step: int) -> None:
        self.env_step = env_step

    def on_step(self, run: drq.RunView) -> bool:
        return run.env_step <= self.env_step


def logged(run: Path) -> dict[int, dict[str, str]]:
    """The rows of train.csv by their env step, without the time."""
    with open(run / "train.csv", newline="") as file:
        rows = [{name: value for name, value in row.items() if name != CLOCK} for row in csv.DictReader(file)]
    return {int(row["env_step"]): row for row in rows}


def made_with(run: Path) -> dict[str, Any]:
    """The commit, the versions of packages, the device and its precision."""
    described = json.loads((run / "config.json").read_text())
    return {
        "commit": described.get("git_commit"),
        **described.get("versions", {}),
        **described.get("computed_with", {}),  # of older runs it is not known
    }


def verdict(there: dict[int, dict[str, str]], here: dict[int, dict[str, str]]) -> tuple[bool, str]:
    """Whether all rows agree that both have, and a sentence."""
    both = sorted(there.keys() & here.keys())
    if not both:
        return False, "No row of train.csv is in both: train longer (--until)."
    for count, env_step in enumerate(both):
        other = {name: (value, here[env_step].get(name)) for name, value in there[env_step].items()}
        changed = [f"{name} is {ours}, not {theirs}" for name, (theirs, ours) in other.items() if ours != theirs]
        if changed:
            return False, f"{rows(count)} agree; then, at {env_step:,} env steps, {'; '.join(changed)}."
    return True, f"{rows(len(both))}, to {both[-1]:,} env steps, agree in every digit."


def rows(count: int) -> str:
    return f"{count} row{'s' * (count != 1)}"


def refuse(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


def repeat(run: Path, until: int, again: Path) -> int:
    """Trains it into that folder and says whether its rows agree: 0 if they do."""
    if not (run / "train.csv").exists():
        return refuse(f"{run} has no train.csv: name the folder of a run.")
    there = logged(run)
    try:
        settings = settings_in(run / "config.json")
        config, before = configure(settings.get("task", ""), settings), made_with(run)
        drq.train(
            config,
            dir=str(again),
            device=before.get("device", config.device),
            engine={"precision": before.get("precision", config.engine.precision)},
            eval={"video": False},
            callbacks=[Until(until)],
        )
    except drq.UserError as error:
        return refuse(str(error))
    except KeyboardInterrupt:
        return 130
    now = made_with(again)
    for name in (name for name in before if before[name] != now.get(name)):
        print(f"{name}: {before[name]} there, {now.get(name)} here")
    same, sentence = verdict(there, logged(again))
    print(sentence)
    return 0 if same else 1


def arguments(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="its folder, with config.json and train.csv")
    parser.add_argument("--until", type=int, default=sys.maxsize, metavar="ENV_STEPS", help="where to stop")
    parser.add_argument("--dir", type=Path, help="where to train (a folder in runs/again)")
    return parser


def folder(args: argparse.Namespace) -> Path:
    return args.dir or Path("runs/again", *args.run.resolve().parts[1:][-4:])


def main() -> int:
    args = arguments(__doc__).parse_args()
    return repeat(args.run, args.until, folder(args))


if __name__ == "__main__":
    sys.exit(main())
