"""Atari 2600 games, played as the Atari 100k benchmark plays them.

Choices that change results:
- The first frame comes after 0 to 30 no-ops, one emulator frame each (`EnvConfig.no_op_steps`: 0 to 29 agent steps).
  FIRE is never pressed for the agent.
- Losing a life ends the return and not the game. It is seen in the number of lives, not in ale-py's
  `life_loss_info`, which reports no loss of the last but one life where a game counts down to 0 while one life is
  left (Bank Heist), and hides a time limit that falls on a loss.
- The time limit is kept here: at its own, ale-py's emulator of many games hands over a picture that is partly the
  one before.
- The minimal action set of each game.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from drq.config import EnvConfig
from drq.envs.atari_emulator import FRAME_SKIP, SCREEN_WIDTH, Emulator, ale_py
from drq.envs.atari_games import GAMES_26, SCORES_26
from drq.envs.episode import checked_number, limit_agent_steps, limit_env_steps
from drq.envs.protocol import Action, EnvSpec, Frame, Step
from drq.envs.tasks import letters
from drq.errors import UserError

MAX_FRAMES = 108_000
"""The time limit of an episode: half an hour of play."""


FOR_SEVERAL_PLAYERS = frozenset({"combat", "joust", "maze_craze", "warlords"})
"""Of these ale-py has the cartridges alone, and ends the process that loads one."""


def games() -> list[str]:
    """All games that ale-py plays."""
    return sorted(set(ale_py().roms.get_all_rom_ids()) - FOR_SEVERAL_PLAYERS)


def names() -> list[str]:
    """All games, or those of the benchmark where ale-py is not installed."""
    try:
        return games()
    except UserError:
        return list(GAMES_26)


def find(name: str) -> str | None:
    """A game's name in ale-py's spelling: BattleZone, battlezone and battle_zone are the same game."""
    return {letters(game): game for game in games()}.get(letters(name))


def make(name: str, config: EnvConfig, action_repeat: int) -> AtariEnvironment:
    """The game of that name. Its action repeat is always 4."""
    check_playable(name, config)
    return AtariEnvironment(name, config)


def check_playable(name: str, config: EnvConfig) -> None:
    """Refuses settings that no game can be played with."""
    if config.observation != "pixels":
        raise UserError(f"atari/{name} is played from pixels: leave out --env.observation {config.observation}.")
    if config.action_repeat not in (None, FRAME_SKIP):
        raise UserError(f"atari/{name} repeats every action {FRAME_SKIP} times: leave out --env.action-repeat.")
    if config.image_size > SCREEN_WIDTH:
        raise UserError(
            f"atari/{name} is drawn {SCREEN_WIDTH} pixels wide: set --env.image-size to {SCREEN_WIDTH} or less."
        )


def game_spec(name: str, config: EnvConfig, action_size: int) -> EnvSpec:
    scores = SCORES_26.get(name)
    return EnvSpec(
        task=f"atari/{name}",
        frame_shape=(1, config.image_size, config.image_size),
        frame_stack=config.frame_stack,
        action_kind="discrete",
        action_size=action_size,
        action_repeat=FRAME_SKIP,
        max_episode_agent_steps=limit_agent_steps(limit_env_steps(MAX_FRAMES, config.max_episode_steps), FRAME_SKIP),
        zero_stack=config.zero_stack,
        random_return=scores.random if scores else None,
        perfect_return=scores.human if scores else None,
    )


class GameEpisode:
    """The rules of an episode: what the emulator gives, as the benchmark counts it."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self._agent_steps = 0
        self._lives = 0
        self.playing = False

    def begin(self, lives: int) -> None:
        self._agent_steps = 0
        self._lives = lives
        self.playing = True

    def checked(self, action: Action) -> int:
        """The action, if it can be played now."""
        if not self.playing:
            raise UserError(f"{self._spec.task} has no episode under way: call reset(seed) before step.")
        return checked_number(self._spec, action)

    def step(self, frame: Frame, score: float, game_over: bool, lives: int) -> Step:
        """What became of an action."""
        self._agent_steps += 1
        terminal = game_over or lives < self._lives
        self._lives = lives
        done = game_over or self._agent_steps == self._spec.max_episode_agent_steps
        self.playing = not done
        return Step(frame, min(max(score, -1.0), 1.0), 0.0 if terminal else 1.0, done, score)


class AtariEnvironment:
    """One game. Grey frames, clipped rewards to learn from, whole ones to score with."""

    render_seconds = 0.0
    """The emulator draws as it goes: there is no time to tell apart."""

    def __init__(self, name: str, config: EnvConfig) -> None:
        self._emulator = Emulator(name, config.image_size, config.no_op_steps)
        self.spec = game_spec(name, config, self._emulator.action_size)
        self._episode = GameEpisode(self.spec)

    def reset(self, seed: int) -> Frame:
        first = self._emulator.reset(seed)
        self._episode.begin(first.lives)
        return first.frame

    def step(self, action: Action) -> Step:
        return self._episode.step(*self._emulator.step(self._episode.checked(action)))

    def render(self) -> NDArray[np.uint8]:
        """The screen in colour, 210 x 160 in most games. The first time costs playing the episode once more."""
        return self._emulator.colours()

    def close(self) -> None:
        self._episode.playing = False
