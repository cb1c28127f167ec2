"""Run folders that somebody, or something, has changed: strangers and broken disks."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import drq
from drills import REFUSED, Outcome, ended, forked, train
from drq import cli
from drq.errors import UserError
from drq.report.watch import Watched
from drq.training.checkpoint_files import Description
from runs import StopAt, small, state

MODULE = 'from pathlib import Path\nPath(__file__).with_name("ran").touch()\n'
ASKING: dict[str, tuple[str, Any]] = {
    "imports": ("imports", ["stranger"]),
    "a task's module": ("task", "gym/stranger:Id-v0"),
    "an augmentation": ("agent.augmentation", "stranger:f"),
    "a wrapper": ("env.wrap", ["stranger:W"]),
    "an absurd image": ("env.image_size", 10**6),
    "a network of no end": ("agent.hidden_dim", 10**12),
    "a folder elsewhere": ("dir", "/"),
}
FILES = (
    *("config.json", "eval.csv", "train.csv", "finished.json", "error.txt", ".lock", "suite.json"),
    *("checkpoint/latest.json", "checkpoint/state"),
)
LINKS = ("checkpoint", "videos", "tensorboard", "config.json", "eval.csv", "error.txt", ".lock", "finished.json")
HALVES = (".config.json.unfinished", "checkpoint/.latest.json.unfinished", "checkpoint/.previous.json.unfinished")


def hostilities(canary: Path) -> dict[str, Callable[[Path], object]]:
    """What a stranger may have done to a run folder, by name. The canary is a folder of the user's."""

    def put(file: Path, make: Callable[[Path], object]) -> None:
        file = max(file.parent.glob("state-*")) if file.name == "state" else suite_file(file)
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        file.unlink(missing_ok=True)
        make(file)

    def ask(folder: Path, name: str, value: Any) -> None:
        described = json.loads((folder / "config.json").read_text())
        *outer, last = name.split(".")
        inner = described["config"]
        for part in outer:
            inner = inner[part]
        inner[last] = value
        (folder / "config.json").write_text(json.dumps(described))

    def tensors(folder: Path, content: bytes) -> None:
        described = Description.from_text((folder / "checkpoint" / "latest.json").read_text())
        (folder / "checkpoint" / described.state).write_bytes(content)
        described = replace(described, state_sha256=hashlib.sha256(content).hexdigest())
        (folder / "checkpoint" / "latest.json").write_text(described.to_text())

    def elsewhere(folder: Path) -> None:
        described = Description.from_text((folder / "checkpoint" / "latest.json").read_text())
        lies = replace(described, state="../../canary/model.safetensors")
        (folder / "checkpoint" / "latest.json").write_text(lies.to_text())

    def label(folder: Path) -> None:
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**described, "label": SCRIPT}))

    def of(name: str) -> Path:
        return canary / ("model.safetensors" if "." in name else "")

    done: dict[str, Callable[[Path], object]] = {
        **{f"a pipe for {name}": lambda folder, name=name: put(folder / name, os.mkfifo) for name in FILES},
        **{f"a folder for {name}": lambda folder, name=name: put(folder / name, Path.mkdir) for name in FILES},
        **{
            f"a link for {name}": lambda folder, name=name: put(folder / name, lambda file: file.symlink_to(of(name)))
            for name in (*LINKS, *HALVES)
        },
        **{
            f"no end of brackets in {name}": lambda folder, name=name: suite_file(folder / name).write_text("[" * 10**6)
            for name in ("config.json", "finished.json", ".lock", "suite.json", "checkpoint/latest.json")
        },
        **{
            f"noise in {name}": lambda folder, name=name: put(folder / name, lambda file: file.write_bytes(NOISE))
            for name in FILES
        },
        **{f"asks for {what}": lambda folder, at=at: ask(folder, *at) for what, at in ASKING.items()},
        "a file for checkpoint": lambda folder: put(folder / "checkpoint", Path.touch),
        "tensors of 2**63 bytes": lambda folder: tensors(folder, b"\xff" * 7 + b"\x7f"),
        "tensors that are no tensors": lambda folder: tensors(folder, b"\x02" + b"\0" * 7 + b"{}"),
        "tensors of others": elsewhere,
        "a label that is a script": label,
        "a suite of modules": lambda folder: suite_file(folder / "suite.json").write_text(suite("gym/stranger:Id-v0")),
    }
    return done


