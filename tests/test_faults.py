"""Full disks, damaged logs, absurd sizes, changed settings: a sentence or a repair, and nothing lost."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tensorboard.summary.writer.record_writer import RecordWriter

import drq
from drq.errors import UserError
from drq.launch import suite_status
from drq.report import write
from drq.report.results import read_results
from drq.training import checkpoint as checkpoint_module
from drq.training import evaluation_service, logs, policy
from drq.training.evaluate import Evaluation
from drq.training.video import save_video
from runs import StopAt, assert_same_run, fails, rows, small


@pytest.fixture
def halfway(tmp_path: Path) -> Path:
    """The same run as `whole`, stopped at agent step 68."""
    drq.train(small(tmp_path / "run"), callbacks=[StopAt(68)], quiet=True)
    return tmp_path / "run"


FULL = OSError(28, "No space left on device")


class FullFile:
    """A file on a full disk."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def write(self, *args: Any) -> None:
        raise FULL

    flush = close = write


def full_csv(patch: pytest.MonkeyPatch) -> None:
    original = logs.CsvLog.write

    def write(self: logs.CsvLog, row: dict[str, Any]) -> None:
        if row["agent_step"] >= 60:
            self._file = FullFile()  # type: ignore[assignment]
        original(self, row)

    patch.setattr(logs.CsvLog, "write", write)


def full_checkpoint(patch: pytest.MonkeyPatch) -> None:
    original = checkpoint_module.save_file

    def save_file(tensors: Any, path: Path, metadata: Any) -> None:
        if "0000000005" in path.name:
            raise checkpoint_module.SafetensorError("Error while serializing: I/O error: No space left on device")
        original(tensors, path, metadata)

    patch.setattr(checkpoint_module, "save_file", save_file)


