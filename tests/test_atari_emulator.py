"""The emulator in the calling thread beside ale-py's `AtariVectorEnv`: the same pictures and counts, to the bit."""

from __future__ import annotations

import sys
from contextlib import closing

import numpy as np
import pytest

from drq.envs.area import AreaAverage
from drq.envs.atari_games import GAMES_26

vector_env = pytest.importorskip("ale_py.vector_env")

from drq.envs import atari_emulator  # noqa: E402
from drq.envs.atari_emulator import Emulator, Played, no_ops  # noqa: E402

NO_NO_OPS = next(seed for seed in range(1_000) if no_ops(seed, 30) == 0)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere C++ draws other numbers")


class Vector:
    """ale-py's own preprocessing of one game."""

    def __init__(
        self, game: str, *, shape: tuple[int, int] = (84, 84), most_no_ops: int = 0, grayscale: bool = True
    ) -> None:
        self._draws, self._played = most_no_ops > 0, False
        self.env = vector_env.AtariVectorEnv(
            game,
            num_envs=1,
            num_threads=1,
            img_height=shape[0],
            img_width=shape[1],
            grayscale=grayscale,
            stack_num=1,
            noop_max=most_no_ops + 1,
            max_num_frames_per_episode=10**6,
            reward_clipping=False,
            use_fire_reset=False,
        )

    def reset(self, seed: int) -> Played:
        # A seed has the game loaded anew: not needed for the first episode, unless it draws no-ops.
        frames, info = self.env.reset(seed=seed if self._played or self._draws else None)
        self._played = True
        return Played(frames[0], 0.0, False, int(info["lives"][0]))

    def step(self, action: int) -> Played:
        frames, rewards, game_over, _, info = self.env.step(np.array([action], dtype=np.int32))
        return Played(frames[0], float(rewards[0]), bool(game_over[0]), int(info["lives"][0]))

    def close(self) -> None:
        self.env.close()


def assert_same(ours: Played, theirs: Played) -> None:
    assert ours[1:] == theirs[1:]
    np.testing.assert_array_equal(ours.frame, theirs.frame)


def side_by_side(ours: Emulator, theirs: Vector, seed: int, agent_steps: int) -> list[Played]:
    """Plays both at random, at most to the end of the game."""
    assert_same(ours.reset(seed), theirs.reset(seed))
    played: list[Played] = []
    for action in np.random.default_rng(1).integers(ours.action_size, size=agent_steps).tolist():
        played.append(ours.step(action))
        assert_same(played[-1], theirs.step(action))
        if played[-1].game_over:
            break
    return played


@pytest.mark.parametrize("game", GAMES_26)
def test_all_games_of_the_benchmark(game: str) -> None:
    with closing(Vector(game)) as theirs:
        played = side_by_side(Emulator(game, 84), theirs, NO_NO_OPS, 150)
    assert len(played) == 150
    assert len({step.frame.tobytes() for step in played}) > 30


@pytest.mark.parametrize(("game", "last"), [("seaquest", 1), ("asterix", 2), ("bank_heist", 3), ("breakout", 4)])
def test_to_the_end_of_a_game_and_on_to_the_next(game: str, last: int) -> None:
    """Each ends in another frame of a step: what it shows then depends on it."""
    ours = Emulator(game, 84)
    with closing(Vector(game)) as theirs:
        assert side_by_side(ours, theirs, NO_NO_OPS, 1_000)[-1].game_over
        assert ours._ale.getEpisodeFrameNumber() % 4 == last % 4
        side_by_side(ours, theirs, NO_NO_OPS, 20)


@pytest.mark.parametrize(("game", "size"), [("alien", 36), ("alien", 83), ("alien", 100), ("air_raid", 84)])
def test_pictures_of_any_size(game: str, size: int) -> None:
    """And of 250 rows instead of 210."""
    with closing(Vector(game, shape=(size, size))) as theirs:
        side_by_side(Emulator(game, size), theirs, NO_NO_OPS, 25)


