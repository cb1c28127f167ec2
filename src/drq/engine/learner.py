"""Runs an agent on a device: acting and updating, eagerly or as CUDA graphs. The agent does not notice."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from drq.agents.protocol import Agent, Metrics
from drq.engine.backend import FastBackend
from drq.engine.graphs import Captured, without_a_trace
from drq.engine.settings import EngineSettings
from drq.envs.protocol import Action, EnvSpec
from drq.replay import Replay


class HostActor:
    """Turns observations into actions on the host."""

    def __init__(self, agent: Agent, engine: EngineSettings) -> None:
        self.agent = agent
        self.engine = engine
        self._graphs: dict[int, ActingGraph] = {}

    def act(self, observations: NDArray[Any] | Tensor, noise: Tensor) -> NDArray[Any]:
        """Actions for a batch of stacked observations, with the agent's numbers for exploration or evaluation.

        The numbers come from the host: a few are drawn there faster than a GPU is asked for them. So do observations,
        unless they are a tensor, which is on the device already.
        """
        return self.begin(observations, noise)()

    def begin(self, observations: NDArray[Any] | Tensor, noise: Tensor) -> Callable[[], NDArray[Any]]:
        """Begins to act; calling the result waits for the actions, and with CUDA graphs for nothing launched after
        them."""
        if self.engine.cuda_graphs:
            count = len(observations)
            if count not in self._graphs:
                self._graphs[count] = ActingGraph(self.agent, self.engine, observations, noise)
            return self._graphs[count].begin(observations, noise)
        on_device = torch.as_tensor(observations, device=self.engine.device)
        actions = self.agent.act(on_device, noise.to(self.engine.device))
        return lambda: actions.cpu().numpy()


class ActingGraph:
    """Acting for a fixed number of observations as a CUDA graph: copies in, networks, copy out, in one launch.

    Observations are always on the host or always on the device. These are copied before the launch.
    """

    def __init__(
        self, agent: Agent, engine: EngineSettings, observations: NDArray[Any] | Tensor, noise: Tensor
    ) -> None:
        # Copies from and to page-locked memory are queued like kernels; others would wait for the whole queue.
        inputs = torch.as_tensor(observations), noise
        on_device = [tensor.to(engine.device, copy=True) for tensor in inputs]
        staged = [tensor.clone().pin_memory() if not tensor.is_cuda else None for tensor in inputs]
        self._on_device, self._staged = on_device, staged
        actions = agent.act(*on_device)
        self._actions = torch.empty_like(actions, device="cpu").pin_memory()

        def act() -> Tensor:
            for tensor, host in zip(on_device, staged, strict=True):
                if host is not None:
                    tensor.copy_(host, non_blocking=True)
            return self._actions.copy_(agent.act(*on_device), non_blocking=True)

        self._graph = Captured(act, [])
        self._done = torch.cuda.Event()

    def begin(self, observations: NDArray[Any] | Tensor, noise: Tensor) -> Callable[[], NDArray[Any]]:
        self._done.synchronize()  # the buffers below are free once the last actions have come out
        for tensor, host, new in zip(self._on_device, self._staged, (observations, noise), strict=True):
            (tensor if host is None else host).copy_(torch.as_tensor(new), non_blocking=True)
        self._graph.replay()
        self._done.record()

        def wait() -> NDArray[Any]:
            self._done.synchronize()
            return self._actions.numpy().copy()

        return wait


def to_action(value: Any, spec: EnvSpec) -> Action:
    """An action as an environment takes it, from a row of an agent's output or of the replay."""
    if spec.action_kind == "discrete":
        return int(np.asarray(value).reshape(()))
    return np.asarray(value, dtype=np.float32)


