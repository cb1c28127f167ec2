"""The episodes of training: what the environments play, and how it comes into the replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from drq.engine import DrawnStack
from drq.envs import Action, Frame, Step
from drq.envs.stack import FrameStack
from drq.replay import Replay
from drq.training.clock import Stopwatch
from drq.training.env_worker import EnvWorker
from drq.training.seeds import Purpose, seed_for
from drq.training.state import RunState, UnderWay

FORGETFUL = (
    "The environment did not come back to the state it was left in (it is not a function of its seed and actions): the "
    "run goes on with a new episode, and is not exactly the one that was interrupted."
)


class Episodes:
    """The environments of a run, each with the episode that it plays and its newest frames."""

    def __init__(
        self,
        envs: Sequence[EnvWorker],
        stacks: Sequence[FrameStack | DrawnStack],
        state: RunState,
        replay: Replay,
        seed: int,
        waiting: Stopwatch,
    ) -> None:
        """`waiting` runs while an environment is waited for."""
        self.stacks = stacks
        self._envs = envs
        self._state = state
        self._replay = replay
        self._seed = seed
        self._waiting = waiting
        self._unstored: list[tuple[Action, Step]] = []
        """Each environment's newest transition, until it is in the replay. Its frame is the newest in the stack."""

    @property
    def observations(self) -> NDArray[Any] | Tensor:
        """What the agent chooses the next actions from, a batch."""
        if len(self.stacks) == 1:
            return self.stacks[0].observation[None]
        return np.stack([stack.on_host() for stack in self.stacks])

    @property
    def render_seconds(self) -> float:
        """How long the first environment has drawn frames."""
        return self._envs[0].env.render_seconds

    def begin(self) -> None:
        """The first episodes of a new run."""
        self._state.under_way = [UnderWay(slot) for slot in range(len(self._envs))]
        self._begin(range(len(self._envs)))

    def begin_steps(self, actions: Sequence[Action]) -> Callable[[], list[Step]]:
        """Begins a step of each environment; calling the result waits for them."""
        with self._waiting:
            under_way = [env.step(action) for env, action in zip(self._envs, actions, strict=True)]

        def wait() -> list[Step]:
            with self._waiting:
                return [wait_for_step() for wait_for_step in under_way]

        return wait

    def advance(self, actions: Sequence[Action], steps: Sequence[Step]) -> list[float]:
        """Takes these steps in, and begins episodes where others are over. Gives the returns of those."""
        self._unstored, over = list(zip(actions, steps, strict=True)), []
        for slot, (action, step) in enumerate(self._unstored):
            self._push(slot, step)
            self._state.under_way[slot].score += step.score
            self._state.under_way[slot].actions.append(action)
            if step.done:
                over.append(slot)
        scores = [self._state.under_way[slot].score for slot in over]
        self._begin_next(over)
        return scores

    def _push(self, slot: int, step: Step) -> None:
        stack = self.stacks[slot]
        (stack.reset if self._replay.spec.stacks_anew(step.discount) else stack.push)(step.frame)

    def store(self) -> None:
        """Puts the newest transitions into the replay, if they are not there."""
        for slot, (action, step) in enumerate(self._unstored):
            newest = self.stacks[slot].newest
            self._replay.add(action, step.reward, step.discount, step.done, newest, slot)
        self._unstored = []

    def go_back(self) -> str | None:
        """Leads the environments back to the middle of the episodes in which a checkpoint found them. Gives a sentence
        about those that do not come back."""
        for slot, frame in self._reset(range(len(self._envs))).items():
            self.stacks[slot].reset(frame)
        forgetful: set[int] = set()
        for actions in zip_longest(*(episode.actions for episode in self._state.under_way)):
            playing = [slot for slot, action in enumerate(actions) if action is not None and slot not in forgetful]
            with self._waiting:
                under_way = [self._envs[slot].step(actions[slot]) for slot in playing]
                steps = [wait_for_step() for wait_for_step in under_way]
            for slot, step in zip(playing, steps, strict=True):
                self._push(slot, step)
                if step.done:  # it was not
                    forgetful.add(slot)
        for slot, stack in enumerate(self.stacks):
            if not np.array_equal(stack.on_host(), self._replay.newest_observation(slot)):
                forgetful.add(slot)
        self._begin_next(sorted(forgetful))
        return FORGETFUL if forgetful else None

    def _begin_next(self, slots: Sequence[int]) -> None:
        """Counts the episodes in these places, which are over, and begins others."""
        for slot in slots:
            self._state.episode += 1
            self._state.under_way[slot] = UnderWay(self._state.episode + len(self._envs) - 1)
        if slots:
            self._begin(slots)

    def _begin(self, slots: Iterable[int]) -> None:
        self.store()
        for slot, frame in self._reset(slots).items():
            self.stacks[slot].reset(frame)
            self._replay.begin(self.stacks[slot].newest, slot)

    def _reset(self, slots: Iterable[int]) -> dict[int, Frame]:
        """The first frames of episodes, from the seeds that their numbers give them."""
        with self._waiting:
            numbers = {slot: self._state.under_way[slot].number for slot in slots}
            under_way = {
                slot: self._envs[slot].reset(seed_for(self._seed, Purpose.EPISODE, number))
                for slot, number in numbers.items()
            }
            return {slot: wait_for_frame() for slot, wait_for_frame in under_way.items()}
