"""A search over settings: a grid or random samples of a space, and whether the worst stop early (docs/suites.md)."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

from drq.errors import UserError, did_you_mean
from drq.settings import flat

KEYS = ("samples", "seed", "first", "keep", "space")
MOST = 10_000
"""Settings of one search."""
EXAMPLE = 'such as "agent.k" = [1, 2], or "agent.learning_rate" = { low = 1e-4, high = 1e-2, log = true }'


@dataclass(frozen=True)
class Search:
    """What varies among the settings of a suite, and how they are thinned out."""

    names: tuple[str, ...]
    """The settings that vary."""
    first: int | None = None
    """Budget after which the worst stop for the first time. None: all get the whole budget."""
    keep: int = 3
    """One in so many settings goes on, with so many times the budget."""

    def rungs(self, steps: int) -> list[int]:
        """The budgets after which the worst stop, and the whole one: 1,000, 3,000, 9,000."""
        found, at = [], self.first or steps
        while at < steps:
            found.append(at)
            at *= self.keep
        return [*found, steps]


Overrides = dict[str, Any]


def read_search(table: Mapping[str, Any]) -> tuple[Search, list[Overrides]]:
    """The search that a suite's `[search]` describes, and the values of each of its settings."""
    for key in table:
        if key not in KEYS:
            raise UserError(f"There is no key {key!r} in [search].{did_you_mean(key, KEYS)} It has {', '.join(KEYS)}.")
    space = _space(table.get("space"))
    numbers = {key: table[key] for key in KEYS if key in table and key != "space"}
    for key, value in numbers.items():
        least = {"keep": 2, "seed": 0}.get(key, 1)
        if type(value) is not int or value < least:
            raise UserError(f"`{key}` in [search] is {value!r}: give it a whole number from {least} up.")
    samples, lists = numbers.get("samples"), {name: axis for name, axis in space.items() if isinstance(axis, list)}
    if samples is None and (ranges := [name for name in space if name not in lists]):
        raise UserError(f"{ranges[0]!r} is a range, which has no end of values: say samples = 20, or list some.")
    count = math.prod(map(len, lists.values())) if samples is None else samples
    if count > MOST:
        raise UserError(f"The search has {count:,} settings: make it {MOST:,} or less.")
    if samples is None:
        values = [dict(zip(lists, each, strict=True)) for each in product(*lists.values())]
    else:
        # A value hangs on its own name and number alone: more samples, or another axis, leave the others as they are.
        seed = numbers.get("seed", 1)
        drawn = [{name: _draw(axis, f"{seed}/{at}/{name}") for name, axis in space.items()} for at in range(samples)]
        values = list({repr(each): each for each in drawn}.values())
    return Search(tuple(space), numbers.get("first"), numbers.get("keep", 3)), values


def label_of(values: Overrides) -> str:
    """`learning_rate 0.000316, k 2`."""
    short = {name: name.rpartition(".")[2] for name in values}
    names = {name: text if list(short.values()).count(text) == 1 else name for name, text in short.items()}
    return ", ".join(f"{names[name]} {value:g}" if type(value) is float else f"{names[name]} {value}"
                     for name, value in values.items())  # fmt: skip


@dataclass(frozen=True)
class _Range:
    low: float
    high: float
    log: bool


def _space(table: Any) -> dict[str, list[Any] | _Range]:
    if not isinstance(table, dict) or not table:
        raise UserError(f"[search.space] is missing or empty: write what varies, {EXAMPLE}.")
    space: dict[str, list[Any] | _Range] = {}
    ranges: dict[str, dict[str, Any]] = {}
    for key, value in flat(table).items():
        name, _, part = key.replace("-", "_").rpartition(".")
        if part in ("low", "high", "log") and name:
            ranges.setdefault(name, {})[part] = value
            space[name] = []  # its place among the others
        elif isinstance(value, list) and value:
            space[key.replace("-", "_")] = value
        else:
            raise UserError(f"{key!r} in [search.space] is {value!r}: give it a list or a range, {EXAMPLE}.")
    for name, ends in ranges.items():
        log = ends.get("log", False)
        given: list[Any] = [ends.get("low"), ends.get("high")]
        numbers = [end for end in given if type(end) in (int, float) and -1e300 < end < 1e300]
        if len(numbers) < 2 or numbers[0] >= numbers[1] or type(log) is not bool or (log and numbers[0] <= 0):
            raise UserError(f"The range of {name!r} is {ends}: give it low < high (with log both above 0), {EXAMPLE}.")
        space[name] = _Range(numbers[0], numbers[1], log)
    return space


def _draw(axis: list[Any] | _Range, seed: str) -> Any:
    rng = random.Random(seed)
    if isinstance(axis, list):
        return rng.choice(axis)
    if axis.log:
        value = math.exp(rng.uniform(math.log(axis.low), math.log(axis.high)))
    else:
        value = rng.uniform(axis.low, axis.high)
    whole = type(axis.low) is int and type(axis.high) is int
    return round(value) if whole else float(f"{value:.3g}")  # three digits can be read, and name a folder


def ranking(results: Mapping[str, Mapping[str, tuple[float, float]]]) -> list[str]:
    """Settings, the best first, from each one's budget and mean return on each task.

    One that went further is better than one that was stopped before. Among equals the mean over tasks of the rank
    decides: returns of different tasks are not on one scale.
    """
    ranks: dict[str, list[int]] = {label: [] for label in results}
    for task in dict.fromkeys(task for tasks in results.values() for task in tasks):
        means = {label: tasks[task][1] for label, tasks in results.items() if task in tasks}
        for label, mean in means.items():
            ranks[label].append(sum(other > mean for other in means.values()))

    def place(label: str) -> tuple[float, float]:
        return -min(steps for steps, _ in results[label].values()), fmean(ranks[label])

    return sorted(results, key=place)


def as_toml(preset: str, tasks: tuple[str, ...], steps: int, values: Mapping[str, Any]) -> str:
    """Settings for `drq train --config`."""
    task = {"task": tasks[0]} if len(tasks) == 1 else {}
    lines = {**task, "preset": preset, "steps": steps, **values}
    keys = {name: name if name.isidentifier() else json.dumps(name) for name in lines}
    return "".join(f"{keys[name]} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in lines.items())
