"""Atari games side by side: each is what a single one is, to the bit, whatever happens in the other slots."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from drq.child import ServedObject
from drq.config import EnvConfig
from drq.envs import Frame, Step, make_group
from drq.errors import UserError

pytest.importorskip("ale_py")

from drq.envs import atari_group, make
from drq.envs.atari_group import AtariGroup

CONFIG = EnvConfig(frame_stack=4, image_size=42)


@pytest.fixture(params=[1, 2], ids=["here", "in processes"], autouse=True)
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """More than the one core that a launcher has given the group, where it takes what others leave."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(atari_group, "usable_cores", lambda: 16)
    monkeypatch.setattr(atari_group, "LEAST_WORKERS", request.param)
    count: int = request.param
    return count


def new_group(game: str, slots: int, config: EnvConfig = CONFIG) -> closing[AtariGroup]:
    group = make_group(f"atari/{game}", config, 4, slots)
    assert isinstance(group, AtariGroup)
    return closing(group)


def actions_of(group: AtariGroup, seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(group.spec.action_size, size=length).tolist()


def alone(game: str, seed: int, actions: list[int]) -> tuple[Frame, list[Step]]:
    """The oracle: an environment of its own for one episode."""
    with closing(make(f"atari/{game}", CONFIG, 4)) as env:
        return env.reset(seed), [env.step(action) for action in actions]


def assert_same(steps: list[Step], expected: list[Step]) -> None:
    assert [step[1:] for step in steps] == [step[1:] for step in expected]
    np.testing.assert_array_equal([step.frame for step in steps], [step.frame for step in expected])


# A plain reset of Assault or Hero leaves traces of the episode before.
@pytest.mark.parametrize("game", ["pong", "assault", "hero"])
def test_an_episode_is_the_same_whatever_is_played_beside_and_before_it(game: str) -> None:
    """Beside one that begins anew and one that is left."""
    with new_group(game, 5) as group:
        assert group.spec == make(f"atari/{game}", CONFIG, 4).spec
        group.reset({slot: 50 + slot for slot in range(5)})
        for beside in actions_of(group, 0, 60):
            group.step({0: beside, 1: beside, 2: beside, 3: beside})
        seeds = {0: 5, 3: 2**31 + 7, 4: 7}
        played: dict[int, list[Step]] = {slot: [] for slot in seeds}
        actions = {slot: actions_of(group, slot, 40) for slot in seeds}
        first = group.reset(seeds)
        assert first.keys() == seeds.keys()
        for number in range(40):
            beside = {1: number % group.spec.action_size}
            if number < 30:
                beside[2] = 0
            steps = group.step({slot: actions[slot][number] for slot in seeds} | beside)
            assert steps.keys() == seeds.keys() | beside.keys()
            for slot in seeds:
                played[slot].append(steps[slot])
            if number in (10, 20):
                group.reset({1: number})
    for slot, seed in seeds.items():
        expected_first, expected = alone(game, seed, actions[slot])
        np.testing.assert_array_equal(first[slot], expected_first)
        assert_same(played[slot], expected)


def test_frames_stay_as_they_were_handed_over() -> None:
    with new_group("freeway", 3) as group:
        frames = list(group.reset({0: 0, 1: 1, 2: 2}).values())
        copies = [frame.copy() for frame in frames]
        for number in range(20):
            if number == 10:
                frames += group.reset({1: 5}).values()
                copies.append(frames[-1].copy())
            for step in group.step({0: 1, 1: 1, 2: 1}).values():
                assert step.frame.flags["C_CONTIGUOUS"]
                frames.append(step.frame)
                copies.append(step.frame.copy())
    np.testing.assert_array_equal(frames, copies)
    assert len({frame.tobytes() for frame in frames}) > 30


def test_a_slot_left_out_of_a_step_stays_as_it_is() -> None:
    with new_group("pong", 3) as group:
        group.reset({0: 0, 1: 7, 2: 2})
        steps = []
        for action in (2, 3):
            group.step({0: 1, 2: 1})
            steps.append(group.step({1: action})[1])
        assert_same(steps, alone("pong", 7, [2, 3])[1])
        assert group.step({}) == {}


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


def test_pictures_for_videos_are_those_of_the_episode_in_the_slot() -> None:
    with new_group("breakout", 3) as group, closing(make("atari/breakout", CONFIG, 4)) as single:
        group.reset({0: 1, 1: 2, 2: 3})
        group.snapshot(2)
        for slot, seed in ((1, 2**32 + 3), (0, 4), (2, 5)):
            group.reset({slot: seed})
            single.reset(seed)
            snapshots, expected = [group.snapshot(slot)], [single.render()]
            for action in (1, 2, 3):
                group.step({0: action, 1: action, 2: action})
                single.step(action)
                snapshots.append(group.snapshot(slot))
                expected.append(single.render())
            np.testing.assert_array_equal(group.develop(snapshots), expected)


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
        ("atari/brekout", CONFIG, "Did you mean 'atari/breakout'"),
        ("atari/pong", EnvConfig(observation="state"), "played from pixels"),
        ("atari/pong", EnvConfig(image_size=0), "--env.image-size is 0"),
    ],
)
def test_impossible_groups_are_refused(task: str, config: EnvConfig, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_group(task, config, 4, 2)


def test_processes_end_with_the_group_and_a_dead_one_is_told(workers: int) -> None:
    if workers == 1:
        pytest.skip("there are none")
    group = make_group("atari/pong", CONFIG, 4, 3)
    assert isinstance(group, AtariGroup)
    group.reset({0: 1, 1: 2})
    processes = [each.process for each in group._workers if isinstance(each, ServedObject)]
    assert len(processes) == workers
    processes[1].kill()
    processes[1].wait()
    with pytest.raises(UserError, match="A process of atari/pong has ended"):
        group.step({0: 0, 1: 0})
    group.close()
    assert [process.poll() for process in processes] == [0, -9]


def test_a_process_needs_no_pytorch() -> None:
    """It would take seconds to start, and hundreds of megabytes, for each core."""
    program = "import sys, drq.envs.atari_group; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
