"""The files of a checkpoint: atomic, as cheap as what is new, and nothing in them is code.

    checkpoint/latest.json                  what belongs together, with checksums; replaced as a whole, last
    checkpoint/previous.json                the latest.json before it, whose files are kept too
    checkpoint/state-<serial>...            networks, optimisers, random generators
    checkpoint/replay-<serial>...           what the replay gained since the checkpoint before
    checkpoint/best-<serial>...             what acted in the best evaluation, as `drq export` writes it

A crash at any moment leaves a latest.json and every file it names, and damage that is found later leaves previous.json.
Serials count up, so that the next attempt writes over what a crash left half done. Only files that one of the two lists
named are ever removed, and what safetensors had begun under names of its own. `checkpoint.py` writes them,
`checkpoint_reader.py` reads them.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drq.settings import parse_json
from drq.training.state import RunState

LATEST, PREVIOUS = "latest.json", "previous.json"
MOST = 2**53
"""No counter is above it."""
FORGOTTEN_EPISODES = 10_000
"""So many times may a run have been resumed in an environment that did not come back to its episode."""

PROGRESS = [
    field.name for field in fields(RunState) if field.name not in ("agent_step", "under_way", "pending", "best")
]
"""What latest.json keeps of a run's state under `progress` as it is."""


@dataclass(frozen=True)
class Segment:
    """A file with a stretch of the replay, and how far each of its streams is at its end."""

    file: str
    marks: list[tuple[int, int]]
    sha256: str | None = None
    """None: written by an earlier version."""

    @staticmethod
    def from_json(plain: dict[str, Any]) -> Segment:
        if "marks" not in plain:  # written by an earlier version, which knew one stream
            return Segment(plain["file"], [(plain["transitions_end"], plain["frames_end"])])
        marks = [(transitions, frames) for transitions, frames in plain["marks"]]
        return Segment(plain["file"], marks, plain.get("sha256"))


@dataclass(frozen=True)
class BestFile:
    """The file with what acted in the best evaluation."""

    file: str
    agent_step: int
    return_mean: float
    sha256: str | None = None


@dataclass(frozen=True)
class Description:
    """latest.json: the files of a checkpoint, and what of it is no tensor."""

    agent_step: int
    updates: int
    device: str
    """Kind of the device that the run learns on."""
    state: str
    """File with the tensors of the agent and the run."""
    segments: list[Segment]
    replay: list[dict[str, int]]
    """The counters of the replay's streams."""
    progress: dict[str, Any]
    """The rest of the run's state, and the newest metrics."""
    serial: int
    """Counts the checkpoints of a run."""
    state_sha256: str | None = None
    """None: written by an earlier version."""
    dropped: bool = False
    """Whether the replay was removed since: the run is finished, and only its weights are kept."""
    best: BestFile | None = None
    """None: there was no evaluation yet, or an earlier version kept none."""

    @staticmethod
    def from_text(text: str) -> Description:
        """What `to_text` wrote, or an earlier version; some error of Python's where it is not that."""
        plain = parse_json(text)
        if "serial" in plain and plain.pop("sha256", None) != _sha256(_json(plain)):
            raise ValueError("its checksum is another")
        described = Description(
            **{
                # An earlier version numbered its files by agent step: the next serial has to be above them.
                "serial": plain["agent_step"],
                **plain,
                "segments": [Segment.from_json(part) for part in plain["segments"]],
                "replay": plain["replay"] if isinstance(plain["replay"], list) else [plain["replay"]],
                "best": BestFile(**plain["best"]) if plain.get("best") else None,
            }
        )
        described.check()
        return described

    def check(self) -> None:
        """Some error of Python's for what no run writes."""
        if not isinstance(self.device, str):
            raise ValueError("its device is no text")
        for name in self.files:
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"it names a file {name!r}")
        step, progress = self.agent_step, self.progress
        stored = step + progress.get("inherited", 0)
        limits = [
            ("agent_step", step, MOST),
            ("serial", self.serial, MOST),
            ("updates", self.updates, MOST),
            ("episode", progress["episode"], step + FORGOTTEN_EPISODES),
            ("evaluated", progress["evaluated"], step),
            *(("under_way", number, step + FORGOTTEN_EPISODES) for number, _ in self.under_way),
            *((f"log_sizes.{name}", progress["log_sizes"][name], MOST) for name in ("train", "eval")),
            ("eval_rows", progress.get("eval_rows") or 0, MOST),
            ("inherited", progress.get("inherited", 0), MOST),
            *(("pending", pending, step) for pending in self.pending),
            *([("best", self.best.agent_step, step)] if self.best else []),
        ]
        for stream in self.replay:
            limits += [
                ("transitions_added", stream["transitions_added"], stored),
                ("frames_added", stream["frames_added"], 2 * stored + FORGOTTEN_EPISODES),
                ("oldest", stream["oldest"], stream["transitions_added"]),
                ("age", stream["age"] + 1, step + 1),
            ]
        for segment in self.segments:
            for (transitions, frames), stream in zip(segment.marks, self.replay, strict=True):
                limits.append((f"the end of {segment.file}", transitions, stream["transitions_added"]))
                limits.append((f"the end of {segment.file}", frames, stream["frames_added"]))
        for name, count, most in limits:
            if type(count) is not int or not 0 <= count <= most:
                raise ValueError(f"{name} is {count!r}")
        numbers = [progress["seconds"], progress["last_return"] or 0.0, *(score for _, score in self.under_way)]
        numbers += [self.best.return_mean] if self.best else []
        if not all(math.isfinite(number) for number in (*numbers, *progress["metrics"].values())):
            raise ValueError("it has a number that is not finite")

    def to_text(self) -> str:
        plain = json.loads(_json(asdict(self)))  # as it will be read: tuples are lists
        if not self.dropped:
            del plain["dropped"]  # an earlier version does not know it
        return _json({**plain, "sha256": _sha256(_json(plain))}) + "\n"

    @property
    def files(self) -> list[str]:
        best = [self.best.file] if self.best else []
        return [self.state, *(segment.file for segment in self.segments), *best]

    @property
    def under_way(self) -> list[tuple[int, float]]:
        """Number and score of each environment's episode. An earlier version knew one."""
        only = [[self.progress["episode"], self.progress.get("episode_score", 0.0)]]
        found = [(number, score) for number, score in self.progress.get("under_way", only)]
        if len(found) != len(self.replay):
            raise ValueError("it has not an episode for each stream")
        return found

    @property
    def pending(self) -> list[int]:
        """Agent steps of the evaluations that were under way."""
        return list(self.progress.get("pending", ()))


def not_finite(state: dict[str, Tensor]) -> str | None:
    """The name of a weight or a moment that is not finite, if there is one."""
    names = [
        name for name, value in state.items() if name.startswith(("agent.", "optimizer.")) and value.is_floating_point()
    ]
    finite = [torch.isfinite(state[name]).all() for name in names]
    # Together: a GPU is waited for once.
    told = torch.stack([one.to(finite[0].device) for one in finite]).tolist() if finite else []
    return next((name for name, fine in zip(names, told, strict=True) if not fine), None)


def _json(plain: dict[str, Any]) -> str:
    return json.dumps(plain, indent=2)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
