"""Searches: what they try, who goes on, and that a run which went from rung to rung is the run it would have been."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from pathlib import Path

import pytest

import drq
import runs
from drq.errors import UserError
from drq.launch import launcher, rungs
from drq.launch.launcher import SuiteRunArguments, run_suite
from drq.launch.rungs import due, write_best
from drq.launch.suite_folder import SuiteFolder
from drq.presets import configure, settings_in
from drq.report import report
from drq.settings import flat
from drq.suites import SUITES, Suite, as_toml, find_suite, ranking
from drq.suites.search import Search, label_of

SPACE = """
tasks = ["toy/reach"]
seeds = 2
steps = 900
[search]
{search}
[search.space]
agent.learning-rate = {{ low = 1e-4, high = 1e-2, log = true }}
agent.k = {{ low = 1, high = 4 }}
agent.augmentation = ["shift", "none"]
"""
GRID = """
tasks = ["toy/reach", "toy/catch"]
steps = 900
[search]
{search}
[search.space]
agent.learning_rate = [1e-3, 1e-4]
agent.k = [1, 2]
"""


def read(folder: Path, text: str) -> Suite:
    (folder / "tune.toml").write_text(text)
    return find_suite(str(folder / "tune.toml"))


def values(suite: Suite) -> list[tuple[object, ...]]:
    assert suite.search is not None
    return [tuple(setting.overrides[name] for name in suite.search.names) for setting in suite.settings]


def test_samples_are_the_same_every_time_and_more_are_added(tmp_path: Path) -> None:
    few, again = (values(read(tmp_path, SPACE.format(search="samples = 5"))) for _ in range(2))
    many = values(read(tmp_path, SPACE.format(search="samples = 40")))
    assert few == again == many[:5]
    rates, views, augmentations = zip(*many, strict=True)
    assert all(1e-4 <= float(str(rate)) <= 1e-2 for rate in rates)
    assert sum(float(str(rate)) < 1e-3 for rate in rates) in range(10, 31)  # half of a logarithmic range
    assert set(views) == {1, 2, 3, 4}
    assert set(augmentations) == {"shift", "none"}
    assert values(read(tmp_path, SPACE.format(search="samples = 5\nseed = 1"))) == few
    assert values(read(tmp_path, SPACE.format(search="samples = 5\nseed = 2"))) != few
    without = SPACE.replace("agent.augmentation", "#")
    assert [each[:2] for each in few] == values(read(tmp_path, without.format(search="samples = 5")))


@pytest.mark.parametrize(("low", "high"), [("0", "0.5"), ("0.0", "1")])
def test_a_range_without_log_is_even_and_may_begin_at_zero(low: str, high: str, tmp_path: Path) -> None:
    axis = f"agent.intensity_scale = {{{{ low = {low}, high = {high} }}}}"
    text = SPACE.replace("agent.k = {{ low = 1, high = 4 }}", axis)
    scales = [float(str(each[1])) for each in values(read(tmp_path, text.format(search="samples = 40")))]
    assert all(0 < scale < float(high) for scale in scales)  # not rounded, as whole numbers alone would be
    assert sum(scale < float(high) / 2 for scale in scales) in range(10, 31)


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    suite = read(tmp_path, GRID.format(search=""))
    assert values(suite) == [(1e-3, 1), (1e-3, 2), (1e-4, 1), (1e-4, 2)]
    assert suite.search == Search(("agent.learning_rate", "agent.k"), first=None, keep=3)
    assert [setting.label for setting in suite.settings][1] == "learning_rate 0.001, k 2"
    assert len(suite.runs()) == 8
    with_common = read(tmp_path, GRID.format(search="") + "[common]\nagent.m = 1\n")
    assert [setting.overrides["agent.m"] for setting in with_common.settings] == [1, 1, 1, 1]


def test_labels_are_short_where_that_tells_settings_apart() -> None:
    assert label_of({"agent.learning_rate": 0.000316, "agent.k": 2, "env.x": 2.0}) == "learning_rate 0.000316, k 2, x 2"
    assert label_of({"agent.x": 1, "env.x": "a", "agent.k": 2}) == "agent.x 1, env.x a, k 2"


def test_the_papers_suites_search_nothing() -> None:
    assert {suite.search for suite in SUITES.values()} == {None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SPACE.format(search=""), "'agent.learning_rate' is a range, which has no end of values: say samples = 20"),
        (SPACE.format(search="samples = 0"), "`samples` in [search] is 0: give it a whole number from 1 up"),
        (SPACE.format(search="samples = 2.5"), "`samples` in [search] is 2.5: give it a whole number from 1 up"),
        (SPACE.format(search="samples = 5\nkeep = 1"), "`keep` in [search] is 1"),
        (SPACE.format(search="sampels = 5"), "There is no key 'sampels' in [search]. Did you mean 'samples'"),
        (SPACE.format(search="samples = 100_000"), "has 100,000 settings: make it 10,000 or less"),
        (GRID.format(search="").replace("[1, 2]", str([*range(1, 5_002)])), "has 10,002 settings: make it 10,000 or"),
        (SPACE.format(search="samples = 5").replace("low = 1e-4", "low = 1"), "give it low < high"),
        (SPACE.format(search="samples = 5").replace("low = 1e-4", "low = 1e-2"), "give it low < high"),
        (SPACE.format(search="samples = 5").replace("log = true", "log = 1"), "give it low < high"),
        (
            GRID.format(search="").replace("[1, 2]", "[]"),
            "'agent.k' in [search.space] is []: give it a list or a range",
        ),
        (GRID.format(search="") + "low = 1\n", "'low' in [search.space] is 1: give it a list or a range"),
        (SPACE.format(search="samples = 5").replace("low = 1e-4", "low = 0"), "with log both above 0"),
        (SPACE.format(search="samples = 5").replace("low = 1e-4", "low = nan"), "give it low < high"),
        (SPACE.format(search="samples = 5").replace("low = 1e-4", 'low = "a"'), "give it low < high"),
        (SPACE.format(search="samples = 5").replace('"shift", "none"', "2026-01-01"), "is datetime.date(2026, 1, 1)"),
        (SPACE.format(search="samples = 5").replace('"none"', '"my_module:Darken"'), "asks to run code of the module"),
        (GRID.format(search="").replace("learning_rate", "learing_rate"), "There is no setting 'agent.learing_rate'"),
        (GRID.format(search="").replace("[1, 2]", "3"), "'agent.k' in [search.space] is 3: give it a list or a range"),
        (GRID.format(search="") + '[[settings]]\nlabel = "x"\n', "leave out [[settings]]"),
        (
            GRID.format(search="") + "[common]\nagent.learning-rate = 1\n",
            "'agent.learning_rate' is in [common] and in [",
        ),
        ('tasks = ["toy/reach"]\n[search]\nsamples = 3\n', "[search.space] is missing or empty"),
        ('tasks = ["toy/reach"]\n[search]\n[search.space]\n', "[search.space] is missing or empty"),
        ('tasks = ["toy/reach"]\n[search]\nspace = 3\n', "[search.space] is missing or empty"),
    ],
)
def test_mistakes_are_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        read(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_rungs_grow_up_to_the_budget() -> None:
    assert Search((), first=100, keep=3).rungs(900) == [100, 300, 900]
    assert Search((), first=100).rungs(1000) == [100, 300, 900, 1000]
    assert Search((), first=100).rungs(80) == [80]
    assert Search(()).rungs(900) == [900]


def test_the_best_went_furthest_and_ranks_best_over_tasks() -> None:
    one = {"a": (9.0, 1.0), "b": (9.0, 500.0)}
    results = {"stopped": {"a": (3.0, 99.0), "b": (3.0, 999.0)}, "one": one}
    assert ranking(results) == ["one", "stopped"]
    # On a scale of returns the third would win by its task b alone.
    results |= {"two": {"a": (9.0, 3.0), "b": (9.0, 600.0)}, "three": {"a": (9.0, 0.5), "b": (9.0, 10_000.0)}}
    assert ranking(results)[0] == "two"
    # Ranks of both tasks count: 0 and 3 are worse than 1 and 1.
    returns = {"first": (9.0, 0.0), "even": (8.0, 8.0), "third": (1.0, 9.0), "last": (0.0, 7.0)}
    assert ranking({label: {"a": (9.0, a), "b": (9.0, b)} for label, (a, b) in returns.items()})[0] == "even"
    assert ranking({"half": {"a": (9.0, 5.0), "b": (3.0, 5.0)}, "whole": one}) == ["whole", "half"]
    assert ranking({"one task": {"a": (9.0, 0.0)}, "whole": one}) == ["whole", "one task"]


def test_settings_are_written_as_toml() -> None:
    one = as_toml("cpu", ("toy/reach",), 900, {"agent.k": 2, "label": "\N{GRINNING FACE}"})
    written = {"preset": "cpu", "steps": 900, "agent.k": 2, "label": "\N{GRINNING FACE}"}
    assert tomllib.loads(one) == {"task": "toy/reach", **written}
    assert tomllib.loads(as_toml("cpu", ("toy/reach", "toy/catch"), 900, {})) == {"preset": "cpu", "steps": 900}


def finish(suite: Suite, folder: Path, steps: int, returns: dict[str, list[float]]) -> None:
    """Run folders as they are after a rung: for each setting's place in the file the returns of its seeds."""
    for run in suite.runs():
        path = folder / run.folder
        path.mkdir(parents=True, exist_ok=True)
        score = returns[run.label][run.seed - 1]
        with open(path / "eval.csv", "w", newline="") as file:
            rows = [(10, 10, 99.0, 1.0), (steps, steps, score, 2.0)]
            csv.writer(file).writerows([("env_step", "agent_step", "return_mean", "seconds"), *rows])
        (path / "finished.json").write_text(json.dumps({"steps": steps, "seconds": 1.0}))


