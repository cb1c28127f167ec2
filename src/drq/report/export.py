"""The report for papers: a tidy CSV, Markdown, a LaTeX (booktabs) table, a figure of the learning curves."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drq.envs import family_of
from drq.report import statistics
from drq.report.benchmarks import task_title
from drq.report.results import RunResult
from drq.report.statistics import Array, Estimate
from drq.report.tables import (
    METRICS,
    Cell,
    ScoreTable,
    aggregates,
    mean_curve,
    order_systems,
    order_tasks,
    score_tables,
    short_count,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

CSV_HEADER = ("benchmark", "task", "counts", "budget", "system", "source", "seeds", "mean", "std", "low", "high")
COLOURS = ("#0072b2", "#d55e00", "#00916b", "#b0508c", "#a67c00", "#3b9bd0", "#8a3324", "#4a4f57")
"""The page's palette, which colour-blind readers can tell apart."""
MARKERS = "os^Dv*P"


def write_csv(runs: Sequence[RunResult], out: Path) -> None:
    """One row for each task, budget and system; `low` and `high` bound the 95% interval of our means. An
    empty budget means each run's last evaluation."""
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_HEADER)
        for table in score_tables(runs):
            for task, cells in zip(table.tasks, table.cells, strict=True):
                for column, (system, cell) in enumerate(zip(table.columns, cells, strict=True)):
                    if cell:
                        writer.writerow(_csv_row(table, task, system, column < table.ours, cell))


def _csv_row(table: ScoreTable, task: str, system: str, ours: bool, cell: Cell) -> list[str | int | float | None]:
    interval = Estimate(cell.mean) if cell.runs is None else statistics.estimate(statistics.mean, [cell.runs])
    place = [table.benchmark.key, task, table.benchmark.counts, table.budget, system]
    return [*place, "runs" if ours else "published", cell.seeds, cell.mean, cell.std, interval.low, interval.high]


def write_markdown(runs: Sequence[RunResult], out: Path) -> None:
    """A table for each benchmark and budget, and Atari's aggregate scores."""
    parts = []
    for table in score_tables(runs):
        rows = [[task_title(task), *cells] for task, cells in _texts(table, " ± ")]
        parts.append(f"## {table.title}\n\n" + _markdown_table(["Task", *table.columns], rows))
        if table.benchmark.key == "atari":
            header, body = _aggregate_texts(table)
            parts.append("## Human-normalised scores\n\n" + _markdown_table(header, body))
    out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _markdown_table(header: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(re.sub(r"([|\\<])", r"\\\1", cell) for cell in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def write_tex(runs: Sequence[RunResult], out: Path) -> None:
    """A booktabs table for each benchmark and budget, and Atari's aggregate scores."""
    parts = ["% needs \\usepackage{booktabs}"]
    for table in score_tables(runs):
        rows = [[_tex(task_title(task)), *cells] for task, cells in _texts(table, r" \pm ", "$")]
        caption = f"{table.title}: mean and standard deviation over seeds."
        parts.append(_tex_table(["Task", *table.columns], rows, caption))
        if table.benchmark.key == "atari":
            header, body = _aggregate_texts(table)
            escaped = [[_tex(cell) for cell in row] for row in body]
            parts.append(_tex_table(header, escaped, "Human-normalised scores with 95% intervals."))
    out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
    return re.sub(r"[\\~^–&%$#_{}]", lambda found: special.get(found[0], "\\" + found[0]), text)


def _tex_table(header: list[str], rows: list[list[str]], caption: str) -> str:
    lines = [" & ".join(cells) + r" \\" for cells in ([_tex(cell) for cell in header], *rows)]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering\small",
            rf"\caption{{{_tex(caption)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _texts(table: ScoreTable, plus_minus: str, maths: str = "") -> list[tuple[str, list[str]]]:
    """Cells of a table as text: "868 ± 10"."""

    def text(cell: Cell | None) -> str:
        if cell is None:
            return "–" if not maths else "--"
        spread = "" if cell.std is None else plus_minus + _decimal(cell.std, table.benchmark.digits)
        return f"{maths}{_decimal(cell.mean, table.benchmark.digits)}{spread}{maths}"

    rows = zip(table.tasks, table.cells, strict=True)
    return [(task, [text(cell) for cell in cells]) for task, cells in rows]


def _decimal(value: float, digits: int) -> str:
    """Halves are rounded away from zero, as on the page."""
    return str(Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def _aggregate_texts(table: ScoreTable) -> tuple[list[str], list[list[str]]]:
    def text(estimate: Estimate) -> str:
        interval = "" if estimate.low is None else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
        return f"{estimate.value:.3f}{interval}"

    rows, _ = aggregates(table)
    body = [[row.system, str(row.games), *(text(row.metrics[name]) for name in METRICS)] for row in rows]
    return ["System", "Games", *METRICS], body


def write_png(runs: Sequence[RunResult], out: Path) -> None:
    """Learning curves, a panel a task: means, one standard deviation either way, published curves dashed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    systems = order_systems(runs)
    benchmarks = {run.benchmark.key: run.benchmark for run in runs}.values()
    panels = [
        (benchmark, task)
        for benchmark in benchmarks
        for task in order_tasks([run for run in runs if run.benchmark is benchmark])
    ]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.1 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    handles: dict[str, Line2D] = {}
    for axis, (benchmark, task) in zip(axes, panels, strict=False):
        end = 0.0
        for number, system in enumerate(systems):
            members = [run for run in runs if (run.benchmark, run.task, run.system) == (benchmark, task, system)]
            if members:
                curve = mean_curve(members)
                colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
                style: dict[str, Any] = {"color": colour, "marker": marker, "markevery": [-1], "zorder": 3}
                handles[system] = _draw(axis, *curve, **style)
                end = max(end, curve[0][-1])
        if published := benchmark.curves.get(task):
            parts = (published.steps, published.mean, published.std)
            handles[published.name] = _draw(axis, *parts, color="#7b828c", linestyle="--", zorder=2)
        axis.set_title(task_title(task), fontsize=11)
        axis.set_xlabel(benchmark.counts.replace("_", " ") + "s", fontsize=9)
        axis.set_xlim(0, end or 1)
        axis.xaxis.set_major_formatter(lambda step, _: short_count(step))
        if highest := family_of(task).highest_return:
            axis.set_ylim(0, min(highest, axis.get_ylim()[1]))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)), frameon=False
    )
    figure.savefig(out, dpi=200, format="png")


def _draw(axis: Axes, steps: Array, mean: Array, std: Array, **style: Any) -> Line2D:
    (line,) = axis.plot(steps, mean, linewidth=1.6, **style)
    known = np.isfinite(std)
    band = (steps[known], (mean - std)[known], (mean + std)[known])
    axis.fill_between(*band, color=style["color"], alpha=0.14, linewidth=0)
    return line


WRITERS: dict[str, Callable[[Sequence[RunResult], Path], None]] = {
    "csv": write_csv,
    "md": write_markdown,
    "tex": write_tex,
    "png": write_png,
}
