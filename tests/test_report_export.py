"""The report for papers: CSV, Markdown, LaTeX, a figure; and the size of the page."""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image
from scipy.stats import t

from drq.errors import UserError
from drq.report import page, report
from drq.report.export import _decimal
from report_runs import evaluations, fake_run, write_table


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, list[Path]]:
    root = tmp_path / "runs"
    tasks = ("dmc/walker-walk", "dmc/cheetah-run", "atari/pong")
    return {task: [fake_run(root, task, seed, preset="planet", videos=1) for seed in (1, 2)] for task in tasks}


def test_csv_has_every_score_once(tmp_path: Path, runs: dict[str, list[Path]]) -> None:
    assert report([tmp_path / "runs"], tmp_path / "out" / "scores.csv", format="csv") == []
    with (tmp_path / "out" / "scores.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    places = [(row["task"], row["budget"], row["system"], row["source"]) for row in rows]
    assert len(places) == len(set(places))
    for task, folders in runs.items():
        counts = "agent_step" if task.startswith("atari/") else "env_step"
        (row,) = [row for row in rows if row["task"] == task and row["source"] == "runs"]
        scores = [evaluations(folder, counts)[100_000] for folder in folders]
        assert (row["counts"], row["seeds"], row["budget"]) == (counts, "2", "100000")
        assert float(row["mean"]) == pytest.approx(sum(scores) / 2)
        assert float(row["std"]) == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
        # Student's of two runs: one degree of freedom.
        reach = 12.7062 * float(row["std"]) / 2**0.5
        assert float(row["low"]) == pytest.approx(float(row["mean"]) - reach, rel=1e-4)
        assert float(row["high"]) == pytest.approx(float(row["mean"]) + reach, rel=1e-4)
    (paper,) = [row for row in rows if row["task"] == "dmc/walker-walk" and row["system"] == "DrQ (paper)"]
    assert (float(paper["mean"]), float(paper["std"]), paper["source"]) == (612, 164, "published")


def test_the_name_says_which_format(tmp_path: Path, runs: dict[str, list[Path]]) -> None:
    for name in ("named.md", "named.HTML", "named"):
        report([tmp_path / "runs"], tmp_path / name)
    report([tmp_path / "runs"], tmp_path / "given", format="md")
    assert (tmp_path / "named.md").read_text() == (tmp_path / "given").read_text()
    assert (tmp_path / "named").read_text() == (tmp_path / "named.HTML").read_text()
    assert (tmp_path / "named").read_text().startswith("<!doctype html>")
    with pytest.raises(UserError, match=r"r\.pdf ends in none of \.html, \.csv, \.md, \.tex, \.png: name it so"):
        report([tmp_path / "runs"], tmp_path / "r.pdf")


def test_markdown_tables(tmp_path: Path, runs: dict[str, list[Path]]) -> None:
    extra = write_table(tmp_path / "theirs.csv", [("walker_walk", 1, 100_000, 123.5, "a|b <i>")])
    report([tmp_path / "runs", extra], tmp_path / "r.md", format="md")
    text = (tmp_path / "r.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [line.replace(r"\|", "").count("|") for line in lines]
    assert "| Walker Walk |" in text
    assert r"a\|b \<i>" in text
    assert "| 124 |" in text  # halves go up, as on the page
    assert "612 ± 164" in text
    assert "Optimality gap" in text
    assert all(cells[at] == cells[at + 1] for at in range(len(cells) - 1) if "---" in lines[at + 1])


@pytest.mark.parametrize(
    ("value", "shown"), [(2.25, "2.3"), (-0.05, "-0.1"), (-0.04, "0.0"), (1e38, "1e+38"), (float("inf"), "inf")]
)
def test_any_score_can_be_shown(value: float, shown: str) -> None:
    assert _decimal(value, 1) == shown


def test_latex_compiles_or_at_least_balances(tmp_path: Path, runs: dict[str, list[Path]]) -> None:
    extra = write_table(tmp_path / "theirs.csv", [("walker_walk", 1, 100_000, 5, r"100% & $x_1$ #{\~^}")])
    report([tmp_path / "runs", extra], tmp_path / "r.tex", format="tex")
    text = (tmp_path / "r.tex").read_text()
    assert r"$612 \pm 164$" in text
    assert r"100\% \& \$x\_1\$ \#\{\textbackslash{}\textasciitilde{}\textasciicircum{}\}" in text
    for table in text.split(r"\begin{tabular}")[1:]:
        columns = len(table[1 : table.index("}")])
        rows = [line for line in table.split(r"\end{tabular}")[0].splitlines() if line.endswith(r"\\")]
        assert len(rows) >= 2
        assert {row.replace(r"\&", "").count("&") + 1 for row in rows} == {columns}
    if latex := shutil.which("pdflatex"):
        document = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}" + text + "\\end{document}"
        (tmp_path / "whole.tex").write_text(document)
        subprocess.run([latex, "-interaction=nonstopmode", "-halt-on-error", "whole.tex"], cwd=tmp_path, check=True)


def test_z_scores_and_missing_runs_are_in_every_text(tmp_path: Path, runs: dict[str, list[Path]]) -> None:
    fake_run(tmp_path / "runs", seed=3, reached=40_000, status="unfinished")
    for kind in ("csv", "md", "tex"):
        report([tmp_path / "runs"], tmp_path / f"r.{kind}", format=kind)
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lacking = {(row["task"], row["budget"]): row["seeds"] for row in rows if row["source"] == "missing"}
    assert lacking == {("dmc/walker-walk", "100000"): "1", ("dmc/cheetah-run", "100000"): "1"}
    (mean,) = [float(row["mean"]) for row in rows if (row["source"], row["task"]) == ("z", "all runs")]
    published = {"dmc/walker-walk": (525.84, 196.05), "dmc/cheetah-run": (356.99, 39.58)}
    z = [
        (evaluations(folder)[100_000] - centre) / spread
        for task, (centre, spread) in published.items()
        for folder in runs[task]
    ]
    assert mean == pytest.approx(sum(z) / len(z))
    text, tex = (tmp_path / "r.md").read_text(), (tmp_path / "r.tex").read_text()
    assert "Missing: DrQ K=2 M=2, seed 3: Cheetah Run, Walker Walk." in text
    assert f"Mean z of all runs: {mean:+.2f} ±" in text
    assert "| Walker Walk | 526 ± 196 | 19 |" in text
    assert "Missing: DrQ K=2 M=2, seed 3: Cheetah Run, Walker Walk." in tex
    assert rf"Mean z of all runs: {mean:+.2f} $\pm$" in tex


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """What the report draws, in place of a file."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out, **_: saved.append(figure) or out.touch())
    return saved


def test_figure_names_its_axes_and_keeps_unfinished_runs_apart(
    tmp_path: Path, runs: dict[str, list[Path]], figures: list[Figure]
) -> None:
    short = fake_run(tmp_path / "runs", seed=3, reached=40_000, status="unfinished")
    report([tmp_path / "runs"], tmp_path / "r.png", format="png")
    (figure,) = figures
    drawn = [axis for axis in figure.axes if axis.axison]
    assert {axis.get_ylabel() for axis in drawn} == {"return"}
    assert {axis.get_xlabel() for axis in drawn} == {"env steps", "agent steps"}
    (walker,) = (axis for axis in drawn if axis.get_title() == "Walker Walk")
    finished, unfinished, published = walker.lines
    one, two = (evaluations(folder) for folder in runs["dmc/walker-walk"])
    assert finished.get_ydata() == pytest.approx([(one[at] + two[at]) / 2 for at in one])
    assert unfinished.get_ydata() == pytest.approx(list(evaluations(short).values()))
    # The published curve ends where ours do: returns that only come later stretch no axis.
    assert published.get_xdata()[-1] == 100_000
    assert 594 < published.get_ydata()[-1] < 634
    assert walker.get_xlim() == (0, 100_000)
    assert walker.get_ylim()[0] == 0
    assert walker.get_ylim()[1] < 900
    assert walker.xaxis.get_major_formatter()(20_000) == "20k"
    # Around the mean is a standard deviation either way.
    band = walker.collections[0].get_paths()[0].vertices
    for at in one:
        edges = band[band[:, 0] == at, 1]
        assert edges.max() - edges.min() == pytest.approx(2 * abs(one[at] - two[at]) / 2**0.5)
        assert edges.max() + edges.min() == pytest.approx(one[at] + two[at])
    assert to_rgb(walker.collections[0].get_facecolor()[0]) == to_rgb(finished.get_color())
    (legend,) = figure.legends
    keys = zip(legend.get_texts(), legend.legend_handles, strict=True)
    assert {text.get_text(): line.get_linestyle() for text, line in keys} == {
        "Eff. DQN+DrQ": "-",
        "DrQ K=2 M=2": "-",
        "DrQ K=2 M=2, unfinished": ":",
        "DrQ (published curves)": "--",
    }
    assert [line.get_linestyle() for line in walker.lines] == ["-", ":", "--"]


def test_figure_shows_no_returns_that_a_task_cannot_give(tmp_path: Path, figures: list[Figure]) -> None:
    for task in ("dmc/walker-walk", "gym/Any-v0"):
        for seed in (1, 2, 3):
            fake_run(tmp_path / "runs", task, seed, level=1000.0)
    report([tmp_path / "runs"], tmp_path / "r.png", format="png")
    walker, unbounded = figures[0].axes
    assert walker.get_ylim() == (0, 1000)
    assert unbounded.get_ylim()[0] < 0
    assert unbounded.get_ylim()[1] > 1000


@pytest.mark.parametrize("panels", [1, 4])
def test_figure_has_its_panels_in_rows_of_three(panels: int, tmp_path: Path, figures: list[Figure]) -> None:
    for task in ("walker-walk", "cheetah-run", "finger-spin", "reacher-easy")[:panels]:
        fake_run(tmp_path / "runs", f"dmc/{task}")
    report([tmp_path / "runs"], tmp_path / "r.png", format="png")
    places = [axis.get_subplotspec() for axis in figures[0].axes if axis.axison]
    expected = [(0, 0), (0, 1), (0, 2), (1, 0)][:panels]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == expected


def test_figure_breaks_and_shortens_a_long_name(tmp_path: Path, figures: list[Figure]) -> None:
    name = "with a shift of four pixels and then " * 5
    fake_run(tmp_path / "runs", label=name.strip())
    report([tmp_path / "runs"], tmp_path / "r.png", format="png")
    lines = figures[0].legends[0].get_texts()[0].get_text().splitlines()
    assert len(lines) == 3
    assert all(20 < len(line) <= 38 for line in lines)
    assert name.startswith(" ".join(lines).removesuffix(" [...]"))


def evaluated_once(root: Path) -> None:
    """Leaves of each run's evaluations only the last."""
    for file in root.rglob("eval.csv"):
        lines = file.read_text().splitlines()
        file.write_text(f"{lines[0]}\n{lines[-1]}\n")


ATARI: dict[str, Any] = {"env": {"frame_stack": 4}, "capacity": None, "every": 100_000}


def test_figure_of_runs_with_one_evaluation_shows_where_they_stand(tmp_path: Path, figures: list[Figure]) -> None:
    for task, seeds in {"atari/pong": (1, 2, 3), "atari/alien": (1, 2)}.items():
        for seed in seeds:
            fake_run(tmp_path / "runs", task, seed, preset="atari100k", **ATARI)
    fake_run(tmp_path / "runs", "atari/pong", label="apart", preset="atari100k", k=2, **ATARI)
    evaluated_once(tmp_path / "runs")
    report([tmp_path / "runs"], tmp_path / "r.png", format="png")
    (axis,) = figures[0].axes
    folders = sorted((tmp_path / "runs").glob("atari-alien*"), key=lambda folder: folder.name[-1])
    alien = [evaluations(folder, "agent_step")[100_000] for folder in folders]
    assert axis.lines[0].get_xdata() == pytest.approx([(one - 734.08) / 92.14 for one in alien])  # the 100 runs of DrQ
    assert figures[0].get_supxlabel().endswith("published: apart")
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert [label.partition(":")[0] for label in labels] == ["Alien", "Pong", "all runs", "seed 1, 2"]
    assert axis.get_title().startswith("Eff. DQN+DrQ among published runs of DrQ: Atari 100k")
    assert axis.get_xlabel() == "z-score among published runs"
    # Marks are beside their labels, the first at the top.
    heights = axis.get_yticks().tolist()
    assert [set(line.get_ydata()) for line in axis.lines[:2]] == [{height} for height in heights[:2]]
    bottom, top = axis.get_ylim()
    assert bottom > heights[3] > heights[2] > heights[1] > heights[0] > top
    for label, height, bar, runs in zip(labels[2:], heights[2:], axis.containers, (5, 4), strict=True):
        (z,), (at,) = bar[0].get_data()
        (low, _), (high, _) = bar[2][0].get_segments()[0]
        mean, error = map(float, label.partition(": ")[2].split(" ± "))
        assert (z, at) == (pytest.approx(mean, abs=0.005), height)
        reach = t.ppf(0.975, runs - 1) * error  # nearly: the error of 100 published runs is a small part of it
        assert (low, high) == pytest.approx((mean - reach, mean + reach), rel=0.03)
    # Marked are the mean of the published runs, and a standard deviation about it.
    assert [0, 0] in [list(line.get_xdata()) for line in axis.lines]
    shaded = axis.patches[0].get_extents().transformed(axis.transData.inverted())
    assert shaded.intervalx == pytest.approx([-1, 1])


def test_figure_has_all_z_scores_and_intervals_in_sight(tmp_path: Path, figures: list[Figure]) -> None:
    for preset, levels in (("atari100k", (540.0, 1010.0)), ("strong", (200.0, 9000.0))):
        for seed, level in enumerate(levels, 1):
            fake_run(tmp_path / "runs", "atari/alien", seed, preset=preset, level=level, **ATARI)
    evaluated_once(tmp_path / "runs")
    report([tmp_path / "runs"], tmp_path / "r.png", format="png")
    for axis in figures[0].axes:
        low, high = axis.get_xlim()
        (bar,) = axis.containers
        ends = bar[2][0].get_segments()[0][:, 0]
        assert bar[0].get_color() == axis.lines[0].get_color()
        assert low == -high
        assert high >= 3
        assert all(low < x < high for x in [*axis.lines[0].get_xdata(), *ends])
    beside = [axis.get_subplotspec() for axis in figures[0].axes]
    assert [(place.rowspan.start, place.colspan.start) for place in beside] == [(0, 0), (0, 1)]
    assert len({axis.lines[0].get_color() for axis in figures[0].axes}) == 2


def test_figure(tmp_path: Path, runs: dict[str, list[Path]]) -> None:
    report([tmp_path / "runs"], tmp_path / "r.png", format="png")
    with Image.open(tmp_path / "r.png") as image:
        assert image.format == "PNG"
        assert image.width > image.height
        drawn = {pixel for _, pixel in image.convert("RGB").getcolors(1 << 24)}
    assert {(0x00, 0x72, 0xB2), (0x7B, 0x82, 0x8C)} <= drawn  # our first system, and the published curve


def test_page_stays_small_with_long_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1, 41):
        fake_run(tmp_path / "runs", seed=seed, steps=1_000_000, every=1_000)
    report([tmp_path / "runs"], tmp_path / "r.html")
    full = (tmp_path / "r.html").stat().st_size
    assert full <= 6_000_000
    monkeypatch.setattr(page, "LARGEST", full * 3 // 4)
    report([tmp_path / "runs"], tmp_path / "r.html")
    assert (tmp_path / "r.html").stat().st_size <= full * 3 // 4


def test_page_asks_for_nothing_outside_itself(tmp_path: Path, runs: dict[str, list[Path]]) -> None:
    report([tmp_path / "runs"], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    for outside in ("http://", "https://", "@import", "url("):
        where = text.replace("http://www.w3.org/2000/svg", "").replace("url(#", "")
        assert outside not in where


def test_the_same_runs_give_the_same_page(tmp_path: Path, runs: dict[str, list[Path]]) -> None:
    report([tmp_path / "runs"], tmp_path / "a.html")
    report([tmp_path / "runs"], tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
