"""Where numbers go: the CSVs, TensorBoard and Weights & Biases say the same."""

from __future__ import annotations

import dataclasses
import json
import locale
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import drq
from drq.training.logs import CsvLog
from runs import rows, small

FAKE_WANDB = """
import json, pathlib

class Run:
    def __init__(self, **settings):
        if settings["project"] == "refused":
            raise RuntimeError("api_key not configured (no-tty)\\ncall wandb.login()")
        self.file = pathlib.Path(settings["dir"]) / "wandb.jsonl"
        kept = ("project", "entity", "group", "tags", "mode", "id", "resume")
        self.write({"init": {key: settings[key] for key in kept}})

    def write(self, row):
        with open(self.file, "a") as file:
            file.write(json.dumps(row) + "\\n")

    def log(self, row):
        self.write(row)

    def finish(self):
        self.write({"finished": True})

def init(**settings):
    return Run(**settings)
"""


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in with the three calls that are used: the real one needs an account."""
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield
    sys.modules.pop("wandb", None)  # later tests must not find it


@pytest.mark.usefixtures("fake_wandb")
def test_weights_and_biases_get_what_the_csvs_get(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    drq.train(small(folder, wandb=True), quiet=True)
    logged = [json.loads(line) for line in (folder / "wandb.jsonl").read_text().splitlines()]
    assert logged[0]["init"]["resume"] == "allow"
    assert logged[-1] == {"finished": True}
    evaluations = [row for row in logged if "eval/return_mean" in row]
    assert [row["env_step"] for row in evaluations] == [40, 80, 120]
    assert [row["eval/return_mean"] for row in evaluations] == [
        float(row["return_mean"]) for row in rows(folder / "eval.csv")
    ]


@pytest.mark.usefixtures("fake_wandb")
def test_weights_and_biases_are_told_where_the_run_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On resume it may be elsewhere. The key, which is in the environment, goes nowhere."""
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    folder = tmp_path / "run"
    drq.train(small(folder, wandb=True, steps=20), quiet=True)
    where = {"wandb_project": "pixels", "wandb_entity": "lab", "wandb_group": "k", "wandb_tags": ("a", "b")}
    drq.train(small(folder, wandb=True, steps=30, wandb_offline=True, **where), quiet=True)
    logged = [json.loads(line) for line in (folder / "wandb.jsonl").read_text().splitlines()]
    first, again = [row["init"] for row in logged if "init" in row]
    assert first | {"id": ""} == {
        **{"project": "drq", "entity": None, "group": None, "tags": [], "mode": None, "resume": "allow", "id": ""}
    }
    assert again == {
        **{"project": "pixels", "entity": "lab", "group": "k", "tags": ["a", "b"], "mode": "offline"},
        **{"resume": "allow", "id": first["id"]},
    }
    assert not [file for file in folder.rglob("*") if file.is_file() and b"secret-key" in file.read_bytes()]


@pytest.mark.usefixtures("fake_wandb")
def test_weights_and_biases_without_a_key_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(drq.UserError, match=r"did not begin \(api_key not configured \(no-tty\)\): `wandb login`"):
        drq.train(small(tmp_path / "run", wandb=True, wandb_project="refused"), quiet=True)


def test_tensorboard_gets_what_the_csvs_get(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    drq.train(small(tmp_path / "run"), quiet=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    points = events.Scalars("eval/return_mean")
    assert [point.step for point in points] == [40, 80, 120]
    expected = [float(row["return_mean"]) for row in rows(tmp_path / "run" / "eval.csv")]
    assert [point.value for point in points] == pytest.approx(expected, rel=1e-6)
    assert {"train/critic_loss", "train/alpha"} <= set(events.Tags()["scalars"])


def test_a_log_is_cut_back_to_where_a_checkpoint_found_it(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "log.csv", 0)
    log.write({"env_step": 1, "b": 2})
    size = log.size
    log.write({"env_step": 3, "b": 4})
    log.close()
    with open(tmp_path / "log.csv", "a") as file:
        file.write("5,")  # a row that a crash cut short
    again = CsvLog(tmp_path / "log.csv", size)
    again.write({"b": 6, "env_step": 5})
    again.close()
    assert (tmp_path / "log.csv").read_text().split() == ["env_step,b", "1,2", "5,6"]


def test_a_log_is_utf8_in_every_locale(tmp_path: Path) -> None:
    usual = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        log = CsvLog(tmp_path / "log.csv", 0)
        log.write({"env_step": 1, "info_tür": 2})
        log.write({"env_step": 2, "info_tür": 3, "info_öl": 4})  # another column: it is written anew
        log.write({"env_step": 3, "info_tür": 4})
        log.close()
    finally:
        locale.setlocale(locale.LC_CTYPE, usual)
    assert (tmp_path / "log.csv").read_text(encoding="utf-8").split()[0] == "env_step,info_tür,info_öl"


def test_without_ffmpeg_a_run_does_without_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: (_ for _ in ()).throw(RuntimeError("no ffmpeg")))
    config = small(tmp_path / "run", eval=dataclasses.replace(small(tmp_path).eval, video=True))
    drq.train(config)
    assert "No videos will be recorded. Videos need ffmpeg: pip install imageio-ffmpeg" in capfd.readouterr().err
    assert len(rows(tmp_path / "run" / "eval.csv")) == 3
    with pytest.raises(drq.UserError, match="Videos need ffmpeg"):
        drq.evaluate(tmp_path / "run", episodes=1, video=tmp_path / "play.mp4")
