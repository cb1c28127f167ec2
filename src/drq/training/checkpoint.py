"""Writes checkpoints while training goes on, and has a run go on from one (what is in them: `checkpoint_files.py`)."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from drq.engine import Learner, Snapshot
from drq.errors import UserError, reason
from drq.replay import stream_suffix
from drq.training import checkpoint_reader as reader
from drq.training.checkpoint_files import LATEST, PREVIOUS, PROGRESS, BestFile, Description, Segment, not_finite
from drq.training.faults import diverged
from drq.training.folder import refuse_odd, write_atomically
from drq.training.policy_file import header, save_file
from drq.training.schedule import Schedule
from drq.training.state import Best, RunState

SAFETENSORS_TEMPORARY = ".tmp??????"
"""What safetensors calls a file while it writes it, another each time: a killed run leaves it, of any size."""


class Checkpoints:
    """The checkpoint folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: int | None = None
        """Agent step of the newest checkpoint that this process has made or restored."""
        self.notice: str | None = None
        """What `restore` found damaged."""
        self._kept: list[Description] = []
        """What is on the disk, the newest last: that and the one before."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, learner: Learner, run: RunState) -> None:
        """Takes a snapshot now and writes it while training goes on."""
        self.wait()
        now = learner.state()
        if broken := not_finite(now):
            raise diverged(f"{broken} is not finite", f"agent step {run.agent_step:,}", self.left)
        for slot, episode in enumerate(run.under_way):
            actions = torch.from_numpy(np.array(episode.actions, dtype=np.float32))
            now[f"episode_actions{stream_suffix(slot)}"] = actions
        for agent_step, weights in run.pending.items():
            now |= {f"evaluation.{agent_step}.{name}": value for name, value in weights.items()}
        state = Snapshot.of(now)
        before, replay = self._kept[-1] if self._kept else None, learner.replay
        # Of two checkpoints of one agent step, as before and after the last evaluation, only one is kept: they share
        # their newest files, and so any damage to these.
        older = [kept for kept in self._kept if kept.agent_step < run.agent_step]
        generation_before = older[-1] if older else before
        serial = before.serial + 1 if before else 1
        segments = before.segments if before else []
        last = segments[-1].marks if segments else [(0, 0) for _ in replay.streams]
        gained = Segment(f"replay-{serial:010d}.safetensors", replay.marks()) if last != replay.marks() else None
        fresh = Snapshot(replay.written_since(last))
        segments = [old for old in segments if replay.keeps(old.marks)]
        best, policy = before.best if before else None, None
        if run.best is not None and run.best.policy is not None:
            best = BestFile(f"best-{serial:010d}.safetensors", run.best.agent_step, run.best.return_mean)
            policy, run.best = run.best.policy, replace(run.best, policy=None)
        described = Description(
            agent_step=run.agent_step,
            updates=learner.updates,
            device=learner.engine.device.type,
            state=f"state-{serial:010d}.safetensors",
            segments=segments,
            replay=replay.counters(),
            progress={
                **{name: getattr(run, name) for name in PROGRESS},
                "under_way": [[episode.number, episode.score] for episode in run.under_way],
                "metrics": learner.metrics(),
                "pending": list(run.pending),
            },
            serial=serial,
            best=best,
        )

        def write() -> None:
            refuse_odd(folders=[self.folder])
            self.folder.mkdir(exist_ok=True)
            for left in self.folder.glob(SAFETENSORS_TEMPORARY):
                left.unlink(missing_ok=True)
            new = described
            if gained is not None:
                sha256 = _save_durably(fresh.on_host(), self.folder / gained.file)
                new = replace(new, segments=[*segments, replace(gained, sha256=sha256)])
            new = replace(new, state_sha256=_save_durably(state.on_host(), self.folder / new.state))
            if policy is not None and best is not None:
                sha256 = _save_durably(policy.weights, self.folder / best.file, header(policy))
                new = replace(new, best=replace(best, sha256=sha256))
            if generation_before is not None:
                write_atomically(self.folder / PREVIOUS, generation_before.to_text())
            write_atomically(self.folder / LATEST, new.to_text())
            self._keep([generation_before, new] if generation_before else [new])

        self._writing = self._writer.submit(write)
        self.newest = run.agent_step

    def wait(self) -> None:
        """Returns once the snapshot being written is on the disk."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                writing.result()
            except (OSError, SafetensorError) as error:
                before = "the previous checkpoint is intact" if self.exist else "which begins anew"
                raise UserError(
                    f"The checkpoint in {self.folder} could not be written ({reason(error)}): free some disk "
                    f"space and run the same command again, {before}."
                ) from error

    def check(self, device: torch.device) -> None:
        """Refuses a checkpoint that a run on this device cannot go on from, before anything is opened."""
        if not self.exist:
            return
        described = reader.newest(self.folder)
        if described.dropped:
            raise UserError(
                f"The replay of {self.folder.parent} was dropped when it had finished, so it cannot go on: choose "
                "another --dir. (`drq suite run --keep-replay` keeps the replays of a suite.)"
            )
        if described.device != device.type:
            raise UserError(
                f"The run was begun on {described.device} and its random numbers go on only there: "
                f"add --device {described.device}, or choose another --dir."
            )

    def restore(self, learner: Learner, schedule: Schedule | None = None) -> RunState | None:
        """Puts the learner back to the latest checkpoint and gives the run's own state, if there is a checkpoint.

        One that is damaged, or further than the run's schedule, is passed over for the one before it.
        """
        if not self.exist:
            return None
        (described, state, run), problem = reader.read_run(self.folder, learner, schedule)
        # From here on what fails is the program, not the files: it must not be reported as their damage.
        learner.replay.restore(reader.segments_of(self.folder, described), described.replay)
        learner.restore(state)
        learner.updates = described.updates
        learner.restore_metrics(described.progress["metrics"])
        previous = reader.descriptions(self.folder).get(self.folder / PREVIOUS)
        self._kept = [previous, described] if previous and problem is None else [described]
        if problem is not None:
            self.notice = (
                f"The newest checkpoint in {self.folder} is damaged ({problem}): "
                f"the run goes on from the one before, of agent step {described.agent_step:,}."
            )
            # Its files are about to be written over: none of them may be taken for whole then.
            write_atomically(self.folder / LATEST, described.to_text())
        self.newest = run.agent_step
        if described.best is not None:
            try:
                reader.check_file(self.folder / described.best.file, described.best.sha256)
                run.best = Best(described.best.agent_step, described.best.return_mean)
            except reader.DAMAGE as error:  # nothing is learnt from it
                lost = f"The best policy in {self.folder} is lost ({reason(error)}): the next one is kept."
                self.notice = " ".join(filter(None, (self.notice, lost)))
                self._kept[-1] = replace(described, best=None)
        return run

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    @property
    def exist(self) -> bool:
        return reader.exists(self.folder)

    @property
    def left(self) -> str:
        """What there is to go on from, in words."""
        return "The last checkpoint stays" if self.newest is not None or self.exist else "There is no checkpoint yet"

    def _keep(self, kept: list[Description]) -> None:
        """Removes the files that only descriptions before these named."""
        before, now = ({name for each in group for name in each.files} for group in (self._kept, kept))
        for name in before - now:
            (self.folder / name).unlink(missing_ok=True)
        self._kept = kept


def replay_files(folder: Path) -> list[Path]:
    """Where a checkpoint and the one before it keep the replay. Files that neither names are not among them."""
    refuse_odd(folder / LATEST, folder / PREVIOUS, folders=[folder])
    described = reader.descriptions(folder).values()
    named = {segment.file for each in described for segment in each.segments} - {each.state for each in described}
    return [path for name in sorted(named) if (path := folder / name).is_file() and not path.is_symlink()]


def drop_replay(folder: Path) -> None:
    """Removes the replay of a finished run; the weights stay. Stopped in the middle, it can be done again."""
    files = replay_files(folder)
    for file, described in reader.descriptions(folder).items():
        write_atomically(file, replace(described, dropped=True).to_text())
    for path in files:
        path.unlink(missing_ok=True)


def _save_durably(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> str:
    """Writes a file that appears whole or not at all; gives its checksum."""
    unfinished = path.with_name(path.name + ".unfinished")
    refuse_odd(unfinished)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata)
    with open(unfinished, "rb+") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return sha256
