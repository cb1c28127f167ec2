"""Fault drills: `make drills`. Breaks small runs in every way that docs/reliability.md lists, and counts what was lost.

    python scripts/drills.py [--quick] [--only NAME] [--seed N] [--count N] [--skip N] [--cost]

Runs are processes forked from this one, so that a hundred of them take minutes. Nothing may be lost: a run that went on
ends with the bits of one that was left alone, and anything else is refused in one sentence.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import drq  # noqa: E402
from drq import cli  # noqa: E402
from drq.engine import EngineSettings  # noqa: E402
from drq.envs import EnvSpec  # noqa: E402
from drq.errors import UserError  # noqa: E402
from drq.presets import preset  # noqa: E402
from drq.report.watch import Watched  # noqa: E402
from drq.training.checkpoint import Checkpoints  # noqa: E402
from drq.training.checkpoint_files import Description  # noqa: E402
from drq.training.checkpoint_reader import DAMAGE, check_description  # noqa: E402
from drq.training.components import make_learner  # noqa: E402
from drq.training.folder import RunFolder  # noqa: E402
from drq.training.loop import Loop  # noqa: E402
from drq.training.run import Trainer  # noqa: E402
from drq.training.state import RunState  # noqa: E402
from runs import FLAGS, assert_same_run, small, state  # noqa: E402

REFUSED = 2
"""Exit code of a run that was refused in a sentence."""


@dataclass
class Outcome:
    """What came of a drill."""

    tried: int = 0
    refused: int = 0
    """Of those, how often a sentence was the answer."""
    lost: list[str] = field(default_factory=list)
    """Results that differ, tracebacks, what was let in."""


def forked(work: Callable[[], object]) -> int:
    """Begins work in a process of its own; its exit code is 0, or 2 for a sentence, or 1 for a traceback."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        torch.set_num_threads(1)
        work()
        code = 0
    except UserError as error:
        code = REFUSED if "\n" not in str(error) else 1
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(folder: Path) -> int:
    return ended(forked(lambda: drq.train(small(folder), quiet=True)))


def same_as(whole: Path, folder: Path, outcome: Outcome, what: str) -> None:
    try:
        assert_same_run(whole, folder)
    except (AssertionError, OSError) as error:
        outcome.lost.append(f"{what}: {error}")


def kills_at_random(whole: Path, work: Path, count: int, chance: random.Random) -> Outcome:
    """SIGKILL at random moments of a run, again and again."""
    outcome = Outcome()
    folder = work / "killed"
    while outcome.tried < count:
        child = forked(lambda: drq.train(small(folder), quiet=True))
        time.sleep(chance.uniform(0.0, 2.0))
        os.kill(child, signal.SIGKILL)
        if ended(child) == 0:  # it was over before
            same_as(whole, folder, outcome, f"after {outcome.tried} kills")
            shutil.rmtree(folder)
            continue
        outcome.tried += 1
    if train(folder) != 0:
        outcome.lost.append("the run does not go on")
    else:
        same_as(whole, folder, outcome, "after the last kill")
    return outcome


def kills_at_writes(whole: Path, work: Path, count: int, chance: random.Random, skip: int = 0) -> Outcome:
    """SIGKILL at the first, second, ... time that a file is synced to the disk, moved to its place or removed."""
    outcome = Outcome()
    for number in range(skip + 1, skip + count + 1):
        folder = work / f"write-{number}"

        def killed(number: int = number, folder: Path = folder) -> None:
            calls = [0]

            def deadly(original: Callable[..., Any]) -> Callable[..., Any]:
                def call(*args: Any, **kwargs: Any) -> Any:
                    calls[0] += 1
                    if calls[0] == number:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return original(*args, **kwargs)

                return call

            os.replace, os.fsync, os.unlink = deadly(os.replace), deadly(os.fsync), deadly(os.unlink)
            drq.train(small(folder), quiet=True)

        if ended(forked(killed)) == 0:
            break  # there are no more writes
        outcome.tried += 1
        if train(folder) != 0:
            outcome.lost.append(f"write {number}: the run does not go on")
        else:
            same_as(whole, folder, outcome, f"write {number}")
        shutil.rmtree(folder)
    return outcome


