"""Tables for docs/speed.md, made from what was measured: prints Markdown.

drq speed --full --json speed.json
python benchmarks/runs.py dmc/cheetah-run --preset planet --at-once 1 2 4 --out cheetah.json
python benchmarks/speed_page.py speed.json cheetah.json
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import Positional


def rows(heading: Iterable[str], lines: Iterable[Iterable[object]]) -> Iterator[str]:
    heading = list(heading)
    yield f"| {' | '.join(heading)} |"
    yield f"|{'---|' * len(heading)}"
    for line in lines:
        yield f"| {' | '.join(str(each) for each in line)} |"
    yield ""


def turns(least: float, most: float) -> str:
    return f"{least:.1f} to {most:.1f}"


def gigabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f} GB"


def of_speed(found: dict[str, Any]) -> Iterator[str]:
    """A file of `drq speed --json`."""
    machine = found["machine"]
    where = f"{machine['device']}; {machine['cpu']}, {machine['cores']} cores; PyTorch {machine['torch']}"
    yield f"### `drq speed` on {where}; commit {machine.get('commit', 'unknown')}\n"
    for comparison in found["comparisons"]:
        yield f"Batch {comparison['batch_size']}, K = {comparison['k']}, M = {comparison['m']}, in turns:\n"
        yield from rows(
            ("what", "ms an update", "times as long", "in single turns"),
            (
                (one["name"], f"{one['timing']['ms']:.3g}", f"{one['ratio']:.1f}", turns(*one["ratio_range"]))
                for one in comparison["contenders"]
            ),
        )
    measured = [("", one) for one in found["presets"]]
    measured += [(f"{what}: ", one) for what, several in found["growth"].items() for one in several]
    if measured:
        yield from rows(
            ("update", "batch", "K, M", "ms", "updates/s", "GPU memory"),
            (
                (
                    what + one["name"],
                    one["batch_size"],
                    f"{one['k']}, {one['m']}",
                    f"{one['timing']['ms']:.3g}",
                    f"{one['updates_per_second']:,.0f}",
                    gigabytes(one["device_bytes"]),
                )
                for what, one in measured
            ),
        )
    if found["processes"]:
        yield from rows(
            ("learners at once", "of", "MPS", "updates/s together"),
            (
                (one["processes"], one["work"], "yes" if one["mps"] else "no", f"{one['updates_per_second']:,.0f}")
                for one in found["processes"]
            ),
        )
    if found["environments"]:
        yield from rows(
            ("environment", "drawn by", "agent steps/s"),
            ((one["task"], one["render"], f"{one['agent_steps_per_second']:,.0f}") for one in found["environments"]),
        )
    for one in found["acting"]:
        yield f"Acting on {one['observations']}: {one['ms']:.2f} ms."


def of_runs(found: dict[str, Any]) -> Iterator[str]:
    """A file of benchmarks/runs.py."""
    what = f"{found['task']}, `{found['preset']}`, {found['steps']:,} steps"
    yield f"### Whole runs of {what}; commit {found['commit']}\n"
    yield from rows(
        ("runs at once", "seconds", "last returns"),
        (
            (
                group["at_once"],
                "not finished" if group["seconds"] is None else f"{group['seconds']:.0f}",
                ", ".join(f"{run['final_return']:.1f}" for run in group["runs"] if run["final_return"] is not None),
            )
            for group in found["groups"]
        ),
    )


def main(files: Positional[tuple[Path, ...]]) -> None:
    """Prints the tables of these files.

    Args:
        files: of `drq speed --json` and of benchmarks/runs.py.
    """
    for file in files:
        found = json.loads(file.read_text())
        day = datetime.date.fromtimestamp(file.stat().st_mtime)
        print("\n".join(of_runs(found) if "groups" in found else of_speed(found)))
        print(f"\n*{day}*\n")


if __name__ == "__main__":
    tyro.cli(main)
