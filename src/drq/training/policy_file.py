"""A policy in one file: the weights that acting needs, the task's shapes, preprocessing and action range.

It is a safetensors file with a description in its header: no replay, nothing that is executed when it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file as save_tensors
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from drq.agents import Agent
from drq.config import TrainConfig, check
from drq.envs import EnvSpec
from drq.envs.protocol import spec_from_json
from drq.envs.stack import blank_observations
from drq.errors import UserError, reason
from drq.settings import config_from_json, config_to_json, parse_json
from drq.training.folder import unfinished_name

FORMAT = 1
"""Version of the file's layout."""


class PolicyFile(NamedTuple):
    """What is in the file."""

    config: TrainConfig
    spec: EnvSpec
    agent_step: int
    weights: dict[str, Tensor]

    def load_into(self, agent: Agent) -> int:
        """Puts the weights into an agent; gives the agent step they are from. What acting does not need is left."""
        own = agent.modules.state_dict()
        missing = [name for name in acting_weights(agent, self.spec) if name not in self.weights]
        strange = [name for name, w in self.weights.items() if name not in own or own[name].shape != w.shape]
        if missing or strange:
            named = (missing + strange)[0]
            raise UserError(f"The policy's weights do not fit its settings ({named}): export it again.")
        agent.modules.load_state_dict(self.weights, strict=False)
        return self.agent_step


def header(policy: PolicyFile) -> dict[str, str]:
    """What the file says beside its weights."""
    # Where it was trained, and which modules of the user's were imported, are nobody else's business.
    config = dataclasses.replace(policy.config, dir=None, imports=(), init_from=None, init_replay=False)
    described = {
        "format": FORMAT,
        "config": config_to_json(config),
        "spec": dataclasses.asdict(policy.spec),
        "agent_step": policy.agent_step,
    }
    return {"drq": json.dumps(described)}


def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """As safetensors', whose files only their owner may read: with the permissions of other files."""
    path.touch()
    mode = path.stat().st_mode
    save_tensors(tensors, path, metadata)
    with contextlib.suppress(OSError):  # of file systems that know no permissions
        path.chmod(mode)


def write_policy_file(path: Path, policy: PolicyFile) -> None:
    """The file appears whole or not at all."""
    unfinished = unfinished_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(policy.weights, unfinished, header(policy))
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # where nothing may be written, nothing was
            unfinished.unlink()
        raise UserError(f"{path} cannot be written ({reason(error)}): choose another --out.") from error


def read_policy_file(path: Path) -> PolicyFile:
    """What `drq export` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            described: Mapping[str, Any] = parse_json((file.metadata() or {})["drq"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if described["format"] != FORMAT:
            raise UserError(
                f"{path} is a policy of format {described['format']} and this version of drq reads {FORMAT}: "
                "use the version that wrote it."
            )
        config = config_from_json(described["config"])
        check(config)
        if type(agent_step := described["agent_step"]) is not int:
            raise ValueError(f"its agent_step is {agent_step!r}")
        return PolicyFile(config, spec_from_json(described["spec"]), agent_step, weights)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is no policy that `drq export` wrote ({reason(error)}): name its .drq file, or a run folder."
        ) from error


class _UsedParameters(TorchFunctionMode):
    """Notes which of some tensors are computed with."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, Tensor) and id(leaf) in self._names:
                self.found.add(self._names[id(leaf)])
        return func(*args, **(kwargs or {}))


def acting_weights(agent: Agent, spec: EnvSpec) -> list[str]:
    """Names of the weights that acting computes with: found by acting once, so that it is so for any agent."""
    names = {id(tensor): name for name, tensor in (*agent.modules.named_parameters(), *agent.modules.named_buffers())}
    device = agent.backend.device
    observation = torch.from_numpy(blank_observations(spec, 1))
    noise = agent.evaluation(1, torch.Generator().manual_seed(0))
    with _UsedParameters(names) as used:
        agent.act(observation.to(device), noise.to(device))
    return [name for name in names.values() if name in used.found]
