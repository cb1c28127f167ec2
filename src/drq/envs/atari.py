"""Atari 2600 games, played as the Atari 100k benchmark plays them. ale-py's `AtariVectorEnv` does the emulation.

Choices that change results:
- The first frame comes after 0 to 30 no-ops, one emulator frame each. FIRE is never pressed for the agent.
- Losing a life ends the return and not the game. It is seen in the number of lives, not in ale-py's
  `life_loss_info`, which reports no loss of the last but one life where a game counts down to 0 while one life is
  left (Bank Heist), and hides a time limit that falls on a loss.
- The time limit is kept here: at its own, the emulator hands over a picture that is partly the one before.
- The minimal action set of each game.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drq.config import EnvConfig
from drq.envs.atari_games import SCORES_26, game_id
from drq.envs.episode import limit_agent_steps, limit_env_steps
from drq.envs.protocol import Action, EnvSpec, Frame, Step
from drq.errors import UserError

FRAME_SKIP = 4
"""Emulator frames of an agent step; an observation is the maximum of the last two."""
MAX_FRAMES = 108_000
"""The time limit of an episode: half an hour of play."""
MAX_NO_OPS = 30


def games() -> list[str]:
    """All games of ale-py."""
    return sorted(_ale_py().roms.get_all_rom_ids())


def make_atari(game: str, config: EnvConfig) -> AtariEnvironment:
    """The game of that name, in ale-py's spelling or the paper's."""
    return AtariEnvironment(checked_name(game, config), config)


def checked_name(game: str, config: EnvConfig) -> str:
    """A game's name in ale-py's spelling, if it can be played with these settings."""
    name = game_id(game, games())
    if config.observation != "pixels":
        raise UserError(f"atari/{name} is played from pixels: leave out --env.observation {config.observation}.")
    if config.action_repeat not in (None, FRAME_SKIP):
        raise UserError(f"atari/{name} repeats every action {FRAME_SKIP} times: leave out --env.action-repeat.")
    return name


def game_spec(name: str, config: EnvConfig, action_size: int) -> EnvSpec:
    scores = SCORES_26.get(name)
    return EnvSpec(
        task=f"atari/{name}",
        frame_shape=(1, config.image_size, config.image_size),
        frame_stack=config.frame_stack,
        action_kind="discrete",
        action_size=action_size,
        action_repeat=FRAME_SKIP,
        max_episode_agent_steps=limit_agent_steps(
            limit_env_steps(MAX_FRAMES, config.max_episode_steps), FRAME_SKIP
        ),
        budget_counts="agent_step",
        random_return=scores.random if scores else None,
        perfect_return=scores.human if scores else None,
    )


class GameEpisode:
    """The rules of an episode: what the emulator gives, as the benchmark counts it."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self.seed = 0
        self.actions: list[int] = []
        """Of the episode under way, or the last one. A new episode has a new list."""
        self._lives = 0
        self.playing = False

    def begin(self, seed: int, lives: int) -> None:
        self.seed = seed
        self.actions = []
        self._lives = lives
        self.playing = True

    def check(self, action: Action) -> None:
        """Refuses what cannot be played now."""
        if not self.playing:
            raise UserError(f"{self._spec.task} has no episode under way: call reset(seed) before step.")
        size = self._spec.action_size
        if (not isinstance(action, int) and np.ndim(action) != 0) or not 0 <= int(action) < size:
            raise UserError(f"{self._spec.task} takes actions from 0 to {size - 1}, not {action!r}.")

    def step(self, action: Action, frame: Frame, score: float, game_over: bool, lives: int) -> Step:
        """What became of an action."""
        self.actions.append(int(action))
        terminal = game_over or lives < self._lives
        self._lives = lives
        done = game_over or len(self.actions) == self._spec.max_episode_agent_steps
        self.playing = not done
        return Step(frame, min(max(score, -1.0), 1.0), 0.0 if terminal else 1.0, done, score)