def test_the_worst_stop_and_failures_do_not_go_on(tmp_path: Path) -> None:
    text = GRID.format(search="first = 100\nkeep = 2").replace(', "toy/catch"', "").replace("steps", "seeds = 2\nsteps")
    suite = read(tmp_path, text)
    folder = SuiteFolder(tmp_path / "out")
    first, second, third, fourth = (setting.label for setting in suite.settings)
    part, later = due(suite, folder)
    assert (part.steps, len(part.settings), later) == (100, 4, 4)  # 100, 200, 400, 800, 900

    # The mean over seeds counts: the fourth has the best single seed. The second has failed with one of its seeds.
    scores = {first: [5.0, 6.0], second: [50.0, 50.0], third: [4.0, 4.0], fourth: [9.0, 0.0]}
    finish(part, folder.path, 100, scores)
    failed = folder.path / next(run.folder for run in part.runs() if run.label == second)
    (failed / "finished.json").unlink()
    assert due(suite, folder)[0].steps == 100  # it is still under way
    (failed / "error.txt").write_text("The agent has diverged.\n")
    part, later = due(suite, folder)
    assert ([setting.label for setting in part.settings], part.steps, later) == ([first, fourth], 200, 3)

    # A command that is a rung behind takes nothing back.
    folder.open(part)
    folder.open(due(suite, SuiteFolder(tmp_path / "none"))[0])
    recorded = {(run.label, run.steps) for run in folder.read().runs}
    assert recorded == {(first, 200), (fourth, 200), (second, 100), (third, 100)}

    finish(part, folder.path, 200, scores)
    part, _ = due(suite, folder)
    assert ([setting.label for setting in part.settings], part.steps) == ([first], 400)
    finish(part, folder.path, 900, scores)
    part, later = due(suite, folder)
    assert (part.steps, later) == (900, 0)
    best = write_best(part, folder)
    assert best is not None
    assert tomllib.loads(best.read_text()) == {
        "task": "toy/reach", "preset": suite.preset, "steps": 900, "agent.learning_rate": 1e-3, "agent.k": 1,
    }  # fmt: skip


