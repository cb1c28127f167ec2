"""Checkpoints: atomic, as cheap as what is new, and nothing in them is code.

    checkpoint/latest.json                  what belongs together, with checksums; replaced as a whole, last
    checkpoint/previous.json                the latest.json before it, whose files are kept too
    checkpoint/state-<serial>...            networks, optimisers, random generators
    checkpoint/replay-<serial>...           what the replay gained since the checkpoint before
    checkpoint/best-<serial>...             what acted in the best evaluation, as `drq export` writes it

A crash at any moment leaves a latest.json and every file it names, and damage that is found later leaves previous.json.
Serials count up, so that the next attempt writes over what a crash left half done. Only files that one of the two lists
named are ever removed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from operator import le
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from drq.agents import Agent
from drq.engine import Learner, Snapshot, to_action
from drq.errors import UserError
from drq.replay import Replay
from drq.training.faults import diverged
from drq.training.folder import refuse_odd, write_atomically
from drq.training.policy_file import PolicyFile, header, read_policy_file
from drq.training.schedule import Schedule
from drq.training.state import Best, RunState, UnderWay

T = TypeVar("T")

DAMAGE = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a damaged file may raise."""
MOST = 2**53
"""No counter is above it."""
FORGOTTEN_EPISODES = 10_000
"""So many times may a run have been resumed in an environment that did not come back to its episode."""


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
        """What `to_text` wrote, or an earlier version; one of `DAMAGE` where it is not that."""
        plain = json.loads(text)
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

    def to_text(self) -> str:
        plain = json.loads(_json(asdict(self)))  # as it will be read: tuples are lists
        if not self.dropped:
            del plain["dropped"]  # an earlier version does not know it
        return _json({**plain, "sha256": _sha256(_json(plain))}) + "\n"

    @property
    def checksums(self) -> dict[str, str | None]:
        """Every file that a run goes on from, and its checksum where it has one."""
        return {self.state: self.state_sha256} | {segment.file: segment.sha256 for segment in self.segments}

    @property
    def files(self) -> list[str]:
        """Every file of the checkpoint."""
        return [*self.checksums, *([self.best.file] if self.best else [])]

    @property
    def under_way(self) -> list[tuple[int, float]]:
        """Number and score of each environment's episode. An earlier version knew one."""
        one = [[self.progress["episode"], self.progress.get("episode_score", 0.0)]]
        found = [(number, score) for number, score in self.progress.get("under_way", one)]
        if len(found) != len(self.replay):
            raise ValueError("it has not an episode for each stream")
        return found

    @property
    def pending(self) -> list[int]:
        """Agent steps of the evaluations that were under way."""
        return list(self.progress.get("pending", ()))

    def check(self) -> None:
        """Raises one of `DAMAGE` for what no run writes."""
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

    def check_budget(self, schedule: Schedule) -> None:
        """ValueError for a checkpoint that is further than its run goes."""
        if self.agent_step > schedule.agent_steps:
            raise ValueError(f"its agent_step {self.agent_step:,} is past the {schedule.agent_steps:,} of the run")
        if self.updates > schedule.updates_until(self.agent_step):
            raise ValueError(f"it counts {self.updates:,} updates by agent step {self.agent_step:,}")


