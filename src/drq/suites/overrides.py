"""Settings changed by their dotted names (`agent.k`), checked against the types in `config.py`."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from drq.config import TrainConfig
from drq.errors import UserError

Overrides = Mapping[str, Any]
"""Dotted name of a setting -> its value."""

ROOMS = ("agent", "env", "replay", "eval", "engine")
ELSEWHERE = {
    "task": "`tasks`",
    "preset": "`preset`",
    "seed": "`seeds`",
    "steps": "`steps`",
    "imports": "`imports`",
    "dir": "--dir on the command line",
}
"""Settings of a run that belong to the suite as a whole, and what says them there."""


def override(config: TrainConfig, overrides: Overrides) -> TrainConfig:
    """The configuration with some settings changed; a name or a value that does not fit is a UserError."""
    changes: dict[str, dict[str, Any]] = {room: {} for room in ("", *ROOMS)}
    types_of = setting_types(config)
    for name, value in overrides.items():
        known = name.replace("-", "_")
        if known in ELSEWHERE:
            raise UserError(f"{name!r} is the same for a whole suite: say it with {ELSEWHERE[known]}.")
        if known not in types_of:
            raise UserError(_no_such_setting(name, list(types_of)))
        room, _, field = known.rpartition(".")
        changes[room][field] = _checked(name, value, types_of[known])
    rooms = {room: dataclasses.replace(getattr(config, room), **changes[room]) for room in ROOMS if changes[room]}
    return dataclasses.replace(config, **changes[""], **rooms)


def setting_types(config: TrainConfig) -> dict[str, Any]:
    """Every setting that can be changed, with its type. The agent's depend on which agent it is."""
    of_rooms = {
        f"{room}.{name}": kind for room in ROOMS for name, kind in _fields(type(getattr(config, room))).items()
    }
    of_run = {name: kind for name, kind in _fields(TrainConfig).items() if name not in (*ROOMS, *ELSEWHERE)}
    return of_rooms | of_run


def _fields(of: type) -> dict[str, Any]:
    return get_type_hints(of)


def _no_such_setting(name: str, known: list[str]) -> str:
    last = name.rpartition(".")[2].replace("-", "_")
    by_last_word = {each.rpartition(".")[2]: each for each in known}
    near = [by_last_word[word] for word in get_close_matches(last, by_last_word, n=3)]
    near = list(dict.fromkeys(near + get_close_matches(name, known, n=2)))[:3]
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"There is no setting {name!r}: {meant}`drq train TASK --help` lists all, as --agent.k for agent.k."


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
    if kind is float and type(value) is int:  # 1 is a number as good as 1.0
        return True, float(value)
    return type(value) is kind, value  # a bool is no int here


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "nothing"}
    return names[kind]
