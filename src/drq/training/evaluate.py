"""Evaluation: whole episodes in environments of their own, played side by side so that acting is batched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drq.agents.protocol import Agent
from drq.engine import EngineSettings, HostActor, to_action
from drq.envs.group import EnvironmentGroup
from drq.envs.protocol import EnvSpec
from drq.envs.stack import FrameStack, blank_observations
from drq.errors import UserError
from drq.training.seeds import Purpose, seed_for


@dataclass
class Episode:
    """One episode of an evaluation."""

    score: float = 0.0
    agent_steps: int = 0
    info: dict[str, float] = field(default_factory=dict)
    """Numbers that a Gymnasium environment put into `info` in the last step."""
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

    @property
    def info(self) -> dict[str, float]:
        """The mean of each number in `info`, over the episodes that have it."""
        names = dict.fromkeys(name for episode in self.episodes for name in episode.info)
        return {
            name: float(np.mean([episode.info[name] for episode in self.episodes if name in episode.info]))
            for name in names
        }


ENDLESS = 100_000
"""Agent steps of an episode without a time limit, after which it is taken to have no end."""
MOST_PICTURES = 5_000
"""In a video, three minutes of it: they are all in memory at once, up to 200 kB each."""

MOST_AT_ONCE_UNTIL_ENOUGH = 16
"""Episodes at once where they are played until there are enough agent steps. Of more, more would be played in vain: of
32 games of Pong a sixth of their steps, of 16 a fourteenth."""

ShowProgress = Callable[[int, int, str], None]
"""How much of an evaluation is played, of how much, and in which unit."""


class EvaluationStopped(Exception):
    """The run shall stop: the evaluation is played again, from its beginning, when it goes on."""


class NumberedEpisodes:
    """The episodes of an evaluation, numbered as they begin. A number has its seed.

    Which of them count does not depend on how many are played at once: it is the shortest run of numbers from 0 that
    is long enough.
    """

    def __init__(self, seed: int, episodes: int, min_agent_steps: int) -> None:
        self._seed = seed
        self._episodes = episodes
        self._min_agent_steps = min_agent_steps
        self.begun: list[Episode] = []

    @property
    def limit(self) -> int:
        """No number from this one on will count, so far as is known: it only ever falls."""
        if not self._min_agent_steps:
            return self._episodes
        missing = self._min_agent_steps
        for number, episode in enumerate(self.begun):
            missing -= max(episode.agent_steps, 1)  # no episode is without an agent step
            if missing <= 0:
                return number + 1
        return len(self.begun) + missing

    def progress(self, under_way: Collection[int]) -> tuple[int, int, str]:
        """How much is played, of how much, and in which unit."""
        if self._min_agent_steps:
            played = sum(episode.agent_steps for episode in self.begun)
            return min(played, self._min_agent_steps), self._min_agent_steps, "agent steps"
        return len(self.begun) - len(under_way), self._episodes, "episodes"

    def seeds(self) -> Iterator[int]:
        """Of the episodes that may be needed beyond those begun."""
        numbers = range(len(self.begun), self.limit)
        return (seed_for(self._seed, Purpose.EVALUATION_EPISODE, number) for number in numbers)


class Evaluator:
    """Plays evaluation episodes with an agent."""

    def __init__(
        self, agent: Agent, make_group: Callable[[int], EnvironmentGroup], engine: EngineSettings, parallel: int
    ) -> None:
        """`make_group` makes so many environments; `parallel` is how many episodes are played at once at the most."""
        self.agent = agent
        self.engine = engine
        self._make_group = make_group
        self._parallel = parallel
        self.stopping: Callable[[], bool] = lambda: False
        """Asked before every step of an evaluation."""
        self.show_progress: ShowProgress = lambda done, of, unit: None
        """Told after every step of an evaluation."""
        self._group: EnvironmentGroup | None = None
        self._slots = 0
        self._actor: HostActor | None = None

    def prepare(self, *, episodes: int, min_agent_steps: int) -> EnvSpec:
        """Makes the environments that such an evaluation needs, and says what they are."""
        return self._group_of(self.at_once(episodes, min_agent_steps)).spec

    def evaluate(
        self,
        seed: int,
        *,
        episodes: int,
        min_agent_steps: int = 0,
        video: bool = False,
        exploring_at: int | None = None,
        show: Callable[[NDArray[np.uint8]], None] | None = None,
    ) -> Evaluation:
        """Plays `episodes` episodes, or whole episodes until `min_agent_steps` are played.

        `exploring_at`: not the evaluation's actions but those of training, at that agent step.
        `show` is called with a picture of every state.
        """
        generator = torch.Generator().manual_seed(seed)
        width = self.at_once(episodes, min_agent_steps)
        group = self._group_of(width)
        spec = group.spec
        self._actor = self._actor or HostActor(self.agent, self.engine)
        observations = blank_observations(spec, width)
        stacks = [FrameStack(spec, memory) for memory in observations]
        numbered = NumberedEpisodes(seed, episodes, min_agent_steps)
        number_in: dict[int, int] = {}  # of the episode under way in a slot
        snapshots: list[Any] = []  # of the first episode

        def begin(slots: Iterable[int]) -> None:
            """Episodes in these slots, as long as any are needed."""
            seeds = dict(zip(slots, numbered.seeds(), strict=False))
            if not seeds:
                return
            frames = group.reset(seeds)
            for slot in seeds:
                number_in[slot] = len(numbered.begun)
                numbered.begun.append(Episode())
                stacks[slot].reset(frames[slot])
                record(slot)

        def record(slot: int) -> None:
            if video and number_in[slot] == 0 and len(snapshots) < MOST_PICTURES:
                snapshots.append(group.snapshot(slot))
            if show is not None:
                show(group.develop([group.snapshot(slot)])[0])

        def noise() -> Tensor:
            if exploring_at is None:
                return self.agent.evaluation(width, generator)
            return self.agent.exploration(width, exploring_at, generator)

        begin(range(width))
        while number_in:
            if self.stopping():
                raise EvaluationStopped
            # Idle places are acted for as well: one batch shape for the whole evaluation.
            actions = self._actor.act(observations, noise())
            steps = group.step({slot: to_action(actions[slot], spec) for slot in number_in})
            for slot, step in steps.items():
                episode = numbered.begun[number_in[slot]]
                episode.score += step.score
                episode.agent_steps += 1
                if episode.agent_steps >= ENDLESS and spec.max_episode_agent_steps is None and not step.done:
                    raise UserError(
                        f"An episode of {spec.task} did not end in {ENDLESS:,} agent steps of an evaluation: train "
                        "with a time limit (--env.max-episode-steps), in a new folder."
                    )
                episode.info = step.info or episode.info
                (stacks[slot].reset if spec.stacks_anew(step.discount) else stacks[slot].push)(step.frame)
                record(slot)
            over = [slot for slot, step in steps.items() if step.done]
            for slot in over:
                if video and number_in[slot] == 0:
                    numbered.begun[0].video = group.develop(snapshots)
                    snapshots.clear()
                del number_in[slot]
            begin(sorted(over))
            limit = numbered.limit
            self.show_progress(*numbered.progress(number_in.values()))
            number_in = {slot: number for slot, number in number_in.items() if number < limit}
        return Evaluation(numbered.begun[: numbered.limit])

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def at_once(self, episodes: int, min_agent_steps: int) -> int:
        """How many episodes are played at once."""
        return min(self._parallel, MOST_AT_ONCE_UNTIL_ENOUGH if min_agent_steps else episodes)

    def _group_of(self, slots: int) -> EnvironmentGroup:
        """The environments, as many as are needed or more."""
        if self._group is None or self._slots < slots:
            self.close()
            self._group = self._make_group(slots)
            self._slots = slots
        return self._group
