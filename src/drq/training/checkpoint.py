"""Checkpoints: atomic, as cheap as what is new, and nothing in them is code.

    checkpoint/latest.json                  what belongs together; replaced as a whole, last
    checkpoint/state-<agent_step>...        networks, optimisers, random generators
    checkpoint/replay-<agent_step>...       what the replay gained since the checkpoint before

A crash at any moment leaves the previous latest.json and every file it names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from operator import le
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drq.agents import Agent
from drq.engine import Learner, to_action
from drq.errors import UserError
from drq.training.folder import write_atomically
from drq.training.state import RunState


@dataclass(frozen=True)
class Segment:
    """A file with a stretch of the replay, and how far each of its streams is at its end."""

    file: str
    marks: list[tuple[int, int]]

    @staticmethod
    def from_json(plain: dict[str, Any]) -> Segment:
        if "marks" not in plain:  # written by an earlier version, which knew one stream
            return Segment(plain["file"], [(plain["transitions_end"], plain["frames_end"])])
        return Segment(plain["file"], [(transitions, frames) for transitions, frames in plain["marks"]])


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

    @staticmethod
    def from_json(plain: dict[str, Any]) -> Description:
        segments = [Segment.from_json(part) for part in plain["segments"]]
        counters = plain["replay"] if isinstance(plain["replay"], list) else [plain["replay"]]
        return Description(**{**plain, "segments": segments, "replay": counters})

    @property
    def files(self) -> set[str]:
        return {self.state, *(segment.file for segment in self.segments)}


class Checkpoints:
    """The checkpoint folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: int | None = None
        """Agent step of the newest checkpoint that this process has made or restored."""
        self._latest = folder / "latest.json"
        self._segments: list[Segment] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, learner: Learner, run: RunState) -> None:
        """Takes a snapshot now and writes it while training goes on."""
        self.wait()
        self.folder.mkdir(exist_ok=True)
        replay = learner.replay
        last = self._segments[-1].marks if self._segments else [(0, 0) for _ in replay.streams]
        fresh = replay.written_since(last)
        anything_new = last != replay.marks()
        segments = [old for old in self._segments if replay.keeps(old.marks)]
        if anything_new:
            segments.append(Segment(f"replay-{run.agent_step:010d}.safetensors", replay.marks()))
        state = {name: tensor.detach().cpu().clone() for name, tensor in learner.state().items()}
        state["episode_actions"] = torch.from_numpy(np.array(run.episode_actions, dtype=np.float32))
        described = Description(
            agent_step=run.agent_step,
            updates=learner.updates,
            device=learner.engine.device.type,
            state=f"state-{run.agent_step:010d}.safetensors",
            segments=segments,
            replay=replay.counters(),
            progress={name: getattr(run, name) for name in _PROGRESS} | {"metrics": learner.metrics()},
        )
        text = json.dumps(asdict(described), indent=2) + "\n"

        def write() -> None:
            if anything_new:
                _save_durably(fresh, self.folder / segments[-1].file)
            _save_durably(state, self.folder / described.state)
            write_atomically(self._latest, text)
            self._remove_all_but(described.files)

        self._segments = segments
        self._writing = self._writer.submit(write)
        self.newest = run.agent_step

    def wait(self) -> None:
        """Returns once the snapshot being written is on the disk."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                writing.result()
            except OSError as error:
                raise UserError(
                    f"The checkpoint in {self.folder} could not be written ({error.strerror or error}): free some disk "
                    "space and run the same command again, the previous checkpoint is intact."
                ) from error

    def check(self, device: torch.device) -> None:
        """Refuses a checkpoint that a run on this device cannot go on from, before anything is opened."""
        if not self._latest.exists():
            return
        begun_on = self._describe().device
        if begun_on != device.type:
            raise UserError(
                f"The run was begun on {begun_on} and its random numbers go on only there: "
                f"add --device {begun_on}, or choose another --dir."
            )

    def restore(self, learner: Learner) -> RunState | None:
        """Puts the learner back to the latest checkpoint and gives the run's own state, if there is a checkpoint."""
        if not self._latest.exists():
            return None
        described = self._describe()
        with _named_if_damaged(self.folder):
            state = load_file(self.folder / described.state)
            _check_state(state, learner)
            run = RunState(
                agent_step=described.agent_step,
                episode_actions=[to_action(row, learner.replay.spec) for row in state["episode_actions"].numpy()],
                **{name: described.progress[name] for name in _PROGRESS},
            )
            metrics: dict[str, float] = described.progress["metrics"]
        # From here on what fails is the program, not the files: it must not be reported as their damage.
        learner.replay.restore(self._parts(described), described.replay)
        learner.restore(state)
        learner.updates = described.updates
        learner.restore_metrics(metrics)
        self._segments = described.segments
        self._remove_all_but(described.files)
        self.newest = run.agent_step
        return run

    def _describe(self) -> Description:
        with _named_if_damaged(self.folder):
            return Description.from_json(json.loads(self._latest.read_text()))

    def _parts(self, described: Description) -> Iterator[tuple[list[tuple[int, int]], dict[str, Tensor]]]:
        """The replay's segments, one in memory at a time: together they are as large as the replay."""
        for segment in described.segments:
            with _named_if_damaged(self.folder):
                part = load_file(self.folder / segment.file)
            yield segment.marks, part

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def _remove_all_but(self, keep: set[str]) -> None:
        for file in self.folder.glob("*.safetensors*"):
            if file.name not in keep:
                file.unlink(missing_ok=True)


_PROGRESS = [field.name for field in fields(RunState) if field.name not in ("agent_step", "episode_actions")]
"""What latest.json keeps of a run's state under `progress`."""


@contextmanager
def _named_if_damaged(folder: Path) -> Iterator[None]:
    """Turns what can go wrong in reading files, and nothing else may stand inside, into a sentence with the remedy."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"The checkpoint in {folder} cannot be read ({error}): "
            "restore its files, or delete the folder to begin the run again."
        ) from error


def load_weights(folder: Path, agent: Agent) -> int:
    """Loads a checkpoint's networks alone; gives the agent step they are from."""
    latest = folder / "latest.json"
    if not latest.exists():
        raise UserError(f"There is no checkpoint in {folder} yet: let the run reach its first checkpoint.")
    described = json.loads(latest.read_text())
    state = load_file(folder / described["state"])
    own = {name.removeprefix("agent."): value for name, value in state.items() if name.startswith("agent.")}
    agent.modules.load_state_dict(own)
    return int(described["agent_step"])


def _check_state(state: dict[str, Tensor], learner: Learner) -> None:
    """Refuses tensors that are not all of this learner's."""
    for name, value in learner.state().items():
        if name.startswith("optimizer."):
            continue  # an optimiser has no moments before its first update
        kept, own = state[name].shape if name in state else None, value.shape
        # A run that is given more steps may have a larger replay, and its sampler more to remember.
        grown = name.startswith("sampler.") and kept and len(kept) == len(own) and all(map(le, kept, own))
        if kept != own and not grown:
            raise ValueError(f"{name} of shape {tuple(value.shape)} is not in it")


def _save_durably(tensors: dict[str, Tensor], path: Path) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished)
    with open(unfinished, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)
