"""A trained agent to use: `drq.load(path).act(observation)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from drq.config import TrainConfig
from drq.engine import Actor, EngineSettings, choose_device, to_action
from drq.envs.protocol import Action, EnvSpec
from drq.errors import UserError
from drq.training.checkpoint import load_weights
from drq.training.components import make_acting_agent
from drq.training.evaluate import Evaluation, FrameStack
from drq.training.evaluation_service import make_evaluator
from drq.training.folder import RunFolder
from drq.training.seeds import Purpose, seed_for
from drq.training.video import NO_FFMPEG, ffmpeg_available, save_video


class TrainedPolicy:
    """The policy of a run, ready to act.

    It keeps the stack of recent frames itself: call `reset` when an episode begins, then `act` with each new frame.
    """

    def __init__(self, config: TrainConfig, spec: EnvSpec, checkpoint: Path) -> None:
        self.config = config
        self.spec = spec
        self.device = choose_device("auto")
        self.engine = EngineSettings.resolve(config.engine, self.device, config.agent)
        self.agent = make_acting_agent(config, spec, self.engine)
        self.agent_step = load_weights(checkpoint, self.agent)
        self._actor = Actor(self.agent, self.engine)
        self._generator = torch.Generator().manual_seed(0)
        self._stack = FrameStack(spec)
        self._begins = True

    def reset(self) -> None:
        """Forgets the frames of the last episode."""
        self._begins = True

    def act(self, observation: NDArray[Any]) -> Action:
        """The evaluation action for the newest frame.

        Args:
            observation: one image, (height, width, channels) or (channels, height, width) of uint8 in the size the
                run was trained with, or a state vector.

        Returns:
            A vector in [-1, 1], or the number of a discrete action.
        """
        frame = self._frame(observation)
        if self._begins:
            self._stack.reset(frame)
            self._begins = False
        else:
            self._stack.push(frame)
        noise = self.agent.evaluation(1, self._generator)
        return to_action(self._actor.act(self._stack.observation[None], noise)[0], self.spec)

    def _frame(self, observation: NDArray[Any]) -> NDArray[Any]:
        frame = np.asarray(observation)
        wanted = self.spec.frame_shape
        if self.spec.pixels and frame.ndim == 3 and frame.shape == (*wanted[1:], wanted[0]):
            frame = frame.transpose(2, 0, 1)
        if frame.shape != wanted:
            raise UserError(
                f"An observation of shape {frame.shape} was given and the policy was trained on {wanted}: "
                "resize the image to it, and give one frame, not a stack."
            )
        if self.spec.pixels and frame.dtype != np.uint8:
            raise UserError(f"Pixels of type {frame.dtype} were given: give uint8 values from 0 to 255.")
        return frame


def load(path: str | Path) -> TrainedPolicy:
    """Loads the policy of a run folder, from its latest checkpoint."""
    folder = RunFolder(Path(path))
    return TrainedPolicy(folder.config, folder.spec, folder.checkpoint)


def evaluate(
    path: str | Path, *, episodes: int | None = None, video: str | Path | None = None, seed: int = 0
) -> Evaluation:
    """Plays evaluation episodes with a trained policy.

    Args:
        path: the run folder.
        episodes: how many. None: as the run's own evaluations.
        video: where to write a video of the first episode, if anywhere.
        seed: another seed gives other episodes.
    """
    if video is not None and not ffmpeg_available():
        raise UserError(NO_FFMPEG)
    policy = load(path)
    config = policy.config
    evaluator = make_evaluator(config, policy.agent, policy.engine)
    try:
        played = evaluator.evaluate(
            seed_for(seed, Purpose.EVALUATION),
            episodes=episodes or config.eval.episodes,
            min_agent_steps=0 if episodes else config.eval.min_agent_steps,
            video=video is not None,
        )
    finally:
        evaluator.close()
    if video is not None:
        save_video(Path(video), played.episodes[0].video)
    return played
