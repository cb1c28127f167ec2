"""Scores of several runs, summarised with the formulas of Agarwal et al. (2021), "Deep Reinforcement
Learning at the Edge of the Statistical Precipice".

`Scores` is one array of runs for each task; tasks may have different numbers of runs. Every summary works
on the last axis, so that the same few lines give a point estimate (1-D arrays) and its bootstrap
distribution (2-D arrays, one row a resample).

Choices: intervals are at 95%, and there is none where a task has a single run. Those of means and their differences
are Student's, as Welch adds up several spreads: a bootstrap of the two or three runs that a task often has is far too
narrow. Those of all else are percentile intervals from 5,000 resamples of the runs *within* each task (a stratified
bootstrap), always drawn from the same seed. Runs are `widened` first, which the published intervals are not: of two
runs a task those hold the truth 4 times in 5. Where tasks have different numbers of runs, all summaries weigh tasks
equally, so that none depends on which tasks were run more often; with equal numbers they are the published formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, t

Array = NDArray[np.float64]
Scores = Sequence[Array]

RESAMPLES = 5_000
SEED = 0
LEVELS = (2.5, 97.5)


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval; `low` and `high` are None where a task has no two runs."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Published:
    """A published score: its mean and, where known, the standard deviation and the number of seeds."""

    mean: float
    std: float | None = None
    seeds: int | None = None


def human_normalised(score: Array | float, random: float, human: float) -> Array:
    """0 for a player who acts at random, 1 for a human."""
    return (np.asarray(score, dtype=np.float64) - random) / (human - random)


def sample_std(values: Array) -> float | None:
    """Standard deviation with ddof 1, as the paper's; None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def task_means(scores: Scores) -> Array:
    """Mean over the runs of each task, tasks along the last axis."""
    return np.stack([runs.mean(axis=-1) for runs in scores], axis=-1)


def mean(scores: Scores) -> Array:
    """Mean over tasks of the mean over runs."""
    return np.asarray(task_means(scores).mean(axis=-1))


def median(scores: Scores) -> Array:
    """Median over tasks of the mean over runs."""
    return np.asarray(np.median(task_means(scores), axis=-1))


def iqm(scores: Scores) -> Array:
    """Inter-quartile mean: the mean of the middle half of all runs of all tasks.

    Where tasks have different numbers of runs, it is as if each run were there as often as makes the numbers equal.
    """
    runs, numbers = np.concatenate(scores, axis=-1), [each.shape[-1] for each in scores]
    weights = np.repeat([1 / number for number in numbers], numbers) / len(scores)
    equal = len(scores) * math.lcm(*numbers)
    cut = equal // 4 / equal  # of either end, in whole runs, as published
    order = runs.argsort(axis=-1)
    middle = np.diff(weights[order].cumsum(axis=-1).clip(cut, 1 - cut), prepend=cut)
    return np.asarray((middle * np.take_along_axis(runs, order, axis=-1)).sum(axis=-1) / (1 - 2 * cut))


def optimality_gap(scores: Scores) -> Array:
    """How far the runs stay below 1 on average; what lies above it earns nothing. Smaller is better."""
    return 1 - mean([np.minimum(runs, 1) for runs in scores])


def probability_of_improvement(ours: Scores, theirs: Scores) -> Array:
    """Chance that a run of ours beats one of theirs on the same task, a tie counting half, averaged over
    tasks."""
    chances = []
    for x, y in zip(ours, theirs, strict=True):
        above = np.sign(x[..., :, None] - y[..., None, :])
        chances.append((above.mean(axis=(-2, -1)) + 1) / 2)
    return np.asarray(np.mean(chances, axis=0))


def resample(scores: Scores, rng: np.random.Generator) -> list[Array]:
    """Runs drawn with replacement within each task: one (resamples, runs) array a task."""
    return [runs[rng.integers(len(runs), size=(RESAMPLES, len(runs)))] for runs in scores]


def widened(scores: Scores) -> list[Array]:
    """Runs moved away from their task's mean, so that resamples of n of them spread as n new runs would: they lack a
    share of 1 / n of the variance."""
    return [runs.mean() + (len(runs) / (len(runs) - 1)) ** 0.5 * (runs - runs.mean()) for runs in scores]


