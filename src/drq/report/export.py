"""The report for papers: a tidy CSV, Markdown, a LaTeX (booktabs) table, a figure of the learning curves."""

from __future__ import annotations

import csv
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drq.envs import family_of
from drq.report import statistics
from drq.report.benchmarks import Benchmark, task_title
from drq.report.results import Place, RunResult
from drq.report.searches import search_tables
from drq.report.standing import Reference, Standing, StandingTable, standing_tables
from drq.report.statistics import Array, Estimate, Published
from drq.report.tables import (
    METRICS,
    ScoreTable,
    aggregates,
    by_finished,
    mean_curve,
    order_systems,
    order_tasks,
    same_games,
    score_tables,
    short_count,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

CSV_HEADER = ("benchmark", "task", "counts", "budget", "system", "source", "seeds", "mean", "std", "low", "high")
COLOURS = ("#0072b2", "#d55e00", "#00916b", "#b0508c", "#a67c00", "#3b9bd0", "#8a3324", "#4a4f57")
"""The page's palette, which colour-blind readers can tell apart."""
MARKERS = "os^Dv*P"


def write_csv(runs: Sequence[RunResult], missing: Sequence[Place], out: Path) -> None:
    """One row for each task, budget and system; `low` and `high` bound the 95% interval of our means. An
    empty budget means each run's last evaluation. Rows whose source is `z` or `z of area` hold z-scores among published
    runs, those with `missing` how many runs are not there."""
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_HEADER)
        writer.writerows(_csv_rows(runs, missing))


def _csv_rows(runs: Sequence[RunResult], missing: Sequence[Place]) -> Iterator[list[str | int | float | None]]:
    def place(table: ScoreTable | StandingTable, task: str, system: str) -> list[str | int | float | None]:
        return [table.benchmark.key, task, table.benchmark.counts, table.budget, system]

    for standing in standing_tables(runs):
        source = "z" if standing.measure == "return" else "z of area"
        for task, among in standing.rows.items():
            z = np.array([each.z for each in among])
            scores = [len(z), float(z.mean()), statistics.sample_std(z), None, None]
            yield [*place(standing, task, standing.system), source, *scores]
        for mean in standing.means():
            ends = (None, None) if mean.reach is None else (mean.z - mean.reach, mean.z + mean.reach)
            yield [*place(standing, mean.of, standing.system), source, mean.runs, mean.z, None, *ends]
    for table in score_tables(runs, missing):
        for (task, system), count in Counter((one.task, one.system) for one in table.missing).items():
            yield [*place(table, task, system), "missing", count, *[None] * 4]
        for task, cells in zip(table.tasks, table.cells, strict=True):
            for system, cell in zip(table.columns, cells, strict=True):
                if cell:
                    source, interval = "published", Estimate(cell.mean)
                    if cell.runs is not None:
                        source, interval = "runs", statistics.estimated_mean([cell.runs])
                    scores = [cell.seeds, cell.mean, cell.std, interval.low, interval.high]
                    yield [*place(table, task, system), source, *scores]


