"""The run folder: its one reader and writer, and when a command may go on with it (docs/run-folder.md)."""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from drq.config import AgentConfig, TrainConfig, check
from drq.envs import FAMILIES, EnvSpec, family_of
from drq.envs.protocol import spec_from_json
from drq.errors import UserError, reason
from drq.presets import resolved
from drq.settings import GROUPS, config_from_json, config_to_json, flat, parse_json

FORMAT = 1
"""Version of the folder's layout."""

NOT_PART_OF_A_RUN = (
    *("wandb", "wandb_project", "wandb_entity", "wandb_group", "wandb_tags", "wandb_offline"),
    *("dir", "device", "steps", "checkpoint_every", "log_every", "engine.eval_process"),
    *("eval.every", "eval.episodes", "eval.min_agent_steps", "eval.video", "env.own_process"),
)
"""Settings that may change when a run goes on: where it is kept, what else sees it, how long it shall be, when it logs
and saves, and how it is evaluated. None of them changes what is learnt. (The device may be said where it was left to
the machine; a checkpoint of another one is refused.)"""

EVALUATION_COLUMNS = ("env_step", "agent_step", "return_mean", "seconds")
"""Of eval.csv: those that a row cannot do without."""

INFO = "info_"
"""What columns of eval.csv begin with that are an environment's own. Where it gave none their cells are empty."""

RECENT_BYTES, EVALUATION_BYTES = 16_384, 4_096
"""How much of a train.csv counts as recent, the last minutes of a run; and where the last row of an eval.csv is."""


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file as a whole: a reader, or a crash, sees the old text or the new."""
    unfinished = unfinished_name(path)
    refuse_odd(unfinished)
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def unfinished_name(path: Path) -> Path:
    """What a file is called until it is whole."""
    return path.with_name(f".{path.name}.unfinished")


def refuse_odd(*files: Path, folders: Iterable[Path] = ()) -> None:
    """Refuses what is no plain file, or folder, inside a run folder: a link may lead to files of others, and a pipe
    would be waited for without end."""
    for path in (*files, *folders):
        if path.is_symlink():
            raise UserError(f"{path} is a link, which a run folder may not hold: put what it leads to in its place.")
        if path.exists() and not (path.is_dir() if path in folders else path.is_file()):
            kind = "folder" if path in folders else "file"
            raise UserError(f"{path} is not the {kind} that a run folder has there: remove it.")


def _plain(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


def unwritable(path: Path, error: OSError) -> str:
    """What to say, and do, where the disk is full."""
    return (
        f"{path} could not be written ({error.strerror or error}): free some disk space and run the same command "
        "again, the last checkpoint is intact."
    )


def versions() -> dict[str, str]:
    """Versions of everything that shapes a result."""
    found = {"python": platform.python_version()}
    simulators = [package for family in FAMILIES.values() for package in family.packages]
    for package in ("drq", "torch", "numpy", "gymnasium", *simulators):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the checkout this package runs from, `-dirty` if it was changed.

    Where there is no history, as in a copy on another machine, it is what DRQ_COMMIT says, or None.
    """
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():
        return os.environ.get("DRQ_COMMIT") or None

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