def estimate(metric: Callable[..., Array], *groups: Scores, by_rank: bool = False) -> Estimate:
    """The metric of one or more groups of scores, with its stratified bootstrap interval.

    Where runs are compared by rank alone they are not widened: they would change places.
    """
    value = float(metric(*groups))
    if not all(map(_has_interval, groups)):
        return Estimate(value)
    rng = np.random.default_rng(SEED)
    drawn = (resample(scores if by_rank else widened(scores), rng) for scores in groups)
    return _with_interval(value, metric(*drawn))


def estimated_mean(scores: Scores) -> Estimate:
    """Mean over tasks of the mean over runs."""
    return _welch(float(mean(scores)), _errors(scores))


def difference(ours: Scores, theirs: Scores) -> Estimate:
    """Mean score of ours minus theirs on the same tasks."""
    return _welch(float(mean(ours) - mean(theirs)), _errors(ours) + _errors(theirs))


def difference_from_published(ours: Scores, published: Sequence[Published]) -> Estimate:
    """Mean score of ours minus the published one, task by task.

    A published mean has its own standard error where spread and seeds are known; elsewhere it is taken as exact, and
    the interval is that of our runs alone.
    """
    value = float(mean(ours)) - float(np.mean([score.mean for score in published]))
    known = [(score.std, score.seeds) for score in published if score.std and score.seeds]
    theirs = [Error((std / len(published)) ** 2 / seeds, max(seeds - 1, 1)) for std, seeds in known]
    return _welch(value, _errors(ours) + theirs)


def normal_score(value: float, others: Array) -> float:
    """The rank of a value among others, a tie counting half, as a normal distribution's z-score of that rank."""
    below, tied = float((others < value).sum()), float((others == value).sum())
    return float(norm.ppf((below + 0.5 * tied + 0.5) / (len(others) + 1)))


def mean_z(scores: Scores, published: Sequence[int]) -> tuple[float, float | None, float | None]:
    """Mean of the z-scores of all runs, its standard error, and how far its 95% interval goes either way; of a single
    run there are neither.

    The error is the sample standard deviation over the root of the number of runs, and in quadrature the error of the
    published means: 1 / sqrt(runs) of a standard deviation for each task, shared by all of our runs of it.
    """
    z = np.concatenate(scores)
    if len(z) < 2:
        return float(z.mean()), None, None
    errors = [Error(float(z.var(ddof=1)) / len(z), len(z) - 1)]
    errors += [
        Error((len(x) / len(z)) ** 2 / runs, max(runs - 1, 1)) for x, runs in zip(scores, published, strict=True)
    ]
    return float(z.mean()), sum(error.variance for error in errors) ** 0.5, _reach(errors)


def _has_interval(scores: Scores) -> bool:
    """Where every task has several runs. A single run would count as known exactly, and the interval be too narrow."""
    return all(len(runs) > 1 for runs in scores)


class Error(NamedTuple):
    """A part of a mean's variance, and the degrees of freedom with which it is known."""

    variance: float
    freedom: int


def _errors(scores: Scores) -> list[Error]:
    """Of the mean over tasks: a part for each. A single run has no degree of freedom."""
    variances = [float(np.var(runs, ddof=min(len(runs) - 1, 1))) / len(runs) for runs in scores]
    return [Error(each / len(scores) ** 2, len(runs) - 1) for each, runs in zip(variances, scores, strict=True)]


def _welch(value: float, errors: Sequence[Error]) -> Estimate:
    """A number with Student's interval."""
    if not all(error.freedom for error in errors):
        return Estimate(value)
    reach = _reach(errors)
    return Estimate(value, value - reach, value + reach)


def _reach(errors: Sequence[Error]) -> float:
    """Half of Student's interval, its degrees of freedom by Welch and Satterthwaite."""
    variance = sum(error.variance for error in errors)
    if not variance:
        return 0.0
    freedom = variance**2 / sum(error.variance**2 / error.freedom for error in errors)
    return float(t.ppf(LEVELS[1] / 100, freedom) * variance**0.5)


def _with_interval(value: float, resampled: Array) -> Estimate:
    low, high = np.percentile(resampled, LEVELS)
    return Estimate(value, float(low), float(high))
