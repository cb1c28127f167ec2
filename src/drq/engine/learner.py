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
        self._captured: dict[int, tuple[Captured[Tensor], Tensor, Tensor]] = {}

    def act(self, observations: NDArray[Any], noise: Tensor) -> NDArray[Any]:
        """Actions for a batch of stacked observations, with the agent's exploration or evaluation numbers."""
        obs = torch.from_numpy(observations)
        if not self.engine.cuda_graphs:
            with self.engine.arithmetic():
                action = self.agent.act(obs.to(self.engine.device), noise)
            return action.cpu().numpy()
        count = len(observations)
        if count not in self._captured:
            self._captured[count] = self._capture(obs, noise)
        graph, static_obs, static_noise = self._captured[count]
        static_obs.copy_(obs, non_blocking=True)
        static_noise.copy_(noise)
        return graph.replay().cpu().numpy()

    def _capture(self, obs: Tensor, noise: Tensor) -> tuple[Captured[Tensor], Tensor, Tensor]:
        static_obs = obs.to(self.engine.device)
        static_noise = noise.clone()

        def act() -> Tensor:
            with self.engine.arithmetic():
                return self.agent.act(static_obs, static_noise)

        return Captured(act, []), static_obs, static_noise

    def action(self, observation: NDArray[Any], noise: Tensor) -> Action:
        """The action for one observation, as an environment takes it."""
        return to_action(self.act(observation[None], noise)[0], self.spec)


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
            # The order in which tensor cores, and vectorised CPU convolutions, read images without turning them.
            agent.modules.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        engine.apply_globally()
        if engine.compile:
            self._compile()

    def action(self, observation: NDArray[Any], agent_step: int) -> Action:
        """An exploring action."""
        return self.actor.action(observation, self.agent.exploration(1, agent_step, self.acting_generator))

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
