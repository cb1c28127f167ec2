"""The live line fits its terminal, and says what is left of an evaluation."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any, Literal

import pytest

from drq.config import EngineConfig
from drq.training import clock as clock_module
from drq.training import progress as progress_module
from drq.training.clock import Clock
from drq.training.evaluate import Episode, NumberedEpisodes
from drq.training.progress import Progress, duration, return_text
from drq.training.run import Trainer
from runs import small

SHOW = """
import time

from drq.training.clock import Clock
from drq.training.progress import Progress

clock = Clock()
for step in range(1, 31):
    time.sleep(0.005)
    clock.count(step, updates=step)
progress = Progress(budget=500_000, unit="env steps", clock=clock)
progress.show(200_000, 30, -1234.5)
progress.say("a sentence")
"""


@pytest.mark.parametrize(("columns", "shares"), [(80, False), (110, False), (130, True), (20, False)])
def test_the_line_fits_the_terminal(columns: int, shares: bool) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    subprocess.run(
        [sys.executable, "-c", SHOW], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, check=True
    )
    os.close(theirs)
    written = os.read(ours, 65_536).decode()
    os.close(ours)
    line, sentence, _ = written.split("\r\n")
    shown = line.split("\x1b[2K")[1]
    assert len(shown) < columns
    assert sentence == "a sentence"
    assert bool(re.search(r"env \d+%  render \d+%  update \d+%$", shown)) is shares
    if columns > 20:
        assert re.match(r"200,000 / 500,000 env steps \| .*evaluation left \| return -1234.5", shown)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(45, "45 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (100_000, "27 h 46 min"), (273_600, "3 d 04 h")],
)
def test_times_in_words(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("mean", "std", "said"), [(43.84, 2.06, "43.8 ± 2.1"), (0.952, 0.009, "0.95 ± 0.01"), (-0.35, None, "-0.35")]
)
def test_a_small_return_has_another_place(mean: float, std: float | None, said: str) -> None:
    assert return_text(mean, std) == said


def test_an_evaluation_says_what_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one from its own pace, once a tenth is played; later ones from the one before."""
    now = [0.0]
    for module in (clock_module, progress_module):
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[-1])
    stream, clock = io.StringIO(), Clock()
    progress = Progress(budget=10, unit="agent steps", clock=clock, stream=stream)
    with clock.evaluating:
        for seconds, done in ((31, 5), (62, 25), (93, 50)):
            now[-1] = seconds
            progress.show_evaluation(done, 100, "episodes")
    clock.evaluated(120.0)
    with clock.evaluating:
        now[-1] += 50
        progress.show_evaluation(0, 100, "episodes")
    assert stream.getvalue().splitlines() == [
        "evaluation: 5 / 100 episodes | 31 s so far",
        "evaluation: 25 / 100 episodes | 3 min 06 s left",
        "evaluation: 50 / 100 episodes | 1 min 33 s left",
        "evaluation: 0 / 100 episodes | 1 min 10 s left",
    ]


def test_how_much_of_an_evaluation_is_played() -> None:
    def played(min_agent_steps: int) -> tuple[int, int, str]:
        numbered = NumberedEpisodes(seed=0, episodes=5, min_agent_steps=min_agent_steps)
        numbered.begun = [Episode(agent_steps=agent_steps) for agent_steps in (7, 3, 4)]
        return numbered.progress(under_way=[2])

    assert played(0) == (2, 5, "episodes")
    assert played(100) == (14, 100, "agent steps")


@pytest.mark.parametrize("process", ["on", "off"])
def test_a_run_shows_the_evaluation_that_it_waits_for(
    process: Literal["on", "off"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path, steps=30, engine=EngineConfig(eval_process=process))
    trainer, shown = Trainer(config, quiet=True), list[Any]()
    monkeypatch.setattr(trainer.progress, "show_evaluation", lambda *what: shown.append(what))
    trainer.run()
    assert shown
    assert all(0 <= done <= of == 2 and unit == "episodes" for done, of, unit in shown)


def test_the_first_line_has_no_shares_of_a_time_that_was_not_spent(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(budget=300, unit="env steps", clock=Clock()).show(1, 2, None)
    assert capsys.readouterr().err == "1 / 300 env steps\n"
