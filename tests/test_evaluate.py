"""Evaluation against episodes played one after the other by the plainest loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from drq.engine.settings import EngineSettings
from drq.envs import Action, EnvironmentGroup, EnvSpec, Frame, Step
from drq.envs.group import ThreadedGroup
from drq.envs.stack import FrameStack
from drq.errors import UserError
from drq.training.evaluate import Episode, Evaluation, Evaluator
from drq.training.seeds import Purpose, seed_for

SPEC = EnvSpec(
    task="toy/dice",
    frame_shape=(2, 3, 3),
    frame_stack=3,
    action_kind="discrete",
    action_size=5,
    action_repeat=1,
    max_episode_agent_steps=None,
)
ENGINE = EngineSettings(
    device=torch.device("cpu"),
    precision="float32",
    compile=False,
    cuda_graphs=False,
    kernels=False,
    eval_process=False,
)
SEED = 7


class Dice:
    """Episodes of 1 to 12 agent steps with frames and scores from a generator that every action moves on."""

    spec = SPEC
    render_seconds = 0.0

    def reset(self, seed: int) -> Frame:
        self._seed = seed
        self._random = np.random.default_rng(seed)
        self._left = int(self._random.integers(1, 13))
        self._played = 0
        return self._frame()

    def step(self, action: Action) -> Step:
        assert isinstance(action, int)
        self._random.bit_generator.advance(action)  # type: ignore[attr-defined]
        self._left -= 1
        self._played += 1
        score = float(self._random.integers(100))
        # What is learnt from is not what is reported, as with the clipped rewards of Atari.
        return Step(self._frame(), -1.0, 1.0, self._left == 0, score)

    def render(self) -> NDArray[np.uint8]:
        return np.array([[[*divmod(self._seed % 2**16, 256), self._played]]], dtype=np.uint8)

    def close(self) -> None: ...

    def _frame(self) -> Frame:
        return self._random.integers(256, size=SPEC.frame_shape, dtype=np.uint8)


def policy(observation: NDArray[np.uint8]) -> int:
    """An action in which every pixel of the stack counts, each according to its place."""
    flat = observation.ravel().astype(np.int64)
    return int((flat * np.arange(1, flat.size + 1)).sum() % SPEC.action_size)


@dataclass
class Player:
    """An agent with that policy. It notes what it was asked."""

    batches: list[NDArray[np.uint8]] = field(default_factory=list)
    noises: list[Tensor] = field(default_factory=list)

    def evaluation(self, count: int, generator: Generator) -> Tensor:
        noise = torch.rand(count, generator=generator)
        self.noises.append(noise)
        return noise

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        assert torch.equal(noise, self.noises[-1])
        self.batches.append(obs.numpy().copy())
        return torch.tensor([policy(observation) for observation in obs.numpy()])


def play_alone(number: int, seed: int = SEED) -> Episode:
    """The oracle: one episode, its stack of frames an ordinary list."""
    env, episode = Dice(), Episode()
    frames = [env.reset(seed_for(seed, Purpose.EVALUATION_EPISODE, number))] * SPEC.frame_stack
    done = False
    while not done:
        step = env.step(policy(np.concatenate(frames[-SPEC.frame_stack :])))
        frames.append(step.frame)
        episode.score += step.score
        episode.agent_steps += 1
        done = step.done
    return episode


def new_group(count: int) -> EnvironmentGroup:
    return ThreadedGroup(Dice, count)


def evaluate(
    parallel: int,
    *,
    agent: Any = None,
    make_group: Callable[[int], EnvironmentGroup] = new_group,
    **options: Any,
) -> Evaluation:
    evaluator = Evaluator(agent or Player(), make_group, ENGINE, parallel)
    try:
        return evaluator.evaluate(SEED, **options)
    finally:
        evaluator.close()


def test_the_oracles_episodes_are_of_all_lengths() -> None:
    lengths = [play_alone(number).agent_steps for number in range(12)]
    assert min(lengths) < 3
    assert max(lengths) > 9
    assert lengths != sorted(lengths)


@pytest.mark.parametrize("parallel", [1, 3, 10])
@pytest.mark.parametrize("episodes", [1, 2, 10, 23])
def test_a_number_of_episodes(episodes: int, parallel: int) -> None:
    played = evaluate(parallel, episodes=episodes)
    assert played.episodes == [play_alone(number) for number in range(episodes)]


@pytest.mark.parametrize("parallel", [1, 3, 10])
@pytest.mark.parametrize("min_agent_steps", [1, 12, 13, 40, 100])
def test_whole_episodes_until_enough_is_played(min_agent_steps: int, parallel: int) -> None:
    """The shortest run of episodes that is long enough, though with several at once shorter ones end first."""
    expected: list[Episode] = []
    while sum(episode.agent_steps for episode in expected) < min_agent_steps:
        expected.append(play_alone(len(expected)))
    # The number of episodes asked for has no say.
    assert evaluate(parallel, episodes=2, min_agent_steps=min_agent_steps).episodes == expected


def test_how_many_are_played_at_once() -> None:
    made = []

    def make_group(count: int) -> EnvironmentGroup:
        made.append(count)
        return new_group(count)

    for options in ({"episodes": 5}, {"episodes": 23}, {"episodes": 60}, {"episodes": 60, "min_agent_steps": 40}):
        evaluate(50, make_group=make_group, **options)
    assert made == [5, 23, 50, 16]


def test_exactly_enough_is_enough() -> None:
    first = play_alone(0).agent_steps
    for parallel in (1, 3, 10):
        assert len(evaluate(parallel, episodes=1, min_agent_steps=first).episodes) == 1
        assert len(evaluate(parallel, episodes=1, min_agent_steps=first + 1).episodes) == 2


def test_the_seed_chooses_the_episodes() -> None:
    evaluator = Evaluator(Player(), new_group, ENGINE, 3)
    for seed in (1, 2, 1):
        played = evaluator.evaluate(seed, episodes=4)
        assert played.episodes == [play_alone(number, seed) for number in range(4)]
    evaluator.close()


@pytest.mark.parametrize("parallel", [1, 3, 10])
def test_a_video_shows_the_first_episode_alone(parallel: int) -> None:
    played = evaluate(parallel, episodes=5, video=True).episodes
    seed = seed_for(SEED, Purpose.EVALUATION_EPISODE, 0) % 2**16
    pictures = np.array(played[0].video)
    # A picture before the first step and one after each: the seed of the episode, and how far it has come.
    assert pictures.shape == (played[0].agent_steps + 1, 1, 1, 3)
    assert (pictures[:, 0, 0, 0].astype(int) * 256 + pictures[:, 0, 0, 1] == seed).all()
    assert pictures[:, 0, 0, 2].tolist() == list(range(played[0].agent_steps + 1))
    assert [len(episode.video) for episode in played[1:]] == [0] * 4


def test_a_video_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    length = play_alone(0).agent_steps
    monkeypatch.setattr("drq.training.evaluate.MOST_PICTURES", length - 1)
    played = evaluate(3, episodes=1, video=True).episodes
    assert played[0].agent_steps == length
    assert [int(picture[0, 0, 2]) for picture in played[0].video] == list(range(length - 1))


def test_an_episode_without_end_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    length = play_alone(0).agent_steps
    monkeypatch.setattr("drq.training.evaluate.ENDLESS", length)
    assert evaluate(1, episodes=1).episodes[0].agent_steps == length
    monkeypatch.setattr("drq.training.evaluate.ENDLESS", length - 1)
    with pytest.raises(UserError, match=r"did not end in .*--env\.max-episode-steps"):
        evaluate(1, episodes=1)


@pytest.mark.parametrize("parallel", [1, 3, 10])
def test_pictures_are_developed_all_at_once_when_their_episode_is_over(parallel: int) -> None:
    """Before any slot begins anew, which may change what there is to draw."""
    developed: list[int] = []

    class Film(ThreadedGroup):
        """Whose snapshots are worth something until the next reset."""

        def __init__(self, count: int) -> None:
            super().__init__(Dice, count)
            self.resets = 0
            self.played = 0

        def reset(self, seeds: Mapping[int, int]) -> dict[int, Frame]:
            self.resets += 1
            return super().reset(seeds)

        def step(self, actions: Mapping[int, Action]) -> dict[int, Step]:
            self.played += 1
            return super().step(actions)

        def snapshot(self, slot: int) -> Any:
            return slot, self.resets, super().snapshot(slot)

        def develop(self, snapshots: Sequence[Any]) -> list[NDArray[np.uint8]]:
            developed.append(self.played)
            # The first episode is in slot 0, and no other reset touches that slot while it goes on.
            assert {slot for slot, _, _ in snapshots} == {0}
            assert snapshots[0][1] == 1
            assert snapshots[-1][1] == self.resets
            return super().develop([picture for _, _, picture in snapshots])

    played = evaluate(parallel, make_group=Film, episodes=23, video=True).episodes
    assert developed == [played[0].agent_steps]
    assert len(played[0].video) == played[0].agent_steps + 1


def test_no_video_unless_asked_for() -> None:
    class Unseen(ThreadedGroup):
        def snapshot(self, slot: int) -> Any:
            raise AssertionError

        develop = snapshot

    played = evaluate(3, make_group=lambda count: Unseen(Dice, count), episodes=5).episodes
    assert all(not episode.video for episode in played)


@pytest.mark.parametrize(("episodes", "min_agent_steps", "width"), [(23, 0, 4), (3, 0, 3), (1, 30, 4)])
def test_one_batch_shape_for_a_whole_evaluation(episodes: int, min_agent_steps: int, width: int) -> None:
    """Idle places are acted for, with random numbers that follow from the seed."""
    agent = Player()
    evaluate(4, agent=agent, episodes=episodes, min_agent_steps=min_agent_steps)
    assert {batch.shape for batch in agent.batches} == {(width, *SPEC.observation_shape)}
    generator = torch.Generator().manual_seed(SEED)
    expected = torch.stack([torch.rand(width, generator=generator) for _ in agent.noises])
    assert torch.equal(torch.stack(agent.noises), expected)


def test_an_episode_begins_with_its_first_frame_repeated() -> None:
    agent = Player()
    evaluate(2, agent=agent, episodes=2)
    for slot, observation in enumerate(agent.batches[0]):
        first = Dice().reset(seed_for(SEED, Purpose.EVALUATION_EPISODE, slot))
        assert np.array_equal(observation, np.concatenate([first] * 3))


def test_a_stack_keeps_the_newest_frames_oldest_first() -> None:
    stack = FrameStack(SPEC)
    frames = [np.full(SPEC.frame_shape, number, np.uint8) for number in range(1, 6)]
    stack.reset(frames[0])
    shown = []
    for frame in frames[1:]:
        stack.push(frame)
        shown.append(stack.observation[::2, 0, 0].tolist())
        assert np.array_equal(stack.observation[::2], stack.observation[1::2])
    assert shown == [[1, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    stack.reset(frames[0])
    assert (stack.observation == 1).all()
    assert stack.observation.dtype == np.uint8


def test_a_stack_may_begin_with_zeros() -> None:
    stack = FrameStack(replace(SPEC, zero_stack=True))
    for number in (1, 2):
        stack.push(np.full(SPEC.frame_shape, number, np.uint8))
    stack.reset(np.full(SPEC.frame_shape, 3, np.uint8))
    assert stack.observation[:, 0, 0].tolist() == [0, 0, 0, 0, 3, 3]
    assert np.array_equal(stack.newest, np.full(SPEC.frame_shape, 3))


@pytest.mark.parametrize(
    ("zero_stack", "seen"),
    [(False, [[1, 1, 1], [1, 1, 2], [1, 2, 3], [2, 3, 4]]), (True, [[0, 0, 1], [0, 1, 2], [0, 0, 3], [0, 3, 4]])],
)
def test_a_lost_life_makes_a_new_stack_where_zeros_begin_one(zero_stack: bool, seen: list[list[int]]) -> None:
    """As in training: an agent sees what it has learnt from. The game goes on."""

    class Lives(Dice):
        """Frames of 1, 2, ... A life is lost in the third."""

        spec = replace(SPEC, frame_shape=(1, 1, 1), zero_stack=zero_stack)

        def reset(self, seed: int) -> Frame:
            self._number = 1
            return np.ones((1, 1, 1), np.uint8)

        def step(self, action: Action) -> Step:
            self._number += 1
            frame = np.full((1, 1, 1), self._number, np.uint8)
            return Step(frame, 0.0, 0.0 if self._number == 3 else 1.0, self._number == 5, 1.0)

    agent = Player()
    (played,) = evaluate(1, agent=agent, make_group=lambda count: ThreadedGroup(Lives, count), episodes=1).episodes
    assert [batch[0, :, 0, 0].tolist() for batch in agent.batches] == seen
    assert played.score == 4.0


def test_a_state_is_its_own_stack() -> None:
    stack = FrameStack(replace(SPEC, frame_shape=(2,), frame_stack=1))
    for state in np.array([[0.5, -2.0], [1.5, 3.0]], np.float32):
        (stack.reset if state[0] < 1 else stack.push)(state)
        assert np.array_equal(stack.observation, state)


def test_mean_and_population_deviation() -> None:
    evaluation = Evaluation([Episode(score=score) for score in (1.0, 2.0, 6.0)])
    assert evaluation.mean == pytest.approx(3.0)
    assert evaluation.std == pytest.approx((14 / 3) ** 0.5)
    assert evaluation.scores.tolist() == [1.0, 2.0, 6.0]


def test_environments_are_made_when_needed_kept_and_closed() -> None:
    events: list[str] = []

    class Noted(ThreadedGroup):
        def __init__(self, count: int) -> None:
            super().__init__(Dice, count)
            events.append(f"made {count}")

        def close(self) -> None:
            super().close()
            events.append("closed")

    evaluator = Evaluator(Player(), Noted, ENGINE, 4)
    assert events == []
    for episodes in (2, 1, 2):
        evaluator.evaluate(SEED, episodes=episodes)
    assert events == ["made 2"]
    assert len(evaluator.evaluate(SEED, episodes=9).episodes) == 9
    assert events == ["made 2", "closed", "made 4"]
    evaluator.evaluate(SEED, episodes=1)
    evaluator.close()
    evaluator.close()
    assert events == ["made 2", "closed", "made 4", "closed"]


class Watched(ThreadedGroup):
    """Notes what is asked of it, and which episode was stepped how often."""

    def __init__(self, env: Callable[[], Any], count: int) -> None:
        super().__init__(env, count)
        self.resets: list[dict[int, int]] = []
        self.number_in: dict[int, int] = {}
        self.agent_steps: list[int] = []

    def reset(self, seeds: Mapping[int, int]) -> dict[int, Frame]:
        self.resets.append(dict(seeds))
        for slot in seeds:
            self.number_in[slot] = len(self.agent_steps)
            self.agent_steps.append(0)
        return super().reset(seeds)

    def step(self, actions: Mapping[int, Action]) -> dict[int, Step]:
        for slot in actions:
            self.agent_steps[self.number_in[slot]] += 1
        return super().step(actions)


def watched(parallel: int, env: Callable[[], Any] = Dice, **options: Any) -> Watched:
    groups: list[Watched] = []

    def make(count: int) -> Watched:
        groups.append(Watched(env, count))
        return groups[-1]

    evaluate(parallel, make_group=make, **options)
    return groups[0]


def seeds_of(*numbers: int) -> list[int]:
    return [seed_for(SEED, Purpose.EVALUATION_EPISODE, number) for number in numbers]


class ThreeSteps(Dice):
    """Every episode takes as long as the others."""

    def reset(self, seed: int) -> Frame:
        frame = super().reset(seed)
        self._left = 3
        return frame


def test_episodes_that_end_together_are_followed_together() -> None:
    group = watched(4, ThreeSteps, episodes=10)
    assert group.resets == [
        dict(enumerate(seeds_of(0, 1, 2, 3))),
        dict(enumerate(seeds_of(4, 5, 6, 7))),
        dict(enumerate(seeds_of(8, 9))),
    ]
    assert group.agent_steps == [3] * 10


def test_slots_in_which_nothing_is_left_to_play_are_not_stepped() -> None:
    group = watched(10, episodes=23)
    assert group.agent_steps == [play_alone(number).agent_steps for number in range(23)]


@pytest.mark.parametrize("parallel", [1, 3, 10])
@pytest.mark.parametrize("min_agent_steps", [1, 12, 40, 100])
def test_little_is_played_that_does_not_count(min_agent_steps: int, parallel: int) -> None:
    """No episode begins, and none goes on, once those before it and itself are enough in any case."""

    class Sparing(Watched):
        def reset(self, seeds: Mapping[int, int]) -> dict[int, Frame]:
            assert sum(self.agent_steps) < min_agent_steps
            return super().reset(seeds)

        def step(self, actions: Mapping[int, Action]) -> dict[int, Step]:
            for slot in actions:
                assert sum(self.agent_steps[: self.number_in[slot]]) < min_agent_steps
            return super().step(actions)

    evaluate(parallel, make_group=lambda count: Sparing(Dice, count), episodes=1, min_agent_steps=min_agent_steps)
