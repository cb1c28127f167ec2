"""Reading runs: names of systems, bad input said by name, other people's tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drq.errors import UserError
from drq.report import report
from drq.report.results import RunResult, read_results
from drq.report.standing import standing_tables
from report_runs import evaluations, fake_run, runs_of, write_table


def systems(root: Path) -> list[str]:
    return sorted({run.system for run in runs_of(root)})


def only(root: Path) -> RunResult:
    (run,) = runs_of(root)
    return run


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "deep" / "deeper", seed=7, videos=2)
    run = only(tmp_path)
    assert (run.task, run.seed, run.status, run.benchmark.key) == ("dmc/walker-walk", 7, "finished", "planet")
    assert dict(zip(run.steps, run.returns, strict=True)) == evaluations(folder)
    assert run.seconds == json.loads((folder / "finished.json").read_text())["seconds"]
    assert [video.name for video in run.videos] == ["0000000.mp4", "0000001.mp4"]


def test_atari_counts_agent_steps(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, "atari/pong", preset="atari100k", every=25_000)
    assert list(only(tmp_path).steps) == list(evaluations(folder, "agent_step")) == [0, 25_000, 50_000, 75_000, 100_000]


def test_systems_are_named_after_what_they_are(tmp_path: Path) -> None:
    fake_run(tmp_path, folder="a")
    fake_run(tmp_path, folder="b", k=1, m=1)
    fake_run(tmp_path, folder="c", augmentation="none")
    fake_run(tmp_path, folder="d", augmentation="cutout")
    fake_run(tmp_path, folder="e", env={"observation": "state"})
    fake_run(tmp_path, folder="f", label="my own name", k=3)
    fake_run(tmp_path, "atari/pong", folder="g")
    fake_run(tmp_path, "atari/pong", folder="h", augmentation="none")
    fake_run(tmp_path, "atari/pong", folder="i", preset="strong")
    assert systems(tmp_path) == [
        "DrQ K=2 M=2", "DrQ K=2 M=2, cutout", "Eff. DQN (no augmentation)", "Eff. DQN+DrQ", "RAD (K=M=1)",
        "Rainbow+DrQ", "SAC (no augmentation)", "SAC State", "my own name",
    ]  # fmt: skip


def test_settings_that_vary_are_in_the_name(tmp_path: Path) -> None:
    fake_run(tmp_path, folder="a", batch_size=128, encoder="impala")
    fake_run(tmp_path, folder="b", batch_size=512, encoder="sac-ae")
    untold = {"action_repeat": 8, "own_process": True}
    fake_run(tmp_path, folder="c", batch_size=512, encoder="sac-ae", seed=2, env=untold)
    assert systems(tmp_path) == ["DrQ K=2 M=2, batch 128, encoder impala", "DrQ K=2 M=2, batch 512, encoder sac-ae"]


def test_a_run_of_an_older_version_is_of_the_same_system(tmp_path: Path) -> None:
    older = fake_run(tmp_path, seed=1) / "config.json"
    fake_run(tmp_path, seed=2)
    described = json.loads(older.read_text())
    del described["config"]["agent"]["freeze_encoder"], described["config"]["env"]["render"]
    older.write_text(json.dumps(described))
    assert {run.system for run in runs_of(tmp_path)} == {"DrQ K=2 M=2"}


def test_a_run_that_began_with_anothers_weights_is_another_system(tmp_path: Path) -> None:
    fake_run(tmp_path, seed=1)
    other = fake_run(tmp_path, seed=2) / "config.json"
    described = json.loads(other.read_text())
    described["config"]["init_from"] = "runs/walker"
    other.write_text(json.dumps(described))
    assert systems(tmp_path) == ["DrQ K=2 M=2", "DrQ K=2 M=2, init from runs/walker"]
    assert standing_tables([only(other.parent)]) == []


def test_a_name_is_one_line(tmp_path: Path) -> None:
    fake_run(tmp_path, folder="a", label=" two\nlines ")
    assert systems(tmp_path) == ["two lines"]


def test_one_label_on_two_settings_does_not_merge_them(tmp_path: Path) -> None:
    fake_run(tmp_path, folder="a", label="grid", learning_rate=1e-3)
    fake_run(tmp_path, folder="b", label="grid", learning_rate=1e-4)
    assert systems(tmp_path) == ["grid, lr 0.0001", "grid, lr 0.001"]


def test_planet_and_dreamer_settings_of_a_task_stay_apart(tmp_path: Path) -> None:
    fake_run(tmp_path, preset="planet")
    fake_run(tmp_path, preset="dreamer")
    runs, warnings = read_results([tmp_path])
    assert sorted(run.benchmark.key for run in runs) == ["dreamer", "planet"]
    assert not warnings


def test_an_empty_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    fake_run(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    runs, warnings = read_results([tmp_path / "good", tmp_path / "empty", tmp_path / "gone"])
    assert len(runs) == 1
    assert [str(tmp_path / name) in text for name, text in zip(("empty", "gone"), warnings, strict=True)] == [
        True,
        True,
    ]


def test_a_folder_given_twice_is_one_run(tmp_path: Path) -> None:
    fake_run(tmp_path / "runs")
    runs, warnings = read_results([tmp_path, tmp_path / "runs"])
    assert (len(runs), warnings) == (1, [])


@pytest.mark.parametrize("broken", ["30000,15000,,1,10,9", "30000,x,1,1,10,9", "30000", "30000,15000,nan,1,10,9"])
def test_a_broken_evaluation_row_is_named_and_skipped(tmp_path: Path, broken: str) -> None:
    folder = fake_run(tmp_path)
    lines = (folder / "eval.csv").read_text().splitlines()
    lines[4] = broken  # the evaluation at 30,000 is on line 5
    (folder / "eval.csv").write_text("\n".join(lines))
    runs, warnings = read_results([tmp_path])
    assert 30_000 not in runs[0].steps
    assert len(runs[0].steps) == 10
    (warning,) = warnings
    assert f"{folder / 'eval.csv'}, line 5" in warning


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"format": 1, "config": {"task": 3}}', '{"format": 1, "config": 1}']
)
def test_a_broken_configuration_is_named(tmp_path: Path, text: str) -> None:
    fake_run(tmp_path, folder="good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text(text)
    runs, (warning,) = read_results([tmp_path])
    assert len(runs) == 1
    assert str(tmp_path / "bad" / "config.json") in warning


def test_a_run_of_another_version_is_named_and_left_out(tmp_path: Path) -> None:
    fake_run(tmp_path, folder="good")
    other = fake_run(tmp_path, folder="other", seed=2)
    record = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(record | {"format": 9}))
    runs, (warning,) = read_results([tmp_path])
    assert len(runs) == 1
    assert str(other) in warning
    assert "format 9" in warning


def test_of_two_runs_with_the_same_task_and_seed_the_longer_is_kept(tmp_path: Path) -> None:
    short = fake_run(tmp_path, folder="a", reached=40_000)
    long = fake_run(tmp_path, folder="b")
    run = only(tmp_path)
    assert run.path == long
    _, (warning,) = read_results([tmp_path])
    assert str(short) in warning
    assert str(long) in warning
    assert "seed 1" in warning


def test_unfinished_failed_and_missing_runs_are_named(tmp_path: Path) -> None:
    unfinished = fake_run(tmp_path, seed=1, reached=30_000, status="unfinished")
    failed = fake_run(tmp_path, seed=2, reached=20_000, status="failed")
    started = fake_run(tmp_path, seed=3, status="unfinished")
    (started / "eval.csv").unlink()
    fake_run(tmp_path, "dmc/cheetah-run", seed=4)
    runs, warnings = read_results([tmp_path])
    said = "\n".join(warnings)
    assert len(runs) == 4
    assert f"{unfinished} (dmc/walker-walk, DrQ K=2 M=2, seed 1): unfinished, 30,000 of 100,000 steps" in said
    assert (
        f"{failed} (dmc/walker-walk, DrQ K=2 M=2, seed 2): failed at 20,000 steps: RuntimeError: out of memory" in said
    )
    assert f"{started} (dmc/walker-walk, DrQ K=2 M=2, seed 3): no evaluation yet" in said
    assert "no run of dmc/walker-walk with seed 4" in said
    assert "no run of dmc/cheetah-run with seed 1, 2, 3" in said


@pytest.mark.parametrize(("status", "said"), [("unfinished", "unfinished, 60,000 of"), ("failed", "failed at 60,000")])
def test_a_run_that_was_given_more_steps_has_finished_when_it_has_made_them(
    status: str, said: str, tmp_path: Path
) -> None:
    """As the runs of a search do: its finished.json is of the budget before."""
    folder = fake_run(tmp_path, steps=100_000, reached=60_000, status=status)
    (folder / "finished.json").write_text(json.dumps({"steps": 50_000, "seconds": 1000.0}))
    run = only(tmp_path)
    assert (run.status, run.seconds) == (status, 1200.0)
    assert said in read_results([tmp_path])[1][0]


def test_an_empty_eval_csv_of_a_young_run_is_no_evaluation_yet(tmp_path: Path) -> None:
    young = fake_run(tmp_path, status="unfinished")
    (young / "eval.csv").write_text("")
    runs, warnings = read_results([tmp_path])
    assert [len(run.steps) for run in runs] == [0]
    assert warnings == [f"{young} (dmc/walker-walk, DrQ K=2 M=2, seed 1): no evaluation yet"]


def test_mixed_versions_of_the_simulator_are_said(tmp_path: Path) -> None:
    fake_run(tmp_path, seed=1)
    other = fake_run(tmp_path, seed=2)
    record = json.loads((other / "config.json").read_text())
    record["versions"]["mujoco"] = "3.12.0"
    (other / "config.json").write_text(json.dumps(record))
    _, (warning,) = read_results([tmp_path])
    assert "mujoco: 3.11.0, 3.12.0" in warning


def test_a_preset_that_nothing_was_published_of_is_said(tmp_path: Path) -> None:
    fake_run(tmp_path, preset="ablation", batch_size=128, label="K=2 M=2")
    fake_run(tmp_path, "toy/reach", preset="cpu")  # beside which nothing stands
    assert read_results([tmp_path])[1] == [
        "PlaNet tasks: the settings of the preset ablation (K=2 M=2) are not those of the published figures"
    ]


def test_runs_drawn_in_different_ways_are_said(tmp_path: Path) -> None:
    fake_run(tmp_path, seed=1, env={"render": "cuda"})
    fake_run(tmp_path, seed=2, env={"render": "ray"})
    assert read_results([tmp_path])[1] == []  # the same pixels
    fake_run(tmp_path, seed=3, env={"render": "fast"})
    assert read_results([tmp_path])[1] == [
        "PlaNet tasks: DrQ K=2 M=2 averages runs drawn in different ways (--env.render fast, ray or cuda) on "
        "dmc/walker-walk"
    ]


def test_other_peoples_results_join(tmp_path: Path) -> None:
    fake_run(tmp_path / "runs", label="taken")
    rows = [
        ("walker_walk", 1, 0, 10.5, "Theirs"),
        ("walker_walk", 1, 96_000, 700, "Theirs"),
        ("Pong", 2, 400_000, 3, "taken"),
    ]
    runs, warnings = read_results([tmp_path / "runs", write_table(tmp_path / "theirs.csv", rows)])
    theirs = {run.system: run for run in runs if not run.ours}
    assert warnings == []
    assert (theirs["Theirs"].task, theirs["Theirs"].benchmark.key) == ("dmc/walker-walk", "planet")
    assert list(theirs["Theirs"].returns) == [10.5, 700]
    assert theirs["taken (theirs.csv)"].task == "atari/pong"
    assert list(theirs["taken (theirs.csv)"].steps) == [100_000]  # agent steps


def test_a_broken_row_of_their_table_is_named_and_the_rest_is_used(tmp_path: Path) -> None:
    rows = [("cheetah_run", 1, 1000, 5, "A"), ("cheetah_run", "one", 2000, 5, "A"), ("cheetah_run", 1, 3000, "", "A"),
            ("cheetah_run", 1, 4000, 7, ""), ("cheetah_run", 1, 1000, 6, "A")]  # fmt: skip
    path = write_table(tmp_path / "theirs.csv", rows)
    runs, warnings = read_results([path])
    assert list(runs[0].returns) == [6]
    assert [warning.split(":")[0] for warning in warnings] == [f"{path}, line {line}" for line in (3, 4, 5, 6)]


def test_tables_that_are_none_are_named(tmp_path: Path) -> None:
    fake_run(tmp_path / "runs")
    (tmp_path / "columns.csv").write_text("task,seed,return\na,1,2\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "empty.csv").write_text("")
    names = ("columns.csv", "binary.csv", "empty.csv", "gone.csv")
    runs, warnings = read_results([tmp_path / "runs", *(tmp_path / name for name in names)])
    assert len(runs) == 1
    assert [name in warning for name, warning in zip(names, warnings, strict=True)] == [True] * 4
    assert "env_step" in warnings[0]


def test_agent_steps_in_an_atari_table_are_suspected(tmp_path: Path) -> None:
    _, (warning,) = read_results([write_table(tmp_path / "a.csv", [("Pong", 1, 100_000, 3, "X")])])
    assert "multiply them by 4" in warning


def test_nothing_usable_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Nothing to report") as error:
        report([tmp_path], tmp_path / "report.html")
    assert str(tmp_path) in str(error.value)
    with pytest.raises(UserError, match=r"a file, and no \.csv: name its run's folder"):
        report([Path(__file__)], tmp_path / "report.html")
    started = fake_run(tmp_path, status="unfinished")
    (started / "eval.csv").unlink()
    with pytest.raises(UserError, match="no evaluation yet"):
        report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_out_must_be_a_file_and_the_format_known(tmp_path: Path) -> None:
    fake_run(tmp_path)
    with pytest.raises(UserError, match="is a folder"):
        report([tmp_path], tmp_path)
    with pytest.raises(UserError, match="html, csv, md, tex, png"):
        report([tmp_path], tmp_path / "x.pdf", format="pdf")  # type: ignore[arg-type]
