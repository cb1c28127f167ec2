"""Scores at a budget, differences, aggregates and grids, against the evaluations on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from drq.report import statistics, tables
from drq.report.benchmarks import SAC_STATE, benchmark_of, benchmarks, canonical_task, read_published, task_title
from drq.report.results import RunResult, missing_runs, read_results
from report_runs import evaluations, fake_run, runs_of, write_table


def one_run(tmp_path: Path, steps: list[int], name: str = "x") -> RunResult:
    rows = [("dmc/walker-walk", 1, at, at / 1000, name) for at in steps]
    (run,) = runs_of(write_table(tmp_path / f"{name}.csv", rows))
    return run


def test_tasks_have_one_name_however_they_are_spelt() -> None:
    for spelling in ("walker_walk", "walker-walk", "dmc/walker-walk", "Walker Walk"):
        assert canonical_task(spelling) == "dmc/walker-walk"
    for spelling in ("cup_catch", "dmc/ball-in-cup-catch", "dmc/ball_in_cup-catch"):  # the second until 0.1
        assert canonical_task(spelling) == "dmc/ball_in_cup-catch"
    assert {canonical_task(name) for name in ("MsPacman", "atari/ms-pacman", "atari/mspacman")} == {"atari/ms_pacman"}
    assert canonical_task(" gym/CarRacing-v3 ") == task_title("gym/CarRacing-v3") == "gym/CarRacing-v3"
    assert canonical_task("dmc/pong") == "dmc/pong"  # not the game
    assert task_title("dmc/ball_in_cup-catch") == "Ball in Cup Catch"
    assert [benchmark_of(task).key for task in ("dmc/walker-run", "dmc/quadruped-walk", "atari/tennis", "toy/x")] == [
        "dreamer", "control", "atari", "other",
    ]  # fmt: skip


def test_a_task_of_both_benchmarks_belongs_to_the_one_whose_preset_it_has() -> None:
    both = {preset: benchmark_of("dmc/walker-walk", preset).key for preset in ("", "planet", "dreamer", "ablation")}
    assert both == {"": "planet", "planet": "planet", "dreamer": "dreamer", "ablation": "planet"}
    assert benchmark_of("dmc/quadruped-walk", "dreamer").key == "control"


def test_the_papers_table_is_the_published_curves_at_the_budget() -> None:
    # each distinct seed once, as in the paper, which cut digits instead of rounding them
    planet = benchmarks()["planet"]
    for task in planet.tasks:
        for budget in (100_000, 500_000):
            curve, paper = (planet.table[task, budget][name] for name in ("DrQ (published curves)", "DrQ (paper)"))
            assert 0 <= curve.mean - paper.mean <= 1, task  # 1: the curves' figures are rounded to a decimal
            assert curve.seeds == paper.seeds, task
            assert planet.table[task, budget]["CURL"].seeds is None  # the paper does not say
    assert len(planet.tasks) == 6
    assert len(benchmarks()["dreamer"].tasks) == 15
    assert len(benchmarks()["atari"].tasks) == 26


def test_every_benchmark_has_its_budgets_tasks_and_curves_once() -> None:
    known = benchmarks()
    for key, budgets in (("planet", (100_000, 500_000)), ("dreamer", (100_000, 500_000, 1_000_000))):
        assert known[key].budgets == budgets
        assert set(known[key].curves) == set(known[key].tasks)
    assert known["atari"].budgets == (100_000,)
    for benchmark in known.values():
        assert len(set(benchmark.tasks)) == len(benchmark.tasks)


def test_sac_from_state_is_there_as_its_authors_published_it() -> None:
    table = benchmarks()["planet"].table
    scores = {task: row[SAC_STATE] for (task, budget), row in table.items() if budget == 100_000}
    assert {task: round(score.mean) for task, score in scores.items()} == {
        "dmc/finger-spin": 790, "dmc/cartpole-swingup": 829, "dmc/reacher-easy": 801, "dmc/cheetah-run": 214,
        "dmc/walker-walk": 847, "dmc/ball_in_cup-catch": 970,
    }  # fmt: skip
    assert [score.seeds for score in scores.values()] == [3, 1, 3, 3, 3, 2]
    assert [score.std is None for score in scores.values()] == [False, True, False, False, False, False]


def test_runs_of_rainbow_stand_beside_every_published_system(tmp_path: Path) -> None:
    fake_run(tmp_path, "atari/ms_pacman", preset="strong", every=50_000)
    (table,) = tables.score_tables(runs_of(tmp_path))
    shown = {name: cell.mean for name, cell in zip(table.columns, table.cells[0], strict=True) if cell}
    published = [row for row in read_published("atari100k_runs.csv") if row["game"] == "MsPacman"]
    assert len(published) == 7
    for row in published:
        name = row["system"] if not row["system"].startswith("DrQ") else f"{row['system']} (100 runs)"
        assert shown[name] == float(row["mean"])
    assert {"Rainbow+DrQ", "Eff. DQN+DrQ (paper)", "Eff. Rainbow", "Human"} <= shown.keys()


def test_published_systems_and_ours_never_share_a_name(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", label="CURL")
    fake_run(tmp_path / "b", preset="state", env={"observation": "state"})
    fake_run(tmp_path / "c", "dmc/hopper-hop", preset="state", env={"observation": "state"})
    planet, dreamer = tables.score_tables(runs_of(tmp_path))
    assert len(set(planet.columns)) == len(planet.columns)
    assert {"CURL", "CURL (published)", "SAC State", "SAC State (paper)"} <= set(planet.columns)
    shown = dict(zip(dreamer.columns, dreamer.cells[0], strict=True))
    assert shown["SAC State (authors' SAC)"].mean == 0.8  # of Hopper Hop at 100k
    (atari,) = tables.score_tables(runs_of(write_table(tmp_path / "t.csv", [("Pong", 1, 400_000, -20, "Random")])))
    rows, _ = tables.aggregates(atari)
    assert [row.system for row in rows if "Random" in row.system or "Human" in row.system] == ["Random"]


def test_a_score_is_the_last_evaluation_at_or_before_the_budget(tmp_path: Path) -> None:
    every_16k = one_run(tmp_path, list(range(0, 200_000, 16_000)))
    assert every_16k.evaluation_at(100_000) == (96_000, 96.0)
    assert every_16k.evaluation_at(None) == (192_000, 192.0)
    assert one_run(tmp_path, list(range(0, 96_001, 16_000)), "ends").evaluation_at(100_000) == (96_000, 96.0)
    assert one_run(tmp_path, list(range(0, 80_001, 16_000)), "short").evaluation_at(100_000) is None
    assert one_run(tmp_path, [0, 45_000, 90_000], "coarse").evaluation_at(50_000) == (45_000, 45.0)
    assert one_run(tmp_path, [100_000], "final").evaluation_at(100_000) == (100_000, 100.0)
    assert one_run(tmp_path, [50_000], "half").evaluation_at(100_000) is None
    assert one_run(tmp_path, [120_000], "late").evaluation_at(100_000) is None


def test_table_holds_mean_and_spread_of_the_runs_that_reached_the_budget(tmp_path: Path) -> None:
    folders = [fake_run(tmp_path, seed=seed) for seed in (1, 2, 3)]
    fake_run(tmp_path, seed=4, reached=50_000, status="unfinished")
    table, unfinished = tables.score_tables(runs_of(tmp_path))
    scores = [evaluations(folder)[100_000] for folder in folders]
    cell = table.cells[0][0]
    assert cell is not None
    assert (table.budget, table.tasks, cell.seeds) == (100_000, ("dmc/walker-walk",), 3)
    assert cell.mean == pytest.approx(sum(scores) / 3)
    assert cell.std == pytest.approx((sum((score - cell.mean) ** 2 for score in scores) / 2) ** 0.5)
    assert table.columns[table.ours :][:3] == ("DrQ (published curves)", "DrQ (paper)", "CURL")
    assert table.missing_in_words() == ["DrQ K=2 M=2, seed 4: Walker Walk"]
    assert (unfinished.title, unfinished.budget) == ("PlaNet tasks, last evaluation of unfinished runs", None)
    assert unfinished.cells[0][0].steps == (50_000, 50_000)


def test_a_run_counts_at_every_budget_that_it_reached(tmp_path: Path) -> None:
    short = fake_run(tmp_path / "a", steps=20_000)
    fake_run(tmp_path / "b", "toy/reach", steps=3_000, every=1_000)
    long = fake_run(tmp_path / "c", seed=2, steps=500_000)
    begun = fake_run(tmp_path / "d", seed=3, steps=500_000, reached=100_000, status="unfinished")
    found = {(table.benchmark.key, table.budget): table for table in tables.score_tables(runs_of(tmp_path))}
    assert set(found) == {("planet", 20_000), ("planet", 100_000), ("planet", 500_000), ("other", 3_000)}
    for budget, folders in {20_000: [short, long, begun], 100_000: [long, begun], 500_000: [long]}.items():
        cell = found["planet", budget].cells[0][0]
        assert cell is not None
        assert sorted(cell.runs) == sorted(evaluations(folder)[budget] for folder in folders)
    assert found["planet", 500_000].missing_in_words() == ["DrQ K=2 M=2, seed 3: Walker Walk"]
    assert found["planet", 100_000].missing == []  # the shortest run was never meant to get there


def test_last_evaluations_of_finished_and_unfinished_runs_are_not_mixed(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", "toy/reach", 1, steps=3_000, every=1_000, reached=1_000, status="unfinished")
    fake_run(tmp_path / "b", "toy/reach", 2, steps=3_000, every=1_000, reached=2_000, status="failed")
    theirs = write_table(tmp_path / "t.csv", [("toy/reach", 1, 700, 5, "Theirs")])  # no budget is known of it
    found = {table.title: table for table in tables.score_tables(runs_of(tmp_path, theirs))}
    assert set(found) == {"Other tasks, last evaluation", "Other tasks, last evaluation of unfinished runs"}
    assert found["Other tasks, last evaluation"].columns == ("Theirs",)
    cell = found["Other tasks, last evaluation of unfinished runs"].cells[0][0]
    assert cell is not None
    assert cell.steps == (1_000, 2_000)


def test_what_a_suite_asked_for_and_is_not_there_is_missing(tmp_path: Path) -> None:
    """Also a task of which there is no run at all, which no other run tells of."""
    suite = tmp_path / "suite"
    fake_run(suite / "dmc-walker-walk" / "drq", label="DrQ", folder="seed-1")
    asked = [("dmc/walker-walk", 1), ("dmc/walker-walk", 2), ("dmc/cheetah-run", 1)]
    runs = [{"task": task, "label": "DrQ", "seed": seed, "steps": 100_000} for task, seed in asked]
    record = {"format": 1, "name": "x", "shows": "", "preset": "planet", "settings": {"DrQ": {}}, "runs": runs}
    (suite / "suite.json").write_text(json.dumps(record))
    found, warnings = read_results([tmp_path])
    missing = missing_runs(found, [tmp_path])
    assert {(one.task, one.system, one.seed) for one in missing} == {
        ("dmc/walker-walk", "DrQ", 2),
        ("dmc/cheetah-run", "DrQ", 1),
    }
    assert warnings == [
        "PlaNet tasks: DrQ has no run of dmc/walker-walk with seed 2",
        "PlaNet tasks: DrQ has no run of dmc/cheetah-run with seed 1",
    ]
    (table,) = tables.score_tables(found, missing)
    assert table.missing_in_words() == ["DrQ, seed 2: Walker Walk", "DrQ, seed 1: Cheetah Run"]
    only = suite / "dmc-walker-walk" / "drq" / "seed-1"
    assert missing_runs(runs_of(only), [only]) == []  # who names one run wants that one


def test_a_suite_of_several_benchmarks_lacks_in_each_what_belongs_there(tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    tasks = ("dmc/walker-walk", "dmc/acrobot-swingup", "toy/reach")
    for task in tasks[:2]:
        fake_run(suite / task.replace("/", "-") / "drq", task, label="DrQ", folder="seed-1")
    runs = [{"task": task, "label": "DrQ", "seed": 1, "steps": 100_000} for task in tasks]
    record = {"format": 1, "name": "x", "shows": "", "preset": "planet", "settings": {"DrQ": {}}, "runs": runs}
    (suite / "suite.json").write_text(json.dumps(record))
    assert read_results([tmp_path])[1] == ["Other tasks: DrQ has no run of toy/reach with seed 1"]


def test_differences_with_published_and_own_systems(tmp_path: Path) -> None:
    for task in ("dmc/walker-walk", "dmc/cheetah-run"):
        for seed in (1, 2, 3):
            fake_run(tmp_path / "a", task, seed, level=700)
            fake_run(tmp_path / "b", task, seed, level=300, augmentation="none")
    (table,) = tables.score_tables(runs_of(tmp_path))
    by_task, overall = tables.differences(table, 0)
    at = {name: index for index, name in enumerate(table.columns)}
    assert by_task[0][0] is None  # nothing to say about itself
    for row, cells in zip(by_task, table.cells, strict=True):
        for name, column in at.items():
            mine, theirs, found = cells[0], cells[column], row[column]
            if column and mine and theirs:
                assert found is not None, name
                assert found.value == pytest.approx(mine.mean - theirs.mean)
                assert found.low < found.value < found.high
    own = overall[at["SAC (no augmentation)"]]
    assert own is not None
    pairs = [(cells[0].mean, cells[1].mean) for cells in table.cells]
    assert own.value == pytest.approx(np.mean([mine - theirs for mine, theirs in pairs]))
    assert own.low > 0


def test_atari_aggregates(tmp_path: Path) -> None:
    games = benchmarks()["atari"].tasks[:5]
    scores: dict[str, list[float]] = {}
    for game in games:
        folders = [fake_run(tmp_path, game, seed, every=50_000, level=900) for seed in (1, 2)]
        scores[game] = [evaluations(folder, "agent_step")[100_000] for folder in folders]
    (table,) = tables.score_tables(runs_of(tmp_path))
    rows, improvements = tables.aggregates(table)
    players = benchmarks()["atari"].table
    normalised = []
    for game in games:
        random, human = (players[game, 100_000][who].mean for who in ("Random", "Human"))
        normalised.append([(score - random) / (human - random) for score in scores[game]])
    ours = rows[0]
    assert (ours.system, ours.games, ours.runs) == ("Eff. DQN+DrQ", 5, 10)
    assert ours.metrics["Mean"].value == pytest.approx(np.mean(normalised))
    assert ours.metrics["Median"].value == pytest.approx(np.median(np.mean(normalised, axis=1)))
    assert {row.system for row in rows}.isdisjoint({"Human", "Random"})
    assert all(row.games == 5 for row in rows)
    beaten = next(one for one in improvements if one.other == "SimPLe")
    simple = [players[game, 100_000]["SimPLe"].mean for game in games]
    wins = [np.mean([score > other for score in scores[game]]) for game, other in zip(games, simple, strict=True)]
    assert beaten.probability.value == pytest.approx(np.mean(wins))
    assert beaten.probability.low is not None  # published means are taken as exact


def test_runs_that_all_beat_the_others_do_so_in_every_resample(tmp_path: Path) -> None:
    """They are compared by rank: moved apart as for means, 13.0 would fall below 12.9, and below SimPLe's 12.8."""
    scores = {"Ours": (13.0, 16.0), "Theirs": (11.9, 12.9)}
    rows = [("Pong", seed, 400_000, score, name) for name, own in scores.items() for seed, score in enumerate(own)]
    (table,) = tables.score_tables(runs_of(write_table(tmp_path / "x.csv", rows)))
    found = {one.other: one.probability for one in tables.aggregates(table)[1] if one.system == "Ours"}
    assert found["Theirs"] == found["SimPLe"] == statistics.Estimate(1.0, 1.0, 1.0)