class AtariEnvironment:
    """One game. Grey frames, clipped rewards to learn from, whole ones to score with."""

    def __init__(self, name: str, config: EnvConfig) -> None:
        size = config.image_size
        self._emulator = new_emulator(name, size, size, grayscale=True)
        self._next = _NextEpisode(lambda: new_emulator(name, size, size, grayscale=True))
        self._spec = game_spec(name, config, int(self._emulator.single_action_space.n))
        self._colour = ColourReplay(name)
        self._episode = GameEpisode(self._spec)

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    @property
    def render_seconds(self) -> float:
        return 0.0  # the emulator draws as it goes: there is no time to tell apart

    def reset(self, seed: int) -> Frame:
        seed = emulators_range(seed)
        begun = self._next.taken_for(self._emulator, seed)
        self._emulator, frames, info = begun or _reset(self._emulator, seed)
        self._episode.begin(seed, int(info["lives"][0]))
        return _only(frames)

    def expect(self, seed: int) -> None:
        """Loads the game anew beside the episode under way, in a second emulator."""
        self._next.begin(emulators_range(seed))

    def step(self, action: Action) -> Step:
        self._episode.check(action)
        frames, rewards, game_over, _, info = self._emulator.step(np.array([action], dtype=np.int32))
        # Nothing steps on after the end of an episode, so the emulator never comes to reset itself.
        return self._episode.step(
            action, _only(frames), float(rewards[0]), bool(game_over[0]), int(info["lives"][0])
        )

    def render(self) -> NDArray[np.uint8]:
        """The screen in colour, 210 x 160. Costs a second emulation, of the episodes it is asked for."""
        return self._colour.picture(self._episode.seed, self._episode.actions)

    def close(self) -> None:
        self._episode.playing = False
        self._emulator.close()
        self._next.close()
        self._colour.close()


class _NextEpisode:
    """A second emulator, which loads the game anew while the first one plays."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._emulator: Any = None
        self._seed: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="atari-reset")
        self._reset: Future[tuple[Any, Any, Any]] | None = None

    def begin(self, seed: int) -> None:
        if seed == self._seed:
            return
        self._wait()
        self._emulator = self._emulator or self._make()
        self._seed = seed
        self._reset = self._thread.submit(_reset, self._emulator, seed)

    def taken_for(self, emulator: Any, seed: int) -> tuple[Any, Any, Any] | None:
        """The emulator with its first frames, if it was this episode that was begun, in exchange for another."""
        if seed != self._seed or self._reset is None:
            return None
        begun = self._reset.result()
        self._emulator, self._seed, self._reset = emulator, None, None
        return begun

    def close(self) -> None:
        self._wait()
        self._thread.shutdown()
        if self._emulator is not None:
            self._emulator.close()

    def _wait(self) -> None:
        if self._reset is not None:
            self._reset.result()


class ColourReplay:
    """Plays an episode a second time, in colour: the grey emulator keeps nothing to draw a video from."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._emulator: Any = None
        self._episode: list[int] | None = None
        self._played = 0
        self._picture = np.zeros((210, 160, 3), dtype=np.uint8)

    def picture(self, seed: int, actions: list[int]) -> NDArray[np.uint8]:
        """The screen after these actions. A new list is a new episode, a longer one the same gone on."""
        if self._emulator is None:
            self._emulator = new_emulator(self._name, *self._picture.shape[:2], grayscale=False)
        if self._episode is not actions:
            self._episode, self._played = actions, 0
            self._picture = _only(_only(self._emulator.reset(seed=seed)[0]))
        for action in actions[self._played :]:
            self._picture = _only(_only(self._emulator.step(np.array([action], dtype=np.int32))[0]))
        self._played = len(actions)
        return self._picture

    def close(self) -> None:
        if self._emulator is not None:
            self._emulator.close()


def _ale_py() -> Any:
    try:
        import ale_py
        import ale_py.roms
        import ale_py.vector_env
    except ImportError as error:
        raise UserError("Atari games need ale-py: pip install -e '.[atari]' in the folder of drq.") from error
    return ale_py


def new_emulator(name: str, height: int, width: int, *, grayscale: bool, count: int = 1, threads: int = 1) -> Any:
    """So many of a game, one picture at a time: stacking, clipping, lives and the time limit are ours."""
    return _ale_py().vector_env.AtariVectorEnv(
        name,
        num_envs=count,
        num_threads=threads,
        img_height=height,
        img_width=width,
        grayscale=grayscale,
        stack_num=1,
        frameskip=FRAME_SKIP,
        maxpool=True,
        noop_max=MAX_NO_OPS + 1,  # ale-py draws from 0 to one less
        repeat_action_probability=0.0,
        full_action_space=False,
        max_num_frames_per_episode=MAX_FRAMES + FRAME_SKIP,
        episodic_life=False,
        life_loss_info=False,
        reward_clipping=False,
        use_fire_reset=False,
    )


def emulators_range(seed: int) -> int:
    return int(seed) % 2**31


def _reset(emulator: Any, seed: int) -> tuple[Any, Any, Any]:
    """The emulator, its first frames and what is known of them.

    A seed makes ale-py load the game anew. That costs some 0.1 s, and is what makes the episode a function of it: in
    some games (Assault, Hero) a plain reset leaves traces of the episode before.
    """
    frames, info = emulator.reset(seed=seed)
    return emulator, frames, info


def _only(batch: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The one thing in a batch of one."""
    only: NDArray[np.uint8]
    (only,) = batch
    return only
