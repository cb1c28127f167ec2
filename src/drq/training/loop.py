"""One run, from the first random action to the last evaluation: act, step, and beside that store and update."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drq import envs
from drq.agents import make_agent
from drq.config import TrainConfig, check
from drq.engine.learner import Learner, to_action
from drq.engine.settings import EngineSettings, choose_device
from drq.envs.protocol import Action, Environment, EnvSpec, Frame, Step
from drq.errors import UserError
from drq.presets import action_repeat_for, default_dir
from drq.replay import Replay
from drq.training.checkpoint import Checkpoints
from drq.training.env_thread import EnvHere, EnvThread, EnvWorker
from drq.training.evaluate import FrameStack
from drq.training.evaluation_service import Request, open_evaluation_service
from drq.training.folder import RunFolder, config_to_json, write_atomically
from drq.training.logs import Logs, require_wandb
from drq.training.progress import Progress, duration
from drq.training.seeds import Purpose, random_action, seed_for
from drq.training.video import NO_FFMPEG, ffmpeg_available

WARM_UPDATES, PROBE_UPDATES = 10, 80
PROBE_SECONDS = 15.0
"""The expected time is told after the second number of updates, or so long after the first. It is counted from the
first number of them on, since what comes before compiles, searches for algorithms and records graphs."""

GPU_PRESETS = ("planet", "dreamer", "ablation")
"""Presets that a CPU needs days for."""


@dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves behind."""

    dir: Path
    evaluations: list[dict[str, float]]
    """Rows of eval.csv."""

    @property
    def final_return(self) -> float:
        """Mean return of the last evaluation."""
        return self.evaluations[-1]["return_mean"]


def make_env(config: TrainConfig) -> Environment:
    """The task of a run."""
    envs.import_modules(config.imports)
    return envs.make(config.task, config.env, action_repeat_for(config))


