"""What a new run begins with when it does not begin from nothing: `--init-from`. Only tensors and JSON are read."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor, nn

from drq.config import TrainConfig
from drq.engine import Learner, to_action
from drq.envs import EnvSpec
from drq.errors import UserError
from drq.replay import ACTION, DISCOUNT, DONE, REWARD, Replay
from drq.training.checkpoint_reader import read_replay, read_weights
from drq.training.folder import RunFolder
from drq.training.policy_file import read_policy_file
from drq.training.schedule import Schedule


def begin_with(config: TrainConfig, learner: Learner) -> tuple[str, int]:
    """Puts the weights of `config.init_from` into a new learner, and its replay where that is asked for. Gives a
    sentence about it, and how many transitions came along."""
    source = Path(config.init_from or "")
    if source.is_file():
        if config.init_replay:
            raise UserError(f"{source} is a policy without a replay: leave --init-replay out, or name a run folder.")
        file = read_policy_file(source)
        agent_step, weights, some = file.agent_step, file.weights, True
    else:
        folder = RunFolder(source)
        there = folder.spec  # which refuses what is no run folder
        agent_step, weights = read_weights(folder.checkpoint)
        some = False
    _load(learner.agent.modules, weights, source, some=some)
    text = f"Begins with the weights of {source}, of agent step {agent_step:,}"
    if not config.init_replay:
        return f"{text}.", 0
    _check_same_task(source, there, learner.replay.spec)
    capacity = Schedule(folder.config).capacity
    kept = read_replay(folder.checkpoint, lambda streams: Replay(there, capacity, streams=streams))  # on the CPU
    count = _copy(kept, learner.replay)
    return f"{text}, and with {count:,} transitions of its replay.", count


def _load(modules: nn.ModuleDict, weights: dict[str, Tensor], source: Path, *, some: bool) -> None:
    """Loads weights that fit, all of them or (`some`) those that acting needs; names those that do not."""
    own = modules.state_dict()
    wrong = [
        f"{name} is {_shape(value)} there and {_shape(own[name]) if name in own else 'missing'} here"
        for name, value in weights.items()
        if name not in own or own[name].shape != value.shape
    ]
    missing = [] if some else [name for name in own if name not in weights]
    wrong += [f"{name} is missing there and {_shape(own[name])} here" for name in missing]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            f"The weights of {source} do not fit this run ({'; '.join(wrong[:3])}{more}): repeat its agent, encoder, "
            "hidden units, image size and frame stack, or leave --init-from out."
        )
    if broken := [name for name, value in weights.items() if not torch.isfinite(value).all()]:
        raise UserError(f"{broken[0]} of {source} is not finite: begin with another checkpoint.")
    # An exported file has one of a network and its target: what begins as a copy of a network shall stay one.
    copies = [(one, other) for one, other in combinations(modules, 2) if _equal(modules[one], modules[other])]
    for one, other in [*copies, *((other, one) for one, other in copies)]:
        for name, value in list(weights.items()):
            module, _, rest = name.partition(".")
            if module == one:
                weights.setdefault(f"{other}.{rest}", value)
    modules.load_state_dict(weights, strict=False)


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "a number"


def _equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _check_same_task(source: Path, there: EnvSpec, here: EnvSpec) -> None:
    for name in ("frame_shape", "action_kind", "action_size", "action_repeat"):
        one, other = getattr(there, name), getattr(here, name)
        if one != other:
            raise UserError(
                f"The replay of {source} does not fit this run ({name} is {one} there and {other} here): "
                "leave --init-replay out."
            )


def _copy(source: Replay, into: Replay) -> int:
    """Adds the episodes of one replay to another, dealt out to its streams; the newest stay where not all fit. An
    episode whose beginning is overwritten is left out. Gives how many transitions there were."""
    frames, rows, places = (ring.numpy() for ring in source.rings[:3])
    count, episodes = 0, 0
    for number, stream in enumerate(source.streams):
        begun = False
        for transition in range(stream.oldest, stream.transitions_added):
            slot = number * source.stream_capacity + transition % source.stream_capacity
            row, (frame, age) = rows[slot], places[slot]
            first = number * source.stream_frames
            if age == 0:
                to, begun, episodes = episodes % len(into.streams), True, episodes + 1
                into.begin(frames[first + frame], to)
            if begun:
                after = frames[first + (frame + 1) % source.stream_frames]
                action = to_action(row[ACTION:], into.spec)
                into.add(action, float(row[REWARD]), float(row[DISCOUNT]), bool(row[DONE]), after, to)
                count += 1
    return count
