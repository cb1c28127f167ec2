"""Evaluation: whole episodes in environments of their own, played side by side so that acting is batched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from drq.agents.protocol import Agent
from drq.engine.learner import Actor, to_action
from drq.engine.settings import EngineSettings
from drq.envs.group import EnvironmentGroup
from drq.envs.protocol import EnvSpec, Frame
from drq.training.seeds import Purpose, seed_for


class FrameStack:
    """The newest frames of one episode as an observation; the first frame is repeated at a reset."""

    def __init__(self, spec: EnvSpec) -> None:
        self._channels = spec.frame_shape[0]
        self._stack = np.zeros(spec.observation_shape, dtype=np.uint8 if spec.pixels else np.float32)

    def reset(self, frame: Frame) -> None:
        for start in range(0, len(self._stack), self._channels):
            self._stack[start : start + self._channels] = frame

    def push(self, frame: Frame) -> None:
        self._stack[: -self._channels] = self._stack[self._channels :]
        self._stack[-self._channels :] = frame

    @property
    def observation(self) -> NDArray[Any]:
        return self._stack


@dataclass
class Episode:
    """One episode of an evaluation."""

    score: float = 0.0
    agent_steps: int = 0
    video: list[NDArray[np.uint8]] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluation:
    """The episodes of one evaluation, in the order of their seeds."""

    episodes: list[Episode]

    @property
    def scores(self) -> NDArray[np.float64]:
        return np.array([episode.score for episode in self.episodes])

    @property
    def mean(self) -> float:
        return float(self.scores.mean())

    @property
    def std(self) -> float:
        """Population standard deviation over the episodes of this evaluation."""
        return float(self.scores.std())


class Evaluator:
    """Plays evaluation episodes with an agent.

    Which episodes count does not depend on how many are played at once: they are numbered, each has its own seed,
    and an evaluation is the shortest run of numbers from 0 that is long enough.
    """

    def __init__(
        self,
        agent: Agent,
        make_group: Callable[[int], EnvironmentGroup],
        engine: EngineSettings,
        parallel: int,
    ) -> None:
        """`make_group` makes so many environments; `parallel` is how many episodes are played at once."""
        self.agent = agent
        self.engine = engine
        self._make_group = make_group
        self._parallel = parallel
        self._group: EnvironmentGroup | None = None
        self._slots = 0
        self._actor: Actor | None = None

    def evaluate(
        self, seed: int, *, episodes: int, min_agent_steps: int = 0, video: bool = False
    ) -> Evaluation:
        """Plays `episodes` episodes, or whole episodes until `min_agent_steps` are played."""
        generator = torch.Generator(self.engine.device).manual_seed(seed)
        width = self._parallel if min_agent_steps else min(self._parallel, episodes)
        group = self._group_of(width)
        spec = group.spec
        self._actor = self._actor or Actor(self.agent, spec, self.engine)
        stacks = [FrameStack(spec) for _ in range(width)]
        played: dict[int, Episode] = {}
        finished: set[int] = set()
        number_in: list[int | None] = [None] * width

        def enough() -> int | None:
            """How many episodes the evaluation consists of, once that is known."""
            if not min_agent_steps:
                return episodes
            total = 0
            for number in range(len(played)):
                if number not in finished:
                    return None
                total += played[number].agent_steps
                if total >= min_agent_steps:
                    return number + 1
            return None

        def begin(slot: int) -> None:
            number = len(played)
            limit = enough()
            if limit is not None and number >= limit:
                number_in[slot] = None
                return
            number_in[slot] = number
            episode = played[number] = Episode()
            stacks[slot].reset(group.reset(slot, seed_for(seed, Purpose.EVALUATION_EPISODE, number)))
            if video and number == 0:
                episode.video.append(group.render(slot))

        for slot in range(width):
            begin(slot)
        while any(number is not None for number in number_in):
            limit = enough()
            if limit is not None and all(number in finished for number in range(limit)):
                break
            # Idle places are acted for as well: one batch shape for the whole evaluation.
            observations = np.stack([stack.observation for stack in stacks])
            actions = self._actor.act(observations, self.agent.evaluation(width, generator))
            playing = {slot: number for slot, number in enumerate(number_in) if number is not None}
            steps = group.step({slot: to_action(actions[slot], spec) for slot in playing})
            for slot, number in playing.items():
                step = steps[slot]
                episode = played[number]
                episode.score += step.score
                episode.agent_steps += 1
                stacks[slot].push(step.frame)
                if video and number == 0:
                    episode.video.append(group.render(slot))
                if step.done:
                    finished.add(number)
                    begin(slot)
        limit = enough()
        assert limit is not None
        return Evaluation([played[number] for number in range(limit)])

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def _group_of(self, slots: int) -> EnvironmentGroup:
        """The environments, as many as are needed or more."""
        if self._group is None or self._slots < slots:
            self.close()
            self._group = self._make_group(slots)
            self._slots = slots
        return self._group
