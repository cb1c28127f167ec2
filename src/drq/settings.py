"""Settings as plain data: config.json of a run, the settings of a suite.

Every name and every value is checked against the types in `config.py`. This is our own because it is shorter than what
libraries would need around them: dacite takes true for a whole number, pydantic and cattrs turn the text "3" into one,
and msgspec passes over names that it does not know.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from drq.agents import agent_kind, agent_name
from drq.config import AgentConfig, EnvConfig, TrainConfig
from drq.envs import split_task
from drq.errors import UserError, did_you_mean

GROUPS = ("agent", "env", "replay", "eval", "engine")
LARGEST = 10**300
"""Whole numbers above it are no float's."""


def parse_json(text: str) -> Any:
    """What JSON says. ValueError for what no file of ours holds, and nothing here could compute with or print: whole
    numbers of hundreds of digits, halves of characters."""
    plain = json.loads(text, parse_int=_whole)
    json.dumps(plain, ensure_ascii=False).encode()
    return plain


def _whole(digits: str) -> int:
    if abs(number := int(digits)) > LARGEST:
        raise ValueError(f"the number {digits[:20]}... is too large")
    return number


def config_to_json(config: TrainConfig) -> dict[str, Any]:
    plain = dataclasses.asdict(config)
    plain["agent"] = {"type": agent_name(config.agent), **plain["agent"]}
    plain["imports"] = list(config.imports)
    return plain


def config_from_json(plain: Mapping[str, Any], agent: AgentConfig | None = None) -> TrainConfig:
    """The configuration that `config_to_json` wrote. A setting that is not named, as by an older version, has the
    default of then; a name or a value that does not fit is a UserError. `agent`: settings of an agent that may be in
    no table.
    """
    named = flat(plain)
    if missing := [name for name in ("task", "preset", "agent.type") if name not in named]:
        raise UserError(f"The setting {missing[0]!r} is missing: write it in again.")
    name = named.pop("agent.type")
    kind = type(agent) if agent is not None and agent_name(agent) == name else agent_kind(name).config
    # Whoever names no way to draw was drawn by OpenGL: what `auto` would be here and now are other pixels.
    return override(TrainConfig(task="", preset="", agent=kind(), env=EnvConfig(render="fast")), named)


def override(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """The configuration with settings changed by their dotted names (`agent.k`)."""
    by_group: dict[str, dict[str, Any]] = {group: {} for group in ("", *GROUPS)}
    agent: Any = type(config.agent)
    known = _types_of_settings(agent)
    for name, value in changes.items():
        setting = name.replace("-", "_")
        if setting not in known:
            meant = did_you_mean(setting, known, most=3, key=lambda each: each.rpartition(".")[2])
            raise UserError(
                f"There is no setting {name!r}.{meant} `drq train TASK --help` lists all, as --agent.k for agent.k."
            )
        group, _, field = setting.rpartition(".")
        by_group[group][field] = _checked(name, value, known[setting])
    groups = {group: dataclasses.replace(getattr(config, group), **by_group[group]) for group in GROUPS}
    return dataclasses.replace(config, **by_group[""], **groups)


def modules_of(task: str, changes: Mapping[str, Any]) -> set[str]:
    """Modules of somebody's own that a task and settings, by their dotted names, would have imported."""
    # Whoever wrote them may have given one name, or a number, where a list belongs.
    given = (changes.get(name, ()) for name in ("env.wrap", "imports"))
    wrappers, imports = (each if isinstance(each, list | tuple) else [each] for each in given)
    parts = str(changes.get("agent.augmentation", "")).split("+")
    modules = {str(reference).rpartition(":")[0] for reference in (split_task(task)[1], *parts, *wrappers)}
    return (modules | set(map(str, imports))) - {""}


def refuse_unnamed_modules(asked: Iterable[str], named: Iterable[str], source: object) -> None:
    """Refuses code that a file asks for and the user has not named: passing a folder on must not pass on control."""

    # A module may be named by its file.
    def module(name: str) -> str:
        return Path(name).stem if name.endswith(".py") else name

    trusted = set(map(module, named))
    if unnamed := sorted(each for each in set(asked) if module(each) not in trusted):
        flags = " ".join(f"--import {module}" for module in unnamed)
        modules = f"the module{'s' if len(unnamed) > 1 else ''} {', '.join(unnamed)}"
        raise UserError(
            f"{source} asks to run code of {modules}, and nothing is run that you do not name: "
            f"if you trust it, add {flags} (in Python, imports={unnamed})."
        )


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"agent": {"k": 1}}` as `{"agent.k": 1}`. An environment's arguments are one setting, a text."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name != "env.kwargs":
            found |= flat(value, f"{name}.")
        else:
            found[name] = _as_text(value) if isinstance(value, dict) else value
    return found


def _as_text(kwargs: dict[str, Any]) -> str:
    """As JSON where that says the same: it has no tuples, and texts alone for keys."""
    try:
        text = json.dumps(kwargs)
    except TypeError as error:
        raise UserError(f"env.kwargs is no JSON ({error}): give it numbers, texts, lists and tables.") from None
    return text if json.loads(text) == kwargs else repr(kwargs)


@cache
def _types_of_settings(agent: type) -> dict[str, Any]:
    """Every setting with its type. The agent's depend on which agent it is."""
    settings = get_type_hints(TrainConfig)
    groups = {group: settings.pop(group) for group in GROUPS} | {"agent": agent}
    for group, kind in groups.items():
        settings |= {f"{group}.{name}": each for name, each in get_type_hints(kind).items()}
    return settings


def _checked(name: str, value: Any, kind: Any) -> Any:
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for option in options:
        fits, cast = _fit(value, option)
        if fits:
            return cast
    raise UserError(f"{name!r} is {value!r}: give it {' or '.join(map(_describe, options))}.")


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether a value is of a type, and the value in that type."""
    if get_origin(kind) is Literal:
        return value in get_args(kind), value
    if get_origin(kind) is tuple:
        is_list = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
        return is_list, tuple(value) if is_list else value
    if kind is float and type(value) is int and abs(value) <= LARGEST:  # 1 is a number as good as 1.0
        return True, float(value)
    return type(value) is kind, value  # a bool is no int here


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        return "a list of texts"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "nothing"}
    return names[kind]
