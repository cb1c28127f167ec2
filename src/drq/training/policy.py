"""A trained agent to use: `drq.load(path).act(frame)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from drq import envs
from drq.agents import Agent
from drq.config import MOST_EPISODES, EngineConfig, TrainConfig
from drq.engine import EngineSettings, HostActor, choose_device
from drq.envs import EnvSpec, family_of
from drq.envs.episode import ActionRange, of_its_type
from drq.envs.pictures import frame_of
from drq.envs.stack import FrameStack, blank_observations
from drq.errors import UserError, reason
from drq.settings import config_to_json, flat, modules_of, refuse_unnamed_modules
from drq.training.checkpoint_reader import load_weights, read_best
from drq.training.components import make_acting_agent
from drq.training.evaluate import Evaluation, ShowProgress
from drq.training.evaluation_service import make_evaluator
from drq.training.folder import RunFolder
from drq.training.policy_file import read_policy_file
from drq.training.progress import return_text
from drq.training.seeds import Purpose, seed_for
from drq.training.video import check_video, save_video
from drq.training.window import open_window


class TrainedPolicy:
    """The policy of a run, ready to act: raw frames in, actions in the environment's own range out.

    It keeps the stack of recent frames itself: call `reset` when an episode begins, then `act` with each new frame.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: EnvSpec,
        load_into: Callable[[Agent], int],
        *,
        stochastic: bool = False,
        device: Literal["auto", "cpu", "cuda"] = "auto",
    ) -> None:
        """`load_into` puts the weights into an agent and gives the agent step they are from."""
        self.config = config
        self.spec = spec
        self.stochastic = stochastic
        self.device = choose_device(device)
        self.engine = EngineSettings.resolve(_engine_here(config.engine, self.device), self.device, config.agent)
        # Acting augments nothing, and so needs no module of the user's that an augmentation may be in.
        acting = dataclasses.replace(config, agent=dataclasses.replace(config.agent, augmentation="none"))
        self.agent = make_acting_agent(acting, spec, self.engine)
        self.agent_step = load_into(self.agent)
        self._actor = HostActor(self.agent, self.engine)
        self._generator = torch.Generator().manual_seed(0)
        self._own_action = own_actions(spec)
        self._observations = blank_observations(spec, 0)
        self._stacks: list[FrameStack] = []
        self._begins: NDArray[np.bool_] = np.zeros(0, dtype=bool)

    def reset(self, which: NDArray[np.bool_] | None = None) -> None:
        """Forgets the frames of the last episode; of a batch, in those places that `which` marks (unset: in all)."""
        if which is None:
            self._stacks = []
        elif self._stacks:  # else all begin
            if len(which) != len(self._stacks):
                raise UserError(f"reset() has {len(which)} places and act() had {len(self._stacks)} frames: mark each.")
            self._begins |= np.asarray(which, dtype=bool)

    def act(self, observation: Any) -> Any:
        """The action for the newest frame: the greedy one (of SAC the mean), or one of the exploring policy where the
        policy was loaded with `stochastic`.

        Args:
            observation: one image of any size, (height, width, channels) or (channels, height, width) of uint8 or of
                floats in [0, 1]; it is made grey and resized as in training. Or a state vector. A batch has one axis
                more, in front.

        Returns:
            What the environment's `step` takes: an array in the range of its action space, or the number of a discrete
            action. Of a batch an array of those.
        """
        array = np.asarray(observation)
        batch = array.ndim == (4 if self.spec.pixels else 2)
        frames = [self._frame(each) for each in (array if batch else [array])]
        if not self._stacks:
            self._observations = blank_observations(self.spec, len(frames))
            self._stacks = [FrameStack(self.spec, memory) for memory in self._observations]
            self._begins = np.ones(len(frames), dtype=bool)
        if len(frames) != len(self._stacks):
            raise UserError(
                f"{len(frames)} frames were given and {len(self._stacks)} before: call reset() when an episode begins."
            )
        for stack, frame, begins in zip(self._stacks, frames, self._begins, strict=True):
            (stack.reset if begins else stack.push)(frame)
        self._begins[:] = False
        actions = [self._own_action(row) for row in self._actor.act(self._observations, self._noise(len(frames)))]
        return np.stack(actions) if batch else actions[0]

    def _noise(self, count: int) -> torch.Tensor:
        if self.stochastic:
            return self.agent.exploration(count, self.agent_step, self._generator)
        # Without random numbers an agent does what it thinks best.
        return torch.zeros_like(self.agent.evaluation(count, self._generator))

    def _frame(self, observation: NDArray[Any]) -> NDArray[Any]:
        wanted = self.spec.frame_shape
        if self.spec.pixels:
            return frame_of(observation, wanted, family_of(self.spec.task).resize)
        if observation.shape != wanted:
            raise UserError(
                f"A state of shape {observation.shape} was given and the policy was trained on {wanted}: give that."
            )
        return observation.astype(np.float32)


