"""Reads checkpoints, and verifies what it reads: one that is damaged is passed over for the one before it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from operator import le
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from drq.agents import Agent
from drq.engine import Learner, to_action
from drq.errors import UserError, reason
from drq.replay import Replay, stream_suffix
from drq.training.checkpoint_files import LATEST, PREVIOUS, PROGRESS, Description, Segment, not_finite
from drq.training.folder import refuse_odd
from drq.training.policy_file import PolicyFile, read_policy_file
from drq.training.schedule import Schedule
from drq.training.state import RunState, UnderWay

T = TypeVar("T")

DAMAGE = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a damaged file may raise."""


def exists(folder: Path) -> bool:
    """Whether there is a checkpoint, whole or not."""
    return (folder / LATEST).exists() or (folder / PREVIOUS).exists()


def newest(folder: Path) -> Description:
    """What the newest checkpoint that is whole says of itself."""
    return newest_whole(folder, lambda described: described)[0]


def newest_whole(folder: Path, read: Callable[[Description], T]) -> tuple[T, str | None]:
    """What `read` makes of the newest checkpoint that is whole, and what is wrong with the one after it, if it is."""
    if not exists(folder):
        raise UserError(f"There is no checkpoint in {folder} yet: let the run reach its first checkpoint.")
    problem = None
    for name in (LATEST, PREVIOUS):
        refuse_odd(folder / name, folders=[folder])
        try:
            return read(Description.from_text((folder / name).read_text(encoding="utf-8"))), problem
        except DAMAGE as error:
            problem = problem or reason(error)
    raise UserError(
        f"The checkpoint in {folder} cannot be read ({problem}), nor is there a whole one before it: "
        "restore its files, or delete the folder to begin the run again."
    )


def descriptions(folder: Path) -> dict[Path, Description]:
    """Those that can be read, the newest last."""
    found = {}
    for file in (folder / PREVIOUS, folder / LATEST):
        try:
            if file.is_file():
                found[file] = Description.from_text(file.read_text(encoding="utf-8"))
        except DAMAGE:
            continue
    return found


def newest_agent_step(folder: Path) -> int | None:
    """Of the newest checkpoint in a folder; None where there is none."""
    described = descriptions(folder).get(folder / LATEST)
    return None if described is None else described.agent_step


def read_run(
    folder: Path, learner: Learner, schedule: Schedule | None
) -> tuple[tuple[Description, dict[str, Tensor], RunState], str | None]:
    """What a run goes on from, verified but for the contents of the replay, and what is wrong with the newest
    checkpoint, if it is. The learner is only compared with. One that is further than the schedule is damaged too."""

    def read(described: Description) -> tuple[Description, dict[str, Tensor], RunState]:
        if schedule is not None and described.agent_step > schedule.agent_steps:
            raise ValueError(f"its agent_step {described.agent_step:,} is past the {schedule.agent_steps:,} of the run")
        if schedule is not None and described.updates > schedule.updates_until(described.agent_step):
            raise ValueError(f"it counts {described.updates:,} updates by agent step {described.agent_step:,}")
        check_file(folder / described.state, described.state_sha256)
        for segment in described.segments:
            _check_segment(folder, segment, learner.replay)
        state = load_file(folder / described.state)
        _check_state(state, learner)
        return described, state, _run_state(described, state, learner)

    return newest_whole(folder, read)


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

    def read(described: Description) -> tuple[int, dict[str, Tensor]]:
        check_file(folder / described.state, described.state_sha256)
        own = _beginning_with("agent.", load_file(folder / described.state))
        check(own)
        return described.agent_step, own

    (agent_step, own), problem = newest_whole(folder, read)
    _say_passed_over(folder, problem, "weights", agent_step)
    return agent_step, own


def read_replay(folder: Path, make: Callable[[int], Replay]) -> Replay:
    """A checkpoint's replay, in one that `make` gives for the number of its streams."""

    def read(described: Description) -> tuple[Description, Replay]:
        if described.dropped:
            raise UserError(f"The replay in {folder} was dropped when its run had finished: leave --init-replay out.")
        replay = make(len(described.replay))
        for segment in described.segments:
            _check_segment(folder, segment, replay)
        return described, replay

    (described, replay), problem = newest_whole(folder, read)
    _say_passed_over(folder, problem, "replay", described.agent_step)
    replay.restore(segments_of(folder, described), described.replay)
    return replay


