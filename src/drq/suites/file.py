"""A suite by its name, or a suite of the user's own, described by a small TOML file (docs/suites.md)."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drq import presets
from drq.envs import FAMILIES, family_of, import_modules
from drq.errors import UserError, did_you_mean
from drq.settings import flat, modules_of, refuse_unnamed_modules
from drq.suites.paper import SUITES
from drq.suites.search import Search, label_of, read_search
from drq.suites.suite import MOST_SEEDS, Setting, Suite, find_task, slug

KEYS = ("name", "shows", "preset", "tasks", "seeds", "steps", "imports", "common", "settings", "search")
EXAMPLE_SETTING = '[[settings]] with label = "K=1 M=1" and "agent.k" = 1'


def find_suite(name: str, imports: Iterable[str] = ()) -> Suite:
    """The suite of that name, or the one that a TOML file describes, which may import these modules and no others."""
    if name.endswith(".toml"):
        return read_suite(Path(name), imports)
    if name not in SUITES:
        meant = did_you_mean(name, SUITES)
        raise UserError(
            f"There is no suite {name!r}.{meant} Choose from {', '.join(SUITES)}, or name a file: my_suite.toml."
        )
    return SUITES[name]


def read_suite(path: Path, imports: Iterable[str] = ()) -> Suite:
    """The suite in a file; everything that can be wrong with it is said before anything runs."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"The suite {path} cannot be read ({error.strerror}): check its name.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8 ({error}): save it as UTF-8.") from None
    try:
        return _suite(tomllib.loads(text), path.stem, imports)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML ({error}): mend that line.") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _suite(table: dict[str, Any], stem: str, named: Iterable[str]) -> Suite:
    for key in table:
        if key not in KEYS:
            raise UserError(f"There is no key {key!r}.{did_you_mean(key, KEYS)} A suite has {', '.join(KEYS)}.")
    imports = tuple(_texts(table, "imports")) if "imports" in table else ()
    search, settings = _search(table) if "search" in table else (None, _settings(table))
    asked = [modules_of(task, setting.overrides) for task in _texts(table, "tasks") for setting in settings]
    refuse_unnamed_modules(set(imports).union(*asked), named, "The suite")
    import_modules(imports)
    tasks = tuple(find_task(name, FAMILIES, imports) for name in _texts(table, "tasks"))
    _refuse_repeated("task", tasks)
    preset = _text(table, "preset", family_of(tasks[0]).preset)
    default = presets.preset_values(preset, tasks[0]).steps
    steps = table.get("steps", default)
    if not _positive(steps):
        raise UserError(f"`steps` is {steps!r}: give it a whole number above 0, such as steps = {default}.")
    suite = Suite(
        name=_text(table, "name", stem),
        shows=_text(table, "shows", ""),
        preset=preset,
        tasks=tasks,
        settings=settings,
        seeds=_seeds(table.get("seeds", 1)),
        steps=steps,
        imports=imports,
        search=search,
    )
    if not slug(suite.name):
        raise UserError(f"name = {suite.name!r} has no letter or digit in it: give the suite a name.")
    for run in suite.runs():
        try:
            suite.config(run, Path())
        except UserError as error:
            raise UserError(f"Setting {run.label!r}: {error}") from None
    return suite


def _settings(table: dict[str, Any]) -> tuple[Setting, ...]:
    rows = table.get("settings")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"`settings` is missing or no list of tables: write {EXAMPLE_SETTING}.")
    common, settings = _common(table), []
    for number, row in enumerate(rows, 1):
        label = row.get("label")
        if not isinstance(label, str) or not slug(label):
            raise UserError(f'Setting {number} has no label: write label = "K=1 M=1", as the report shall call it.')
        own = {key: value for key, value in row.items() if key != "label"}
        settings.append(Setting(label, common | _underscored(own)))
    return _told_apart(settings)


def _search(table: dict[str, Any]) -> tuple[Search, tuple[Setting, ...]]:
    if "settings" in table or not isinstance(table["search"], dict):
        raise UserError("[search] makes the settings of a suite: leave out [[settings]], and write [search.space].")
    search, values = read_search(table["search"])
    if said_twice := sorted(_common(table).keys() & search.names):
        raise UserError(f"{said_twice[0]!r} is in [common] and in [search.space]: leave it out of one.")
    return search, _told_apart([Setting(label_of(each), _common(table) | each) for each in values])


def _common(table: dict[str, Any]) -> dict[str, Any]:
    common = table.get("common", {})
    if not isinstance(common, dict):
        raise UserError('`common` is no table: write [common] and below it lines such as "agent.batch_size" = 128.')
    return _underscored(common)


def _told_apart(settings: list[Setting]) -> tuple[Setting, ...]:
    _refuse_repeated("label", [setting.label for setting in settings])
    by_folder: dict[str, str] = {}
    for setting in settings:
        other = by_folder.setdefault(slug(setting.label), setting.label)
        if other != setting.label:
            raise UserError(
                f"The labels {other!r} and {setting.label!r} give the same folder ({slug(other)}): reword one of them."
            )
    return tuple(settings)


def _underscored(table: dict[str, Any]) -> dict[str, Any]:
    """`agent.k = 1`, which TOML reads as a table in a table, is the same as `"agent.k" = 1`."""
    return {name.replace("-", "_"): value for name, value in flat(table).items()}


def _text(table: dict[str, Any], key: str, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise UserError(f"`{key}` is {value!r}: give it a text, such as {key} = {default or 'what it shows'!r}.")
    return value


def _texts(table: dict[str, Any], key: str) -> list[str]:
    value = table.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        example = '["walker-walk", "cheetah-run"]' if key == "tasks" else '["my_module"]'
        what = "missing" if value is None else repr(value)
        raise UserError(f"`{key}` is {what}: give it a list of texts, such as {key} = {example}.")
    return value


def _seeds(value: Any) -> tuple[int, ...]:
    if _positive(value):
        if value > MOST_SEEDS:
            raise UserError(f"`seeds` is {value}: give it {MOST_SEEDS:,} or less.")
        return tuple(range(1, value + 1))
    is_list = isinstance(value, list) and value and all(type(each) is int and each >= 0 for each in value)
    if not is_list:
        raise UserError(f"`seeds` is {value!r}: give it how many, as in seeds = 3, or which, as in seeds = [1, 2, 3].")
    _refuse_repeated("seed", value)
    return tuple(value)


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0  # true is no number here


def _refuse_repeated(what: str, values: Any) -> None:
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise UserError(f"The {what} {repeated[0]!r} is there twice: leave one out, or rename it.")