def races(whole: Path, work: Path, count: int, chance: random.Random) -> Outcome:
    """Two processes begin one run, or go on with it, at once: one of them does, the other is refused."""
    outcome = Outcome()
    for number in range(count):
        folder = work / f"race-{number}"
        if number % 2:  # there is something to go on with
            child = forked(lambda folder=folder: drq.train(small(folder), quiet=True))  # type: ignore[misc]
            time.sleep(chance.uniform(0.5, 1.5))
            os.kill(child, signal.SIGKILL)
            ended(child)
        first = forked(lambda folder=folder: drq.train(small(folder), quiet=True))  # type: ignore[misc]
        time.sleep(chance.choice([0.0, 0.0, chance.uniform(0.0, 0.5)]))
        second = forked(lambda folder=folder: drq.train(small(folder), quiet=True))  # type: ignore[misc]
        codes = sorted([ended(first), ended(second)])
        outcome.tried += 1
        outcome.refused += REFUSED in codes
        if codes not in ([0, REFUSED], [0, 0]):  # both: one came when the other was through
            outcome.lost.append(f"race {number}: exit codes {codes}")
        same_as(whole, folder, outcome, f"race {number}")
        shutil.rmtree(folder)
    return outcome


CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
"""Of Linux's sched.h: what this process mounts then, nobody else sees."""


def full_disks(whole: Path, work: Path, count: int, chance: random.Random) -> Outcome:
    """A run on a small disk of its own, real but for lying in memory: full at some moment, and then larger."""
    said = work / "full.json"

    def fill() -> None:
        outcome = Outcome()
        user, group = os.getuid(), os.getgid()
        if ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNS):
            raise UserError("This machine lets nobody mount a disk of their own.")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        disk = work / "disk"
        disk.mkdir()
        needed = sum(file.stat().st_size for file in whole.rglob("*") if file.is_file()) // 1024
        for number in range(count):
            size = chance.randrange(8, needed)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)], check=True)
            outcome.tried += 1
            code = train(disk / "run")
            outcome.refused += code == REFUSED
            if code not in (0, REFUSED):
                outcome.lost.append(f"disk {number} of {size} kB: a traceback")
            subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True)
            if train(disk / "run") != 0:
                outcome.lost.append(f"disk {number} of {size} kB: the run does not go on")
            else:
                same_as(whole, disk / "run", outcome, f"disk {number} of {size} kB")
            subprocess.run(["umount", str(disk)], check=True)
        said.write_text(json.dumps(asdict(outcome)))

    code = ended(forked(fill))
    if code == REFUSED:
        return Outcome()
    return Outcome(**json.loads(said.read_text())) if said.exists() else Outcome(0, 0, [f"the drill ended with {code}"])


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

    def stopped() -> None:
        original = Loop._save_if_due

        def save_if_due(self: Loop) -> None:
            self.stop.requested = self.state.agent_step == 68
            original(self)

        with suppress(KeyboardInterrupt), mock.patch.object(Loop, "_save_if_due", save_if_due):
            drq.train(small(halfway), quiet=True)

    ended(forked(stopped))
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


COMMANDS = [
    ["train", "toy/reach", *FLAGS, "--seed", "3", "--agent.k", "2", "--agent.augmentation", "shift+cutout"],
    ["train", "toy/catch", "--preset", "cpu", "--agent.n-step", "3", "--agent.learning-rate", "1e-3", "--steps", "90"],
    ["train", "--config", "mutated/config.json", "--dir", "other", "--agent.discount", "0.9", "--eval.every", "10"],
    ["eval", "mutated", "--episodes", "1", "--seed", "4"],
    ["report", "mutated", "whole", "--out", "page.md", "--format", "md"],
    ["export", "mutated", "--out", "policy.drq"],
    ["suite", "run", "whole.toml", "--seeds", "2", "--steps", "100", "--jobs", "1", "--dry-run", "--dir", "suite"],
    ["suite", "status", "whole"],
    ["tasks", "toy"],
    ["completion", "bash"],
]
ODD = ["", "-1", "0", "nan", "1e999", "9" * 30, "--", "-h", "[]", "{}", "pipe", "..", "toy/", "a\0b"]
"""What people and programs put where something else was meant."""
SUITE = {"tasks": ["toy/reach"], "seeds": 2, "steps": 100, "settings": [{"label": "a", "agent.k": 1}], "preset": "cpu"}


class Enough(BaseException):
    """A command that has begun to do what it was told."""