def test_aggregates_are_over_the_same_games(tmp_path: Path) -> None:
    """Each set of games that a system has makes a table, of it and of all that have these games too."""
    played = {
        "DrQ": ("alien", "boxing", "pong"),
        "Plain": ("boxing", "pong"),
        "Other": ("pong", "boxing"),
        "New": ("alien",),
    }
    for label, games in played.items():
        for game in games:
            fake_run(tmp_path, f"atari/{game}", every=50_000, level=20, label=label)
    fake_run(tmp_path, "atari/tennis", every=50_000, label="DrQ")  # no human's score is known
    (table,) = tables.score_tables(runs_of(tmp_path))
    three, two, one = tables.same_games(table)
    assert [part.table.columns[: part.table.ours] for part in (three, two, one)] == [
        ("DrQ",), ("DrQ", "Other", "Plain"), ("DrQ", "New"),
    ]  # fmt: skip
    assert (two.of, two.lacking) == (["Other", "Plain"], ["New"])
    assert two.title == "Atari 100k at 100k agent steps, human-normalised, over 2 games"
    assert two.in_words() == ["The games of Other; Plain: Boxing, Pong.", "Not here, for want of games: New."]
    for part in (three, two, one):
        rows, improvements = tables.aggregates(part.table)
        assert {row.games for row in rows} == {len(part.table.tasks)}
        assert {"DrQ(eps) (100 runs)", "SimPLe"} <= {one.other for one in improvements}
    rows, _ = tables.aggregates(two.table)
    paper = [table.benchmark.table[f"atari/{game}", 100_000] for game in ("boxing", "pong")]
    simple = [(of["SimPLe"].mean - of["Random"].mean) / (of["Human"].mean - of["Random"].mean) for of in paper]
    assert {row.system: row.metrics["Mean"].value for row in rows}["SimPLe"] == pytest.approx(np.mean(simple))


