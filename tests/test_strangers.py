"""A folder or a file from a stranger runs no code of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drq
import runs
from drq.errors import UserError
from drq.report import report
from drq.suites.file import read_suite
from runs import small

MODULE = 'from pathlib import Path\nPath(__file__).with_name("ran").touch()\n'

ASKING: dict[str, Callable[[dict[str, Any]], object]] = {
    "imports": lambda config: config.update(imports=["stranger"]),
    "an augmentation": lambda config: config["agent"].update(augmentation="shift+stranger:f"),
    "a task": lambda config: config.update(task="gym/stranger:Id-v0"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger") / "run"
    drq.train(small(folder, steps=25), quiet=True)
    for name in ("stranger.py", "torch.py", "tyro.py", "safetensors.py"):  # some that pass for others
        (folder / name).write_text(MODULE)
    return folder


@pytest.mark.parametrize("asking", ASKING)
def test_a_run_folder_imports_only_what_the_command_names(
    asking: str, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained / "config.json"
    before = config.read_text()
    described = json.loads(before)
    ASKING[asking](described["config"])
    config.write_text(json.dumps(described))
    try:
        assert drq.load(trained).agent_step == 25  # acting needs no module of the user's
        if asking != "an augmentation":  # nor does playing augment
            with pytest.raises(UserError, match=r"code of the module stranger.* add --import stranger"):
                drq.evaluate(trained)
        said = runs.drq("eval", ".", "--episodes", "1", cwd=trained)
        monkeypatch.chdir(trained)
        report([Path(".")], trained / "page.html")
    finally:
        config.write_text(before)
    assert said.returncode == (0 if asking == "an augmentation" else 2), said.stderr
    assert ("add --import stranger" in said.stderr) == (asking != "an augmentation")
    assert "Traceback" not in said.stderr
    assert not (trained / "ran").exists()


def test_the_module_that_the_command_names_is_imported(trained: Path) -> None:
    (trained / "mine.py").write_text(MODULE.replace('"ran"', '"mine ran"'))
    described = json.loads((trained / "config.json").read_text())
    described["config"]["imports"] = ["mine"]
    for name in ("torch.py", "tyro.py", "safetensors.py"):
        (trained / name).unlink()
    (trained / "config.json").write_text(json.dumps(described))
    played = runs.drq("eval", ".", "--import", "mine", cwd=trained)
    assert played.returncode == 0, played.stderr
    assert (trained / "mine ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        'imports = ["stranger"]\ntasks = ["toy/reach"]\n[[settings]]\nlabel = "a"\n',
        'tasks = ["gym/stranger:Id-v0"]\n[[settings]]\nlabel = "a"\n',
        'tasks = ["toy/reach"]\n[[settings]]\nlabel = "a"\nagent.augmentation = "stranger:f"\n',
        'tasks = ["toy/reach"]\n[[settings]]\nlabel = "a"\n[common]\n"agent.augmentation" = "stranger:f"\n',
    ],
)
def test_a_suite_file_imports_only_what_the_command_names(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "suite.toml").write_text(text)
    (tmp_path / "stranger.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="add --import stranger"):
        read_suite(tmp_path / "suite.toml")
    assert not (tmp_path / "ran").exists()