def mutated_inputs(whole: Path, work: Path, count: int, chance: random.Random) -> Outcome:
    """Command lines, suites, JSONs and CSVs with parts exchanged by anything: no traceback."""
    import hypothesis
    from hypothesis import strategies as some

    from drq.launch import launcher
    from drq.suites.file import read_suite
    from drq.training import run as training

    outcome = Outcome()
    plain = some.recursive(
        some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
        lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(), inner, max_size=3),
        max_leaves=5,
    )
    folder = work / "mutated"
    shutil.copytree(whole, folder)
    jsons = {name: json.loads((folder / name).read_text()) for name in ("config.json", "finished.json")}
    latest = json.loads((folder / "checkpoint" / "latest.json").read_text())
    csv = (folder / "eval.csv").read_bytes()

    def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [prefix, *(path for key, each in inner for path in paths(each, (*prefix, key)))]

    def exchanged(value: Any, path: tuple[Any, ...], new: Any) -> Any:
        if not path:
            return new
        copy = value.copy()
        copy[path[0]] = exchanged(value[path[0]], path[1:], new)
        return copy

    def read_folder(name: str, value: Any) -> None:
        (folder / name).write_text(json.dumps(value))
        run = RunFolder(folder)
        for read in (lambda: run.config, lambda: run.spec, lambda: run.finished, run.evaluations):
            tolerate(read)
        (folder / name).write_text(json.dumps(jsons[name]))

    def tolerate(read: Callable[[], object]) -> None:
        try:
            read()
        except UserError as error:
            outcome.refused += 1
            if "\n" in str(error):
                outcome.lost.append(f"more than a sentence: {error}")
        except SystemExit:
            outcome.refused += 1

    def read_latest(value: Any) -> None:
        try:
            check_description(Description.from_text(json.dumps(value)))
        except DAMAGE:
            outcome.refused += 1

    def read_csv(content: bytes) -> None:
        (folder / "eval.csv").write_bytes(content)
        tolerate(RunFolder(folder).evaluations)

    def read_toml(value: Any, noise: str) -> None:
        lines = [f"{key} = {json.dumps(part)}" for key, part in value.items()] if isinstance(value, dict) else []
        (work / "suite.toml").write_text("\n".join(lines).replace('{"label": ', "{label=").replace('": ', '"=') + noise)
        tolerate(lambda: read_suite(work / "suite.toml"))

    def command(change: tuple[list[str], int, str, str]) -> None:
        words, at, how, odd = change
        at %= len(words)
        words = {
            "exchange": [*words[:at], odd, *words[at + 1 :]],
            "insert": [*words[:at], odd, *words[at:]],
            "leave out": [*words[:at], *words[at + 1 :]],
            "twice": [*words[: at + 1], *words[at:]],
        }[how]
        with (  # all but the training
            mock.patch.object(training, "train", lambda config: Trainer(config, quiet=True)),
            mock.patch.object(launcher.Launch, "run", return_value=0),
            suppress(Enough),
        ):
            signal.setitimer(signal.ITIMER_REAL, 2.0)  # ten million episodes are no mistake, and no drill either
            try:
                tolerate(lambda: cli.main(words))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)

    def enough(number: int, frame: object) -> None:
        raise Enough

    answered = signal.signal(signal.SIGALRM, enough)
    os.mkfifo(work / "pipe")
    (work / "whole.toml").write_text('tasks = ["toy/reach"]\npreset = "cpu"\n[[settings]]\nlabel = "a"\n')
    hows = some.sampled_from(["exchange", "exchange", "exchange", "insert", "leave out", "twice"])
    odd = some.sampled_from(ODD) | some.text(max_size=8)
    commands = some.tuples(some.sampled_from(COMMANDS), some.integers(0, 99), hows, odd)
    drills: dict[str, Any] = {
        "config": (
            some.sampled_from(paths(jsons["config.json"])),
            lambda at, new: read_folder("config.json", exchanged(jsons["config.json"], at, new)),
        ),
        "finished": (
            some.sampled_from(paths(jsons["finished.json"])),
            lambda at, new: read_folder("finished.json", exchanged(jsons["finished.json"], at, new)),
        ),
        "latest": (some.sampled_from(paths(latest)), lambda at, new: read_latest(exchanged(latest, at, new))),
        "suite": (some.sampled_from(paths(SUITE)), lambda at, new: read_toml(exchanged(SUITE, at, new), "")),
        "csv": (some.binary(max_size=60), lambda noise, new: read_csv(csv[: len(noise) * 3] + noise)),
        "command": (commands, lambda each, new: command(each)),
    }
    def mutation(strategy: Any, drill: Callable[[Any, Any], None]) -> Callable[[], None]:
        @hypothesis.settings(
            max_examples=count // len(drills) + 1,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.seed(chance.randrange(2**32))
        @hypothesis.given(strategy, plain)
        def mutate(at: Any, new: Any) -> None:
            outcome.tried += 1
            said = sys.stdout, sys.stderr
            with open(os.devnull, "w") as nowhere:
                sys.stdout = sys.stderr = nowhere
                try:
                    drill(at, new)
                finally:
                    sys.stdout, sys.stderr = said

        return mutate  # type: ignore[no-any-return]

    before = os.getcwd()
    os.chdir(work)
    try:
        for name, (strategy, drill) in drills.items():
            try:
                mutation(strategy, drill)()
            except Exception as error:
                outcome.lost.append(f"{name}: {type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
    finally:
        os.chdir(before)
        signal.signal(signal.SIGALRM, answered)
    return outcome


def by_tests(*arguments: str) -> Callable[..., Outcome]:
    """Drills that are tests as well."""

    def run(whole: Path, work: Path, count: int, chance: random.Random) -> Outcome:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
        dots = "".join(re.findall(r"^[.FEsx]+", done.stdout, re.MULTILINE))
        failed = re.findall(r"^FAILED (.*)", done.stdout, re.MULTILINE)
        return Outcome(dots.count(".") + dots.count("F") + dots.count("E"), 0, failed)

    return run


DRILLS: dict[str, tuple[str, Callable[..., Outcome], int]] = {
    "kills": ("SIGKILL at random moments", kills_at_random, 50),
    "writes": ("SIGKILL at every write", kills_at_writes, 200),
    "damage": ("damaged files", damaged_files, 200),
    "mutations": ("mutated command lines, suites, CSVs, JSONs", mutated_inputs, 1200),
    "environments": ("misbehaving environments, NaN weights", by_tests("test_misbehaving.py"), 0),
    "strangers": ("hostile folders", hostile_folders, 100),
    "modules": ("suites and exported files that ask for modules", by_tests("test_strangers.py", "test_export.py"), 0),
    "races": ("two processes on one folder", races, 20),
    "locks": ("locks that others left, or that no file system has", by_tests("test_lock.py"), 0),
    "disks": ("full disks", full_disks, 20),
    "faults": ("damaged logs, absurd sizes, GPU faults", by_tests("test_faults.py", "test_gpu_faults.py"), 0),
}


def checkpoint_cost(work: Path) -> None:
    """What 1,000 new transitions cost a checkpoint, by how many the replay holds: 84x84x3, the paper's networks."""
    spec = EnvSpec("toy/reach", (3, 84, 84), 3, "continuous", 2, 1, 1000)
    config = preset("planet", "toy/reach")
    engine = EngineSettings.resolve(config.engine, torch.device("cpu"), config.agent, 0)
    learner = make_learner(config, spec, engine, 100_000)
    frames = np.random.default_rng(0).integers(0, 256, (64, 3, 84, 84), dtype=np.uint8)
    checkpoints = Checkpoints(work / "cost")
    learner.replay.begin(frames[0])
    print("| transitions | new | snapshot, training waits | written beside training |\n|---|---|---|---|")
    for number in range(1, 100_001):
        learner.replay.add(np.zeros(2, np.float32), 0.0, 1.0, number % 1000 == 0, frames[number % 64])
        if number % 1000 == 0:
            learner.replay.begin(frames[0])
        if number in (1000, 9000, 10_000, 99_000, 100_000):
            began = time.perf_counter()
            checkpoints.save(learner, RunState(agent_step=number, episode=number // 1000))
            taken = time.perf_counter() - began
            checkpoints.wait()
            written = time.perf_counter() - began
            described = Description.from_text((work / "cost" / "latest.json").read_text())
            new = [work / "cost" / name for name in (described.state, described.segments[-1].file)]
            if number in (1000, 10_000, 100_000):
                size = sum(file.stat().st_size for file in new) / 1e6
                print(f"| {number:,} | {size:.0f} MB | {taken:.2f} s | {written:.2f} s |", flush=True)
    checkpoints.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of each")
    parser.add_argument("--only", choices=DRILLS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="so many of each, instead of all")
    parser.add_argument("--skip", type=int, default=0, help="of the writes: begin after so many")
    parser.add_argument("--cost", action="store_true", help="measure what checkpoints cost instead")
    options = parser.parse_args()
    lost = 0
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        if options.cost:
            checkpoint_cost(work)
            return 0
        whole = work / "whole"
        train(whole)
        print(f"| {'drill':51} | tried | refused | lost | seconds |\n|---|---|---|---|---|", flush=True)
        for name in options.only or DRILLS:
            title, drill, count = DRILLS[name]
            began = time.monotonic()
            count = options.count or (max(count // 10, 1) if options.quick else count)
            more = {"skip": options.skip} if name == "writes" else {}
            outcome = drill(whole, work, count, random.Random(options.seed), **more)
            took = time.monotonic() - began
            print(f"| {title:51} | {outcome.tried:5} | {outcome.refused:7} | {len(outcome.lost):4} | {took:7.0f} |")
            for line in outcome.lost:
                print(f"    lost: {line}")
            sys.stdout.flush()
            lost += len(outcome.lost)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
