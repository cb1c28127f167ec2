"""The report as one HTML file that needs nothing else: data as JSON, charts drawn by `web/*.js`.

Everything that came from a file travels inside the JSON and is put on the page as text, never as markup.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from drq.envs import family_of
from drq.errors import UserError
from drq.report import tables
from drq.report.benchmarks import Benchmark, benchmarks, read_published, sources, task_title
from drq.report.results import Place, RunResult
from drq.report.searches import SearchTable, search_tables
from drq.report.standing import StandingTable, standing_tables
from drq.report.statistics import Array, Estimate

LARGEST = 6_000_000
"""Bytes a page may have."""
POINTS = (120, 60, 30, 12, 4)
"""Points kept of a curve: the first number with which the page is small enough."""
SMOOTHED = 5
"""Training games under a point of their curve."""
SHOWN_AT_FIRST = 8
"""Systems switched on when the page opens; more lines than this in a chart cannot be told apart."""

Json = dict[str, Any]


def write_page(runs: Sequence[RunResult], warnings: Sequence[str], missing: Sequence[Place], out: Path) -> None:
    """Writes the report on these runs to `out`."""
    out.write_text(render(page_data(runs, warnings, missing, lambda video: _link(video, out))), encoding="utf-8")


def page_data(
    runs: Sequence[RunResult], warnings: Sequence[str], missing: Sequence[Place], link: Callable[[Path], str]
) -> Json:
    """All that the page shows, with as many points of curves as it has room for. `link` is how it leads to a video."""
    names = tables.order_systems(runs)
    ours = {run.system for run in runs if run.ours}
    first_of_task = {run.task: run.system for run in sorted(runs, key=lambda run: -names.index(run.system))}
    shown = {*names[:SHOWN_AT_FIRST], *first_of_task.values()}
    compared = tables.score_tables(runs, missing)
    configs: dict[str, int] = {}
    data: Json = _plain(
        {
            "warnings": warnings,
            "systems": [{"name": name, "ours": name in ours, "on": name in shown} for name in names],
            "tables": [_table(table, names) for table in compared],
            "standings": [_standing(table, names) for table in standing_tables(runs)],
            "atari": [
                _aggregates(part, names)
                for table in compared
                if table.benchmark.key == "atari"
                for part in tables.same_games(table)
            ],
            "grids": [_grid(grid) for grid in tables.grids(runs)],
            "searches": [_search(table) for table in search_tables(runs)],
            "runs": [_run(run, names, configs, link) for run in _in_order(runs, names)],
            "configs": list(configs),
            "sources": sources(),
        }
    )
    for points in POINTS:
        data["panels"] = _plain(_panels(runs, names, points))
        if len(render(data).encode()) <= LARGEST:
            return data
    raise UserError(f"{len(runs)} runs do not fit into a page of 6 MB; give fewer folders at a time.")


def json_text(data: Json) -> str:
    """JSON that may stand inside a script element: "<" could close it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def render(data: Json, *, live: bool = False) -> str:
    """The page with its data. A live one asks the server that it came from for more."""
    files = resources.files("drq.report").joinpath("web")
    parts = {
        "style": files.joinpath("page.css").read_text(encoding="utf-8"),
        "script": "\n".join(
            files.joinpath(name).read_text(encoding="utf-8")
            for name in ("charts.js", "tables.js", "page.js", *(["watch.js"] if live else []))
        ),
        "data": json_text(data),
        "server": " connect-src 'self'; media-src 'self';" if live else "",
    }
    template = files.joinpath("template.html").read_text(encoding="utf-8")
    return re.sub(r"/\*(style|script|data|server)\*/", lambda marker: parts[marker[1]], template)


def _in_order(runs: Sequence[RunResult], names: list[str]) -> list[RunResult]:
    order, tasks = list(benchmarks().values()), tables.order_tasks(runs)
    return sorted(
        runs, key=lambda run: (order.index(run.benchmark), tasks.index(run.task), names.index(run.system), run.seed)
    )


def rounded(value: float | None) -> float | int | None:
    """Seven significant digits, a decimal of scores above 100,000 too, in as few characters as it takes."""
    if value is None or not np.isfinite(value):
        return None
    short = float(f"{value:.7g}")
    return int(short) if short.is_integer() else short


