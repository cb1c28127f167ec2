"""The 26 games of the Atari 100k benchmark, and what Atari games are called."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import NamedTuple

from drq.errors import UserError


class Scores(NamedTuple):
    """Mean scores of whole games, from the paper's table: what a human-normalised score lies between."""

    random: float
    human: float


SCORES_26 = {
    "alien": Scores(227.8, 7127.7),
    "amidar": Scores(5.8, 1719.5),
    "assault": Scores(222.4, 742.0),
    "asterix": Scores(210.0, 8503.3),
    "bank_heist": Scores(14.2, 753.1),
    "battle_zone": Scores(2360.0, 37187.5),
    "boxing": Scores(0.1, 12.1),
    "breakout": Scores(1.7, 30.5),
    "chopper_command": Scores(811.0, 7387.8),
    "crazy_climber": Scores(10780.5, 35829.4),
    "demon_attack": Scores(152.1, 1971.0),
    "freeway": Scores(0.0, 29.6),
    "frostbite": Scores(65.2, 4334.7),
    "gopher": Scores(257.6, 2412.5),
    "hero": Scores(1027.0, 30826.4),
    "jamesbond": Scores(29.0, 302.8),
    "kangaroo": Scores(52.0, 3035.0),
    "krull": Scores(1598.0, 2665.5),
    "kung_fu_master": Scores(258.5, 22736.3),
    "ms_pacman": Scores(307.3, 6951.6),
    "pong": Scores(-20.7, 14.6),
    "private_eye": Scores(24.9, 69571.3),
    "qbert": Scores(163.9, 13455.0),
    "road_runner": Scores(11.5, 7845.0),
    "seaquest": Scores(68.4, 42054.7),
    "up_n_down": Scores(533.4, 11693.2),
}

GAMES_26 = tuple(SCORES_26)
"""The benchmark's games as ale-py spells them."""


def game_id(name: str, games: Iterable[str]) -> str:
    """The one of ale-py's names that is meant: BattleZone, battlezone and battle_zone are the same game."""
    by_letters = {_letters(game): game for game in games}
    letters = _letters(name)
    if letters in by_letters:
        return by_letters[letters]
    near = [f"atari/{by_letters[match]}" for match in get_close_matches(letters, by_letters, n=3)]
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(f"There is no game 'atari/{name}': {meant}`drq tasks` lists all.")


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
