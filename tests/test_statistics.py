"""Statistics of the report against the published formulas, written out slowly, and against numbers by hand."""

from __future__ import annotations

import csv
import math
import random
from importlib import resources

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, ttest_1samp, ttest_ind

from drq.envs.atari_games import SCORES_26
from drq.report import statistics
from drq.report.benchmarks import benchmarks
from drq.report.statistics import Published


def by_task(matrix: list[list[float]]) -> list[np.ndarray]:
    """A (runs x tasks) matrix, as the published formulas have it, as one array of runs a task."""
    return [np.array(column, dtype=np.float64) for column in zip(*matrix, strict=True)]


def slow_iqm(values: list[float]) -> float:
    cut = int(0.25 * len(values))
    middle = sorted(values)[cut : len(values) - cut]
    return sum(middle) / len(middle)


def slow_median(values: list[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


X = [[1, 2], [2, 2], [1, 1], [2, 1]]
Y = [[1, 1], [2, 2], [3, 3]]


def test_numbers_that_rliable_publishes_for_its_own_matrices() -> None:
    # the expected values of the test-suite of rliable, the library of Agarwal et al.
    for metric in (statistics.median, statistics.mean, statistics.iqm):
        assert metric(by_task(X)) == 1.5
        assert metric(by_task(Y)) == 2
    assert statistics.probability_of_improvement(by_task(X), by_task(Y)) == pytest.approx(1 / 3)


def test_numbers_by_hand() -> None:
    scores = by_task([[0.0, 2.0, 0.5], [0.4, 4.0, 0.7]])
    assert statistics.mean(scores) == pytest.approx((0.2 + 3.0 + 0.6) / 3)
    assert statistics.median(scores) == pytest.approx(0.6)
    assert statistics.iqm(scores) == pytest.approx((0.4 + 0.5 + 0.7 + 2.0) / 4)  # 6 scores: one cut at either end
    assert statistics.optimality_gap(scores) == pytest.approx(1 - (0.0 + 0.4 + 1 + 1 + 0.5 + 0.7) / 6)
    assert statistics.sample_std(np.array([1.0, 2.0, 4.0])) == pytest.approx((7 / 3) ** 0.5)
    assert statistics.sample_std(np.array([1.0, 3.0])) == pytest.approx(2**0.5)
    assert statistics.sample_std(np.array([1.0])) is None
    assert statistics.human_normalised(np.array([-20.7, 14.6, 0.0]), -20.7, 14.6) == pytest.approx([0, 1, 20.7 / 35.3])
    ours, theirs = by_task([[3.0, 1.0], [5.0, 1.0]]), by_task([[4.0, 1.0]])
    assert statistics.probability_of_improvement(ours, theirs) == pytest.approx((0.5 + 0.5) / 2)


def test_summaries_of_random_matrices_match_the_formulas_written_out() -> None:
    draw = random.Random(3)
    for runs, tasks in ((1, 5), (2, 3), (5, 26), (7, 4)):
        matrix = [[draw.uniform(-1, 3) for _ in range(tasks)] for _ in range(runs)]
        pooled = [score for row in matrix for score in row]
        means = [sum(column) / runs for column in zip(*matrix, strict=True)]
        scores = by_task(matrix)
        assert statistics.mean(scores) == pytest.approx(sum(means) / tasks)
        assert statistics.median(scores) == pytest.approx(slow_median(means))
        assert statistics.iqm(scores) == pytest.approx(slow_iqm(pooled))
        gap = 1 - sum(min(score, 1) for score in pooled) / len(pooled)
        assert statistics.optimality_gap(scores) == pytest.approx(gap)


def test_a_task_with_more_runs_weighs_no_more() -> None:
    draw = random.Random(4)
    for numbers in ((1, 2), (2, 3, 3), (3, 1, 2, 4, 2)):
        scores = [[draw.uniform(-1, 3) for _ in range(number)] for number in numbers]
        common = math.lcm(*numbers)
        equal = [score for runs in scores for score in runs for _ in range(common // len(runs))]
        assert statistics.iqm([np.array(runs) for runs in scores]) == pytest.approx(slow_iqm(equal))
        twice = [np.array(scores[0] * 2), *map(np.array, scores[1:])]
        for metric in (statistics.mean, statistics.median, statistics.optimality_gap):
            assert metric(twice) == pytest.approx(float(metric([np.array(runs) for runs in scores])))


def test_probability_of_improvement_is_the_mann_whitney_statistic() -> None:
    rng = np.random.default_rng(1)
    ours = [rng.integers(0, 6, 7).astype(float) for _ in range(5)]  # integers: there are ties
    theirs = [rng.integers(0, 6, 4).astype(float) for _ in range(5)]
    expected = np.mean([mannwhitneyu(x, y).statistic / 28 for x, y in zip(ours, theirs, strict=True)])
    assert statistics.probability_of_improvement(ours, theirs) == pytest.approx(expected)
    assert statistics.probability_of_improvement(ours, ours) == pytest.approx(0.5)


@pytest.mark.parametrize("metric", [statistics.mean, statistics.median, statistics.iqm, statistics.optimality_gap])
def test_interval_agrees_with_a_slow_stratified_bootstrap(metric) -> None:
    rng = np.random.default_rng(5)
    scores = [rng.normal(task, 1 + task, 8) for task in range(4)]
    draw = random.Random(11)
    # Runs are redrawn within their own task, and moved away from its mean so that they spread as new ones would.
    apart = [runs.mean() + (8 / 7) ** 0.5 * (runs - runs.mean()) for runs in scores]
    resampled = []
    for _ in range(3000):
        resampled.append(float(metric([np.array([draw.choice(list(runs)) for _ in runs]) for runs in apart])))
    low, high = np.percentile(resampled, [2.5, 97.5])
    found = statistics.estimate(metric, scores)
    assert found.value == pytest.approx(float(metric(scores)))
    assert found.low == pytest.approx(low, abs=0.08 * (high - low))
    assert found.high == pytest.approx(high, abs=0.08 * (high - low))


def how_often_it_holds(tasks: int, runs: int) -> float:
    """How often the interval of an inter-quartile mean holds the truth, of normal scores."""
    rng, held = np.random.default_rng(0), []
    for _ in range(500):
        found = statistics.estimate(statistics.iqm, list(rng.normal(size=(tasks, runs))))
        assert found.low is not None
        assert found.high is not None
        held.append(found.low <= 0 <= found.high)
    return float(np.mean(held))


@pytest.mark.parametrize("runs", [2, 3])
def test_an_interval_holds_the_truth_about_as_often_as_it_says(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 1_000)
    assert 0.91 <= how_often_it_holds(26, runs) <= 0.99  # not widened: 0.81 of two runs a task, 0.88 of three


def test_intervals_of_means_are_students_and_welchs() -> None:
    rng = np.random.default_rng(7)
    for ours, theirs in ((2, 3), (3, 2), (5, 20)):
        x, y = rng.normal(10, 4, ours), rng.normal(7, 1, theirs)
        alone, apart = statistics.estimated_mean([x]), statistics.difference([x], [y])
        assert (alone.low, alone.high) == pytest.approx(tuple(ttest_1samp(x, 0).confidence_interval()))
        assert (apart.low, apart.high) == pytest.approx(tuple(ttest_ind(x, y, equal_var=False).confidence_interval()))
        published = statistics.difference_from_published([x], [Published(y.mean(), float(y.std(ddof=1)), theirs)])
        assert (published.low, published.high) == pytest.approx((apart.low, apart.high))


def test_an_interval_of_a_mean_over_tasks_holds_the_truth_as_often_as_it_says() -> None:
    """Also where tasks spread differently and have different numbers of runs."""
    rng, held = np.random.default_rng(0), []
    for _ in range(4_000):
        found = statistics.estimated_mean([rng.normal(0, spread, runs) for spread, runs in ((1, 2), (3, 3), (2, 5))])
        assert found.low is not None
        assert found.high is not None
        held.append(found.low <= 0 <= found.high)
    assert float(np.mean(held)) == pytest.approx(0.95, abs=0.015)


def test_every_resample_is_summarised_by_itself() -> None:
    rng = np.random.default_rng(6)
    ours, theirs = ([rng.integers(0, 4, (3, runs)).astype(float) for runs in each] for each in ((4, 2, 5), (3, 6, 2)))
    for metric in (statistics.mean, statistics.median, statistics.iqm, statistics.optimality_gap):
        assert metric(ours).tolist() == [metric([runs[row] for runs in ours]) for row in range(3)]
    found = statistics.probability_of_improvement(ours, theirs)
    one_by_one = [([x[row] for x in ours], [y[row] for y in theirs]) for row in range(3)]
    assert found.tolist() == [statistics.probability_of_improvement(*each) for each in one_by_one]
    assert len(set(found.tolist())) == 3


def test_tasks_are_not_mixed_by_the_bootstrap() -> None:
    # within a task there is no spread, between tasks there is: a stratified interval has no width
    found = statistics.estimate(statistics.iqm, [np.full(5, 0.0), np.full(5, 10.0)])
    assert (found.low, found.high) == (5.0, 5.0)


def test_same_numbers_every_time() -> None:
    scores = [np.random.default_rng(task).normal(size=5) for task in range(6)]
    assert statistics.estimate(statistics.iqm, scores) == statistics.estimate(statistics.iqm, scores)


def test_a_single_run_has_no_interval() -> None:
    found = statistics.estimate(statistics.mean, [np.array([3.0]), np.array([5.0])])
    assert (found.value, found.low, found.high) == (4.0, None, None)
    two = statistics.estimate(statistics.mean, [np.array([3.0, 5.0])])
    assert (two.low, two.high) == pytest.approx((4 - 2**0.5, 4 + 2**0.5))  # as far apart as new runs would be


def test_a_task_with_a_single_run_among_others_leaves_no_interval() -> None:
    mixed = [np.array([1.0, 2.0]), np.array([5.0])]
    assert statistics.estimate(statistics.mean, mixed).low is None
    assert statistics.difference_from_published(mixed, [Published(1.0), Published(2.0)]).low is None
    single = [np.array([1.0]), np.array([2.0])]
    ours = [np.array([1.0, 2.0]), np.array([5.0, 6.0])]
    for one, other in ((ours, single), (single, ours)):
        assert statistics.difference(one, other).low is None
        assert statistics.estimate(statistics.probability_of_improvement, one, other).low is None


def test_difference_of_two_systems() -> None:
    rng = np.random.default_rng(2)
    ours, theirs = [rng.normal(10, 2, 40)], [rng.normal(7, 3, 30)]
    found = statistics.difference(ours, theirs)
    assert found.value == pytest.approx(ours[0].mean() - theirs[0].mean())
    error = (ours[0].var(ddof=1) / 40 + theirs[0].var(ddof=1) / 30) ** 0.5
    assert found.low == pytest.approx(found.value - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.value + 1.96 * error, abs=0.1 * error)


def test_difference_from_published_scores() -> None:
    rng = np.random.default_rng(4)
    ours = [rng.normal(5.0, 0.6, 50), rng.normal(2.0, 0.2, 40)]
    variance = (ours[0].var(ddof=1) / 50 + ours[1].var(ddof=1) / 40) / 4  # of the mean of two tasks
    exact = [Published(4.8), Published(1.5, std=0.8)], variance  # of how many seeds, nobody knows
    spread = [Published(4.8, std=3.0, seeds=500), Published(1.5, seeds=5)], variance + 3.0**2 / 500 / 4
    for published, expected in (exact, spread):
        found = statistics.difference_from_published(ours, published)
        assert found.value == pytest.approx((ours[0].mean() - 4.8 + ours[1].mean() - 1.5) / 2)
        assert found.low == pytest.approx(found.value - 1.96 * expected**0.5, abs=0.1 * expected**0.5)
        assert found.high == pytest.approx(found.value + 1.96 * expected**0.5, abs=0.1 * expected**0.5)
    assert statistics.difference_from_published([np.array([500.0])], [Published(480.0)]).low is None
    two = statistics.difference_from_published([np.array([3.0, 5.0])], [Published(1.0)])
    assert (two.low, two.high) == pytest.approx((3 - 12.706, 3 + 12.706), abs=1e-3)


def test_published_atari_aggregates_come_out_of_the_papers_table() -> None:
    table, players = benchmarks()["atari"], {f"atari/{game}": scores for game, scores in SCORES_26.items()}
    path = resources.files("drq.report").joinpath("published", "atari100k_peers.csv")
    peers = {row["system"]: row for row in csv.DictReader(path.read_text().splitlines())}
    for name in ("Eff. DQN+DrQ", "Eff. DQN", "SimPLe", "OTRainbow", "Eff. Rainbow"):
        column = f"{name} (paper)" if name.startswith("Eff. DQN") else name
        means = {task: table.table[task, 100_000][column].mean for task in table.tasks}
        scores = [np.atleast_1d(statistics.human_normalised(mean, *players[task])) for task, mean in means.items()]
        assert len(scores) == 26
        assert statistics.median(scores) == pytest.approx(float(peers[name]["median_hns"]), abs=6e-4)
        assert statistics.mean(scores) == pytest.approx(float(peers[name]["mean_hns"]), abs=6e-4)
        assert statistics.iqm(scores) == pytest.approx(float(peers[name]["iqm_hns"]), abs=6e-4)
