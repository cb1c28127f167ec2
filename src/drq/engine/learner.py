"""Runs an agent on a device: acting and updating, eagerly or as CUDA graphs. The agent does not notice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drq.agents.protocol import Agent, Metrics
from drq.engine import kernels
from drq.engine.aligned import align
from drq.engine.fused import use_kernels
from drq.engine.graphs import BesideOnStream, Captured, without_a_trace
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
        """Actions for a batch of stacked observations, with the agent's numbers for exploration or evaluation.

        Both come from the host: a few numbers are drawn there faster than a GPU is asked for them.
        """
        return self.begin(observations, noise)()

    def begin(self, observations: NDArray[Any], noise: Tensor) -> Callable[[], NDArray[Any]]:
        """Begins to act; calling the result waits for the actions, and on a GPU for nothing launched after them."""
        if self.engine.cuda_graphs:
            count = len(observations)
            if count not in self._graphs:
                self._graphs[count] = ActingGraph(self.agent, self.engine, observations, noise)
            return self._graphs[count].begin(observations, noise)
        with self.engine.arithmetic():
            on_device = torch.from_numpy(observations).to(self.engine.device)
            actions = self.agent.act(on_device, noise.to(self.engine.device))
        return lambda: actions.cpu().numpy()


class ActingGraph:
    """Acting for a fixed number of observations as a CUDA graph: copies in, networks, copy out, in one launch."""

    def __init__(self, agent: Agent, engine: EngineSettings, observations: NDArray[Any], noise: Tensor) -> None:
        # Copies from and to page-locked memory are queued like kernels; others would wait for the whole queue.
        self._inputs = [tensor.clone().pin_memory() for tensor in (torch.from_numpy(observations), noise)]
        on_device = [tensor.to(engine.device) for tensor in self._inputs]
        with engine.arithmetic():
            actions = agent.act(*on_device)
        self._actions = torch.empty_like(actions, device="cpu").pin_memory()

        def act() -> Tensor:
            for tensor, host in zip(on_device, self._inputs, strict=True):
                tensor.copy_(host, non_blocking=True)
            with engine.arithmetic():
                return self._actions.copy_(agent.act(*on_device), non_blocking=True)

        self._graph = Captured(act, [])
        self._done = torch.cuda.Event()

    def begin(self, observations: NDArray[Any], noise: Tensor) -> Callable[[], NDArray[Any]]:
        self._done.synchronize()  # the buffers below are free once the last actions have come out
        self._inputs[0].numpy()[...] = observations
        self._inputs[1].copy_(noise)
        self._graph.replay()
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
        self.acting_generator = torch.Generator().manual_seed(seed + 1)
        self.actor = Actor(agent, replay.spec, engine)
        self._graphs: dict[Hashable, Captured[Metrics]] = {}
        self._metrics: Metrics = {}
        self._kernels = engine.kernels and kernels.available()
        self.fused = False
        """Whether convolutions go through our kernels."""
        if self._kernels:
            try:
                self.fused = use_kernels(agent, replay, convolve=engine.precision == "bf16")
            except kernels.KernelError as error:
                self._kernels = False
                reason = str(error).splitlines()[0].rstrip(":.")
                print(f"Going on with PyTorch's kernels: {reason}.", file=sys.stderr)
        if not self.fused:
            lay_out(agent)
        if engine.on_tensor_cores:
            align(agent)
        self._beside = BesideOnStream() if engine.cuda_graphs and hasattr(agent, "beside") else None
        if self._beside:
            agent.beside = self._beside  # type: ignore[attr-defined]
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
            replay, count = self.replay, self.agent.batch_size
            if self._kernels:
                batch = kernels.transitions(replay, replay.draw(count, self.generator))
            else:
                batch = replay.gather(replay.sample(count, self.generator))
            if self._beside:
                self._beside.begin()
            with self.engine.arithmetic():
                return self.agent.update(batch, draws, phase)

        return update

    def _compile(self) -> None:
        """Compiles the agent's losses, the only parts that are worth it."""
        for name in self.agent.compiled:
            setattr(self.agent, name, torch.compile(getattr(self.agent, name), dynamic=False))
