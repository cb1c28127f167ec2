"""One Atari game, emulated in the calling thread, preprocessed to the bit as by ale-py's `AtariVectorEnv`.

Ours because that one's threads have to be woken and waited for, and it loads a game anew at every seed: driven here, a
step took 278 us instead of 388 on one core, and a reset 4 ms instead of 89, when this was adopted.
Nothing heavy is imported here: `atari_group` starts processes that need this file alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drq.envs.area import AreaAverage
from drq.envs.protocol import Frame
from drq.errors import UserError, install_command

Screen = NDArray[np.uint8]

FRAME_SKIP = 4
"""Emulator frames of an agent step; an observation is the maximum of the last two."""
MAX_NO_OPS, MAX_NO_OP_STEPS = 30, 29
"""Before an episode: frames, or agent steps."""
SCREEN_WIDTH = 160
"""Of every game. The height is 210 in nearly all."""


def ale_py() -> Any:
    """The package, with the parts of it that are used here."""
    try:
        import ale_py
        import ale_py.roms
    except ImportError as error:
        raise UserError(f"Atari games need ale-py: {install_command('atari')}.") from error
    return ale_py


class Played(NamedTuple):
    """What the emulator shows and counts after a step."""

    frame: Frame
    score: float
    game_over: bool
    lives: int


class PooledScreen:
    """The maximum of the last two screens of a step, as the emulator's method `read` gives them."""

    def __init__(self, read: Callable[[Screen], None], shape: tuple[int, ...]) -> None:
        self._read = read
        self._before: Screen = np.zeros(shape, dtype=np.uint8)
        self.picture = np.zeros_like(self._before)

    def begin(self) -> None:
        self._before.fill(0)
        self._read(self.picture)

    def look(self, *, last: bool) -> None:
        self._read(self.picture if last else self._before)

    def pool(self) -> None:
        np.maximum(self.picture, self._before, out=self.picture)


class Emulator:
    """A game with small grey pictures. An episode is a function of its seed and its actions alone."""

    def __init__(self, name: str, size: int, no_op_steps: bool = False) -> None:
        ale = ale_py()
        self._no_op_steps = no_op_steps
        ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)
        self._ale = ale.ALEInterface()
        self._ale.setFloat("repeat_action_probability", 0.0)
        # Without sticky actions nothing is drawn from the emulator's own seed: one will do for all episodes.
        self._ale.setInt("random_seed", 0)
        self._ale.loadROM(ale.roms.get_rom_path(name))
        self._loaded = self._ale.cloneSystemState()
        self._actions = [int(action.value) for action in self._ale.getMinimalActionSet()]
        height, width = self._ale.getScreenDims()
        self._average = AreaAverage(height, width, size)
        self._grey = PooledScreen(self._ale.getScreenGrayscale, (height, width))
        self._shown = [self._grey]
        self._seed = 0
        self._played_actions: list[int] = []

    @property
    def action_size(self) -> int:
        return len(self._actions)

    def reset(self, seed: int) -> Played:
        """Begins an episode: what comes after the no-ops that its seed draws."""
        self._seed, self._played_actions = seed, []
        # In some games (Assault, Hero) a reset alone leaves traces of the episode before.
        self._ale.restoreSystemState(self._loaded)
        self._ale.reset_game()
        if self._no_op_steps:
            return self._after_no_op_steps(no_ops(seed, MAX_NO_OP_STEPS))
        for _ in range(no_ops(seed, MAX_NO_OPS)):
            self._ale.act(0)
            if self._ale.game_over():
                self._ale.reset_game()
        return self._begun()

    def _begun(self) -> Played:
        for shown in self._shown:
            shown.begin()
        return self._played(0, False)

    def _after_no_op_steps(self, count: int) -> Played:
        first = self._begun()
        for _ in range(count):
            first = self.step(0)  # which is to do nothing, in every game
            if first.game_over:
                self._ale.reset_game()
                first = self._begun()
        self._played_actions = []
        return first._replace(score=0.0)

    def step(self, action: int) -> Played:
        """Repeats an action. If the game ends meanwhile, the frame in which it does is not looked at, and what was
        shown before shows through."""
        self._played_actions.append(action)
        ale, code = self._ale, self._actions[action]
        score = 0
        for frames_left in range(FRAME_SKIP - 1, -1, -1):
            score += ale.act(code)
            if ale.game_over():
                return self._played(score, True)
            if frames_left < 2:
                for shown in self._shown:
                    shown.look(last=frames_left == 0)
        return self._played(score, False)

    def colours(self) -> Screen:
        """The whole screen as it is now."""
        if len(self._shown) == 1:
            # They are not kept until they are asked for. This leads back to where the game is.
            self._shown.append(PooledScreen(self._ale.getScreenRGB, (*self._ale.getScreenDims(), 3)))
            actions = self._played_actions
            self.reset(self._seed)
            for action in actions:
                self.step(action)
        return self._shown[1].picture.copy()

    def _played(self, score: int, game_over: bool) -> Played:
        for shown in self._shown:
            shown.pool()
        return Played(self._average(self._grey.picture)[None], float(score), game_over, self._ale.lives())


def no_ops(seed: int, most: int) -> int:
    """How many an episode begins with: the first number of a Mersenne twister, scaled. `AtariVectorEnv`, whose seeds
    have 31 bits, has the same of the same seed, where it is compiled with GCC (on Linux)."""
    drawn = int(np.random.RandomState(seed % 2**31).randint(2**32, dtype=np.uint32))
    return drawn * (most + 1) >> 32
