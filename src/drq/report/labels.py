"""What to call the settings of a run: "DrQ K=2 M=2", "RAD (K=M=1)", "SAC (no augmentation)"."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from drq.errors import UserError
from drq.settings import config_from_json, config_to_json

SHORT = {
    "batch_size": "batch",
    "learning_rate": "lr",
    "init_temperature": "temperature",
    "updates_per_step": "updates/step",
    "freeze_encoder": "frozen encoder",
}
NAMED = ("type", "augmentation", "k", "m", "observation")
"""Settings that the first part of a name already tells."""
UNTOLD = ("action_repeat", "camera", "max_episode_steps", "render", "own_process")
"""Settings that follow the task, or the machine: they vary among runs without making another system."""

Settings = dict[str, str]


def label_runs(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """A name for the settings of each run, given its benchmark and its config.json.

    A `label` in config.json is taken as it is. Otherwise the name says the algorithm. Settings that vary are
    appended: among all runs of the same benchmark and algorithm, or among those of the same label.
    """
    names = [_label(record) or _algorithm(record["config"]) for _, record in runs]
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for index, (benchmark, record) in enumerate(runs):
        groups[benchmark, str(record["config"]["agent"]["type"]), _label(record)].append(index)
    for members in groups.values():
        settings = {index: settings_of(runs[index][1]["config"]) for index in members}
        for index, suffix in zip(members, _what_varies([settings[index] for index in members]), strict=True):
            names[index] = ", ".join([names[index], *suffix])
    return names


def settings_of(config: Mapping[str, Any], without: Sequence[str] = NAMED) -> Settings:
    """Every setting that can make another system, as text; without those that are unset."""
    with contextlib.suppress(UserError):  # an agent that is not ours keeps what it says
        config = config_to_json(config_from_json(config))  # what an older version does not name has its default
    ordinary = {"num_envs": 1, "init_from": None, "init_replay": False}
    named = {key: value for key, usual in ordinary.items() if (value := config.get(key, usual)) != usual}
    for room in ("agent", "env", "replay"):
        named |= config.get(room, {})
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in named.items()
        if value is not None and key not in (*without, *UNTOLD)
    }


def one_line(name: str) -> str:
    """A name that fits into a row of a table."""
    return " ".join(name.split())


def _label(record: Mapping[str, Any]) -> str:
    return one_line(record.get("label") or "")


def _algorithm(config: Mapping[str, Any]) -> str:
    agent, env = config["agent"], config.get("env", {})
    augmentation, views = str(agent.get("augmentation", "")), (agent.get("k"), agent.get("m"))
    if without := {"dqn": "Eff. DQN", "rainbow": "Rainbow"}.get(agent["type"]):
        if augmentation == "none":
            return f"{without} (no augmentation)"
        name = f"{without}+DrQ" if views == (1, 1) else f"{without}+DrQ K={views[0]} M={views[1]}"
        return name if augmentation == "shift+intensity" else f"{name}, {augmentation}"
    if agent["type"] != "sac":
        return str(agent["type"])
    if env.get("observation") == "state":
        return "SAC State"
    if augmentation == "none":
        return "SAC (no augmentation)"
    name = "RAD (K=M=1)" if views == (1, 1) else f"DrQ K={views[0]} M={views[1]}"
    return name if augmentation == "shift" else f"{name}, {augmentation}"


def _what_varies(settings: list[Settings]) -> list[list[str]]:
    keys = dict.fromkeys([*SHORT, *(key for one in settings for key in one)])
    varying = [key for key in keys if len({one.get(key) for one in settings}) > 1]
    return [[_phrase(key, one[key]) for key in varying if key in one] for one in settings]


def _phrase(key: str, value: str) -> str:
    name = SHORT.get(key, key.replace("_", " "))
    if value in ("true", "false"):
        return name if value == "true" else f"no {name}"
    return f"{name} {value}"
