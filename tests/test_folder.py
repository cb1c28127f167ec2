"""The run folder's reader: older folders, hand-edited ones, damaged ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import drq
from drq.config import EngineConfig, EnvConfig, EvalConfig, TrainConfig
from drq.envs import EnvSpec
from drq.errors import UserError
from drq.presets import PRESETS, action_repeat_for, preset
from drq.report.results import read_results
from drq.settings import _types_of_settings as settings_of
from drq.settings import config_from_json, config_to_json, flat, override
from drq.training.folder import Finished, RunFolder
from runs import StopAt, small, state

SPEC = EnvSpec("dmc/cartpole-swingup", (3, 84, 84), 3, "continuous", 1, 8, 125)


def edit(folder: RunFolder, change: Callable[[dict[str, Any]], object]) -> None:
    described = json.loads(folder.config_file.read_text())
    change(described)
    folder.config_file.write_text(json.dumps(described))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("task", ["dmc/cartpole-swingup", "atari/pong", "toy/reach"])
def test_a_configuration_survives_json(name: str, task: str) -> None:
    config = dataclasses.replace(preset(name, task), imports=("one", "two"), dir="somewhere")
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_settings_that_an_older_folder_does_not_name_have_their_defaults() -> None:
    plain = config_to_json(preset("planet", "dmc/walker-walk"))
    del plain["engine"], plain["eval"]["min_agent_steps"], plain["log_every"]
    assert config_from_json(plain) == preset("planet", "dmc/walker-walk")


def test_a_run_that_names_no_way_to_draw_is_drawn_as_it_was() -> None:
    """By OpenGL: `auto` became the default later."""
    plain = config_to_json(preset("planet", "dmc/walker-walk"))
    del plain["env"]["render"]
    assert config_from_json(plain).env.render == "fast"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"agent.k": "2"}, "'agent.k' is '2': give it a whole number."),
        ({"agent.k": True}, "'agent.k' is True: give it a whole number."),
        ({"agent.discount": None}, "'agent.discount' is None: give it a number."),
        ({"agent.kk": 2}, "There is no setting 'agent.kk'. Did you mean 'agent.k'?"),
        ({"env.render": "pretty"}, "'env.render' is 'pretty': give it 'auto' or 'paper' or 'fast' or 'ray' or 'cuda'."),
        ({"replay.capacity": 0.5}, "'replay.capacity' is 0.5: give it a whole number or nothing."),
        ({"imports": "my_module"}, "'imports' is 'my_module': give it a list of texts."),
        ({"agent.type": "td9"}, "There is no agent 'td9': choose from sac, dqn"),
    ],
)
def test_a_hand_edited_configuration_is_refused_in_one_sentence(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open(preset("planet", "dmc/cartpole-swingup"), SPEC)

    def changed(described: dict[str, Any]) -> None:
        for name, value in change.items():
            group, _, field = name.rpartition(".")
            (described["config"][group] if group else described["config"])[field] = value

    edit(folder, changed)
    with pytest.raises(UserError) as raised:
        drq.load(folder.path)
    assert f"{folder.config_file}: {said}" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "value"), [("env", 3), ("task", ["toy/reach"]), ("seed", "1"), ("preset", None)])
def test_a_value_of_another_type_is_named(tmp_path: Path, name: str, value: object) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open(preset("planet", "dmc/cartpole-swingup"), SPEC)
    edit(folder, lambda described: described["config"].update({name: value}))
    with pytest.raises(UserError) as raised:
        drq.load(folder.path)
    assert f"{folder.config_file} is damaged ('{name}' is of another type): restore it" in str(raised.value)


MAY_CHANGE = {
    *("dir", "device", "checkpoint_every", "log_every", "engine.eval_process"),
    *("eval.every", "eval.episodes", "eval.min_agent_steps", "eval.video", "env.own_process"),
}
TEXTS = {"device": "auto", "env.observation": "state", "env.render": "paper", "agent.encoder": "nature"}


def test_a_run_that_failed_before_its_first_row_may_begin_with_other_settings(tmp_path: Path) -> None:
    folder, other = RunFolder(tmp_path / "run"), small(tmp_path / "run", seed=2)
    folder.open(small(tmp_path / "run"), SPEC)
    folder.train_csv.touch()
    with pytest.raises(UserError, match="holds a run with other settings"):
        folder.check(other)
    folder.error_file.write_text("It cannot be drawn.\n")
    folder.check(other)
    folder.train_csv.write_text("env_step\n")
    with pytest.raises(UserError, match="holds a run with other settings"):
        folder.check(other)


def test_what_may_change_when_a_run_goes_on_is_this_and_nothing_else(tmp_path: Path) -> None:
    folder, config = RunFolder(tmp_path / "run"), small(tmp_path / "run")
    folder.open(config, SPEC)
    kinds = settings_of(type(config.agent))
    for name, value in flat(config_to_json(config)).items():
        if name in ("agent.type", "steps"):
            continue
        options = [each for kind in (get_args(kinds[name]) or [kinds[name]]) for each in (get_args(kind) or [kind])]
        other: Any = TEXTS.get(name, "another")
        if isinstance(value, bool):
            other = not value
        elif int in options or float in options:
            other = (value or 1) + 1
        elif isinstance(value, list | tuple):
            other = ["another"]
        elif (literals := [each for each in options if isinstance(each, str) and each != value]) and name not in TEXTS:
            other = literals[0]
        changed = override(config, {name: other})
        if name in MAY_CHANGE or name.startswith("wandb"):
            folder.check(changed)
        else:
            with pytest.raises(UserError, match=f"holds a run with other settings \\({name}: "):
                folder.check(changed)
    many = {"task": "toy/catch", **{f"agent.{name}": 7 for name in ("k", "m", "pad", "n_step", "tau")}}
    with pytest.raises(UserError, match=r"settings \(task: 'toy/reach' there, 'toy/catch' now; .*; and 1 more\)"):
        folder.check(override(config, many))
    with pytest.raises(UserError, match="is no name in UTF-8"):
        RunFolder(tmp_path / "L\udce4ufe").check(config)
    folder.check(dataclasses.replace(config, steps=config.steps + 1))
    with pytest.raises(UserError, match="holds a run of 120 steps, more than the 119 asked for"):
        folder.check(dataclasses.replace(config, steps=config.steps - 1))


def test_what_may_change_changes_nothing_that_is_learnt(tmp_path: Path) -> None:
    drq.train(small(tmp_path / "whole", steps=140), quiet=True)
    drq.train(small(tmp_path / "run"), callbacks=[StopAt(50)], quiet=True)
    often = EvalConfig(every=25, episodes=1, min_agent_steps=60, video=True)
    changes = {"log_every": 7, "checkpoint_every": 30, "eval": often, "engine": EngineConfig(eval_process="on")}
    drq.train(small((tmp_path / "run").rename(tmp_path / "moved"), steps=140, **changes), quiet=True)
    one, other = state(tmp_path / "whole"), state(tmp_path / "moved")
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_presets_say_the_action_repeat() -> None:
    repeats = {name: preset(name, "dmc/cartpole-swingup").env.action_repeat for name in PRESETS}
    assert (repeats.pop("dreamer"), repeats.pop("state")) == (2, 1)
    assert set(repeats.values()) == {8}
    assert preset("dreamer", "toy/reach").env.action_repeat == 1  # an environment of one's own is taken as it is
    assert preset("dreamer", "atari/pong").env.action_repeat == 4


@pytest.mark.parametrize(("name", "repeat"), [("planet", 8), ("dreamer", 2), ("of an older version", 8)])
def test_a_folder_that_left_the_action_repeat_to_its_preset_goes_on(tmp_path: Path, name: str, repeat: int) -> None:
    def run(action_repeat: int | None) -> TrainConfig:
        config = preset("planet", "dmc/cartpole-swingup")
        return dataclasses.replace(config, preset=name, env=EnvConfig(action_repeat=action_repeat))

    folder = RunFolder(tmp_path / "run")
    folder.open(run(None), SPEC)
    assert folder.config.env.action_repeat is None
    assert action_repeat_for(folder.config) == repeat
    folder.check(run(repeat))
    folder.check(run(None))
    with pytest.raises(UserError, match=f"env.action_repeat: {repeat} there, 5 now"):
        folder.check(run(5))


def test_a_run_of_an_older_version_resumes_evaluates_and_is_reported(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    drq.train(small(folder.path, steps=60), quiet=True)
    folder.finished_file.unlink()

    def older(described: dict[str, Any]) -> None:
        assert described["config"]["env"].pop("action_repeat") is None  # `small` leaves it to the preset
        del described["config"]["engine"]["kernels"], described["label"]

    edit(folder, older)
    assert len(drq.evaluate(folder.path, episodes=1).episodes) == 1
    said = dataclasses.replace(small(folder.path).env, action_repeat=1)
    result = drq.train(small(folder.path, env=said), quiet=True)
    assert [row["env_step"] for row in result.evaluations] == [40, 60, 80, 120]
    runs, warnings = read_results([tmp_path])
    assert ([run.last_step for run in runs], warnings) == ([120], [])


def test_what_a_crash_leaves_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    header = "env_step,agent_step,return_mean,return_std,episodes,seconds"
    folder.eval_csv.write_text(f"{header}\n10,10,1.5,0,2,3\n20,20,nan,0,2,6\n30,30,2")
    assert [row["env_step"] for row in folder.evaluations()] == [10, 20]  # the last is half written
    problems: list[str] = []
    assert [row["env_step"] for row in folder.evaluations(problems)] == [10]
    assert [problem.partition(":")[0] for problem in problems] == [f"{folder.eval_csv}, line {at}" for at in (3, 4)]
    folder.train_csv.write_text("env_step,episode_return,seconds\n10,,1\n20,3.5,2\n3")
    assert folder.recent_training("env_step", "episode_return", "seconds") == [
        {"env_step": 10, "seconds": 1}, {"env_step": 20, "episode_return": 3.5, "seconds": 2},
    ]  # fmt: skip
    assert folder.last_evaluation()["env_step"] == 20
    folder.eval_csv.write_text(header + "\n" + "".join(f"{at},{at},{at / 2},0,2,3\n" for at in range(1_000)))
    last = {"env_step": 999, "agent_step": 999, "return_mean": 499.5, "seconds": 3}
    assert folder.last_evaluation() == last  # out of the last bytes alone
    assert (folder.finished, folder.error) == (None, None)
    folder.finished_file.write_text('{"steps": 30, "sec')
    assert folder.finished is None
    folder.finished_file.write_text('{"steps": 30, "seconds": 9.5}')
    assert folder.finished == Finished(30, 9.5)
    folder.error_file.write_text("Traceback\n  File\nValueError: no\n\n")
    assert folder.error == "ValueError: no"
