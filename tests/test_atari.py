"""Atari games against a plain emulator driven by hand."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from drq.config import EnvConfig
from drq.envs import Environment, make
from drq.envs.atari_games import GAMES_26, SCORES_26
from drq.envs.protocol import EnvSpec
from drq.errors import UserError

ale_py = pytest.importorskip("ale_py")

from drq.envs import atari  # noqa: E402
from drq.envs.atari_emulator import no_ops  # noqa: E402

CONFIG = EnvConfig(frame_stack=4)


class ByHand:
    """ale-py's plain interface, with frame skip, max-pooling and area averaging spelt out."""

    def __init__(self, game: str, no_ops: int) -> None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(ale_py.roms.get_rom_path(game))
        self.ale.reset_game()
        for _ in range(no_ops):
            self.ale.act(0)
        self.actions = self.ale.getMinimalActionSet()
        self.frame = small(self.ale.getScreenGrayscale())
        self.picture = self.ale.getScreenRGB()

    def step(self, action: int) -> float:
        reward, grey, colour = 0.0, [], []
        for _ in range(4):
            reward += self.ale.act(self.actions[action])
            grey.append(self.ale.getScreenGrayscale())
            colour.append(self.ale.getScreenRGB())
            if self.ale.game_over():
                return reward
        self.frame = small(np.maximum(grey[-1], grey[-2]))
        self.picture = np.maximum(colour[-1], colour[-2])
        return reward


def small(screen: np.ndarray) -> np.ndarray:
    """210 x 160 to 84 x 84: the mean over the area that each pixel covers."""

    def shares(from_size: int) -> np.ndarray:
        edges = np.arange(85) * from_size / 84
        cells = np.arange(from_size)
        overlap = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
        return np.clip(overlap, 0, None) * 84 / from_size

    return shares(210) @ screen.astype(float) @ shares(160).T


def play(env: Environment, seed: int, actions: list[int]) -> list[np.ndarray]:
    return [env.reset(seed), *(env.step(action).frame for action in actions)]


def some_actions(env: Environment, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(env.spec.action_size, size=count).tolist()


def test_names_of_the_benchmark() -> None:
    known = atari.games()
    assert len(known) > 100
    assert len(GAMES_26) == 26
    assert set(GAMES_26) <= set(known)
    table = resources.files("drq.report").joinpath("published", "paper_atari_table.csv").read_text()
    assert [atari.find(row["game"]) for row in csv.DictReader(table.splitlines())] == list(GAMES_26)
    assert (SCORES_26["alien"], SCORES_26["pong"], SCORES_26["up_n_down"]) == (
        (227.8, 7127.7), (-20.7, 14.6), (533.4, 11693.2),
    )  # fmt: skip


def test_every_game_in_the_list_can_be_played() -> None:
    """In a process of its own, because ale-py ends the one that loads what it does not play."""
    program = (
        "from drq.envs.atari import games\nfrom drq.envs.atari_emulator import Emulator\n"
        "for name in games():\n    game = Emulator(name, 84)\n    game.reset(1)\n    game.step(0)\n"
        "print(len(games()))"
    )
    played = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert played.stdout.split() == [str(len(atari.games()))], played.stderr
    with pytest.raises(UserError, match="no task 'atari/joust'"):
        make("atari/joust", CONFIG, 4)


@pytest.mark.parametrize("name", ["battle_zone", "BattleZone", "battlezone", "BATTLE-ZONE"])
def test_a_game_has_one_name_however_it_is_spelt(name: str) -> None:
    env = make(f"atari/{name}", CONFIG, 4)
    assert env.spec.task == "atari/battle_zone"
    assert (env.spec.random_return, env.spec.perfect_return) == (2360.0, 37187.5)


def test_mistakes_are_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="Did you mean 'atari/breakout'"):
        make("atari/brekout", CONFIG, 4)
    with pytest.raises(UserError, match="played from pixels"):
        make("atari/pong", replace(CONFIG, observation="state"), 4)
    with pytest.raises(UserError, match="leave out --env"):
        make("atari/pong", replace(CONFIG, action_repeat=2), 4)
    with pytest.raises(UserError, match="are for Atari games, not toy/catch"):
        make("toy/catch", replace(CONFIG, zero_stack=True), 1)
    with pytest.raises(UserError, match="to 160 or less"):
        make("atari/pong", replace(CONFIG, image_size=161), 4)
    env = make("atari/pong", CONFIG, 4)
    with pytest.raises(UserError, match=r"call reset\(seed\)"):
        env.step(0)
    env.reset(1)
    with pytest.raises(UserError, match="from 0 to 5"):
        env.step(6)
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[atari\]'"):
        make("atari/pong", CONFIG, 4)


def test_what_a_game_promises() -> None:
    spec = make("atari/pong", CONFIG, 4).spec
    assert spec.observation_shape == (4, 84, 84)
    assert (spec.action_kind, spec.action_size) == ("discrete", 6)
    assert spec.action_repeat == 4
    assert spec.max_episode_agent_steps == 27_000
    unknown = make("atari/zaxxon", replace(CONFIG, image_size=60), 4).spec
    assert unknown.frame_shape == (1, 60, 60)
    assert unknown.random_return is unknown.perfect_return is None