@dataclass(frozen=True)
class Block:
    """A table of the report as text, and what is said below it."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]
    code: str = ""


def write_markdown(runs: Sequence[RunResult], missing: Sequence[Place], out: Path) -> None:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(re.sub(r"([|\\<])", r"\\\1", cell) for cell in cells) + " |"

    parts = []
    for block in _blocks(runs, missing):
        table = [line(block.header), "|" + "---|" * len(block.header), *map(line, block.rows)]
        parts += [f"## {block.title}", "\n".join(table), *block.notes]
        parts += [f"```toml\n{block.code}```"] if block.code else []
    out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def write_tex(runs: Sequence[RunResult], missing: Sequence[Place], out: Path) -> None:
    """The same as booktabs tables."""
    parts = ["% needs \\usepackage{booktabs}"]
    for block in _blocks(runs, missing):
        header, *rows = [" & ".join(map(_tex, cells)) + r" \\" for cells in (block.header, *block.rows)]
        lines = [
            r"\begin{table}",
            r"\centering\small",
            rf"\caption{{{_tex(' '.join([f'{block.title}.', *block.notes]))}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(block.header) - 1)}}}",
            r"\toprule",
            header,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        lines += [rf"\begin{{verbatim}}{block.code}\end{{verbatim}}"] if block.code else []
        parts.append("\n".join(lines))
    out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _tex(text: str) -> str:
    if re.fullmatch(r"[-+]?[\d.]+( ± [\d.]+)?", text):
        return "$" + text.replace("±", r"\pm") + "$"
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {"–": "--", "±": r"$\pm$"}
    return re.sub(r"[\\~^–±&%$#_{}]", lambda found: special.get(found[0], "\\" + found[0]), text)


def _blocks(runs: Sequence[RunResult], missing: Sequence[Place]) -> Iterator[Block]:
    """Scores at each budget, Atari's aggregates, where runs stand among published ones, searches."""
    for table in score_tables(runs, missing):
        rows = [
            [task_title(task), *("–" if cell is None else _score(cell, table.benchmark) for cell in cells)]
            for task, cells in zip(table.tasks, table.cells, strict=True)
        ]
        lacking = [f"Missing: {one}." for one in table.missing_in_words()]
        said = ["Mean and standard deviation over seeds.", *lacking]
        yield Block(table.title, ["Task", *table.columns], rows, said)
        for part in same_games(table) if table.benchmark.key == "atari" else []:
            rows = [
                [one.system, str(one.games), str(one.runs or "means"), *map(_estimate, one.metrics.values())]
                for one in aggregates(part.table)[0]
            ]
            said = [*part.in_words(), "With 95% intervals; published systems by their means alone."]
            yield Block(part.title, ["System", "Games", "Runs", *METRICS], rows, said)
    for standing in standing_tables(runs):
        header = ["Task", "Published", "Runs", "Our runs", "z", "Mean z"]
        yield Block(standing.title, header, _standing_rows(standing), _mean_lines(standing))
    for search in search_tables(runs):
        header = [*search.names, search.benchmark.unit, "Return", "Seeds"]
        rows = [
            [*map(str, row.values), f"{row.steps:,.0f}", _score(row.cell, search.benchmark), str(row.cell.seeds)]
            for row in search.rows
        ]
        yield Block(f"{search.title}: {task_title(search.task)}", header, rows, ["The best settings:"], search.best)


def _standing_rows(table: StandingTable) -> list[list[str]]:
    """Published mean and spread, each seed's score, its z-score or rank, and their mean."""

    def place(each: Standing) -> str:
        rank = "" if each.above is None else f" (above {each.above} of {each.reference.runs})"
        return f"{each.z:+.2f}{rank}"

    rows = []
    for task, runs in table.rows.items():
        reference = runs[0].reference
        scores = ", ".join(_decimal(each.score, table.benchmark.digits) for each in runs)
        published = [_score(reference, table.benchmark), str(reference.runs)]
        rows.append([task_title(task), *published, scores, ", ".join(map(place, runs)), str(table.task_mean(task))])
    return rows


def _mean_lines(table: StandingTable) -> list[str]:
    lines = []
    for mean in table.means():
        of = f"{mean.runs} run{'s'[: mean.runs > 1]} of {mean.tasks} task{'s'[: mean.tasks > 1]}"
        lines.append(f"Mean z of {mean.of}: {mean} ({of}).")
    return lines


def _score(score: Published | Reference, benchmark: Benchmark) -> str:
    """As in "868 ± 10"."""
    spread = "" if score.std is None else f" ± {_decimal(score.std, benchmark.digits)}"
    return _decimal(score.mean, benchmark.digits) + spread


def _estimate(estimate: Estimate) -> str:
    interval = "" if estimate.low is None else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"{estimate.value:.3f}{interval}"


def _decimal(value: float, digits: int) -> str:
    """Halves are rounded away from zero, as on the page, and there is no minus before a zero."""
    if not abs(value) < 1e15:  # a table has no room for its digits, and infinity has none
        return f"{value:.3g}"
    return str(Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP) + 0)


def write_png(runs: Sequence[RunResult], missing: Sequence[Place], out: Path) -> None:
    """Learning curves; where runs were only evaluated at their end, as Atari's, their z-scores among published runs."""
    from matplotlib.figure import Figure

    runs = [run for run in runs if len(run.steps)]
    standings = standing_tables(runs)
    figure = Figure(layout="constrained")
    if standings and all(len(run.steps) == 1 for run in runs):
        _draw_standings(figure, standings, order_systems(runs))
    else:
        _draw_curves(figure, runs)
    figure.savefig(out, dpi=200, format="png")


