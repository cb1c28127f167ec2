"""docs/own-environment.md from top to bottom, with a training of seconds."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import gymnasium
import pytest

import drq
from drq import cli
from drq.training.run import train
from runs import FLAGS

PAGE = (Path(__file__).parents[1] / "docs" / "own-environment.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
COMMANDS = [line for line in PAGE.splitlines() if line.startswith("drq ")]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a reader who saved the page's environment."""
    (tmp_path / "my_env.py").write_text(PYTHON[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_env", None)
    gymnasium.registry.pop("Follow-v0", None)


def test_from_registration_to_a_policy_that_plays(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    assert [command.split()[1] for command in COMMANDS] == ["check", "train", "eval", "eval", "export"]
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        with nullcontext() if words[0] != "check" else pytest.raises(SystemExit, match="0"):
            cli.main([*words, *(FLAGS[2:] if words[0] == "train" else [])])
        said[command] = capsys.readouterr()
    check, train, scores, video, export = said.values()
    assert "No fault was found." in check.out
    assert "The agent sees the observation, 64x64x3, resized to 24x24." in train.err
    played = json.loads(scores.out)["episodes"]
    assert [episode["agent_steps"] for episode in played] == [25] * 20
    assert (page / "follow.mp4").stat().st_size > 1000
    assert re.match(r"return \d+\.\d over 1 episode\n", video.out)
    assert "follow.drq" in export.out

    exec(PYTHON[2], {})
    total = float(re.findall(r"return (\d+\.\d)", capsys.readouterr().out)[0])
    assert 0 < total <= 25


def test_the_python_of_the_page_trains(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = {
        "steps": 60,
        "env.image_size": 24,
        "agent.hidden_dim": 16,
        "eval.episodes": 1,
        "eval.video": False,
        "agent.seed_steps": 55,
        "agent.batch_size": 4,
    }
    monkeypatch.setattr(
        drq, "train", lambda task, **settings: train(task, **settings | shorter, quiet=True), raising=False
    )
    exec(PYTHON[1], {})
    assert drq.load("runs/follow-again").agent_step == 60
