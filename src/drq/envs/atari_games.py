"""The 26 games of the Atari 100k benchmark."""

from __future__ import annotations

from typing import NamedTuple


class PlayerScores(NamedTuple):
    """Mean scores of whole games, from the paper's table: what a human-normalised score lies between."""

    random: float
    human: float


SCORES_26 = {
    "alien": PlayerScores(227.8, 7127.7),
    "amidar": PlayerScores(5.8, 1719.5),
    "assault": PlayerScores(222.4, 742.0),
    "asterix": PlayerScores(210.0, 8503.3),
    "bank_heist": PlayerScores(14.2, 753.1),
    "battle_zone": PlayerScores(2360.0, 37187.5),
    "boxing": PlayerScores(0.1, 12.1),
    "breakout": PlayerScores(1.7, 30.5),
    "chopper_command": PlayerScores(811.0, 7387.8),
    "crazy_climber": PlayerScores(10780.5, 35829.4),
    "demon_attack": PlayerScores(152.1, 1971.0),
    "freeway": PlayerScores(0.0, 29.6),
    "frostbite": PlayerScores(65.2, 4334.7),
    "gopher": PlayerScores(257.6, 2412.5),
    "hero": PlayerScores(1027.0, 30826.4),
    "jamesbond": PlayerScores(29.0, 302.8),
    "kangaroo": PlayerScores(52.0, 3035.0),
    "krull": PlayerScores(1598.0, 2665.5),
    "kung_fu_master": PlayerScores(258.5, 22736.3),
    "ms_pacman": PlayerScores(307.3, 6951.6),
    "pong": PlayerScores(-20.7, 14.6),
    "private_eye": PlayerScores(24.9, 69571.3),
    "qbert": PlayerScores(163.9, 13455.0),
    "road_runner": PlayerScores(11.5, 7845.0),
    "seaquest": PlayerScores(68.4, 42054.7),
    "up_n_down": PlayerScores(533.4, 11693.2),
}

GAMES_26 = tuple(SCORES_26)
"""The benchmark's games as ale-py spells them."""