def _say_passed_over(folder: Path, problem: str | None, what: str, agent_step: int) -> None:
    if problem is not None:
        said = f"The newest checkpoint in {folder} is damaged ({problem}): the one before has the {what}, of"
        print(f"{said} agent step {agent_step:,}.", file=sys.stderr)


def segments_of(folder: Path, described: Description) -> Iterator[tuple[list[tuple[int, int]], dict[str, Tensor]]]:
    """The replay's segments, one in memory at a time: together they are as large as the replay."""
    for segment in described.segments:
        yield segment.marks, load_file(folder / segment.file)


def read_best(folder: Path) -> PolicyFile:
    """What acted in the best evaluation of a run."""
    best = newest(folder).best
    if best is None:
        raise UserError(
            f"{folder} keeps no best policy yet: let the run reach a checkpoint after its first evaluation, "
            "or leave --best out."
        )
    try:
        check_file(folder / best.file, best.sha256)
    except DAMAGE as error:
        raise UserError(f"The best policy in {folder} cannot be read ({reason(error)}): leave --best out.") from None
    return read_policy_file(folder / best.file)


def _run_state(described: Description, state: dict[str, Tensor], learner: Learner) -> RunState:
    under_way = []
    for slot, (number, score) in enumerate(described.under_way):
        actions = state[f"episode_actions{stream_suffix(slot)}"]
        if len(actions) > described.agent_step or not torch.isfinite(actions).all():
            raise ValueError("its episode_actions are none")
        under_way.append(UnderWay(number, score, [to_action(row, learner.replay.spec) for row in actions.numpy()]))
    return RunState(
        agent_step=described.agent_step,
        under_way=under_way,
        pending={number: _beginning_with(f"evaluation.{number}.", state) for number in described.pending},
        **{name: described.progress[name] for name in PROGRESS if name in described.progress},
    )


def check_file(path: Path, sha256: str | None) -> None:
    """ValueError for what is no plain file, or not what was written."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path.name} is no plain file")
    if sha256 is not None:
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise ValueError(f"{path.name} is not what was written: its checksum is another")


def _check_segment(folder: Path, segment: Segment, replay: Replay) -> None:
    """The same, and for a stretch that does not fit into the replay, by what the file says of its tensors."""
    rings, path = replay.rings, folder / segment.file
    check_file(path, segment.sha256)
    with safe_open(path, "pt") as file:
        for number, (transitions, frames) in enumerate(segment.marks):
            counts = {"rows": transitions, "places": transitions, "oldest_frame": transitions, "frames": frames}
            shapes = {"rows": rings.rows, "places": rings.places, "frames": rings.frames}
            for name, most in counts.items():
                found = list(file.get_slice(name + stream_suffix(number)).get_shape())
                wanted = list(shapes[name].shape[1:]) if name in shapes else []
                if found[1:] != wanted or found[0] > most:
                    raise ValueError(f"{name} of {path.name} have the shape {tuple(found)}")


def _check_state(state: dict[str, Tensor], learner: Learner) -> None:
    """Refuses tensors that are not all of this learner's, or not numbers to go on from."""
    # An optimiser has no moments before its first update.
    wanted = {name: value for name, value in learner.state().items() if not name.startswith("optimizer.")}
    _check_shapes(state, wanted)
    if broken := not_finite(state):
        raise ValueError(f"{broken} is not finite")


def _check_shapes(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        kept, own = state[name].shape if name in state else None, value.shape
        # A run that is given more steps may have a larger replay, and its sampler more to remember.
        grown = name.startswith("sampler.") and kept and len(kept) == len(own) and all(map(le, kept, own))
        if kept != own and not grown:
            raise ValueError(f"{name} of shape {tuple(value.shape)} is not in it")


def _beginning_with(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
