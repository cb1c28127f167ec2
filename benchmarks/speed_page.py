"""Puts what was measured, the files in results/speed, into docs/speed.md as tables.

drq speed --full --json results/speed/2026-11-16-h200.json
python benchmarks/runs.py dmc/cheetah-run --preset planet --at-once 1 2 4 --out results/speed/2026-11-16-runs.json
python benchmarks/speed_page.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, MEASURED = ROOT / "docs/speed.md", ROOT / "results/speed"
BEGIN, END = "<!-- python benchmarks/speed_page.py: begin -->\n", "<!-- end -->\n"


def rows(heading: Iterable[str], lines: Iterable[Iterable[object]]) -> Iterator[str]:
    heading = list(heading)
    yield f"| {' | '.join(heading)} |"
    yield f"|{'---|' * len(heading)}"
    for line in lines:
        yield f"| {' | '.join(str(each) for each in line)} |"
    yield ""


def turns(least: float, most: float) -> str:
    return "" if least == most else f"{least:.1f} to {most:.1f}"


def gigabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f} GB"


def of_speed(found: dict[str, Any]) -> Iterator[str]:
    """A file of `drq speed --json`."""
    machine = found["machine"]
    where = f"{machine['device']}, {machine['cores']} cores, PyTorch {machine['torch']}"
    yield f"{where}, commit {machine['commit']}; engine: {found['engine']}.\n"
    for comparison in found["comparisons"]:
        yield f"Batch {comparison['batch_size']}, K = {comparison['k']}, M = {comparison['m']}, in turns:\n"
        yield from rows(
            ("what", "ms an update", "times as long", "in single turns"),
            (
                (one["name"], f"{one['timing']['ms']:.3g}", f"{one['ratio']:.3g}", turns(*one["ratio_range"]))
                for one in comparison["contenders"]
            ),
        )
    if found["presets"]:
        yield from rows(
            ("preset", "batch", "K, M", "ms an update", "updates/s", "GPU memory"),
            (
                (
                    one["name"],
                    one["batch_size"],
                    f"{one['k']}, {one['m']}",
                    f"{one['timing']['ms']:.2f}",
                    f"{1e3 / one['timing']['ms']:,.0f}",
                    gigabytes(one["device_bytes"]),
                )
                for one in found["presets"]
            ),
        )
    if found["growth"]:
        yield from rows(
            (f"{found['growth_from']} with", "ms an update", "GPU memory"),
            (
                (
                    f"{what} {', '.join(one['name'] for one in several)}",
                    ", ".join(f"{one['timing']['ms']:.2f}" for one in several),
                    ", ".join(gigabytes(one["device_bytes"]) for one in several),
                )
                for what, several in found["growth"].items()
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
    if found["acting"]:
        each = (f"{one['ms']:.2f} ms for {one['observations']}" for one in found["acting"])
        yield f"Acting, from observations to actions: {', '.join(each)}.\n"


def of_runs(found: dict[str, Any]) -> Iterator[str]:
    """A file of benchmarks/runs.py."""
    what = f"{found['task']}, `{found['preset']}`, {found['steps']:,} steps"
    yield f"Whole runs of {what}; commit {found['commit']}\n"
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


def tables() -> Iterator[str]:
    for file in sorted(MEASURED.glob("*.json")):
        found = json.loads(file.read_text())
        yield f"[{file.name}](../{file.relative_to(ROOT).as_posix()}):"
        yield from of_runs(found) if "groups" in found else of_speed(found)


def page(text: str) -> str:
    """The page with these tables in the place of those it has."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n".join(tables()) + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
