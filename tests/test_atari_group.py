"""Atari games side by side: each is what a single one is, to the bit, whatever happens in the other slots."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import count

import numpy as np
import pytest

from drq.config import EnvConfig
from drq.envs import Frame, Step, make_group
from drq.errors import UserError

pytest.importorskip("ale_py")

from drq.envs.atari import AtariEnvironment, make_atari
from drq.envs.atari_group import AtariGroup

CONFIG = EnvConfig(frame_stack=4, image_size=42)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[AtariEnvironment]:
    """Every environment made in a test."""
    envs: list[AtariEnvironment] = []
    original = AtariEnvironment.__init__

    def noted(self: AtariEnvironment, *args: object) -> None:
        original(self, *args)  # type: ignore[arg-type]
        envs.append(self)

    monkeypatch.setattr(AtariEnvironment, "__init__", noted)
    return envs


def new_group(game: str, slots: int, config: EnvConfig = CONFIG) -> closing[AtariGroup]:
    group = make_group(f"atari/{game}", config, 4, slots)
    assert isinstance(group, AtariGroup)
    return closing(group)


def actions_of(group: AtariGroup, seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(group.spec.action_size, size=length).tolist()


def alone(game: str, seed: int, actions: list[int]) -> tuple[Frame, list[Step]]:
    """The oracle: an environment of its own for one episode."""
    with closing(make_atari(game, CONFIG)) as env:
        return env.reset(seed), [env.step(action) for action in actions]


def assert_same(steps: list[Step], expected: list[Step]) -> None:
    assert [step[1:] for step in steps] == [step[1:] for step in expected]
    np.testing.assert_array_equal([step.frame for step in steps], [step.frame for step in expected])


# A plain reset of Assault or Hero leaves traces of the episode before.
@pytest.mark.parametrize("game", ["pong", "assault", "hero"])
def test_an_episode_is_the_same_whatever_is_played_beside_and_before_it(game: str) -> None:
    with new_group(game, 3) as group:
        assert group.spec == make_atari(game, CONFIG).spec
        group.reset({0: 50, 1: 51, 2: 52})
        for beside in actions_of(group, 0, 60):
            group.step({0: beside, 2: beside})
        group.expect([6, 7])
        played: dict[int, list[Step]] = {0: [], 2: []}
        seeds = {0: 5, 2: 7}  # one that was expected and one that was not
        actions = {slot: actions_of(group, seed, 40) for slot, seed in seeds.items()}
        first = group.reset(seeds)
        for number in range(40):
            group.step({1: number % group.spec.action_size})
            for slot, step in group.step({slot: actions[slot][number] for slot in seeds}).items():
                played[slot].append(step)
            if number == 20:
                group.reset({1: 6})
    for slot, seed in seeds.items():
        expected_first, expected = alone(game, seed, actions[slot])
        np.testing.assert_array_equal(first[slot], expected_first)
        assert_same(played[slot], expected)


def test_whole_games_one_after_the_other_in_one_slot() -> None:
    """To the last life, with another game that goes on beside them; FIRE alone serves ball after ball."""
    with new_group("breakout", 2) as group:
        group.reset({0: 1})
        for seed in (3, 4):
            group.reset({1: seed})
            played: list[Step] = []
            while not played or not played[-1].done:
                played.append(group.step({0: 0, 1: 1})[1])
            assert [step.discount for step in played].count(0.0) == 5
            assert_same(played, alone("breakout", seed, [1] * len(played))[1])
            with pytest.raises(UserError, match=r"call reset\(seed\) before step"):
                group.step({1: 1})


def test_a_time_limit_ends_each_episode_at_its_own_time() -> None:
    with new_group("pong", 2, EnvConfig(max_episode_steps=12)) as group:
        group.reset({0: 0})
        assert [group.step({0: 0})[0].done for _ in range(2)] == [False, False]
        group.reset({1: 1})
        dones = [group.step({0: 0, 1: 0}), group.step({1: 0}), group.step({1: 0})]
        assert [{slot: step.done for slot, step in steps.items()} for steps in dones] == [
            {0: True, 1: False},
            {1: False},
            {1: True},
        ]
        assert all(step.discount == 1.0 for steps in dones for step in steps.values())


def test_expected_episodes_are_loaded_once_and_beside_play(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    asked: list[int] = []
    played_meanwhile = threading.Event()
    original = AtariEnvironment.reset

    def reset(self: AtariEnvironment, seed: int) -> Frame:
        loaded.append(seed)
        if seed >= 12:
            assert played_meanwhile.wait(timeout=20)
        return original(self, seed)

    def upcoming() -> Iterator[int]:
        for seed in count(12):
            asked.append(seed)
            yield seed

    monkeypatch.setattr(AtariEnvironment, "reset", reset)
    with new_group("pong", 2) as group:
        group.reset({0: 10, 1: 11})
        group.expect(upcoming())
        assert 2 <= len(asked) < 10, "of an endless row of seeds only the first are looked at"
        group.step({0: 0, 1: 0})
        played_meanwhile.set()
        group.reset({1: 13, 0: 12})
    assert sorted(loaded) == [10, 11, *asked]


def test_emulators_are_few_however_long_a_group_is_used(made: list[AtariEnvironment]) -> None:
    with new_group("pong", 3) as group:
        assert len(made) == 3
        for round_ in range(4):
            group.reset({slot: 100 * round_ + slot for slot in range(3)})
            group.expect(range(100 * round_ + 3, 100 * round_ + 50))
            group.reset({1: 100 * round_ + 3})
        assert len(made) <= 3 + 4
    for env in made:
        with pytest.raises(UserError, match="no episode under way"):
            env.check(0)


def test_pictures_for_videos_are_those_of_the_episode_in_the_slot() -> None:
    with new_group("breakout", 2) as group, closing(make_atari("breakout", CONFIG)) as single:
        group.reset({0: 1, 1: 2})
        group.expect([3])
        for slot, seed in ((1, 3), (0, 4)):
            group.reset({slot: seed})
            single.reset(seed)
            for action in (1, 2, 3):
                np.testing.assert_array_equal(group.render(slot), single.render())
                group.step({0: action, 1: action})
                single.step(action)
            np.testing.assert_array_equal(group.render(slot), single.render())


def test_a_mistake_in_one_slot_moves_none() -> None:
    with new_group("pong", 3) as group:
        group.reset({0: 1, 1: 2})
        for wrong in ({0: 0, 1: 6}, {1: 0, 0: -1}, {0: np.zeros(2), 1: 0}):
            with pytest.raises(UserError, match="takes actions from 0 to 5"):
                group.step(wrong)
        with pytest.raises(UserError, match=r"call reset\(seed\) before step"):
            group.step({0: 0, 1: 0, 2: 0})
        assert_same([group.step({0: 2, 1: 3})[1]], alone("pong", 2, [3])[1])


@pytest.mark.parametrize(
    ("task", "config", "said"),
    [
        ("atari/brekout", CONFIG, "did you mean atari/breakout"),
        ("atari/pong", EnvConfig(observation="state"), "played from pixels"),
        ("atari/pong", EnvConfig(image_size=0), "--env.image-size is 0"),
    ],
)
def test_impossible_groups_are_refused(task: str, config: EnvConfig, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_group(task, config, 4, 2)