@pytest.mark.parametrize(("game", "seed"), [("breakout", 0), ("freeway", 3), ("alien", 4)])
def test_frames_scores_and_lives_of_a_plain_emulator(game: str, seed: int) -> None:
    env = make(f"atari/{game}", CONFIG, 4)
    by_hand = ByHand(game, no_ops(seed, 30))
    frame = env.reset(seed)
    assert (frame.shape, frame.dtype) == ((1, 84, 84), np.uint8)
    kept = []
    for action in some_actions(env, 150):
        np.testing.assert_allclose(frame[0], by_hand.frame, atol=1.0)
        np.testing.assert_array_equal(env.render(), by_hand.picture)
        lives = by_hand.ale.lives()
        reward = by_hand.step(action)
        step = env.step(action)
        frame = step.frame
        kept.append((frame, frame.copy()))
        assert step.score == reward
        assert step.reward == np.clip(reward, -1, 1)
        assert step.discount == float(by_hand.ale.lives() >= lives)
        assert step.done == by_hand.ale.game_over()
        if step.done:
            break
    assert all((frame == copied).all() for frame, copied in kept)  # nothing is overwritten later


@pytest.mark.parametrize("game", ["pong", "assault", "kung_fu_master"])  # a reset alone of these two remembers
def test_an_episode_follows_from_its_seed_and_actions(game: str) -> None:
    env = make(f"atari/{game}", CONFIG, 4)
    actions = some_actions(env, 40)
    first = play(env, 7, actions)
    play(env, 8, some_actions(env, 200, seed=1))
    again = play(env, 7, actions)
    elsewhere = play(make(f"atari/{game}", CONFIG, 4), 7, actions)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, elsewhere)


def test_losing_a_life_ends_the_return_and_not_the_game() -> None:
    env = make("atari/breakout", CONFIG, 4)
    env.reset(3)
    discounts, dones = [], []
    while not dones or not dones[-1]:
        step = env.step(1)  # FIRE serves the ball; the paddle never moves
        discounts.append(step.discount)
        dones.append(step.done)
    assert discounts.count(0.0) == 5  # five lives, the last one with the game
    assert dones.count(True) == 1
    assert discounts[-1] == 0.0
    with pytest.raises(UserError, match=r"call reset\(seed\)"):
        env.step(1)


def test_a_life_that_leaves_none_to_spare_is_lost_as_well() -> None:
    """Bank Heist counts the lives in reserve, and is at 0 while the last one is played."""
    env = make("atari/bank_heist", CONFIG, 4)
    env.reset(1)
    zeros = 0
    for action in some_actions(env, 2_000):
        step = env.step(action)
        zeros += step.discount == 0.0
        if step.done:
            break
    assert step.done
    assert zeros == 5


def test_rewards_are_clipped_and_scores_are_whole() -> None:
    env = make("atari/alien", CONFIG, 4)
    env.reset(1)
    steps = [env.step(action) for action in some_actions(env, 60)]
    assert {step.reward for step in steps} == {0.0, 1.0}
    assert sum(step.score for step in steps) > 5 * sum(step.reward for step in steps)
    env = make("atari/pong", CONFIG, 4)
    env.reset(1)
    assert {env.step(0).reward for _ in range(150)} == {0.0, -1.0}


def test_a_time_limit_ends_the_episode_and_not_the_return() -> None:
    env = make("atari/pong", replace(CONFIG, max_episode_steps=40), 4)
    assert env.spec.max_episode_agent_steps == 10
    actions = some_actions(env, 10)
    free = play(make("atari/pong", CONFIG, 4), 5, actions)
    env.reset(5)
    steps = [env.step(action) for action in actions]
    assert [step.done for step in steps] == [False] * 9 + [True]
    assert all(step.discount == 1.0 for step in steps)
    # The last frame is bootstrapped from, so it must be the game's own.
    np.testing.assert_array_equal(steps[-1].frame, free[-1])


def test_every_game_begins_with_its_own_lives_and_its_whole_time() -> None:
    spec = EnvSpec("atari/any", (1, 2, 2), 4, "discrete", 3, 4, max_episode_agent_steps=3)
    episode = atari.GameEpisode(spec)

    def step(score: float, game_over: bool, lives: int) -> tuple[float, float, bool, float]:
        found = episode.step(np.zeros((1, 2, 2), np.uint8), score, game_over, lives)
        return found.reward, found.discount, found.done, found.score

    for _ in range(2):
        episode.begin(lives=3)
        assert step(5.0, False, 2) == (1.0, 0.0, False, 5.0)  # a life lost at once
        assert step(-7.0, False, 2) == (-1.0, 1.0, False, -7.0)
        assert step(0.5, False, 2) == (0.5, 1.0, True, 0.5)
        assert not episode.playing
    episode.begin(lives=0)  # a game that counts none
    assert step(0.0, True, 0) == (0.0, 0.0, True, 0.0)


def test_a_picture_may_be_asked_for_at_any_time() -> None:
    watched, unwatched = make("atari/breakout", CONFIG, 4), make("atari/breakout", CONFIG, 4)
    actions = some_actions(watched, 30)
    frames = [watched.reset(2)]
    for number, action in enumerate(actions):
        if number in (0, 1, 20):
            assert watched.render().shape == (210, 160, 3)
        frames.append(watched.step(action).frame)
    np.testing.assert_array_equal(frames, play(unwatched, 2, actions))
    np.testing.assert_array_equal(watched.render(), unwatched.render())
    watched.reset(9)
    unwatched.reset(9)
    np.testing.assert_array_equal(watched.render(), unwatched.render())
    watched.close()