def _draw_standings(figure: Figure, tables: Sequence[StandingTable], systems: Sequence[str]) -> None:
    """A panel a table, a row a task, a mark a run; below them the means with their 95% intervals."""
    figure.set_size_inches(7.0 * len(tables), 0.24 * max(len(table.rows) for table in tables) + 1.9)
    for axis, table in zip(figure.subplots(1, len(tables), squeeze=False).flatten(), tables, strict=True):
        colour = COLOURS[systems.index(table.system) % len(COLOURS)]
        for row, runs in enumerate(table.rows.values()):
            axis.plot([each.z for each in runs], [row] * len(runs), "o", color=colour, markersize=5)
        means = table.means()
        for row, mean in enumerate(means, len(table.rows) + 1):
            axis.errorbar(mean.z, row, xerr=mean.reach or 0.0, fmt="D", color=colour, markersize=6, capsize=3)
        names = [f"{mean.of.partition(', which')[0]}: {mean}" for mean in means]
        at = [*range(len(table.rows)), *range(len(table.rows) + 1, len(table.rows) + 1 + len(means))]
        axis.set_yticks(at, [*map(task_title, table.rows), *names], fontsize=8)
        axis.axvspan(-1, 1, color="#7b828c", alpha=0.12, linewidth=0)
        axis.axvline(0, color="#7b828c", linewidth=1, linestyle=":")
        marks = [abs(each.z) for runs in table.rows.values() for each in runs]
        ends = [abs(mean.z) + (mean.reach or 0.0) for mean in means]
        reach = max(3.0, 1.05 * max(marks + ends))
        axis.set_xlim(-reach, reach)
        axis.set_ylim(at[-1] + 0.7, -0.7)
        axis.set_xlabel("z-score among published runs", fontsize=9)
        axis.set_title(_lines(table.title, 80), fontsize=10)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    if apart := set(systems) - {table.system for table in tables}:
        note = f"Not here, as no runs of their settings were published: {', '.join(sorted(apart))}"
        figure.supxlabel(_lines(note, 110 * len(tables)), fontsize=8)


def _draw_curves(figure: Figure, runs: Sequence[RunResult]) -> None:
    """A panel a task: means, one standard deviation either way; published curves are dashed, those of unfinished runs
    dotted."""
    systems = order_systems(runs)
    panels = [
        (benchmark, task)
        for benchmark in dict.fromkeys(run.benchmark for run in runs)
        for task in order_tasks([run for run in runs if run.benchmark is benchmark])
    ]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure.set_size_inches(4.2 * columns, 3.1 * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    handles: dict[str, Line2D] = {}
    for axis, (benchmark, task) in zip(axes, panels, strict=False):
        end = 0.0
        for number, system in enumerate(systems):
            members = [run for run in runs if (run.benchmark, run.task, run.system) == (benchmark, task, system)]
            for finished, group in by_finished(members).items():
                curve = mean_curve(group)
                colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
                style: dict[str, Any] = {"color": colour, "marker": marker, "markevery": [-1], "zorder": 3}
                name = system if finished else f"{system}, unfinished"
                handles[name] = _draw(axis, *curve, linestyle="-" if finished else ":", **style)
                end = max(end, curve[0][-1])
        if published := benchmark.curves.get(task):
            # As far as ours go: what lies beyond would stretch the axis of returns.
            until = min(end, published.steps[-1])
            steps = np.append(published.steps[published.steps < until], until)
            parts = steps, *(np.interp(steps, published.steps, each) for each in (published.mean, published.std))
            handles[published.name] = _draw(axis, *parts, color="#7b828c", linestyle="--", zorder=2)
        axis.set_title(_lines(task_title(task), 40), fontsize=11)
        axis.set_xlabel(benchmark.unit, fontsize=9)
        axis.set_ylabel("return", fontsize=9)
        axis.set_xlim(0, end or 1)
        axis.xaxis.set_major_formatter(lambda step, _: short_count(step))
        if highest := family_of(task).highest_return:
            axis.set_ylim(0, min(highest, axis.get_ylim()[1]))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    names = [_lines(name, 38) for name in handles]
    figure.legend(handles.values(), names, loc="outside lower center", ncols=columns, frameon=False)


def _lines(text: str, width: int) -> str:
    """A text that would not fit into a figure, in up to three lines."""
    return "\n".join(textwrap.wrap(text, width, max_lines=3))


def _draw(axis: Axes, steps: Array, mean: Array, std: Array, **style: Any) -> Line2D:
    (line,) = axis.plot(steps, mean, linewidth=1.6, **style)
    known = np.isfinite(std)
    band = (steps[known], (mean - std)[known], (mean + std)[known])
    axis.fill_between(*band, color=style["color"], alpha=0.14, linewidth=0)
    return line


WRITERS: dict[str, Callable[[Sequence[RunResult], Sequence[Place], Path], None]] = {
    "csv": write_csv,
    "md": write_markdown,
    "tex": write_tex,
    "png": write_png,
}