def _plain(value: Any) -> Any:
    """As JSON has it: arrays and estimates as lists, numbers rounded."""
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, Estimate):
        value = [value.value, value.low, value.high]
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _panel_id(benchmark: Benchmark, task: str) -> str:
    return f"{benchmark.key}:{task}"


def _panels(runs: Sequence[RunResult], names: list[str], points: int) -> list[Json]:
    """A chart for each task: for each system the evaluations of its runs on one grid of steps."""
    groups: dict[tuple[Benchmark, str], dict[str, list[tuple[int, RunResult]]]] = defaultdict(lambda: defaultdict(list))
    for index, run in enumerate(_in_order(runs, names)):
        if len(run.steps):
            groups[run.benchmark, run.task][run.system].append((index, run))
    panels = []
    for (benchmark, task), members in groups.items():
        of_state = any(run.from_state for numbered in members.values() for _, run in numbered)
        series = [
            _series(names.index(name), [one for one in numbered if (one[1].status == "finished") is finished], points)
            | {"unfinished": not finished}
            for name, numbered in members.items()
            for finished in tables.by_finished([run for _, run in numbered])
        ]
        panels.append(
            {
                "id": _panel_id(benchmark, task),
                "benchmark": benchmark.title,
                "title": task_title(task),
                "unit": benchmark.unit,
                "digits": benchmark.digits,
                "top": family_of(task).highest_return,
                "series": sorted(series, key=lambda one: one["system"]),
                "published": _published(benchmark, task, of_state=of_state),
                "training": [
                    _training_games(names.index(name), index, *run.training, points)
                    for name, numbered in members.items()
                    for index, run in numbered
                    if run.training
                ],
            }
        )
    return panels


def _series(system: int, numbered: list[tuple[int, RunResult]], points: int) -> Json:
    """Runs that were evaluated at the same steps keep their numbers; others are interpolated between
    theirs."""
    grid, curves = tables.common_grid([run for _, run in numbered])
    kept = _spread(len(grid), points)
    values = {index: curve[kept] for (index, _), curve in zip(numbered, curves, strict=True)}
    return {"system": system, "x": grid[kept], "runs": values}


def _training_games(system: int, index: int, steps: Array, returns: Array, points: int) -> Json:
    """The running mean of a few games, as single ones differ too much to be read."""
    width = min(SMOOTHED, len(returns))
    smooth = np.convolve(returns, np.ones(width) / width, mode="valid")
    kept = _spread(len(smooth), points)
    return {"system": system, "run": index, "x": steps[width - 1 :][kept], "y": smooth[kept]}


def _spread(count: int, points: int) -> NDArray[np.int64]:
    """Places of at most so many points of a curve, evenly from its first to its last."""
    return np.unique(np.linspace(0, count - 1, min(points, count)).round().astype(int))


def _published(benchmark: Benchmark, task: str, *, of_state: bool) -> list[Json]:
    """The published curve, or scores at budgets where there is none; those from state beside runs of that kind."""
    curve = benchmark.curves.get(task)
    found: list[Json] = []
    if curve:
        found.append({"name": curve.name, "x": curve.steps, "mean": curve.mean, "std": curve.std, "n": curve.seeds})
    kinds = (*(() if curve else ("DrQ", "Eff. DQN+DrQ", "BBF without SPR")), *(("SAC State",) if of_state else ()))
    for budget in benchmark.budgets:
        at = f" at {tables.short_count(budget)}" if len(benchmark.budgets) > 1 else ""
        found += [
            {"name": name + at, "x": [budget], "mean": [score.mean], "std": [score.std], "n": [score.seeds]}
            for name, score in benchmark.table.get((task, budget), {}).items()
            if name.startswith(kinds)
        ]
    return found


def _cell(cell: tables.Cell | None) -> Json | None:
    if cell is None:
        return None
    steps = [tables.short_count(at) for at in cell.steps] if cell.steps else []
    read = " to ".join(dict.fromkeys(steps))
    return {"mean": cell.mean, "std": cell.std, "n": cell.seeds, "at": read}