class Finished(NamedTuple):
    """A budget that a run has completed."""

    steps: int
    seconds: float
    """Wall-clock time from the start, over all processes."""


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.eval_csv = path / "eval.csv"
        self.train_csv = path / "train.csv"
        self.checkpoint = path / "checkpoint"
        self.videos = path / "videos"
        self.tensorboard = path / "tensorboard"
        self.finished_file = path / "finished.json"
        self.error_file = path / "error.txt"
        self.lock_file = path / ".lock"

    def refuse_odd(self) -> None:
        """Refuses a folder of which a part leads elsewhere. The folder itself may be reached through a link."""
        files = self.config_file, self.eval_csv, self.train_csv, self.finished_file, self.error_file, self.lock_file
        refuse_odd(*files, folders=(self.checkpoint, self.videos, self.tensorboard))

    def check(self, config: TrainConfig) -> None:
        """Refuses a folder that holds something else than this run, before anything is written to it."""
        try:
            str(self.path).encode()  # as config.json and TensorBoard's writer will
        except UnicodeEncodeError:
            raise UserError(f"{self.path} is no name in UTF-8: choose another --dir.") from None
        self.refuse_odd()
        beginnings = {self.lock_file, unfinished_name(self.config_file)}  # of a run that was killed as early as that
        if self.config_file.exists():
            if not self.failed_at_once:
                self._check_same(config)
        elif self.path.is_file():
            raise UserError(f"{self.path} is a file: choose another --dir.")
        elif self.path.exists() and (not self.path.is_dir() or set(self.path.iterdir()) - beginnings):
            raise UserError(f"{self.path} has something in it and is no run folder: choose another --dir.")

    @property
    def failed_at_once(self) -> bool:
        """Whether the run failed before there was anything of it, as where its environment could not be drawn: the
        remedy is often another setting, which the folder then takes."""
        made = (self.eval_csv, self.train_csv, self.finished_file)
        something = self.checkpoint.exists() or any(file.exists() and file.stat().st_size for file in made)
        return self.error_file.exists() and not something

    def _why_not(self) -> str:
        if not self.path.exists():
            return "there is nothing of that name"
        run = next(self.path.glob("*/config.json"), None)
        return "it has no config.json" + (f", {run.parent.name} in it has one" if run else "")

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Makes the folder, and says in a sentence where it, or something in it, cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            raise UserError(
                f"The run folder {self.path} cannot be written ({error.strerror}): choose another --dir."
            ) from error

    def open(
        self,
        config: TrainConfig,
        spec: EnvSpec,
        label: str | None = None,
        computed_with: dict[str, str | int] | None = None,
    ) -> None:
        """Makes the folder and describes the run in it. The label is the run's name in comparisons; `computed_with`
        says what its arithmetic hangs on, so that it can go on with the same."""
        described = {
            "format": FORMAT,
            "label": label,
            "config": config_to_json(config),
            "versions": versions(),
            "git_commit": git_commit(),
            "computed_with": computed_with,
            "spec": dataclasses.asdict(spec),
        }
        with self.writable():
            write_atomically(self.config_file, json.dumps(described, indent=2) + "\n")

    def finish(self, steps: int, seconds: float) -> None:
        """Says that the run has completed a budget."""
        try:
            write_atomically(self.finished_file, json.dumps({"steps": steps, "seconds": round(seconds, 3)}) + "\n")
        except OSError as error:
            raise UserError(unwritable(self.finished_file, error)) from error

    def holds_finished(self, config: TrainConfig) -> bool:
        """Whether this run is finished already. One without evaluations, or with more steps than were ever asked for,
        is damaged: its checkpoint knows better."""
        return config.steps <= self.finished_steps <= self.config_like(config.agent).steps and bool(self.evaluations())

    def _check_same(self, config: TrainConfig) -> None:
        stored = self.config_like(config.agent)
        # As each would be run: an older version may have left settings to their defaults.
        before, now = (flat(config_to_json(resolved(each))) for each in (stored, config))
        # Another task or preset has many others in its wake: it is named first, and not all of them.
        keys = sorted(before.keys() | now.keys(), key=lambda key: (key not in ("task", "preset"), key))
        differing = [
            f"{key}: {before.get(key)!r} there, {now.get(key)!r} now"
            for key in keys
            if before.get(key) != now.get(key) and key not in NOT_PART_OF_A_RUN
        ]
        if differing:
            more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
            raise UserError(
                f"{self.path} holds a run with other settings ({'; '.join(differing[:5])}{more}): "
                "choose another --dir, or repeat its settings to resume it."
            )
        if config.steps < stored.steps:
            raise UserError(
                f"{self.path} holds a run of {stored.steps:,} steps, more than the {config.steps:,} "
                "asked for: choose another --dir."
            )
        if config.env.observation == "pixels":
            there, here = self.description.get("versions", {}), versions()
            for package in family_of(config.task).packages:
                if there.get(package) != here.get(package):
                    raise UserError(
                        f"{self.path} was begun with {package} {there.get(package)} and {here.get(package)} is "
                        f"installed, which may draw other pixels: pip install {package}=={there.get(package)}, "
                        "or choose another --dir."
                    )

    @property
    def computed_with(self) -> dict[str, Any]:
        """Device, precision and threads, which the last bits of a result hang on; nothing where it does not say."""
        try:
            found = self.description.get("computed_with")
        except UserError:
            return {}  # who reads the rest says what is wrong
        if not isinstance(found, dict) or not {"device", "precision", "threads"} <= found.keys():
            return {}
        return found if isinstance(found["threads"], int) and found["threads"] > 0 else {}

    @property
    def description(self) -> dict[str, Any]:
        """The whole of config.json."""
        self.refuse_odd()
        try:
            described: dict[str, Any] = parse_json(self.config_file.read_text(encoding="utf-8"))
            if described["format"] != FORMAT:
                raise UserError(
                    f"{self.path} has run-folder format {described['format']!r} and this version of drq reads "
                    f"{FORMAT}: use the version that wrote it (config.json names it)."
                )
            config = described["config"]
            texts = {"task": config["task"], "preset": config["preset"], "agent.type": config["agent"]["type"]}
            groups = {"versions": described.get("versions", {})} | {name: config.get(name, {}) for name in GROUPS}
            for kind, values in (
                (str, texts),
                (int, {"seed": config["seed"]}),
                (str | None, {"label": described.get("label")}),
                (dict, groups),
            ):
                for name, value in values.items():
                    if not isinstance(value, kind):
                        raise TypeError(f"{name!r} is of another type")
            return described
        except FileNotFoundError:
            raise UserError(
                f"{self.path} is no run folder ({self._why_not()}): name the --dir of a `drq train`."
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise UserError(
                f"{self.config_file} is damaged ({reason(problem)}): restore it, or choose another folder."
            ) from None

    @property
    def config(self) -> TrainConfig:
        return self.config_like(None)

    def config_like(self, agent: AgentConfig | None) -> TrainConfig:
        """The settings, where the agent may be one of the user's own, with settings like these."""
        described = self.description
        try:
            config = config_from_json(described["config"], agent)
            check(config)
            return config
        except UserError as error:
            raise UserError(f"{self.config_file}: {error}") from None

    @property
    def spec(self) -> EnvSpec:
        """The shape of the run's task."""
        try:
            return spec_from_json(dict(self.description["spec"]))
        except (KeyError, TypeError, ValueError) as problem:
            raise UserError(f"{self.config_file} does not describe its task ({reason(problem)}): restore it.") from None

    @property
    def finished(self) -> Finished | None:
        """The budget that this run has completed, if it has."""
        if not _plain(self.finished_file):
            return None
        try:
            plain = parse_json(self.finished_file.read_text(encoding="utf-8"))
            return Finished(int(plain["steps"]), finite(plain["seconds"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    @property
    def finished_steps(self) -> int:
        """Of the budget that it has completed; 0 where it has none."""
        return self.finished.steps if self.finished else 0

    @property
    def error(self) -> str | None:
        """Why the run failed, if it did: the last line of what it said, which in a traceback names the problem."""
        if not _plain(self.error_file):
            return None
        try:
            lines = self.error_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            return None
        return lines[-1].strip() if lines else "no reason given"

    def evaluations(self, problems: list[str] | None = None) -> list[dict[str, float]]:
        """Rows of eval.csv. A row that is none, half written or damaged, is left out.

        Who gives a list of `problems` has them named there, and rows with numbers that are not finite left out too.
        """
        said = [] if problems is None else problems
        rows: list[dict[str, float]] = []
        if self.eval_csv.is_symlink() or (self.eval_csv.exists() and not self.eval_csv.is_file()):
            said.append(f"{self.eval_csv}: no plain file; left out")
            return rows
        begun = self.eval_csv.exists() and self.eval_csv.stat().st_size  # a young run may not have its heading yet
        for line, row in csv_rows(self.eval_csv, EVALUATION_COLUMNS, said) if begun else ():
            try:
                number = float if problems is None else finite
                given = {name: value for name, value in row.items() if value != "" or not name.startswith(INFO)}
                rows.append({column: number(value or "") for column, value in given.items()})
            except (ValueError, TypeError) as problem:
                said.append(f"{self.eval_csv}, line {line}: broken row ({reason(problem)}); skipped")
        return rows

    def last_evaluation(self) -> dict[str, float]:
        """The last row of eval.csv; empty if there is none. The rest is not read."""
        rows = _ends(self.eval_csv, EVALUATION_COLUMNS, EVALUATION_BYTES)
        return rows[-1] if rows and len(rows[-1]) == len(EVALUATION_COLUMNS) else {}

    def recent_training(self, *columns: str) -> list[dict[str, float]]:
        """The first and the last of the recent rows of train.csv; cells without a number left out."""
        return _ends(self.train_csv, columns, RECENT_BYTES)


def run_folders(root: Path) -> list[RunFolder]:
    """Every run at or below a folder."""
    return [RunFolder(Path(folder)) for folder, _, files in sorted(os.walk(root)) if "config.json" in files]


def _ends(path: Path, columns: Iterable[str], size: int) -> list[dict[str, float]]:
    """The first and the last row in the last bytes of a CSV of ours, which may be in the middle of being written."""
    if not _plain(path):
        return []
    try:
        with open(path, "rb") as file:
            heading = file.readline()
            begins = max(len(heading), file.seek(0, 2) - size)
            file.seek(begins)
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
    except OSError:
        return []
    names = heading.decode(errors="replace").strip().split(",")
    places = [(name, names.index(name)) for name in columns if name in names]
    lines = lines[begins > len(heading) :]  # the first may be cut

    def whole(line: str) -> bool:
        return line.endswith("\n") and line.count(",") == len(names) - 1

    ends = dict.fromkeys((next(filter(whole, lines), ""), next(filter(whole, reversed(lines)), "")))
    rows = [line.strip().split(",") for line in ends if line]
    return [{name: float(row[at]) for name, at in places if _is_number(row[at])} for row in rows]


def csv_rows(path: Path, columns: Iterable[str], problems: list[str]) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Rows with their line numbers; a file that is no table with these columns is named in `problems` and has none."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            if missing := [column for column in columns if column not in (reader.fieldnames or [])]:
                needed = ",".join(columns)
                problems.append(f"{path}: no column {', '.join(missing)} (it needs {needed}); left out")
                return
            for row in reader:
                yield reader.line_num, row
    except FileNotFoundError:
        problems.append(f"{path}: no such file")
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        problems.append(f"{path}: not readable as CSV ({reason(problem)}); what came before is used")


def finite(text: str | float) -> float:
    """The number that a text is; ValueError where it is none, or none that can be averaged."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
