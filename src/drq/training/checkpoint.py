"""Checkpoints: atomic, as cheap as what is new, and nothing in them is code.

    checkpoint/latest.json                  what belongs together; replaced as a whole, last
    checkpoint/state-<agent_step>...        networks, optimisers, random generators
    checkpoint/replay-<agent_step>...       what the replay gained since the checkpoint before

A crash at any moment leaves the previous latest.json and every file it names.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drq.agents.protocol import Agent
from drq.engine.learner import Learner
from drq.errors import UserError
from drq.training.folder import write_atomically


@dataclass(frozen=True)
class Segment:
    """A file with a stretch of the replay, and the numbers after its last transition and frame."""

    file: str
    transitions_end: int
    frames_end: int


class Checkpoints:
    """The checkpoint folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._latest = folder / "latest.json"
        self._segments: list[Segment] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, learner: Learner, agent_step: int, progress: dict[str, Any], episode_actions: Tensor) -> None:
        """Takes a snapshot now and writes it while training goes on. `progress` is whatever the loop needs back."""
        self.wait()
        self.folder.mkdir(exist_ok=True)
        replay = learner.replay
        last = self._segments[-1] if self._segments else Segment("", 0, 0)
        fresh = replay.written_since(last.transitions_end, last.frames_end)
        anything_new = len(fresh["rows"]) or len(fresh["frames"])
        segments = [
            old
            for old in self._segments
            if old.transitions_end > replay.transitions_added - replay.capacity
            or old.frames_end > replay.frames_added - replay.frame_capacity
        ]
        if anything_new:
            name = f"replay-{agent_step:010d}.safetensors"
            segments.append(Segment(name, replay.transitions_added, replay.frames_added))
        state = {name: tensor.detach().cpu().clone() for name, tensor in _state_of(learner).items()}
        state["episode_actions"] = episode_actions
        state_file = f"state-{agent_step:010d}.safetensors"
        described = {
            "agent_step": agent_step,
            "updates": learner.updates,
            "device": learner.engine.device.type,
            "state": state_file,
            "segments": [asdict(part) for part in segments],
            "replay": replay.counters(),
            "progress": progress,
        }

        def write() -> None:
            if anything_new:
                _save_durably(fresh, self.folder / segments[-1].file)
            _save_durably(state, self.folder / state_file)
            write_atomically(self._latest, json.dumps(described, indent=2) + "\n")
            self._remove_all_but({state_file, *(part.file for part in segments)})

        self._segments = segments
        self._writing = self._writer.submit(write)

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

    def restore(self, learner: Learner) -> tuple[int, dict[str, Any], Tensor] | None:
        """Puts the learner back to the latest checkpoint, if there is one.

        Gives its agent step, the loop's own words, and the actions of the episode under way.
        """
        if not self._latest.exists():
            return None
        try:
            described = json.loads(self._latest.read_text())
            if described["device"] != learner.engine.device.type:
                raise UserError(
                    f"The run was begun on {described['device']} and its random numbers go on only there: "
                    f"add --device {described['device']}, or choose another --dir."
                )
            self._segments = [Segment(**part) for part in described["segments"]]
            # One file in memory at a time: together they are as large as the replay.
            parts = (
                (part.transitions_end, part.frames_end, load_file(self.folder / part.file))
                for part in self._segments
            )
            learner.replay.restore(parts, described["replay"])
            state = load_file(self.folder / described["state"])
            _put_back(learner, state)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"The checkpoint in {self.folder} cannot be read ({error}): "
                "restore its files, or delete the folder to begin the run again."
            ) from error
        learner.updates = described["updates"]
        self._remove_all_but({described["state"], *(part.file for part in self._segments)})
        return described["agent_step"], described["progress"], state["episode_actions"]

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def _remove_all_but(self, keep: set[str]) -> None:
        for file in self.folder.glob("*.safetensors*"):
            if file.name not in keep:
                file.unlink(missing_ok=True)


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


def _state_of(learner: Learner) -> dict[str, Tensor]:
    state = {f"agent.{name}": value for name, value in learner.agent.modules.state_dict().items()}
    for name, optimizer in learner.agent.optimizers.items():
        for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
            for key, value in optimizer.state[parameter].items():
                state[f"optimizer.{name}.{number}.{key}"] = value
    state["generator.updates"] = learner.generator.get_state()
    state["generator.acting"] = learner.acting_generator.get_state()
    return state


def _put_back(learner: Learner, state: dict[str, Tensor]) -> None:
    agent = learner.agent
    agent.modules.load_state_dict(
        {name.removeprefix("agent."): value for name, value in state.items() if name.startswith("agent.")}
    )
    for name, optimizer in agent.optimizers.items():
        for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
            prefix = f"optimizer.{name}.{number}."
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if own:
                # The fused step walks through memory: a moment must lie there in the order of its parameter.
                optimizer.state[parameter] = {
                    key: value.to(parameter.device)
                    if key == "step"
                    else torch.empty_like(parameter, requires_grad=False).copy_(value)
                    for key, value in own.items()
                }
    learner.generator.set_state(state["generator.updates"])
    learner.acting_generator.set_state(state["generator.acting"])


def _save_durably(tensors: dict[str, Tensor], path: Path) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished)
    with open(unfinished, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)