@on_linux
def test_no_ops_are_those_of_the_vector_environment() -> None:
    ours = Emulator("freeway", 84)  # traffic moves in every frame
    seeds = [0, 1, 2**31 - 1, *np.random.default_rng(0).integers(2**31, size=5).tolist()]
    with closing(Vector("freeway", most_no_ops=30)) as theirs:
        for seed in seeds:
            assert_same(ours.reset(seed), theirs.reset(seed))


def test_no_ops_are_drawn_evenly() -> None:
    counts = np.bincount([no_ops(seed, 30) for seed in range(3_100)], minlength=31)
    assert len(counts) == 31
    assert counts.min() > 60  # 100 each, with a standard deviation of 10
    assert counts.max() < 140


def test_no_op_steps_are_steps_in_which_nothing_is_done() -> None:
    counts = [no_ops(seed, 29) for seed in range(1_000)]
    assert set(counts) == set(range(30))
    ours, plain = Emulator("freeway", 84, no_op_steps=True), Emulator("freeway", 84)  # traffic moves in every frame
    for seed in (counts.index(0), counts.index(1), counts.index(7)):
        played = plain.reset(NO_NO_OPS)
        for _ in range(no_ops(seed, 29)):
            played = plain.step(0)
        assert_same(ours.reset(seed), played._replace(score=0.0))
        assert_same(ours.step(1), plain.step(1))
        np.testing.assert_array_equal(ours.colours(), plain.colours())


@on_linux
def test_no_ops_that_end_the_game_begin_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assault is lost after 642 frames without a hand on the stick."""
    monkeypatch.setattr(atari_emulator, "MAX_NO_OPS", 1_500)
    seed = next(seed for seed in range(100) if 700 < no_ops(seed, 1_500) < 1_200)
    with closing(Vector("assault", most_no_ops=1_500)) as theirs:
        side_by_side(Emulator("assault", 84), theirs, seed, 20)


def test_colours_are_those_of_the_vector_environment() -> None:
    """Asked for in the middle of an episode, at its end and in the next one; grey pictures stay as they are."""
    ours, grey = Emulator("seaquest", 84), Emulator("seaquest", 84)
    with closing(Vector("seaquest", shape=(210, 160), grayscale=False)) as theirs:
        for _ in range(2):
            actions: list[int] = []
            shown = theirs.reset(NO_NO_OPS).frame[0]
            assert_same(ours.reset(NO_NO_OPS), grey.reset(NO_NO_OPS))
            for action in np.random.default_rng(1).integers(ours.action_size, size=1_000).tolist():
                if len(actions) % 50 == 7:
                    np.testing.assert_array_equal(ours.colours(), shown)
                actions.append(action)
                step = ours.step(action)
                assert_same(step, grey.step(action))
                shown = theirs.step(action).frame[0]
                if step.game_over:
                    break
            assert step.game_over
            np.testing.assert_array_equal(ours.colours(), shown)


@pytest.mark.parametrize(("height", "width", "size"), [(210, 160, 84), (250, 160, 84), (210, 160, 97), (64, 64, 64)])
def test_averages_of_noise(height: int, width: int, size: int) -> None:
    """Against the exact means: no pixel is further off than rounding takes it."""

    def shares(length: int) -> np.ndarray:
        edges, cells = np.arange(size + 1) * length / size, np.arange(length)
        overlap = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
        return np.clip(overlap, 0, None) * size / length

    average = AreaAverage(height, width, size)
    for seed, levels in enumerate((2, 7, 256)):
        noise = np.random.default_rng(seed).integers(levels, size=(height, width)) * (255 // (levels - 1))
        means = shares(height) @ noise @ shares(width).T
        small = average(noise.astype(np.uint8))
        assert (small.dtype, small.shape) == (np.uint8, (size, size))
        assert np.abs(small - means).max() < 0.501
        assert (average(noise.astype(np.uint8)) == small).all()