def test_mean_differences_are_over_all_tasks_of_the_chosen_system(tmp_path: Path) -> None:
    for task in ("dmc/walker-walk", "dmc/cheetah-run", "dmc/reacher-easy"):
        fake_run(tmp_path / "a", task)
        if task != "dmc/reacher-easy":
            fake_run(tmp_path / "b", task, augmentation="none")
    (table,) = tables.score_tables(runs_of(tmp_path))
    plain, slac, curl = (table.columns.index(name) for name in ("SAC (no augmentation)", "SLAC", "CURL"))
    of_drq, of_plain = (tables.differences(table, column)[1] for column in (0, plain))
    assert (of_drq[plain], of_drq[slac]) == (None, None)  # neither has Reacher Easy
    assert of_drq[curl]
    two = [cells[plain].mean - cells[0].mean for cells in table.cells if cells[plain]]
    assert of_plain[0].value == pytest.approx(np.mean(two))
    assert of_plain[slac]


def test_grids_are_found_where_settings_are_crossed(tmp_path: Path) -> None:
    folders = {}
    for k in (1, 2):
        for m in (1, 2):
            folders[k, m] = [fake_run(tmp_path / "km", seed=seed, k=k, m=m, level=100 * k + 10 * m) for seed in (1, 2)]
    for batch in (128, 512):
        for rate in (1e-4, 1e-3):
            for heat in (0.1, 0.2):
                fake_run(
                    tmp_path / "robust", "dmc/cheetah-run", batch_size=batch, learning_rate=rate, init_temperature=heat
                )
    found = {grid.title: grid for grid in tables.grids(runs_of(tmp_path))}
    assert set(found) == {"K and M", "Robustness"}
    km, robust = found["K and M"], found["Robustness"]
    assert km.values == ((1, 2), (1, 2))
    for (k, m), members in folders.items():
        assert km.cells[m, k].mean == pytest.approx(np.mean([evaluations(one)[100_000] for one in members]))
    assert robust.values == ((128, 512), (1e-4, 1e-3), (0.1, 0.2))
    assert len(robust.cells) == 8


def test_counts_in_short() -> None:
    counts = (0, 999, 1_500, 96_000, 999_999, 1_000_000, 1_234_567)
    assert [tables.short_count(count) for count in counts] == ["0", "999", "1.5k", "96k", "1000k", "1M", "1.23M"]


def test_settings_that_change_together_are_no_grid(tmp_path: Path) -> None:
    fake_run(tmp_path, k=1, m=1)
    fake_run(tmp_path, k=2, m=2)
    assert tables.grids(runs_of(tmp_path)) == []


def test_mean_curve_of_runs_with_different_evaluations(tmp_path: Path) -> None:
    rows = [("dmc/walker-walk", 1, 0, 0, "x"), ("dmc/walker-walk", 1, 20, 20, "x"), ("dmc/walker-walk", 2, 10, 30, "x")]
    steps, mean, std = tables.mean_curve(runs_of(write_table(tmp_path / "x.csv", rows)))
    assert steps.tolist() == [0, 10, 20]
    assert mean.tolist() == [0, 20, 20]  # at 10 the first run is half-way between its evaluations
    assert std[1] == pytest.approx(statistics.sample_std(np.array([10.0, 30.0])))
    assert np.isnan(std[[0, 2]]).all()