class Checkpoints:
    """The checkpoint folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: int | None = None
        """Agent step of the newest checkpoint that this process has made or restored."""
        self.notice: str | None = None
        """What `restore` found damaged."""
        self._latest = folder / "latest.json"
        self._previous = folder / "previous.json"
        self._kept: list[Description] = []
        """What is on the disk, the newest last: that and the one before."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, learner: Learner, run: RunState) -> None:
        """Takes a snapshot now and writes it while training goes on."""
        self.wait()
        now = learner.state()
        if broken := _not_finite(now):
            raise diverged(f"{broken} is not finite", f"agent step {run.agent_step:,}", self.left)
        for slot, episode in enumerate(run.under_way):
            now[_actions_of(slot)] = torch.from_numpy(np.array(episode.actions, dtype=np.float32))
        for agent_step, weights in run.pending.items():
            now |= {f"evaluation.{agent_step}.{name}": value for name, value in weights.items()}
        state = Snapshot.of(now)
        before, replay = self._kept[-1] if self._kept else None, learner.replay
        # Of two checkpoints of one agent step, as before and after the last evaluation, only one is kept: they share
        # their newest files, and so any damage to these.
        older = [kept for kept in self._kept if kept.agent_step < run.agent_step]
        generation_before = older[-1] if older else before
        segments = before.segments if before else []
        serial = before.serial + 1 if before else 1
        last = segments[-1].marks if segments else [(0, 0) for _ in replay.streams]
        fresh = Snapshot(replay.written_since(last))
        segments = [old for old in segments if replay.keeps(old.marks)]
        if last != replay.marks():
            segments.append(Segment(f"replay-{serial:010d}.safetensors", replay.marks()))
        progress = {name: getattr(run, name) for name in _PROGRESS}
        described = Description(
            agent_step=run.agent_step,
            updates=learner.updates,
            device=learner.engine.device.type,
            state=f"state-{serial:010d}.safetensors",
            segments=segments,
            replay=replay.counters(),
            progress=progress
            | {
                "under_way": [[episode.number, episode.score] for episode in run.under_way],
                "metrics": learner.metrics(),
                "pending": list(run.pending),
            },
            serial=serial,
            best=before.best if before else None,
        )
        policy = run.best.policy if run.best else None
        if run.best is not None and policy is not None:
            best = BestFile(f"best-{serial:010d}.safetensors", run.best.agent_step, run.best.return_mean)
            described = replace(described, best=best)
            run.best = replace(run.best, policy=None)

        def write() -> None:
            refuse_odd(folders=[self.folder])
            self.folder.mkdir(exist_ok=True)
            written = [
                segment
                if segment.sha256 or segment.file in (before.checksums if before else ())
                else replace(segment, sha256=_save_durably(fresh.on_host(), self.folder / segment.file))
                for segment in segments
            ]
            state_sha256 = _save_durably(state.on_host(), self.folder / described.state)
            new = replace(described, segments=written, state_sha256=state_sha256)
            if policy is not None and new.best is not None:
                sha256 = _save_durably(policy.weights, self.folder / new.best.file, header(policy))
                new = replace(new, best=replace(new.best, sha256=sha256))
            if generation_before is not None:
                write_atomically(self._previous, generation_before.to_text())
            write_atomically(self._latest, new.to_text())
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
                raise UserError(
                    f"The checkpoint in {self.folder} could not be written ({_reason(error)}): free some disk "
                    "space and run the same command again, the previous checkpoint is intact."
                ) from error

    def check(self, device: torch.device) -> None:
        """Refuses a checkpoint that a run on this device cannot go on from, before anything is opened."""
        if not self.exist:
            return
        described = _newest_whole(self.folder, lambda described: described)[0]
        if described.dropped:
            raise UserError(
                f"The replay of {self.folder.parent} was dropped when it had finished, so it cannot go on: choose "
                "another --dir. (`drq suite run --keep-replay` keeps the replays of a suite.)"
            )
        begun_on = described.device
        if begun_on != device.type:
            raise UserError(
                f"The run was begun on {begun_on} and its random numbers go on only there: "
                f"add --device {begun_on}, or choose another --dir."
            )

    def restore(self, learner: Learner, schedule: Schedule | None = None) -> RunState | None:
        """Puts the learner back to the latest checkpoint and gives the run's own state, if there is a checkpoint.

        One that is damaged, or further than the run's schedule, is passed over for the one before it.
        """
        if not self.exist:
            return None

        def read(described: Description) -> tuple[Description, dict[str, Tensor], RunState]:
            if schedule is not None:
                described.check_budget(schedule)
            for name, sha256 in described.checksums.items():
                _check_file(self.folder / name, sha256)
            for segment in described.segments:
                _check_segment(self.folder / segment.file, segment, learner.replay)
            state = load_file(self.folder / described.state)
            _check_state(state, learner)
            return described, state, _run_state(described, state, learner)

        (described, state, run), problem = _newest_whole(self.folder, read)
        # From here on what fails is the program, not the files: it must not be reported as their damage.
        learner.replay.restore(_parts(self.folder, described), described.replay)
        learner.restore(state)
        learner.updates = described.updates
        learner.restore_metrics(described.progress["metrics"])
        if problem is None:
            self._kept = [*_described_or_nothing(self._previous), described]
        else:
            self.notice = (
                f"The newest checkpoint in {self.folder} is damaged ({problem}): "
                f"the run goes on from the one before, of agent step {described.agent_step:,}."
            )
            # Its files are about to be written over: none of them may be taken for whole then.
            write_atomically(self._latest, described.to_text())
            self._kept = [described]
        self.newest = run.agent_step
        if described.best is not None:
            try:
                _check_file(self.folder / described.best.file, described.best.sha256)
                run.best = Best(described.best.agent_step, described.best.return_mean)
            except DAMAGE as error:  # nothing is learnt from it
                lost = f"The best policy in {self.folder} is lost ({_reason(error)}): the next one is kept."
                self.notice = " ".join(filter(None, (self.notice, lost)))
                self._kept[-1] = replace(described, best=None)
        return run

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    @property
    def exist(self) -> bool:
        return self._latest.exists() or self._previous.exists()

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


