"""Runs an agent on a device: acting and updating, eagerly or as CUDA graphs. The agent does not notice."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drq.agents.protocol import Agent, Metrics
from drq.engine.fused import fuse
from drq.engine.graphs import Captured, without_a_trace
from drq.engine.settings import EngineSettings
from drq.envs.protocol import Action, EnvSpec
from drq.replay import Replay


class Actor:
    """Turns observations on the host into actions on the host."""

    def __init__(self, agent: Agent, spec: EnvSpec, engine: EngineSettings) -> None:
        self.agent = agent
        self.spec = spec
        self.engine = engine
        self._graphs: dict[int, ActingGraph] = {}

    def act(self, observations: NDArray[Any], noise: Tensor) -> NDArray[Any]:
        """Actions for a batch of stacked observations, with the agent's exploration or evaluation numbers."""
        return self.begin(observations, noise)()

    def begin(self, observations: NDArray[Any], noise: Tensor) -> Callable[[], NDArray[Any]]:
        """Begins to act; calling the result waits for the actions, and on a GPU for nothing launched after them."""
        if self.engine.cuda_graphs:
            count = len(observations)
            if count not in self._graphs:
                self._graphs[count] = ActingGraph(self.agent, self.engine, observations, noise)
            return self._graphs[count].begin(observations, noise)
        with self.engine.arithmetic():
            actions = self.agent.act(torch.from_numpy(observations).to(self.engine.device), noise)
        return lambda: actions.cpu().numpy()


class ActingGraph:
    """Acting for a fixed number of observations as a CUDA graph, with its copies in and out."""

    def __init__(self, agent: Agent, engine: EngineSettings, observations: NDArray[Any], noise: Tensor) -> None:
        # Copies from and to page-locked memory are queued like kernels; others would wait for the whole queue.
        self._observations = torch.from_numpy(observations).pin_memory()
        self._on_device = self._observations.to(engine.device)
        self._noise = noise.clone()

        def act() -> Tensor:
            with engine.arithmetic():
                return agent.act(self._on_device, self._noise)

        self._graph = Captured(act, [])
        self._actions = torch.empty_like(self._graph.result, device="cpu").pin_memory()
        self._done = torch.cuda.Event()

    def begin(self, observations: NDArray[Any], noise: Tensor) -> Callable[[], NDArray[Any]]:
        self._done.synchronize()  # the buffers below are free once the last actions have come out
        self._observations.numpy()[...] = observations
        self._on_device.copy_(self._observations, non_blocking=True)
        self._noise.copy_(noise)
        self._actions.copy_(self._graph.replay(), non_blocking=True)
        self._done.record()

        def wait() -> NDArray[Any]:
            self._done.synchronize()
            return self._actions.numpy().copy()

        return wait


def lay_out(agent: Agent) -> None:
    """Puts weights into the order in which tensor cores, and vectorised CPUs, read images without turning them.

    Rounding depends on it: whatever acts with an agent's weights lays them out alike.
    """
    agent.modules.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def to_action(value: Any, spec: EnvSpec) -> Action:
    """An action as an environment takes it, from a row of an agent's output or of the replay."""
    if spec.action_kind == "discrete":
        return int(np.asarray(value).reshape(()))
    return np.asarray(value, dtype=np.float32)


class Learner:
    """An agent with its replay and its random numbers: what a loop calls."""

    def __init__(self, agent: Agent, replay: Replay, engine: EngineSettings, seed: int) -> None:
        self.agent = agent
        self.replay = replay
        self.engine = engine
        self.updates = 0
        self.generator = torch.Generator(engine.device).manual_seed(seed)
        """Draws everything of the updates."""
        self.acting_generator = torch.Generator(engine.device).manual_seed(seed + 1)
        self.actor = Actor(agent, replay.spec, engine)
        self._graphs: dict[Hashable, Captured[Metrics]] = {}
        self._metrics: Metrics = {}
        self.fused = engine.kernels and fuse(agent, replay)
        if not self.fused:
            lay_out(agent)
        engine.apply_globally()
        if engine.compile:
            self._compile()

    @property
    def runs_ahead(self) -> bool:
        """Whether `update` only launches the work, so that it may be called before the action has arrived."""
        return self.engine.device.type == "cuda"

    def action(self, observation: NDArray[Any], agent_step: int) -> Callable[[], Action]:
        """Begins to choose an exploring action; calling the result waits for it."""
        noise = self.agent.exploration(1, agent_step, self.acting_generator)
        wait = self.actor.begin(observation[None], noise)
        return lambda: to_action(wait()[0], self.replay.spec)

    def update(self) -> None:
        """One update. On a GPU it is launched, not waited for."""
        phase = self.agent.phase(self.updates)
        if self.engine.cuda_graphs:
            if phase not in self._graphs:
                with without_a_trace(self.agent, self.generator):
                    self._graphs[phase] = Captured(self._update_of(phase), [self.generator])
            metrics = self._graphs[phase].replay()
        else:
            metrics = self._update_of(phase)()
        self.updates += 1
        self._metrics = {**self._metrics, **metrics}

    def metrics(self) -> dict[str, float]:
        """The newest value of every metric. Waits for the device."""
        return {name: float(value) for name, value in self._metrics.items()}

    def restore_metrics(self, metrics: dict[str, float]) -> None:
        """Puts back what `metrics` gave, so that a resumed run logs what the interrupted one would have."""
        self._metrics = {name: torch.tensor(value) for name, value in metrics.items()}

    def _update_of(self, phase: Any) -> Callable[[], Metrics]:
        def update() -> Metrics:
            draws = self.agent.draw(self.generator)
            slots = self.replay.sample(self.agent.batch_size, self.generator)
            with self.engine.arithmetic():
                return self.agent.update(self.replay.gather(slots), draws, phase)

        return update

    def _compile(self) -> None:
        """Compiles the agent's losses, the only parts that are worth it."""
        for name in self.agent.compiled:
            setattr(self.agent, name, torch.compile(getattr(self.agent, name), dynamic=False))
