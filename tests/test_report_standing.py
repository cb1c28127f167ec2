"""Where runs stand among published ones, against the shipped figures read and computed without the package."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, rankdata

from drq.report import statistics
from drq.report.standing import StandingTable, area, standing_tables
from report_runs import evaluations, fake_run, runs_of, write_table


def shipped(file: str) -> list[dict[str, str]]:
    text = resources.files("drq.report").joinpath("published", file).read_text()
    return list(csv.DictReader(text.splitlines()))


def spread(task: str, which: str, budget: int = 100_000) -> dict[str, float]:
    (row,) = (
        row
        for row in shipped("drq_control_spread.csv")
        if (row["task"], row["set"], row["budget"]) == (task, which, str(budget))
    )
    return {key: float(row[key]) for key in ("seeds", "area_mean", "area_std", "last_mean", "last_std")}


def tables_of(*paths: Path) -> dict[str, StandingTable]:
    return {table.measure: table for table in standing_tables(runs_of(*paths)) if table.budget == 100_000}


# The formulas.


def test_a_normal_score_is_the_rank_among_all() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        others = rng.integers(0, 6, size=9).astype(float)  # with ties
        value = float(rng.integers(0, 6))
        rank = rankdata([value, *others])[0]  # ties share their mean rank
        assert statistics.normal_score(value, others) == pytest.approx(norm.ppf((rank - 0.5) / 10))
    assert statistics.normal_score(0.0, np.zeros(10)) == 0.0


def test_the_error_of_a_mean_holds_ours_and_theirs() -> None:
    z = [np.array([1.0, -0.5]), np.array([0.25])]
    every = [1.0, -0.5, 0.25]
    mean = sum(every) / 3
    ours = sum((one - mean) ** 2 for one in every) / 2 / 3
    theirs = (2 / 3) ** 2 / 10 + (1 / 3) ** 2 / 8
    got, error, _ = statistics.mean_z(z, [10, 8])
    assert got == pytest.approx(mean)
    assert error == pytest.approx(math.sqrt(ours + theirs))
    assert statistics.mean_z([np.array([2.0])], [100]) == (2.0, None, None)


def test_a_task_has_a_mean_of_its_own(tmp_path: Path) -> None:
    for task, seeds in (("dmc/cheetah-run", 1), ("dmc/walker-walk", 3)):
        for seed in range(1, seeds + 1):
            fake_run(tmp_path, task, seed=seed, level=300.0 + 100 * seed)
    table = tables_of(tmp_path)["return"]
    z = [each.z for each in table.rows["dmc/walker-walk"]]
    mean = table.task_mean("dmc/walker-walk")
    assert (mean.runs, mean.z) == (3, pytest.approx(np.mean(z)))
    assert mean.error == pytest.approx(math.sqrt(np.var(z, ddof=1) / 3 + 1 / 19))
    assert str(mean) == f"{mean.z:+.2f} ± {mean.error:.2f}"
    alone = table.task_mean("dmc/cheetah-run")
    assert str(alone) == f"{alone.z:+.2f}"


def test_the_error_is_the_spread_of_means_over_repeated_studies() -> None:
    """Runs and references drawn again and again from the same distribution: three of ours on each of three tasks. The
    interval holds their common mean as often as it says; 1.96 errors would 93 times in 100."""
    rng = np.random.default_rng(2)
    means, errors, held = [], [], []
    for _ in range(4_000):
        centres = rng.standard_normal(3) / math.sqrt(10)  # the mean of ten published runs
        mean, error, reach = statistics.mean_z([rng.standard_normal(3) - centre for centre in centres], [10, 10, 10])
        assert reach is not None
        means.append(mean)
        errors.append(error)
        held.append(abs(mean) < reach)
    assert np.mean(held) == pytest.approx(0.95, abs=0.01)
    assert np.std(means) == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=0.05)


# The references.


def test_both_sets_together_where_their_settings_are_the_same(tmp_path: Path) -> None:
    expected = {
        ("planet", "dmc/walker-walk"): "planet+dreamer",
        ("dreamer", "dmc/finger-spin"): "planet+dreamer",
        ("planet", "dmc/cheetah-run"): "planet",
        ("dreamer", "dmc/cheetah-run"): "dreamer",
    }
    for (name, task), which in expected.items():
        env = {"action_repeat": 2} if name == "dreamer" else None
        folder = fake_run(tmp_path / name / task, task, preset=name, env=env)
        points = evaluations(folder)
        found, figures = tables_of(folder), spread(task, which)
        (by_return,), (by_area,) = found["return"].rows[task], found["area"].rows[task]
        assert by_return.reference.runs == figures["seeds"]
        assert by_return.above is None
        assert by_return.z == pytest.approx((points[100_000] - figures["last_mean"]) / figures["last_std"])
        own = sum(points[at] for at in range(20_000, 100_001, 10_000)) / 9
        assert by_area.score == pytest.approx(own)
        assert by_area.z == pytest.approx((own - figures["area_mean"]) / figures["area_std"])


def test_ranks_where_published_seeds_hardly_differ_from_the_end_of_the_range(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, "dmc/hopper-hop", preset="dreamer", level=3.0)
    score = evaluations(folder)[100_000]
    (each,) = tables_of(folder)["return"].rows["dmc/hopper-hop"]
    (row,) = (
        row
        for row in shipped("drq_control_seeds.csv")
        if (row["task"], row["budget"], row["measure"]) == ("dmc/hopper-hop", "100000", "last")
    )
    theirs = [float(one) for one in row["scores"].split()]
    assert each.above == sum(one < score for one in theirs)
    assert each.z == pytest.approx(norm.ppf((each.above + 0.5) / (len(theirs) + 1)))
    tied = dataclasses.replace(each, score=max(theirs))
    assert tied.above == sum(one < max(theirs) for one in theirs) < len(theirs)


def test_ranks_are_shipped_for_exactly_the_figures_that_reach_beyond_the_range() -> None:
    beyond = set()
    for row in shipped("drq_control_spread.csv"):
        together = row["task"] in ("dmc/walker-walk", "dmc/finger-spin")
        for measure in ("area", "last"):
            mean, std = float(row[f"{measure}_mean"]), float(row[f"{measure}_std"])
            if (mean - std < 0 or mean + std > 1000) and together is (row["set"] == "planet+dreamer"):
                beyond.add((row["task"], row["set"], row["budget"], measure))
    seeds = {(row["task"], row["set"], row["budget"], row["measure"]): row for row in shipped("drq_control_seeds.csv")}
    assert set(seeds) == beyond
    for (task, which, budget, measure), row in seeds.items():
        scores, figures = [float(one) for one in row["scores"].split()], spread(task, which, int(budget))
        assert len(scores) == figures["seeds"]
        assert np.mean(scores) == pytest.approx(figures[f"{measure}_mean"], abs=0.06)
        assert np.std(scores, ddof=1) == pytest.approx(figures[f"{measure}_std"], abs=0.06)


@pytest.mark.parametrize(
    ("name", "system"),
    [
        ("atari100k", "DrQ"),
        ("atari100k-eps", "DrQ(eps)"),
        ("strong", "BBF without SPR, 2 updates a step"),
        ("strong8", "BBF without SPR, 8 updates a step"),
    ],
)
def test_an_atari_run_stands_in_the_distribution_of_its_settings(tmp_path: Path, name: str, system: str) -> None:
    own: dict[str, Any] = {
        "atari100k-eps": {"epsilon_final": 0.01, "epsilon_eval": 0.001},
        "strong8": {"updates_per_step": 8, "reset_every": 5_000, "last_reset": 90_000},
    }.get(name, {})
    rows = {row["game"]: row for row in shipped("atari100k_runs.csv") if row["system"] == system}
    z = {}
    for game, task in (("Alien", "atari/alien"), ("MsPacman", "atari/ms_pacman")):
        for seed in (1, 2) if game == "Alien" else (1,):
            settings = {"env": {"frame_stack": 4}, "capacity": None, **own}
            folder = fake_run(tmp_path, task, seed, preset=name, every=50_000, level=900, **settings)
            score = evaluations(folder, "agent_step")[100_000]
            z[task, seed] = (score - float(rows[game]["mean"])) / float(rows[game]["std"])
    (table,) = standing_tables(runs_of(tmp_path))
    found = {(task, each.run.seed): each.z for task, runs in table.rows.items() for each in runs}
    assert found == pytest.approx(z)
    every, complete = table.means()
    assert (every.runs, complete.runs, complete.of) == (3, 2, "seed 1, which every task has")
    assert every.z == pytest.approx(np.mean(list(z.values())))
    assert complete.z == pytest.approx((z["atari/alien", 1] + z["atari/ms_pacman", 1]) / 2)


def test_seeds_that_no_other_task_has_make_one_mean_alone(tmp_path: Path) -> None:
    fake_run(tmp_path, "dmc/walker-walk", 1)
    fake_run(tmp_path, "dmc/cheetah-run", 2)
    (mean,) = tables_of(tmp_path)["return"].means()
    assert (mean.of, mean.runs, mean.tasks) == ("all runs", 2, 2)


def test_tables_name_what_they_compare_in_the_reports_order(tmp_path: Path) -> None:
    for task, seeds in (("dmc/walker-walk", (8, 2, 1)), ("dmc/ball_in_cup-catch", (1, 8))):
        for number, seed in enumerate(seeds):
            fake_run(tmp_path, task, seed, label="DrQ", folder=f"{number}-{task[4:]}")  # found in this order
    fake_run(tmp_path, "dmc/walker-walk", label="Another")
    fake_run(tmp_path, "atari/pong", preset="atari100k", every=50_000, env={"frame_stack": 4}, capacity=None)
    tables = standing_tables(runs_of(tmp_path))
    assert [table.title for table in tables] == [
        "DrQ among published runs of DrQ: PlaNet tasks, area, 100k env steps",
        "DrQ among published runs of DrQ: PlaNet tasks, return at the budget, 100k env steps",
        "Eff. DQN+DrQ among published runs of DrQ: Atari 100k, 100k agent steps",
        "Another among published runs of DrQ: PlaNet tasks, area, 100k env steps",
        "Another among published runs of DrQ: PlaNet tasks, return at the budget, 100k env steps",
    ]
    seeds = [(task, [each.run.seed for each in runs]) for task, runs in tables[0].rows.items()]
    assert seeds == [("dmc/walker-walk", [1, 2, 8]), ("dmc/ball_in_cup-catch", [1, 8])]
    assert tables[0].means()[1].of == "seed 1, 8, which every task has"


# Which runs are compared.


def test_other_settings_than_the_published_ones_are_not_compared(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", k=1, m=1)
    fake_run(tmp_path / "b", preset="ablation", batch_size=128)
    fake_run(tmp_path / "c", env={"action_repeat": 4})
    fake_run(tmp_path / "d", "toy/reach")
    fake_run(tmp_path / "e", reached=60_000, status="unfinished")
    begun = fake_run(tmp_path / "g") / "config.json"
    record = json.loads(begun.read_text())
    record["config"]["init_from"] = "runs/other"
    begun.write_text(json.dumps(record))
    theirs = write_table(tmp_path / "t.csv", [("walker_walk", 1, 100_000, 5, "Theirs")])
    assert standing_tables(runs_of(tmp_path, theirs)) == []
    for changed in ({"render": "paper"}, {"physics": "paper"}):  # how it is drawn does not count, nor whose simulator
        folder = tmp_path / "_".join(changed)
        fake_run(folder, seed=2, env=changed)
        assert len(standing_tables(runs_of(folder))) == 2


def test_what_takes_a_departure_of_strong_back_is_compared_too(tmp_path: Path) -> None:
    """By the name of its setting: benchmarks/strong-priorities.toml."""
    given: dict[str, Any] = {"preset": "strong", "every": 50_000, "capacity": None}
    stack = {"frame_stack": 4}
    fake_run(tmp_path, "atari/boxing", label="own", env=stack, **given)
    fake_run(tmp_path, "atari/boxing", label="uniform", env=stack, prioritised=False, **given)
    fake_run(tmp_path, "atari/assault", label="uniform", env=stack, prioritised=False, **given)
    asked = stack | {"no_op_steps": True, "zero_stack": True}
    fake_run(tmp_path, "atari/boxing", label="theirs", env=asked, early_bootstrap=True, **given)
    fake_run(tmp_path, "atari/boxing", label="two views", env=stack, k=2, m=2, **given)
    tables = {table.system: table for table in standing_tables(runs_of(tmp_path))}
    assert tables.keys() == {"own", "uniform", "theirs"}
    (both,) = tables["uniform"].means()
    assert (both.runs, both.tasks) == (2, 2)
    assert both.error is not None
    assert tables["own"].means()[0].error is None  # of one run there is none


def test_an_area_is_interpolated_and_needs_evaluations(tmp_path: Path) -> None:
    rows = [("dmc/cartpole-swingup", 1, at, at / 100, "x") for at in range(16_000, 113_000, 16_000)]
    (run,) = runs_of(write_table(tmp_path / "x.csv", rows))
    assert area(run, 100_000) == pytest.approx(sum(range(200, 1_001, 100)) / 9)  # a straight line stays one
    (seldom,) = runs_of(write_table(tmp_path / "y.csv", [("walker_walk", 1, at, 1, "x") for at in (50_000, 100_000)]))
    assert area(seldom, 100_000) is None
    # More than 20k env steps without are too many: at the beginning, between, and around the budget, but not after it.
    for first, last_but_one, rest, told in (
        (20_000, 80_000, (100_000,), True),
        (20_001, 80_000, (100_000,), False),
        (20_000, 79_999, (100_000,), False),
        (20_000, 80_000, (100_001,), False),
        (20_000, 80_000, (100_000, 200_000), True),
    ):
        steps = (first, 40_000, 60_000, last_but_one, *rest)
        (other,) = runs_of(write_table(tmp_path / "z.csv", [("walker_walk", 1, at, 1, "x") for at in steps]))
        assert (area(other, 100_000) is not None) is told
    assert area(run, 500_000) is None
