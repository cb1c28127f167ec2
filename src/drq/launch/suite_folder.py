"""A suite's folder: which suite it holds, and which of its runs are under way.

suite.json                          the declaration, and every run that was asked for
<task>/<setting>/seed-<n>/          run folders (docs/run-folder.md); error.txt in those that failed
logs/                               what each run printed
.claims/                            which command works on which run (claims.py)
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drq.errors import UserError
from drq.launch.claims import Claims, State
from drq.settings import parse_json
from drq.suites import Run, Suite, slug
from drq.training.checkpoint_reader import descriptions
from drq.training.folder import RunFolder, write_atomically
from drq.training.lock import Holder, locked

FORMAT = 1
PATIENCE = 120.0
"""Seconds to wait for another command that writes suite.json."""


@dataclass(frozen=True)
class SuiteRecord:
    """What suite.json says."""

    name: str
    shows: str
    preset: str
    settings: dict[str, dict[str, Any]]
    """Label -> what the setting changes in the preset."""
    runs: tuple[Run, ...]
    search: list[str] = field(default_factory=list)
    """Of a search: the settings that vary."""

    @staticmethod
    def of(suite: Suite) -> SuiteRecord:
        settings = {setting.label: dict(setting.overrides) for setting in suite.settings}
        search = list(suite.search.names) if suite.search else []
        return SuiteRecord(suite.name, suite.shows, suite.preset, settings, tuple(suite.runs()), search)

    def to_text(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n"

    def check(self) -> None:
        """ValueError for values of other types than we write."""
        texts = [self.name, self.shows, self.preset, *self.search]
        texts += [text for run in self.runs for text in (run.task, run.label)]
        counts = [count for run in self.runs for count in (run.seed, run.steps)]
        if not all(isinstance(text, str) for text in texts) or not all(type(count) is int for count in counts):
            raise ValueError("a name in it is no text, or a count no whole number")
        if not isinstance(self.settings, dict) or not all(isinstance(each, dict) for each in self.settings.values()):
            raise ValueError("its settings are no table")


class SuiteFolder:
    """One suite on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "suite.json"
        self._claims = Claims(path / ".claims")

    def read(self) -> SuiteRecord:
        try:
            if self.file.exists() and not self.file.is_file():
                raise ValueError("it is no plain file")
            plain = parse_json(self.file.read_text(encoding="utf-8"))
            if plain["format"] != FORMAT:
                raise UserError(
                    f"{self.file} has format {plain['format']!r} and this version of drq reads {FORMAT}: "
                    "use the version that wrote it."
                )
            del plain["format"]
            record = SuiteRecord(**{**plain, "runs": tuple(Run(**run) for run in plain["runs"])})
            record.check()
            return record
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{self.path} holds no suite (it has no suite.json): name the --dir of a `drq suite run`."
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{self.file} is damaged ({error}): restore it, or choose another --dir.") from None

    def joined(self, suite: Suite) -> SuiteRecord:
        """What the folder holds once this suite's runs are added; another suite's do not go in with them."""
        asked = SuiteRecord.of(suite)
        for path in (self.path, *self.path.parents):
            if path.is_file():
                raise UserError(f"{path} is a file: choose another --dir.")
        if not self.file.exists():
            return asked
        held = self.read()
        if (held.name, held.preset) != (asked.name, asked.preset):
            raise UserError(
                f"{self.path} holds the suite {held.name!r} (preset {held.preset}), not {asked.name!r} "
                f"(preset {asked.preset}): choose another --dir."
            )
        for label in held.settings.keys() & asked.settings.keys():
            if held.settings[label] == asked.settings[label]:
                continue
            # Where no run got as far as to begin, the setting was perhaps the mistake, and is mended now.
            if any(self.run_folder(run).config_file.exists() for run in held.runs if run.label == label):
                raise UserError(
                    f"{self.path} holds {held.name!r} with other values for {label!r} ({held.settings[label]} there, "
                    f"{asked.settings[label]} now): choose another --dir, or another label."
                )
        by_folder = {slug(label): label for label in held.settings}
        for label in asked.settings:
            if by_folder.get(slug(label), label) != label:
                raise UserError(
                    f"{self.path} keeps {by_folder[slug(label)]!r} where {label!r} would go: reword the label."
                )
        runs = {run.folder: run for run in held.runs}
        for run in asked.runs:
            before = runs.get(run.folder, run)
            if suite.search and before.steps > run.steps:
                continue  # another command is a rung further
            if before.steps > run.steps:
                raise UserError(
                    f"{self.path} holds runs of {before.steps:,} steps, more than the {run.steps:,} asked for: "
                    f"say --steps {before.steps}, or choose another --dir."
                )
            listed = descriptions(self.run_folder(run).checkpoint) if before.steps < run.steps else {}
            if any(each.dropped for each in listed.values()):
                raise UserError(
                    f"{self.path / run.folder} has finished {before.steps:,} steps and its replay was dropped: it "
                    f"cannot go on to {run.steps:,}: choose another --dir, with --keep-replay if its runs shall go on "
                    "later."
                )
            runs[run.folder] = run
        settings = held.settings | asked.settings
        return SuiteRecord(asked.name, asked.shows, asked.preset, settings, tuple(runs.values()), asked.search)

    def open(self, suite: Suite) -> None:
        """Records the suite, beside what other commands have recorded."""
        self.joined(suite)  # refused before anything is made
        until = time.monotonic() + PATIENCE
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            while not self._claims.take(self.file.name):
                if time.monotonic() > until:
                    raise UserError(f"{self.file} is being written by another command for long: stop that one.")
                time.sleep(0.05)
            try:
                text = self.joined(suite).to_text()
                if not self.file.exists() or self.file.read_text(encoding="utf-8") != text:
                    write_atomically(self.file, text)
            finally:
                self._claims.release(self.file.name)
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error.strerror}): choose another --dir.") from error

    def claim(self, run: Run) -> bool:
        """Whether the run is this command's now, until `release` or the end of the process."""
        # The process of a command that was killed may still be writing its last checkpoint.
        return not locked(self.run_folder(run).lock_file) and self._claims.take(_name(run))

    def release(self, run: Run) -> None:
        self._claims.release(_name(run))

    def claimed(self) -> dict[str, State]:
        """The folders of runs that other commands have, or may have."""
        return {name.replace("+", "/"): state for name, state in self._claims.states().items()}

    def under_way(self) -> dict[str, Holder]:
        """The folders of runs that are under way now, and the command that has each."""
        return {name.replace("+", "/"): holder for name, holder in self._claims.holders().items() if "+" in name}

    def close(self) -> None:
        self._claims.release_all()

    def run_folder(self, run: Run) -> RunFolder:
        return RunFolder(self.path / run.folder)

    def log(self, run: Run) -> Path:
        return self.path / "logs" / f"{'_'.join(run.folder.parts)}.log"


def _name(run: Run) -> str:
    """As a file; no slug has a plus."""
    return "+".join(run.folder.parts)
