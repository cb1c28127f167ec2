"""Copies what is worth publishing of a suite's finished runs: python scripts/keep_results.py runs/planet results/planet

Of every run its settings, evaluations, time and a thinned train.csv; no checkpoints, videos or logs, and no paths of
the machine that trained it. suite.json comes along, so that `drq suite status` says which runs are missing; those
that one kept there before asked for stay in it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROWS = 50
"""Of train.csv at most; it is there to look at curves."""


def thinned(lines: list[str], rows: int) -> list[str]:
    """The heading and at most so many of the rows below, evenly spaced, the last one among them; nothing of nothing."""
    heading, body = lines[:1], lines[1:]
    every = -(-len(body) // rows) or 1
    return heading + body[::-1][::every][::-1]


def keep(run: Path, there: Path) -> None:
    """Copies one run."""
    there.mkdir(parents=True, exist_ok=True)
    described = json.loads((run / "config.json").read_text())
    described["config"]["dir"] = there.as_posix()
    (there / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    for name in ("eval.csv", "finished.json"):
        shutil.copyfile(run / name, there / name)
    lines = (run / "train.csv").read_text().splitlines(keepends=True)
    (there / "train.csv").write_text("".join(thinned(lines, ROWS)))


def joined(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The suite kept before with what another asks for, whose settings of the same names are the same."""
    runs = before["runs"] + [run for run in now["runs"] if run not in before["runs"]]
    return {**before, "settings": before["settings"] | now["settings"], "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, help="the suite's folder")
    parser.add_argument("results", type=Path, help="where to keep them: relative, as config.json names it")
    args = parser.parse_args()
    if args.results.is_absolute():
        sys.exit(f"{args.results} is a path of this machine: name it relative to the current folder.")
    if not (args.suite / "suite.json").exists():
        sys.exit(f"{args.suite} holds no suite (it has no suite.json): name the --dir of a `drq suite run`.")
    suite, kept = json.loads((args.suite / "suite.json").read_text()), args.results / "suite.json"
    if kept.exists():
        before = json.loads(kept.read_text())
        common = before["settings"].keys() & suite["settings"].keys()
        others = any(before["settings"][label] != suite["settings"][label] for label in common)
        if others or before["preset"] != suite["preset"]:
            sys.exit(f"{args.results} holds runs of other settings than {args.suite}: name another folder for these.")
        suite = joined(before, suite)
    finished = [file.parent for file in args.suite.rglob("finished.json")]
    if not finished:
        sys.exit(f"No run of {args.suite} has finished: `drq suite status {args.suite}` says how far they are.")
    for run in finished:
        keep(run, args.results / run.relative_to(args.suite))
    kept.write_text(json.dumps(suite, indent=2) + "\n")
    print(f"{len(finished)} runs kept in {args.results}.")


if __name__ == "__main__":
    main()