class Learner:
    """An agent with its replay and its random numbers: what a loop calls."""

    def __init__(self, agent: Agent, replay: Replay, backend: FastBackend, seed: int) -> None:
        """The backend is the one that agent and replay were constructed with."""
        self.agent = agent
        self.replay = replay
        self.backend = backend
        self.engine = backend.settings
        self.seed = seed
        self.updates = 0
        self.generator = torch.Generator(backend.device).manual_seed(seed)
        """Draws everything of the updates."""
        self.acting_generator = torch.Generator().manual_seed(seed + 1)
        self.actor = HostActor(agent, backend.settings)
        self._graphs: dict[Hashable, Captured[Metrics]] = {}
        self._metrics: Metrics = {}
        backend.prepare(agent, replay)

    @property
    def runs_ahead(self) -> bool:
        """Whether `update` only launches the work, so that it may be called before the action has arrived."""
        return self.engine.device.type == "cuda"

    def actions(self, observations: NDArray[Any] | Tensor, agent_step: int) -> Callable[[], list[Action]]:
        """Begins to choose exploring actions for a batch; calling the result waits for them."""
        noise = self.agent.exploration(len(observations), agent_step, self.acting_generator)
        wait = self.actor.begin(observations, noise)
        return lambda: [to_action(row, self.replay.spec) for row in wait()]

    def update(self) -> None:
        """One update. On a GPU it is launched, not waited for."""
        agent = self.agent
        agent.before_update(self.updates, _mixed(self.seed, self.updates))
        self.backend.refresh()
        self.replay.set_returns(*agent.returns(self.updates))
        phase = agent.phase(self.updates)
        if self.engine.cuda_graphs:
            if phase not in self._graphs:
                with without_a_trace(agent, self.replay.sampler, self.generator):
                    self._graphs[phase] = Captured(lambda: self._update(phase), [self.generator])
            metrics = self._graphs[phase].replay()
        else:
            metrics = self._update(phase)
        self.updates += 1
        self._metrics = {**self._metrics, **metrics}

    def metrics(self) -> dict[str, float]:
        """The newest value of every metric. Waits for the device."""
        return {name: float(value) for name, value in self._metrics.items()}

    def restore_metrics(self, metrics: dict[str, float]) -> None:
        """Puts back what `metrics` gave, so that a resumed run logs what the interrupted one would have."""
        self._metrics = {name: torch.tensor(value) for name, value in metrics.items()}

    def state(self) -> dict[str, Tensor]:
        """All tensors that go on from one update to the next, but for the replay's rings."""
        state = {f"agent.{name}": value for name, value in self.agent.modules.state_dict().items()}
        for name, optimizer in self.agent.optimizers.items():
            for number, parameter in enumerate(_parameters(optimizer)):
                for key, value in optimizer.state[parameter].items():
                    state[f"optimizer.{name}.{number}.{key}"] = value
        state |= {f"sampler.{name}": value for name, value in self.replay.sampler.state().items()}
        state["generator.updates"] = self.generator.get_state()
        state["generator.acting"] = self.acting_generator.get_state()
        return state

    def restore(self, state: dict[str, Tensor]) -> None:
        """Puts back what `state` gave. The replay's rings have to be there again before."""
        self.agent.modules.load_state_dict(_beginning_with("agent.", state))
        for name, optimizer in self.agent.optimizers.items():
            for number, parameter in enumerate(_parameters(optimizer)):
                own = _beginning_with(f"optimizer.{name}.{number}.", state)
                if own:
                    # The fused step walks through memory: a moment must lie there in the order of its parameter.
                    optimizer.state[parameter] = {
                        key: value.to(parameter.device)
                        if key == "step"
                        else torch.empty_like(parameter, requires_grad=False).copy_(value)
                        for key, value in own.items()
                    }
        kept = _beginning_with("sampler.", state)
        for name, value in self.replay.sampler.state().items():
            if value.shape == kept[name].shape:
                value.copy_(kept[name])
            else:  # the replay of a run that was given more steps: in a larger ring transitions are elsewhere
                parts = (slots.unflatten(0, (len(self.replay.streams), -1)) for slots in (value, kept[name]))
                for stream, now, before in zip(self.replay.streams, *parts, strict=True):
                    numbers = torch.arange(stream.oldest, stream.transitions_added)
                    now[numbers % len(now)] = before[numbers % len(before)].to(now.device)
        self.generator.set_state(state["generator.updates"])
        self.acting_generator.set_state(state["generator.acting"])

    def _update(self, phase: Any) -> Metrics:
        draws = self.agent.draw(self.generator)
        batch = self.backend.batch(self.replay, self.replay.draw(self.agent.batch_size, self.generator))
        self.backend.begin_update()
        metrics, errors = self.agent.update(batch, draws, phase)
        if errors is not None and batch.slots is not None:
            self.replay.sampler.learnt(batch.slots, errors)
        return metrics


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _beginning_with(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _mixed(seed: int, update: int) -> int:
    """Another seed for every update."""
    return (seed * 1_000_003 + update) % 2**31