@pytest.mark.parametrize("fill", [full_csv, full_checkpoint])
def test_a_full_disk_ends_a_run_in_order(
    fill: Callable[[pytest.MonkeyPatch], None], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fill(patch)
        with pytest.raises(UserError, match=r"No space left on device.*free some disk space.*checkpoint is intact"):
            drq.train(small(tmp_path / "run"), quiet=True)
    drq.train(small(tmp_path / "run"), quiet=True)
    assert_same_run(whole, tmp_path / "run")


def test_a_disk_too_full_for_pictures_does_not_end_a_run(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def save_video(*args: Any) -> None:
        raise FULL

    def for_one() -> Iterator[None]:
        yield
        raise FULL

    room = for_one()
    monkeypatch.setattr(evaluation_service, "save_video", save_video)
    monkeypatch.setattr(RecordWriter, "write", lambda *args: next(room))
    drq.train(small(tmp_path / "run", eval=dataclasses.replace(small(tmp_path).eval, video=True)))
    said = capfd.readouterr().err
    assert "TensorBoard's files are not written any more" in said
    assert "Traceback" not in said
    assert "could not be written (No space left on device)" in said
    assert rows(whole / "eval.csv") == rows(tmp_path / "run" / "eval.csv")


def test_a_folder_that_was_moved_away_does_not_come_back_with_its_videos(whole: Path, tmp_path: Path) -> None:
    class Mover(drq.Callback):
        def on_step(self, run: drq.RunView) -> None:
            if run.agent_step == 39:  # an evaluation and its video are next
                run.dir.rename(tmp_path / "moved")

    evaluation = dataclasses.replace(small(tmp_path).eval, video=True)
    with pytest.raises((FileNotFoundError, UserError)):  # the latter where a checkpoint was being written
        drq.train(small(tmp_path / "run", eval=evaluation), callbacks=[Mover()], quiet=True)
    assert [folder.name for folder in tmp_path.iterdir()] == ["moved"]
    drq.train(small(tmp_path / "moved"), quiet=True)
    assert_same_run(whole, tmp_path / "moved")


def test_a_report_of_before_stays_where_there_is_no_room_for_another(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_page(runs: Any, warnings: Any, missing: Any, out: Path) -> None:
        out.write_text("half")
        raise FULL

    (tmp_path / "report.html").write_text("of before")
    monkeypatch.setattr(write, "write_page", write_page)
    with pytest.raises(UserError, match=r"report.html could not be written \(No space left on device\): see that"):
        write.report([whole], tmp_path / "report.html")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("report.html", "of before")]


def test_what_was_played_is_said_where_its_video_has_no_room(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_video(*args: Any) -> None:
        raise OSError("[Errno 32] Broken pipe\n\nFFMPEG COMMAND:\nffmpeg -y -f rawvideo")

    monkeypatch.setattr(policy, "save_video", save_video)
    monkeypatch.setattr(Evaluation, "mean", 0.954)  # of small returns two places are said
    with pytest.raises(UserError) as raised:
        drq.evaluate(whole, episodes=1, video=tmp_path / "play.mp4")
    assert "\n" not in str(raised.value)
    assert "play.mp4 could not be written ([Errno 32] Broken pipe): see that" in str(raised.value)
    assert "The return was 0.95 ± 0.00." in str(raised.value)


def test_a_video_appears_whole_or_not_at_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (10, 239, 241, 3), dtype=np.uint8)
    with pytest.raises(OSError, match=r"^No such file or directory$"):
        save_video(Path("/proc/play.mp4"), list(noise))
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))  # so few pictures that the encoder has them all by then
    try:
        with pytest.raises(OSError, match="ffmpeg ended with"):
            save_video(tmp_path / "play.mp4", list(noise))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(OSError, match="its pictures are not all of one size"):
        save_video(tmp_path / "play.mp4", [*noise, noise[0, :-1]])
    assert list(tmp_path.iterdir()) == []
    for video in (tmp_path / "play.mp4", tmp_path / "play.avi", tmp_path / "a:b.mp4"):  # a: is no protocol
        save_video(video, list(noise))
        assert np.shape(imageio.mimread(video)) == (10, 240, 242, 3)
        with imageio.get_reader(video) as reader:
            assert reader.get_meta_data()["codec"] == "h264"
    assert capfd.readouterr().err == ""


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str | None]] = {
    "half a row": ("train.csv", cut, None),
    "no rows": ("train.csv", lambda file: file.write_text(""), None),
    "no file": ("eval.csv", Path.unlink, None),
    "half an evaluation": ("eval.csv", cut, None),
    "no table": ("eval.csv", lambda file: file.write_bytes(b"\x00\xff\n" * 400), "names of its columns"),
    "finished too soon": ("finished.json", lambda file: file.write_text('{"steps": 10000000, "seconds": 1}'), None),
    "finished with nonsense": ("finished.json", lambda file: file.write_text('{"steps": [], "seconds": "x"}'), None),
    "finished with nothing": ("finished.json", lambda file: file.write_text(""), None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_logs_are_repaired_or_named(
    damage: str, halfway: Path, whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, do, refused = DAMAGE[damage]
    do(halfway / name)
    if refused:
        with pytest.raises(UserError, match=refused):
            drq.train(small(halfway), quiet=True)
        return
    drq.train(small(halfway))
    if name.endswith(".csv"):
        assert f"{name} is " in (said := capfd.readouterr().err)
        assert "rows are lost" in said
    expected = [tuple(row.items()) for row in rows(whole / "eval.csv")]
    found = [tuple(row.items()) for row in rows(halfway / "eval.csv")]
    assert set(found) <= set(expected)
    assert found[-1] == expected[-1]
    assert json.loads((halfway / "finished.json").read_text())["steps"] == 120


def test_a_lost_last_evaluation_is_played_again(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "eval.csv").write_bytes(b"")
    assert drq.train(small(run), quiet=True).final_return == float(rows(whole / "eval.csv")[-1]["return_mean"])
    assert rows(run / "eval.csv") == rows(whole / "eval.csv")[-1:]


ABSURD = {
    "agent.hidden_dim": 10**9,
    "env.image_size": 10**6,
    "agent.k": 10**20,
    "replay.capacity": 10**15,
    "steps": 10**20,
    "seed": -1,
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_sizes_are_refused_also_from_a_folder(name: str, whole: Path, tmp_path: Path) -> None:
    group, _, field = name.rpartition(".")
    config = small(tmp_path / "run")
    part = dataclasses.replace(getattr(config, group) if group else config, **{field: ABSURD[name]})
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} is {ABSURD[name]}: set it to"):
        drq.train(dataclasses.replace(config, **{group: part}) if group else part, quiet=True)
    stranger = tmp_path / "stranger"
    shutil.copytree(whole, stranger)
    described = json.loads((stranger / "config.json").read_text())
    (described["config"][group] if group else described["config"])[field] = ABSURD[name]
    (stranger / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} is {ABSURD[name]}"):
        drq.load(stranger)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["eval", "RUN", "--seed", "-1"], "--seed is -1: set it to 0 or more"),
        (["eval", "RUN", "--video", "x.txt"], "x.txt does not end in .mp4"),
        (["eval", "/dev/null"], "/dev/null/config.json"),
        (["report", "RUN", "--format", "csv", "--out", "/dev/full"], "No space left on device"),
        (["suite", "run", "planet", "--seeds", "99999999999"], "--seeds is 99999999999: say how many, 1 to 10,000"),
    ],
)
def test_what_a_command_cannot_do_is_one_sentence(
    args: list[str],
    said: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in fails(capsys, *[str(whole) if arg == "RUN" else arg for arg in args])


WRONG: dict[str, Any] = {
    "label": [],
    "versions": 5,
    "config": [],
    "config.env": 5,
    "config.agent.discount": 10**400,
    "config.agent.augmentation": "\ud800",
    "spec.frame_shape": [3, 10**7, 1],
    "spec.action_kind": [],
    "spec.action_low": [0.0, float("nan")],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_another_type_is_named_by_all_who_read_it(name: str, whole: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    shutil.copytree(whole, stranger)
    described = json.loads((stranger / "config.json").read_text())
    part, (*outer, last) = described, name.split(".")
    for each in outer:
        part = part[each]
    part[last] = WRONG[name]
    (stranger / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"config\.json .*: restore it"):
        drq.load(stranger)
    read, warnings = read_results([stranger])  # a shape does not matter to a report
    assert len(read) == name.startswith("spec.")
    assert any("config.json is damaged" in warning for warning in warnings) != name.startswith("spec.")
    file = tmp_path / "policy.drq"
    save_file({"a": torch.zeros(1)}, file, {"drq": json.dumps({**described, "agent_step": 1})})
    if name not in ("label", "versions"):
        with pytest.raises(UserError, match=r"policy\.drq"):
            drq.load(file)


def test_a_task_of_another_shape_than_the_policys(whole: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    shutil.copytree(whole, stranger)
    described = json.loads((stranger / "config.json").read_text())
    described["config"]["env"]["image_size"] = 32
    (stranger / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"was trained with .*\(9, 24, 24\).* toy/reach has .*\(9, 32, 32\)"):
        drq.evaluate(stranger, episodes=1)


def test_no_device_or_pipe_is_exchanged_for_a_policy(whole: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is no plain file"):
        drq.export(whole, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        '{"format": 1}',
        '{"format": 1, "name": 3, "shows": "", "preset": "cpu", "settings": {}, "runs": []}',
        '{"format": 1, "name": "a", "shows": "", "preset": "cpu", "settings": [], "runs": []}',
        '{"format": 1, "name": "a", "shows": "", "preset": "cpu", "settings": {}, "runs": [{"task": "toy/reach", '
        '"label": "a", "seed": "../..", "steps": 5}]}',
        '{"format": 1, "name": "a", "shows": "", "preset": "cpu", "settings": {}, "runs": [7]}',
    ],
)
def test_a_damaged_suite_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "suite.json").write_text(text)
    with pytest.raises(UserError, match=r"suite.json is damaged .* restore it"):
        suite_status(tmp_path)