_PROGRESS = [
    field.name for field in fields(RunState) if field.name not in ("agent_step", "under_way", "pending", "best")
]
"""What latest.json keeps of a run's state under `progress` as it is."""


def newest_agent_step(folder: Path) -> int | None:
    """Of the newest checkpoint in a folder; None where there is none."""
    return next((described.agent_step for described in _described_or_nothing(folder / "latest.json")), None)


def replay_files(folder: Path) -> list[Path]:
    """Where a checkpoint and the one before it keep the replay. Files that neither names are not among them."""
    files = [folder / name for name in ("latest.json", "previous.json")]
    refuse_odd(*files, folders=[folder])
    described = [each for file in files for each in _described_or_nothing(file)]
    named = {segment.file for each in described for segment in each.segments} - {each.state for each in described}
    return [path for name in sorted(named) if (path := folder / name).is_file() and not path.is_symlink()]


def drop_replay(folder: Path) -> None:
    """Removes the replay of a finished run; the weights stay. Stopped in the middle, it can be done again."""
    files = replay_files(folder)
    for file in (folder / "previous.json", folder / "latest.json"):
        for described in _described_or_nothing(file):
            write_atomically(file, replace(described, dropped=True).to_text())
    for path in files:
        path.unlink(missing_ok=True)


def load_weights(folder: Path, agent: Agent) -> int:
    """Loads a checkpoint's networks alone; gives the agent step they are from."""
    wanted = agent.modules.state_dict()
    agent_step, weights = read_weights(folder, lambda own: _check_shapes(own, wanted))
    agent.modules.load_state_dict(weights)
    return agent_step


def read_weights(
    folder: Path, check: Callable[[dict[str, Tensor]], None] = lambda own: None
) -> tuple[int, dict[str, Tensor]]:
    """A checkpoint's networks, and the agent step they are from. What `check` raises for is damaged."""
    if not (folder / "latest.json").exists() and not (folder / "previous.json").exists():
        raise UserError(f"There is no checkpoint in {folder} yet: let the run reach its first checkpoint.")

    def read(described: Description) -> tuple[int, dict[str, Tensor]]:
        _check_file(folder / described.state, described.state_sha256)
        own = _beginning_with("agent.", load_file(folder / described.state))
        check(own)
        return described.agent_step, own

    return _newest_whole(folder, read)[0]


def read_replay(folder: Path, make: Callable[[int], Replay]) -> Replay:
    """A checkpoint's replay, in one that `make` gives for the number of its streams."""

    def read(described: Description) -> tuple[Description, Replay]:
        if described.dropped:
            raise UserError(f"The replay in {folder} was dropped when its run had finished: leave --init-replay out.")
        replay = make(len(described.replay))
        for segment in described.segments:
            _check_file(folder / segment.file, segment.sha256)
            _check_segment(folder / segment.file, segment, replay)
        return described, replay

    (described, replay), _ = _newest_whole(folder, read)
    replay.restore(_parts(folder, described), described.replay)
    return replay


def _parts(folder: Path, described: Description) -> Iterator[tuple[list[tuple[int, int]], dict[str, Tensor]]]:
    """The replay's segments, one in memory at a time: together they are as large as the replay."""
    for segment in described.segments:
        yield segment.marks, load_file(folder / segment.file)


def read_best(folder: Path) -> PolicyFile:
    """What acted in the best evaluation of a run."""
    if not (folder / "latest.json").exists() and not (folder / "previous.json").exists():
        raise UserError(f"There is no checkpoint in {folder} yet: let the run reach its first checkpoint.")
    best = _newest_whole(folder, lambda described: described)[0].best
    if best is None:
        raise UserError(
            f"{folder} keeps no best policy yet: let the run reach a checkpoint after its first evaluation, "
            "or leave --best out."
        )
    try:
        _check_file(folder / best.file, best.sha256)
    except DAMAGE as error:
        raise UserError(f"The best policy in {folder} cannot be read ({_reason(error)}): leave --best out.") from None
    return read_policy_file(folder / best.file)


