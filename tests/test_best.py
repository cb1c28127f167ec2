"""The best policy is kept beside the last: `--best`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import drq
from drq.errors import UserError
from drq.training.evaluation_service import InlineEvaluation
from runs import StopAt, small, state
from runs import drq as command

SCORES = {40: 3.0, 80: 7.0, 120: 1.0}


@pytest.fixture(autouse=True)
def scores(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Evaluations that give what a test wants them to."""
    wanted = dict(SCORES)
    monkeypatch.setattr(InlineEvaluation, "play", lambda self, agent, request: ([wanted[request.agent_step]], {}))
    return wanted


class Keep(drq.Callback):
    """The weights at the evaluations' own steps."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_step(self, run: drq.RunView) -> None:
        if run.agent_step in SCORES:
            self.weights[run.agent_step] = run.policy().agent.modules.state_dict()


def best_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "checkpoint" / "latest.json").read_text())["best"]
    return found


def kept(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "checkpoint").glob("best-*"))


def test_it_is_what_acted_in_the_best_evaluation(tmp_path: Path) -> None:
    keep = Keep()
    drq.train(small(tmp_path / "run"), callbacks=[keep], quiet=True)
    best = best_of(tmp_path / "run")
    assert (best["agent_step"], best["return_mean"]) == (80, 7.0)
    assert kept(tmp_path / "run") == [best["file"]]
    weights = load_file(tmp_path / "run" / "checkpoint" / best["file"])
    for name, value in weights.items():
        assert torch.equal(value, keep.weights[80][name]), name
    names = {name.partition(".")[0] for name in weights}
    assert (names, any(name.startswith("critic.encoder") for name in weights)) == ({"actor", "critic"}, True)
    exported = drq.export(tmp_path / "run", tmp_path / "best.drq", best=True)
    assert load_file(exported).keys() == weights.keys()
    image = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)
    policies = [drq.load(tmp_path / "run", best=True), drq.load(exported), drq.load(tmp_path / "run")]
    best_action, exported_action, last_action = (policy.act(image) for policy in policies)
    assert [policy.agent_step for policy in policies] == [80, 80, 120]
    assert np.array_equal(best_action, exported_action)
    assert not np.array_equal(best_action, last_action)


def test_of_equal_ones_it_is_the_last(scores: dict[int, float], tmp_path: Path) -> None:
    scores[120] = 7.0
    drq.train(small(tmp_path / "run"), quiet=True)
    assert best_of(tmp_path / "run")["agent_step"] == 120
    assert drq.load(tmp_path / "run", best=True).agent_step == 120


class Crash(BaseException):
    """The power goes out."""


def test_it_is_exact_on_resume(scores: dict[int, float], tmp_path: Path) -> None:
    class At(drq.Callback):
        def on_step(self, run: drq.RunView) -> None:
            if run.agent_step == 100:
                raise Crash

    drq.train(small(tmp_path / "whole"), quiet=True)
    with pytest.raises(Crash):
        drq.train(small(tmp_path / "run", checkpoint_every=60), callbacks=[At()], quiet=True)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    drq.train(small(tmp_path / "run"), quiet=True)
    folders = tmp_path / "run", tmp_path / "whole"
    one, other = (load_file(folder / "checkpoint" / best_of(folder)["file"]) for folder in folders)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    # An evaluation after the checkpoint that now comes out otherwise leaves no trace of the lost one.
    scores[80] = 2.0
    drq.train(small(tmp_path / "other"), quiet=True)
    assert (best_of(tmp_path / "other")["agent_step"], best_of(tmp_path / "other")["return_mean"]) == (40, 3.0)
    assert kept(tmp_path / "other") == [best_of(tmp_path / "other")["file"]]


def test_damage_to_it_is_named_and_stops_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    drq.train(small(folder, steps=80), quiet=True)
    file = folder / "checkpoint" / best_of(folder)["file"]
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"The best policy in .* cannot be read .*checksum.*: leave --best out"):
        drq.load(folder, best=True)
    before = state(folder)
    drq.train(small(folder))
    assert "The best policy" in capfd.readouterr().err
    assert best_of(folder)["agent_step"] == 120
    assert before.keys() == state(folder).keys()


def test_where_there_is_none_that_is_said(tmp_path: Path) -> None:
    drq.train(small(tmp_path / "run"), callbacks=[StopAt(1)], quiet=True)
    with pytest.raises(UserError, match="keeps no best policy yet"):
        drq.load(tmp_path / "run", best=True)
    exported = drq.export(tmp_path / "run", tmp_path / "last.drq")
    with pytest.raises(UserError, match="holds one policy: leave --best out"):
        drq.evaluate(exported, best=True)


def test_the_command(tmp_path: Path) -> None:
    drq.train(small(tmp_path / "run"), quiet=True)
    out = tmp_path / "best.drq"
    assert command("export", str(tmp_path / "run"), "--best", "--out", str(out)).returncode == 0
    assert drq.load(out).agent_step == 80
    played = [drq.evaluate(path, best=best, episodes=1).mean for path, best in ((tmp_path / "run", True), (out, False))]
    assert played[0] == played[1]