def test_a_search_of_which_all_fail_ends(tmp_path: Path) -> None:
    suite = read(tmp_path, GRID.format(search="first = 100\nkeep = 2"))
    folder = SuiteFolder(tmp_path / "out")
    for run in suite.runs():
        (folder.path / run.folder).mkdir(parents=True)
        (folder.path / run.folder / "error.txt").write_text("The agent has diverged.\n")
    part, _ = due(suite, folder)
    assert part.steps == 100
    assert write_best(part, folder) is None


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_rung_before_the_first_update_is_refused(dry_run: bool, tmp_path: Path) -> None:
    read(tmp_path, GRID.format(search="first = 500\nkeep = 2"))
    args = SuiteRunArguments(str(tmp_path / "tune.toml"), dir=tmp_path / "out", dry_run=dry_run)
    with pytest.raises(UserError, match=r"after first = 500 env steps, before toy/reach, .* has made an update: raise"):
        run_suite(args)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep_replay", [False, True])
def test_those_that_stop_drop_their_replay_also_when_the_command_came_later(
    keep_replay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = read(tmp_path, GRID.format(search="first = 600\nkeep = 4"))
    folder, dropped = SuiteFolder(tmp_path / "out"), list[Path]()
    finish(suite, folder.path, 600, {setting.label: [float(at)] for at, setting in enumerate(suite.settings)})
    monkeypatch.setattr(launcher, "_run_part", lambda *_: 0)
    monkeypatch.setattr(rungs, "replay_files", lambda checkpoint: [checkpoint])
    monkeypatch.setattr(rungs, "drop_replay", dropped.append)
    run_suite(SuiteRunArguments(str(tmp_path / "tune.toml"), dir=folder.path, keep_replay=keep_replay))
    assert len(dropped) == (0 if keep_replay else 6)  # three of four settings, on two tasks


TINY = """[common]
device = "cpu"
env.image_size = 24
agent.hidden_dim = 16
agent.feature_dim = 8
agent.batch_size = 8
agent.seed_steps = 20
eval.episodes = 1
eval.video = false
"""


def test_the_example_of_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "suites.md").read_text()
    _, example = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    whole = read(tmp_path, example)
    assert (len(whole.settings), len(whole.runs())) == (9, 18)
    assert whole.search is not None
    assert whole.search.rungs(whole.steps) == [1_000, 3_000, 9_000]

    small = example.replace("9_000", "90").replace("1_000", "30").replace("samples = 9", "samples = 3")
    suite = read(tmp_path, small.replace("[search]", TINY + "[search]"))
    args = SuiteRunArguments(str(tmp_path / "tune.toml"), seeds=1, dir=tmp_path / "out", jobs=2)
    assert run_suite(args) == 0
    said = capsys.readouterr().out
    assert "3 settings up to 30 steps; then the worst stop." in said
    assert said.count("Finished: ") == 4
    finished = {run.label: drq.training.folder.RunFolder(tmp_path / "out" / run.folder).finished_steps
                for run in suite.narrowed(seeds=1).runs()}  # fmt: skip
    assert sorted(finished.values()) == [30, 30, 90]
    assert not list((tmp_path / "out").rglob("replay-*"))

    # The winner is, to the bit, the run that had the whole budget at once.
    (winner,) = (run for run in suite.narrowed(seeds=1).runs() if finished[run.label] == 90)
    drq.train(suite.config(winner, tmp_path / "whole"), quiet=True)
    went, whole_run = runs.state(tmp_path / "out" / winner.folder), runs.state(tmp_path / "whole" / winner.folder)
    assert all(went[name].equal(whole_run[name]) for name in whole_run if name.startswith(("agent.", "optimizer.")))

    best = tmp_path / "out" / "best.toml"
    config = configure("toy/reach", flat(settings_in(best)))
    wanted = suite.config(winner, tmp_path)
    assert (config.agent, config.env, config.steps) == (wanted.agent, wanted.env, 90)
    assert run_suite(args) == 0
    assert "Nothing to do." in capsys.readouterr().out
    report([tmp_path / "out"], tmp_path / "r.md", format="md")
    assert f"```toml\n{best.read_text()}```" in (tmp_path / "r.md").read_text()