def _newest_whole(folder: Path, read: Callable[[Description], T]) -> tuple[T, str | None]:
    """What `read` makes of the newest checkpoint that is whole, and what is wrong with the one after it, if it is."""
    problem = None
    for name in ("latest.json", "previous.json"):
        refuse_odd(folder / name, folders=[folder])
        try:
            return read(Description.from_text((folder / name).read_text(encoding="utf-8"))), problem
        except DAMAGE as error:
            problem = problem or _reason(error)
    raise UserError(
        f"The checkpoint in {folder} cannot be read ({problem}), nor is there a whole one before it: "
        "restore its files, or delete the folder to begin the run again."
    )


def _described_or_nothing(file: Path) -> list[Description]:
    if not file.is_file():  # there is none yet
        return []
    try:
        return [Description.from_text(file.read_text(encoding="utf-8"))]
    except DAMAGE:  # it is lost, and what only it named stays
        return []


def _run_state(described: Description, state: dict[str, Tensor], learner: Learner) -> RunState:
    under_way = []
    for slot, (number, score) in enumerate(described.under_way):
        actions = state[_actions_of(slot)]
        if len(actions) > described.agent_step or not torch.isfinite(actions).all():
            raise ValueError("its episode_actions are none")
        under_way.append(UnderWay(number, score, [to_action(row, learner.replay.spec) for row in actions.numpy()]))
    return RunState(
        agent_step=described.agent_step,
        under_way=under_way,
        pending={number: _beginning_with(f"evaluation.{number}.", state) for number in described.pending},
        **{name: described.progress[name] for name in _PROGRESS if name in described.progress},
    )


def _actions_of(slot: int) -> str:
    """The tensor with the actions of an environment's episode; the only one of most runs has no number."""
    return f"episode_actions.{slot}" if slot else "episode_actions"


def _check_file(path: Path, sha256: str | None) -> None:
    """ValueError for what is no plain file, or not what was written."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path.name} is no plain file")
    if sha256 is not None:
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise ValueError(f"{path.name} is not what was written: its checksum is another")


def _check_segment(path: Path, segment: Segment, replay: Replay) -> None:
    """ValueError for a stretch that does not fit into the replay; reads only what the file says of its tensors."""
    rings = replay.rings
    with safe_open(path, "pt") as file:
        for number, (transitions, frames) in enumerate(segment.marks):
            suffix = f".{number}" if number else ""
            counts = {"rows": transitions, "places": transitions, "oldest_frame": transitions, "frames": frames}
            shapes = {"rows": rings.rows, "places": rings.places, "frames": rings.frames}
            for name, most in counts.items():
                found = list(file.get_slice(name + suffix).get_shape())
                wanted = list(shapes[name].shape[1:]) if name in shapes else []
                if found[1:] != wanted or found[0] > most:
                    raise ValueError(f"{name} of {path.name} have the shape {tuple(found)}")


def _check_state(state: dict[str, Tensor], learner: Learner) -> None:
    """Refuses tensors that are not all of this learner's, or not numbers to go on from."""
    # An optimiser has no moments before its first update.
    wanted = {name: value for name, value in learner.state().items() if not name.startswith("optimizer.")}
    _check_shapes(state, wanted)
    if broken := _not_finite(state):
        raise ValueError(f"{broken} is not finite")


def _check_shapes(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        kept, own = state[name].shape if name in state else None, value.shape
        # A run that is given more steps may have a larger replay, and its sampler more to remember.
        grown = name.startswith("sampler.") and kept and len(kept) == len(own) and all(map(le, kept, own))
        if kept != own and not grown:
            raise ValueError(f"{name} of shape {tuple(value.shape)} is not in it")


def _not_finite(state: dict[str, Tensor]) -> str | None:
    """The name of a weight or a moment that is not finite, if there is one."""
    names = [
        name
        for name, value in state.items()
        if name.startswith(("agent.", "optimizer.")) and value.is_floating_point()
    ]
    finite = [torch.isfinite(state[name]).all() for name in names]
    # Together: a GPU is waited for once.
    told = torch.stack([one.to(finite[0].device) for one in finite]).tolist() if finite else []
    return next((name for name, fine in zip(names, told, strict=True) if not fine), None)


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


def _beginning_with(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _json(plain: dict[str, Any]) -> str:
    return json.dumps(plain, indent=2)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    name = f"{Path(error.filename).name}: " if isinstance(error, OSError) and error.filename else ""
    return name + str(getattr(error, "strerror", None) or error or type(error).__name__).partition("\n")[0]