def suite(task: str, label: str = "../../canary") -> str:
    """suite.json of a suite with one run."""
    run = {"task": task, "label": label, "seed": 1, "steps": 120}
    settings = {label: {"agent.augmentation": "stranger:f"}}
    return json.dumps(
        {"format": 1, "name": label, "shows": "", "preset": "planet", "settings": settings, "runs": [run]}
    )


def suite_file(file: Path) -> Path:
    """suite.json lies above the folders of task, setting and seed; everything else in the run's own."""
    return file.parents[3] / file.name if file.name == "suite.json" else file


SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J"


NOISE = bytes(range(255, -1, -1))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def hostile_folders(whole: Path, work: Path, count: int, chance: random.Random) -> Outcome:
    """A stranger's folder is read, reported, played, gone on with: no code of its runs, no file elsewhere changes."""
    outcome, canary = Outcome(), work / "canary"
    canary.mkdir()
    shutil.copy(next((whole / "checkpoint").glob("state-*")), canary / "model.safetensors")
    before = contents(canary)
    done = list(hostilities(canary).items())
    for what, make in done if count >= len(done) else chance.sample(done, count):
        above = work / "stranger"
        folder = above / "toy-reach" / "a" / "seed-1"
        shutil.copytree(whole, folder)
        (above / "suite.json").write_text(suite("toy/reach", "a"))
        (folder / "stranger.py").write_text(MODULE)
        make(folder)
        page, refused = work / "page.html", work / "refused"

        def use(above: Path = above, folder: Path = folder, page: Path = page, refused: Path = refused) -> None:
            os.chdir(folder)
            signal.alarm(90)
            for work in (
                lambda: drq.load(folder),
                lambda: drq.evaluate(folder, episodes=1),
                lambda: cli.main(["eval", ".", "--episodes", "1"]),
                lambda: cli.main(["report", str(above), "--out", str(page)]),
                lambda: cli.main(["suite", "status", str(above)]),
                lambda: Watched(above).report(),
                lambda: drq.train(small(folder, steps=140), quiet=True),
                lambda: cli.main(["suite", "prune", str(above), "--yes"]),
            ):
                try:
                    work()
                except UserError as error:
                    refused.touch()
                    if "\n" in str(error):
                        raise
                except SystemExit as ended:
                    if ended.code not in (0, REFUSED):
                        raise

        code = ended(forked(use))
        outcome.tried += 1
        outcome.refused += refused.exists()
        if code:
            outcome.lost.append(f"{what}: {'it hangs' if code == -signal.SIGALRM else f'exit code {code}'}")
        if (folder / "ran").exists():
            outcome.lost.append(f"{what}: code was run")
        if contents(canary) != before:
            outcome.lost.append(f"{what}: files elsewhere were changed")
        if page.exists() and SCRIPT[:20] in page.read_text():
            outcome.lost.append(f"{what}: a script is in the report")
        page.unlink(missing_ok=True)
        refused.unlink(missing_ok=True)
        shutil.rmtree(above)
    return outcome


def damage(file: Path, chance: random.Random) -> str:
    content = bytearray(file.read_bytes())
    how = chance.choice(["flip", "flip", "flip", "cut", "empty", "noise", "gone"])
    if how == "flip" and content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del content[chance.randrange(len(content) + 1) :]
    elif how == "empty":
        content.clear()
    elif how == "noise":
        content = bytearray(chance.randbytes(len(content)))
    file.unlink()
    if how != "gone":
        file.write_bytes(content)
    return f"{how} {file.name}"


def damaged_files(whole: Path, work: Path, count: int, chance: random.Random) -> Outcome:
    """A file of a run that was stopped half-way is flipped, cut, emptied, exchanged or deleted; then it goes on."""
    outcome = Outcome()
    halfway = work / "halfway"
    ended(forked(lambda: drq.train(small(halfway), callbacks=[StopAt(68)], quiet=True)))
    names = [file.relative_to(halfway) for file in sorted(halfway.rglob("*")) if file.is_file()]
    names = [name for name in names if name.parts[0] != "tensorboard" and name.name != ".lock"]
    for number in range(count):
        folder = work / f"damaged-{number}"
        shutil.copytree(halfway, folder)
        what = damage(folder / names[number % len(names)], chance)
        code = train(folder)
        outcome.tried += 1
        outcome.refused += code == REFUSED
        if code not in (0, REFUSED):
            outcome.lost.append(f"{what}: a traceback")
        elif code == 0:
            one, other = state(whole), state(folder)
            if one.keys() != other.keys() or not all(one[name].equal(other[name]) for name in one):
                outcome.lost.append(f"{what}: another result")
        shutil.rmtree(folder)
    return outcome