def _table(table: tables.ScoreTable, names: list[str]) -> Json:
    compared = {}
    for index in range(table.ours):
        by_task, overall = tables.differences(table, index)
        compared[names.index(table.columns[index])] = {"tasks": by_task, "overall": overall}
    return {
        "title": table.title,
        "unit": table.benchmark.unit,
        "budget": table.budget,
        "digits": table.benchmark.digits,
        "columns": [
            {"name": name, "system": names.index(name) if at < table.ours else None}
            for at, name in enumerate(table.columns)
        ],
        "rows": [
            {"panel": _panel_id(table.benchmark, task), "title": task_title(task), "cells": [_cell(one) for one in row]}
            for task, row in zip(table.tasks, table.cells, strict=True)
        ],
        "differences": compared,
        "missing": table.missing_in_words(),
    }


def _standing(table: StandingTable, names: list[str]) -> Json:
    return {
        "title": table.title,
        "system": names.index(table.system),
        "digits": table.benchmark.digits,
        "rows": [
            {
                "panel": _panel_id(table.benchmark, task),
                "title": task_title(task),
                "published": [runs[0].reference.mean, runs[0].reference.std, runs[0].reference.runs],
                "runs": [
                    {"seed": each.run.seed, "score": each.score, "z": each.z, "above": each.above} for each in runs
                ],
                "mean": vars(table.task_mean(task)),
            }
            for task, runs in table.rows.items()
        ],
        "means": [vars(mean) for mean in table.means()],
    }


def _aggregates(part: tables.SameGames, names: list[str]) -> Json:
    rows, improvements = tables.aggregates(part.table)
    number = {name: names.index(name) for name in part.table.columns[: part.table.ours]}
    return {
        "title": part.title,
        "of": [number[name] for name in part.of],
        "games": len(part.table.tasks),
        "notes": part.in_words(),
        "metrics": list(tables.METRICS),
        "rows": [{"name": row.system, **vars(row), "system": number.get(row.system)} for row in rows],
        "improvements": [{**vars(one), "system": number[one.system]} for one in improvements],
        "peers": read_published("atari100k_peers.csv") if part.complete else [],
    }


def _grid(grid: tables.Grid) -> Json:
    columns, rows, *panels = grid.values
    return {
        "title": grid.title,
        "panel": _panel_id(grid.benchmark, grid.task),
        "task": task_title(grid.task),
        "budget": f"{tables.short_count(grid.budget)} {grid.benchmark.unit}",
        "digits": grid.benchmark.digits,
        "names": grid.names,
        "columns": columns,
        "rows": rows,
        "panels": [
            {
                "value": panel,
                "cells": [[_cell(grid.cells.get((column, row, *panel))) for column in columns] for row in rows],
            }
            for panel in itertools.product(*panels)
        ],
    }


def _search(table: SearchTable) -> Json:
    return {
        "title": f"{table.title}: {task_title(table.task)}",
        "panel": _panel_id(table.benchmark, table.task),
        "task": task_title(table.task),
        "unit": table.benchmark.unit,
        "digits": table.benchmark.digits,
        "names": table.names,
        "rows": [{"values": row.values, "steps": row.steps, "cell": _cell(row.cell)} for row in table.rows],
        "best": table.best,
    }


def _config_text(record: Json) -> str:
    same_for_all_seeds = {key: value for key, value in record["config"].items() if key not in ("seed", "dir")}
    return json.dumps(record | {"config": same_for_all_seeds}, indent=1, sort_keys=True)


def _run(run: RunResult, names: list[str], configs: dict[str, int], link: Callable[[Path], str]) -> Json:
    """`configs` has the place of each different configuration, and grows by one that is new."""
    rate = run.last_step / run.seconds if run.seconds else None
    return {
        "panel": _panel_id(run.benchmark, run.task),
        "title": task_title(run.task),
        "system": names.index(run.system),
        "seed": run.seed,
        "status": run.status if len(run.steps) else "no evaluation" if run.status != "failed" else "failed",
        "error": run.error,
        "step": run.last_step,
        "budget": run.budget,
        "unit": run.benchmark.unit,
        "digits": run.benchmark.digits,
        "last": float(run.returns[-1]) if len(run.returns) else None,
        "seconds": run.seconds,
        "rate": rate,
        "folder": str(run.path),
        "config": configs.setdefault(_config_text(run.record), len(configs)) if run.ours else None,
        "videos": [[video.name, link(video)] for video in run.videos],
    }


def _link(file: Path, out: Path) -> str:
    """A link from the page to a file, relative so that the folder can be moved as a whole."""
    relative = os.path.relpath(file.resolve(), out.resolve().parent)
    return "./" + quote(relative.replace(os.sep, "/"))