class Trainer:
    """The state of a run in progress."""

    def __init__(self, config: TrainConfig, *, quiet: bool = False, label: str | None = None) -> None:
        check(config)
        if config.wandb:
            require_wandb()
        self.config = config
        self.label = label
        self.device = choose_device(config.device)
        in_its_place = EnvHere if self.device.type == "cuda" else EnvThread
        self.env: EnvWorker = in_its_place(lambda: make_env(config))
        self.spec: EnvSpec = self.env.env.spec
        self.unit = "env steps" if self.spec.budget_counts == "env_step" else "agent steps"
        self.steps_per_agent_step = self.spec.action_repeat if self.spec.budget_counts == "env_step" else 1
        updates = (self.total_agent_steps - config.agent.seed_steps) * config.agent.updates_per_step
        self.engine = EngineSettings.resolve(config.engine, self.device, config.agent, updates)
        self.progress = Progress(budget=config.steps, unit=self.unit, quiet=quiet)
        self.folder = RunFolder(Path(config.dir or default_dir(config)))

        self.agent_step = 0
        self.episode = 0
        self.episode_score = 0.0
        self.episode_actions: list[Action] = []
        """Of the episode under way: with its seed they lead an environment back to its state."""
        self.last_return: float | None = None
        self.evaluated = 0
        """Agent step of the newest evaluation."""
        self._unstored: tuple[Action, Step] | None = None
        """The newest transition, until it is in the replay. Its frame is the newest in the stack."""
        self._stop_requested = False
        self.seconds_before = 0.0
        """Wall-clock seconds of this run in earlier processes."""

    @property
    def env_step(self) -> int:
        return self.agent_step * self.spec.action_repeat

    @property
    def total_agent_steps(self) -> int:
        return self.config.steps // self.steps_per_agent_step

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self._began

    def due(self, every: int) -> bool:
        """Whether the budget's unit just passed a multiple of `every`."""
        done = self.agent_step * self.steps_per_agent_step
        return every > 0 < done and done // every > (done - self.steps_per_agent_step) // every

    def run(self) -> TrainResult:
        """Trains to the end of the budget, from wherever the folder's checkpoint is."""
        try:
            return self._run()
        finally:
            self.env.close()
            self.progress.close()

    def _run(self) -> TrainResult:
        self._began = time.perf_counter()
        if self.total_agent_steps < 1:
            raise UserError(
                f"--steps {self.config.steps} is less than one agent step ({self.steps_per_agent_step}): raise it."
            )
        self.folder.check(self.config)
        finished = self.folder.finished_steps
        if finished is not None and finished >= self.config.steps:
            self.progress.say(
                f"{self.folder.path} is finished: {finished:,} {self.unit}, "
                f"return {self.folder.evaluations()[-1]['return_mean']:.1f}. Nothing to do."
            )
            return TrainResult(self.folder.path, self.folder.evaluations())
        self.videos = self.config.eval.video and ffmpeg_available()
        if self.config.eval.video and not self.videos:
            self.progress.say(f"No videos will be recorded. {NO_FFMPEG}")

        if self.device.type == "cpu" and self.spec.pixels and self.config.preset in GPU_PRESETS:
            self.progress.say(
                f"The preset {self.config.preset!r} is made for a GPU; --preset cpu is the one for this machine."
            )
        with ExitStack() as closing:
            self.evaluations = open_evaluation_service(self.config, self.engine)
            closing.callback(self.evaluations.close)
            self.learner = self._make_learner()
            self.folder.open(self.config, self.spec, self.label)
            self.checkpoints = Checkpoints(self.folder.checkpoint)
            closing.callback(self.checkpoints.close)
            restored = self.checkpoints.restore(self.learner)
            progress = restored[1] if restored else None
            self.logs = Logs(
                self.folder, config_to_json(self.config), wandb=self.config.wandb, resumed=progress
            )
            closing.callback(self.logs.close)
            self.stack = FrameStack(self.spec)
            if restored:
                self._resume(*restored)
            else:
                self._begin_episode()
            with self._stopping_cleanly():
                self._train(checkpointed=restored is not None)
        write_atomically(
            self.folder.finished_file,
            json.dumps({"steps": self.config.steps, "seconds": round(self.seconds, 3)}) + "\n",
        )
        result = TrainResult(self.folder.path, self.folder.evaluations())
        score = result.final_return
        self.progress.say(
            f"Done in {duration(self.seconds)}: return {score:.1f}{self._normalised(score)} "
            f"after {self._steps_text(self.total_agent_steps)}. {self.folder.path}"
        )
        return result

    def _make_learner(self) -> Learner:
        config = self.config
        capacity = config.replay.capacity or self.total_agent_steps
        needed = Replay.bytes_needed(self.spec, capacity)
        self.progress.say(
            f"{config.task} on {_device_name(self.device)}; replay of {capacity:,} transitions: {needed / 1e9:.2f} GB."
        )
        agent = make_agent(self.spec, config.agent, self.device, seed_for(config.seed, Purpose.WEIGHTS))
        try:
            replay = Replay(
                self.spec,
                capacity,
                n_step=config.agent.n_step,
                discount=config.agent.discount,
                device=self.device,
            )
        except (RuntimeError, MemoryError) as error:
            raise UserError(
                f"The replay does not fit: {needed / 1e9:.2f} GB are needed on {self.device}; lower --replay.capacity."
            ) from error
        return Learner(agent, replay, self.engine, seed_for(config.seed, Purpose.UPDATES))

    def _train(self, *, checkpointed: bool) -> None:
        config, learner, shares = self.config, self.learner, self.progress.shares
        stack = self.stack
        owed = False
        """A checkpoint is due and not yet made."""
        first_update: float | None = None
        counted_from: tuple[float, int] | None = None
        told = False
        while True:
            due = self.due(config.checkpoint_every) and not checkpointed
            checkpointed = False
            # An evaluation under way belongs to an earlier step: a checkpoint waits until its row is in the file,
            # and training waits for both when the next checkpoint is due already.
            self._collect_evaluations(wait=self._stop_requested or (due and owed))
            owed = owed or due
            if (owed and not self.evaluations.under_way) or self._stop_requested:
                self._checkpoint()
                owed = False
            if self._stop_requested:
                raise KeyboardInterrupt
            finished = self.agent_step == self.total_agent_steps
            if (self.due(config.eval.every) or finished) and self.evaluated < self.agent_step:
                self._evaluate()
            if finished:
                self._collect_evaluations(wait=True)
                self._checkpoint()
                return
            if self.due(config.log_every):
                self._log_train()

            learning = self.agent_step >= config.agent.seed_steps
            started = time.perf_counter()
            wait_for_action = self._begin_action(learning)
            # A GPU is told of the update while it chooses the action, and so never waits for the environment. A CPU
            # updates while the environment works in a thread of its own.
            if learner.runs_ahead:
                self._learn(learning)
            action = wait_for_action()
            rendered_before = self.env.env.render_seconds
            acted = time.perf_counter()
            wait_for_step = self.env.step(action)
            waited = time.perf_counter() - acted
            if not learner.runs_ahead:
                self._learn(learning)
            updated = time.perf_counter()
            step = wait_for_step()
            now = time.perf_counter()
            waited += now - updated
            rendered = self.env.env.render_seconds - rendered_before
            shares.update += now - started - waited
            shares.render += min(rendered, waited)
            shares.env += max(waited - rendered, 0.0)

            self._unstored = action, step
            stack.push(step.frame)
            self.agent_step += 1
            self.episode_score += step.score
            self.episode_actions.append(action)
            if step.done:
                self.last_return = self.episode_score
                self.episode += 1
                self._begin_episode()

            done = self.agent_step * self.steps_per_agent_step
            self.progress.show(done, self.last_return, time.perf_counter() - self._began)
            if learning and not told:
                now = time.perf_counter()
                first_update = first_update or now
                if counted_from is None or learner.updates <= WARM_UPDATES:
                    counted_from = now, done
                elif learner.updates >= PROBE_UPDATES or now - first_update > PROBE_SECONDS:
                    self._say_expected_time(*counted_from, done)
                    told = True

    def _begin_action(self, learning: bool) -> Callable[[], Action]:
        """Begins to choose the next action, with the weights as they are; calling the result waits for it."""
        if learning:
            return self.learner.action(self.stack.observation, self.agent_step)
        return lambda: random_action(self.spec, self.config.seed, self.agent_step)

    def _learn(self, learning: bool) -> None:
        """Stores the newest transition, then updates: the agent always learns from all that it has seen."""
        self._store()
        if learning:
            self._update()

    def _update(self) -> None:
        for _ in range(self.config.agent.updates_per_step):
            self.learner.update()

    def _store(self) -> None:
        """Puts the newest transition into the replay, if it is not there."""
        if self._unstored is not None:
            action, step = self._unstored
            # Ours: the frame it was copied from may be one that the environment is drawing into already.
            frame = self.stack.observation[-self.spec.frame_shape[0] :]
            self.learner.replay.add(action, step.reward, step.discount, step.done, frame)
            self._unstored = None

    def _begin_episode(self) -> None:
        self._store()
        frame = self._reset()
        self.learner.replay.begin(frame)
        self.stack.reset(frame)
        self.episode_score = 0.0
        self.episode_actions = []

    def _reset(self) -> Frame:
        """The first frame of the episode, from the seed that its number gives it."""
        return self.env.reset(seed_for(self.config.seed, Purpose.EPISODE, self.episode))

    def _evaluate(self) -> None:
        self.evaluations.submit(
            self.learner.agent,
            Request(
                agent_step=self.agent_step,
                env_step=self.env_step,
                seed=seed_for(self.config.seed, Purpose.EVALUATION, self.agent_step),
                video=str(self.folder.videos / f"{self.env_step:010d}.mp4") if self.videos else None,
            )
        )
        self.evaluated = self.agent_step

    def _collect_evaluations(self, *, wait: bool) -> None:
        for request, scores in self.evaluations.collect(wait=wait):
            mean, std = float(np.mean(scores)), float(np.std(scores))
            self.logs.log_eval(
                {
                    "env_step": request.env_step,
                    "agent_step": request.agent_step,
                    "return_mean": mean,
                    "return_std": std,
                    "episodes": len(scores),
                    "seconds": round(self.seconds, 3),
                }
            )
            self.progress.say(
                f"{self._steps_text(request.agent_step)}: return {mean:.1f} ± {std:.1f} over {len(scores)} episodes"
                f"{self._normalised(mean)}, {duration(self.seconds)}"
            )

    def _steps_text(self, agent_step: int) -> str:
        """A count in the budget's unit; for Atari in frames as well, since both are called steps."""
        if self.spec.budget_counts == "env_step":
            return f"{agent_step * self.spec.action_repeat:,} env steps"
        return f"{agent_step:,} agent steps ({agent_step * self.spec.action_repeat:,} frames)"

    def _normalised(self, score: float) -> str:
        """The human-normalised score of an Atari game, where human and random scores are known."""
        low, high = self.spec.random_return, self.spec.perfect_return
        if not envs.family_of(self.config.task).scores or low is None or high is None:
            return ""
        return f", human-normalised {(score - low) / (high - low):.3f}"

    def _log_train(self) -> None:
        row: dict[str, Any] = {
            "env_step": self.env_step,
            "agent_step": self.agent_step,
            "updates": self.learner.updates,
            "episode": self.episode,
            "episode_return": self.last_return if self.last_return is not None else "",
            "seconds": round(self.seconds, 3),
        }
        if self.learner.updates:
            self.logs.log_train(row | self.learner.metrics())

    def _checkpoint(self) -> None:
        self._store()
        self.checkpoints.save(
            self.learner,
            self.agent_step,
            {
                "env_step": self.env_step,
                "episode": self.episode,
                "episode_score": self.episode_score,
                "last_return": self.last_return,
                "evaluated": self.evaluated,
                "seconds": self.seconds,
                "log_sizes": self.logs.sizes(),
                "metrics": self.learner.metrics(),
            },
            torch.from_numpy(np.array(self.episode_actions, dtype=np.float32)),
        )

    def _resume(self, agent_step: int, progress: dict[str, Any], actions: Tensor) -> None:
        self.agent_step = agent_step
        self.episode = progress["episode"]
        self.episode_score = progress["episode_score"]
        self.last_return = progress["last_return"]
        self.evaluated = progress["evaluated"]
        self.learner.restore_metrics(progress["metrics"])
        self.seconds_before = progress["seconds"]
        self.progress.say(f"Resuming at {self._steps_text(self.agent_step)}.")
        replay = self.learner.replay
        self.stack.reset(self._reset())
        for row in actions.numpy():
            action = to_action(row, self.spec)
            self.episode_actions.append(action)
            self.stack.push(self.env.step(action)().frame)
        if not np.array_equal(self.stack.observation, replay.newest_observation()):
            self.progress.say(
                "The environment did not come back to the state it was left in (it is not a function of its seed and "
                "actions): the run goes on with a new episode, and is not exactly the one that was interrupted."
            )
            self.episode += 1
            self._begin_episode()

    @contextmanager
    def _stopping_cleanly(self) -> Iterator[None]:
        """Turns a first Ctrl-C, or a scheduler's SIGTERM, into a checkpoint between two steps."""

        def request(number: int, frame: object) -> None:
            self._stop_requested = True
            for each, handler in before.items():
                signal.signal(each, handler)

        before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            before = {each: signal.signal(each, request) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except KeyboardInterrupt:
            self.progress.say(f"Stopped at {self._steps_text(self.agent_step)}. Run the same command again to go on.")
            raise
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _say_expected_time(self, since: float, done_then: int, done: int) -> None:
        per_step = (time.perf_counter() - since) / max(done - done_then, 1)
        left = per_step * (self.config.steps - done)
        self.progress.say(
            f"Expected: about {duration(left)} for the remaining {self.config.steps - done:,} {self.unit} "
            "on this machine, evaluations not counted."
        )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def train(config: TrainConfig, *, quiet: bool = False, label: str | None = None) -> TrainResult:
    """Trains an agent, or resumes it if `config.dir` holds the run already.

    Args:
        config: all settings; `drq.preset(name, task)` gives one to start from.
        quiet: print nothing.
        label: the run's name in comparisons (`drq report`). None: one is made from its settings.
    """
    return Trainer(config, quiet=quiet, label=label).run()