def own_actions(spec: EnvSpec) -> Callable[[NDArray[Any]], Any]:
    """From an agent's action to one as the environment itself takes it. A run folder of the time when ranges were not
    written down has [-1, 1]."""
    if spec.action_kind == "discrete":
        return lambda row: int(np.asarray(row).reshape(())) + spec.action_start
    scale = ActionRange(*action_bounds(spec))
    return lambda row: of_its_type(scale(row), spec.action_dtype).reshape(action_shape(spec))


def action_bounds(spec: EnvSpec) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The range of each component of the environment's own actions."""
    low, high = spec.action_low or [-1.0] * spec.action_size, spec.action_high or [1.0] * spec.action_size
    return np.array(low, dtype=np.float64), np.array(high, dtype=np.float64)


def action_shape(spec: EnvSpec) -> tuple[int, ...]:
    """Of the environment's own actions, where they are continuous."""
    return (spec.action_size,) if spec.action_shape is None else spec.action_shape


def _engine_here(engine: EngineConfig, device: torch.device) -> EngineConfig:
    """The run's settings, less what only the machine that it was trained on can do."""
    if device.type == "cuda":
        return dataclasses.replace(engine, kernels="auto")
    precision = "float32" if engine.precision == "tf32" else engine.precision
    return EngineConfig(precision=precision)


