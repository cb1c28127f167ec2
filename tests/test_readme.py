"""What the README and the docs tell a reader to type does what they say."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch

import drq
from drq import cli
from drq.config import TrainConfig
from drq.launch.probe import Cost
from drq.presets import PRESETS, configure
from drq.suites import SUITES
from runs import OWN_ENV, small

ROOT = Path(__file__).parent.parent
MEASURED = (ROOT / "docs/atari.md").read_text().split("### Measured")[1].split("### ")[0]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(name: str) -> list[str]:
    """Every `drq ...` line of every document's code blocks and tables, without comments."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for block in re.findall(r"```(?:\w*)\n(.*?)```", text, flags=re.S):
            found += block.splitlines()
        found += re.findall(r"`(drq [^`\n]*)`", text)
    lines = [line.split("#")[0].strip() for line in found]
    return sorted({line for line in lines if line.startswith(f"drq {name} ") and "..." not in line and "<" not in line})


@pytest.mark.parametrize("command", commands("train"))
def test_train_commands_describe_a_run(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parsed for real; only the hours of training are left out."""
    trained: list[TrainConfig] = []
    monkeypatch.setattr("drq.training.run.train", trained.append)
    if "my_module" in command:
        (tmp_path / "my_module.py").write_text(
            "import gymnasium as gym\nfrom gymnasium.envs.classic_control import PendulumEnv\n"
            "for name in ('MyRobot-v0', 'MyEnv-v0'):\n"
            "    if name not in gym.registry:\n        gym.register(name, PendulumEnv)\n"
            "class Darken:\n    columns = 1\n"
        )
        monkeypatch.chdir(tmp_path)
    if "my_env" in command:
        page = (ROOT / "docs" / "own-environment.md").read_text()
        (code,) = re.findall(r"```python\n(# my_env.py.*?)```", page, flags=re.S)
        (tmp_path / "my_env.py").write_text(code)
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, "my_env", raising=False)
    arguments = [word for word in shlex.split(command)[2:] if not word.startswith("[")]
    if arguments[-1] == "--help":
        with pytest.raises(SystemExit):
            cli.main(["train", *arguments])
        return
    cli.main(["train", *arguments])
    (config,) = trained
    assert config.task == arguments[0]


def test_there_are_commands_to_test() -> None:
    assert len(commands("train")) >= 6
    assert "drq train dmc/walker-walk --preset planet --seed 1 --steps 100_000 --dir runs/walker" in commands("train")


@pytest.mark.parametrize("command", [c for c in commands("suite") if c.startswith("drq suite run ")])
def test_suite_commands_plan_their_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)[1:]
    if words[2].endswith(".toml"):
        pytest.skip("a file of the reader's own: tests/test_suites.py has them")
    monkeypatch.setattr("drq.launch.dry_run.cost_of", lambda config: Cost(0.01, 5.0, beside=False, assumed=""))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main([*words, *([] if "--dry-run" in words else ["--dry-run"])])
    assert stopped.value.code == 0
    assert "runs" in capsys.readouterr().out


def test_every_suite_and_preset_is_documented() -> None:
    readme = (ROOT / "README.md").read_text()
    for suite in SUITES:
        assert f"drq suite run {suite.name if hasattr(suite, 'name') else suite}`" in readme
    configuration = (ROOT / "docs" / "configuration.md").read_text()
    for preset in PRESETS:
        assert f"| {preset} |" in configuration


def test_eval_and_report_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    drq.train(small(tmp_path / "runs" / "walker"), quiet=True)
    readme = (ROOT / "README.md").read_text()
    for command in ("drq eval runs/walker --episodes 10 --video walker.mp4", "drq report runs --out report.html"):
        assert command in readme
        cli.main(shlex.split(command)[1:])
    assert "over 10 episodes" in capsys.readouterr().out
    assert (tmp_path / "walker.mp4").stat().st_size > 1000
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_picture_of_the_readme_is_made_by_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "drq report results/planet --format png" in (ROOT / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    cli.main(["report", str(ROOT / "results/planet"), "--format", "png"])
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_the_table_of_results_comes_out_of_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rows = re.findall(r"\| this package, .*", (ROOT / "README.md").read_text())
    assert len(rows) == 2
    for row in rows:
        _, _, runs, *scores, mean_z, command = [cell.strip(" `") for cell in row.split("|")[:-1]]
        assert command in (ROOT / "docs/atari.md").read_text()
        words = (sorted(map(str, Path().glob(word))) if "*" in word else [word] for word in command.split()[1:])
        out = tmp_path / "r.md"
        cli.main([*chain(*words), "--out", str(out)])
        (line,) = re.findall(rf"\| DrQ \| 26 \| {runs} \| .*", out.read_text())
        assert [cell.split()[0] for cell in line.split("|")[4:7]] == scores
        assert f"Mean z of all runs: {mean_z} ({runs} runs of 26 tasks)" in out.read_text()


def standings(folder: str, out: Path) -> list[dict[str, list[str]]]:
    """The tables of z-scores that the report writes: by task what stands in each column."""
    cli.main(["report", str(ROOT / folder), "--format", "md", "--out", str(out)])
    parts = [part for part in out.read_text().split("## ") if " among published runs of " in part.partition("\n")[0]]
    rows = [[line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")] for part in parts]
    return [{task: columns for task, *columns in table} for table in rows]


def test_the_z_scores_of_the_pages_come_out_of_their_commands(tmp_path: Path) -> None:
    by_area, by_return = standings("results/planet", tmp_path / "planet.md")
    results, fidelity = ((ROOT / page).read_text() for page in ("results/README.md", "docs/fidelity.md"))
    for task in set(by_area) - {"Task"}:
        columns = [*by_area[task][2:], *by_return[task][2:]]
        theirs = f"{by_area[task][0]}, {by_return[task][0]} ({by_area[task][1]})"
        assert f"| {task} | {' | '.join(columns)} | {theirs} |" in results
    for name, table in (("mean return over 20k to 100k env steps", by_area), ("return at 100k", by_return)):
        (row,) = re.findall(rf"\| {name} \| (.*) \|", fidelity)
        assert row.split(" | ")[:-1] == [columns[-1] for task, columns in table.items() if task != "Task"]
    (atari,) = standings("results/atari100k-eps", tmp_path / "atari.md")
    found = dict(re.findall(r"\| (\w+) \|.*\| ([-+\d., ]+) \| [^|]+ ± [^|]+ \| [^|]+ \| [^|]+ \|", MEASURED))
    assert found == {task.replace(" ", ""): columns[3] for task, columns in atari.items() if task != "Task"}


def test_the_scores_of_rainbow_come_out_of_their_command(tmp_path: Path) -> None:
    readme, atari, results = ((ROOT / page).read_text() for page in ("README.md", "docs/atari.md", "results/README.md"))
    out, folders = tmp_path / "r.md", [str(ROOT / "results" / name) for name in ("strong12", "strong-priorities")]
    cli.main(["report", *folders, "--format", "md", "--out", str(out)])
    page = out.read_text()
    mean, runs = re.findall(r"Mean z of all runs: (\S+ ± \S+) \((\d) runs", page)[0]
    assert f"Mean z {mean} of five runs" in atari
    assert all(f"z {mean}" in text for text in (readme, results))
    table = next(part for part in page.split("## ") if part.startswith("Rainbow + DrQ among"))
    scores = re.findall(r"^\| ([A-Z][A-Za-z ]+) \| [^|]+± [^|]+ \| 14 \| ([\d.]+) \| (\S+) \|", table, flags=re.M)
    assert len(scores) == int(runs) == 5
    for game, score, z in scores:
        assert f"| {game} | {float(score):,.1f} | {z} |" in atari
        assert f"{game} {float(score):,.1f}" in readme or f"{game} {float(score):,.0f}" in readme
    aggregate = page.partition("human-normalised, over 5 games")[2]
    for system in ("Rainbow + DrQ", "DrQ(eps) (100 runs)", "BBF without SPR, 2 updates a step"):
        (iqm,) = re.findall(
            rf"^\| {re.escape(system)} \| 5 \| \w+ \| \S+ \| (\S+) ", aggregate.partition("##")[0], re.M
        )
        assert f"{float(iqm):.2f}" in readme


def test_the_published_runs_are_counted() -> None:
    page = (ROOT / "results/README.md").read_text()
    rows = re.findall(r"^\| (?:\[([^]]+)\]\([^)]*\)) \|[^|]*\| (\d+)(?: of \d+)? \|", page, flags=re.M)
    for folders, count in rows:
        found = [*chain(*((ROOT / "results" / name).rglob("finished.json") for name in folders.split(", ")))]
        assert len(found) == int(count), folders
    assert page.partition("# Published runs")[2].strip().startswith(f"{sum(int(count) for _, count in rows)} runs ")


def test_the_study_drawn_anew(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "results/README.md").read_text()
    (block,) = re.findall(r"```python\n(from pathlib.*?)```", page, flags=re.S)
    exec(block, {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.split(maxsplit=1)[1] in MEASURED


def test_walkers_fall_as_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```python\n(import csv.*?)```", (ROOT / "results/README.md").read_text(), flags=re.S)
    exec(block, {})
    counted = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    fallen = {run.removeprefix("results/") for run, how in counted.items() if how == "fell"}
    large = {f"dreamer/dmc-walker-{task}/drq/seed-1" for task in ("run", "stand")}
    small = {f"versions/dmc-walker-walk/k2-m2/seed-{seed}" for seed in (1, 2)}
    more = {"k2-m2/seed-3", "k2-m2-tf32/seed-4", "k1-m1/seed-6"}
    assert fallen == large | small | {f"walker-falls/dmc-walker-walk/{run}" for run in more}
    labels = "drq", "k1-m1", "k2-m1", "k2-m2", "k2-m2-tf32"
    assert [sum(run.split("/")[-2] == label for run in counted) for label in labels] == [7, 8, 2, 8, 4]


def test_the_python_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, deploy = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    monkeypatch.setattr("drq.training.run.configure", lambda task, settings: configure(task, settings | {"steps": 200}))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"image": np.zeros((24, 24, 3), np.uint8)}
    exec(block, names)
    action = names["action"]
    assert isinstance(action, np.ndarray)
    assert action.shape == (2,)

    drq.train(small(tmp_path / "lamp", "gym/Lamp-v0", imports=(OWN_ENV,)), quiet=True)
    drq.export("lamp", "robot.drq")
    names = {"gymnasium": SimpleNamespace(make=lambda *_, **__: gymnasium.make("Lamp-v0")), "drq": drq}
    exec(deploy, names)
    assert names["done"]
    assert names["truncated"]


def test_the_python_of_the_configuration_page(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/configuration.md").read_text(), flags=re.S)
    trained: list[TrainConfig] = []
    monkeypatch.setattr(drq, "train", trained.append, raising=False)
    exec(block, {})
    assert dataclasses.asdict(trained[0].agent)["k"] == 1
    assert trained[0].seed == 2


def test_links_lead_somewhere() -> None:
    for document in [*DOCUMENTS, *ROOT.glob("*/README.md")]:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", document.read_text()):
            if "://" not in target:
                there = document.parent / target if target else document
                assert there.exists(), f"{document}: {target}"
                titles = re.findall(r"^#+ (.*)", there.read_text(), flags=re.M) if anchor else [""]
                anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
                assert anchor in anchors, f"{document}: {target}#{anchor}"


def test_the_augmentation_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n# my_module.py\n(.*?)```", (ROOT / "docs/extending.md").read_text(), flags=re.S)
    (tmp_path / "darkening.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    f = drq.augmentation("shift+darkening:Darken")
    images = torch.randint(0, 256, (5, 9, 24, 24), dtype=torch.uint8)
    nu = f.sample(5, (24, 24), torch.Generator().manual_seed(0))
    assert f(images, nu).mean() < images.float().mean()