def load(
    path: str | Path,
    *,
    best: bool = False,
    imports: Sequence[str] = (),
    stochastic: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> TrainedPolicy:
    """Loads a policy.

    Args:
        path: a run folder, of which the latest checkpoint is taken, or a file that `drq export` wrote.
        best: of a run folder, what acted in the evaluation with the highest mean return.
        imports: modules (names, or files that end in .py) to import first. Nothing else of the user's is imported:
            acting needs none, `evaluate` the one that registers the environment.
        stochastic: act as in training, with exploration.
        device: where to act.
    """
    return TrainedPolicy(*read_policy(path, imports, best=best), stochastic=stochastic, device=device)


def read_policy(
    path: str | Path, imports: Sequence[str] = (), *, best: bool = False, plays: bool = False
) -> tuple[TrainConfig, EnvSpec, Callable[[Agent], int]]:
    """What a `TrainedPolicy` is made of, from a run folder or a file. Who `plays` with it needs the environment, whose
    modules the user must have named."""
    envs.import_modules(imports)
    path = Path(path)
    if path.is_file():
        if best:
            raise UserError(f"{path} holds one policy: leave --best out, or name a run folder.")
        file = read_policy_file(path)
        config, spec, load_into = file.config, file.spec, file.load_into
    else:
        folder = RunFolder(path)
        config, spec = folder.config, folder.spec
        load_into = read_best(folder.checkpoint).load_into if best else partial(load_weights, folder.checkpoint)
    # Modules that a folder names are not imported: it may be a stranger's.
    if plays:
        asked = modules_of(config.task, flat(config_to_json(config)) | {"agent.augmentation": "none"})
        refuse_unnamed_modules(asked, imports, path)
    return dataclasses.replace(config, imports=tuple(imports)), spec, load_into


def wrap(
    env: gymnasium.Env[Any, Any], policy: TrainedPolicy, *, action_repeat: int | None = None
) -> gymnasium.Env[Any, Any]:
    """A Gymnasium environment as the policy knew it in training: its observations are the frames that the policy saw,
    one step repeats its action as often, and a reset resets the policy.

    Args:
        env: the environment; made with `render_mode="rgb_array"` where the policy saw what it draws.
        policy: from `drq.load`.
        action_repeat: another number of repeats than in training, as 1 for an environment that repeats actions itself.
    """
    from gymnasium.vector import VectorEnv

    from drq.envs.gym import AsTrained

    if isinstance(env, VectorEnv):
        raise UserError(
            "drq.wrap takes one environment. Of several at once, give policy.act their frames as a batch, call "
            "policy.reset(done) with the places whose episodes ended, and repeat actions as training did."
        )
    repeat = policy.spec.action_repeat if action_repeat is None else action_repeat
    return AsTrained(env, policy.config.env, repeat, policy.reset)


def _refuse_other_shapes(path: str | Path, trained: EnvSpec, played: EnvSpec) -> None:
    """The environment, or somebody's config.json, may have changed since training."""
    there, here = ((s.observation_shape, s.action_kind, s.action_size) for s in (trained, played))
    if there != here:
        raise UserError(
            f"{path} was trained with observations and actions of {there}, and {played.task} has {here} with its "
            "settings: restore its config.json, or the environment as it was."
        )


def evaluate(
    path: str | Path,
    *,
    best: bool = False,
    episodes: int | None = None,
    video: str | Path | None = None,
    seed: int = 0,
    imports: Sequence[str] = (),
    stochastic: bool = False,
    render: Literal["human"] | None = None,
    show_progress: ShowProgress | None = None,
) -> Evaluation:
    """Plays evaluation episodes with a trained policy.

    Args:
        path: a run folder, or a file that `drq export` wrote.
        best: of a run folder, what acted in the evaluation with the highest mean return, not the latest checkpoint.
        episodes: how many. None: as the run's own evaluations.
        video: where to write a video of the first episode, if anywhere.
        seed: another seed gives other episodes.
        imports: modules to import first, such as the one that registers the environment.
        stochastic: play the exploring policy.
        render: "human" shows the episodes in a window, one after the other.
        show_progress: called after every step with how much is played, of how much, and in which unit.
    """
    if seed < 0:
        raise UserError(f"--seed is {seed}: set it to 0 or more.")
    if episodes is not None and not 1 <= episodes <= MOST_EPISODES:
        raise UserError(f"--episodes is {episodes}: set it between 1 and {MOST_EPISODES:,}.")
    if video is not None:
        check_video(Path(video))
    show = open_window() if render == "human" else None
    policy = TrainedPolicy(*read_policy(path, imports, best=best, plays=True), stochastic=stochastic)
    config = policy.config
    evaluator = make_evaluator(config, policy.agent, policy.engine, parallel=1 if show else None)
    evaluator.show_progress = show_progress or evaluator.show_progress
    least = 0 if episodes else config.eval.min_agent_steps
    length = {"episodes": episodes or config.eval.episodes, "min_agent_steps": least}
    try:
        _refuse_other_shapes(path, policy.spec, evaluator.prepare(**length))
        played = evaluator.evaluate(
            seed_for(seed, Purpose.EVALUATION),
            **length,
            video=video is not None,
            exploring_at=policy.agent_step if stochastic else None,
            show=show,
        )
    finally:
        evaluator.close()
    if video is not None:
        try:
            save_video(Path(video), played.episodes[0].video)
        except (OSError, RuntimeError) as error:  # the encoder's own text has many lines
            raise UserError(
                f"The video {video} could not be written ({reason(error)}): see that its folder has room and may be "
                f"written. The return was {return_text(played.mean, played.std)}."
            ) from error
    return played
