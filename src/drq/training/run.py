"""One run, from its settings to its result: refused or opened, trained, closed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from drq import envs
from drq.agents import Agent, check_agent
from drq.config import TrainConfig, check
from drq.cores import usable_cores
from drq.engine import EngineSettings, FastBackend, choose_device
from drq.envs import Environment, EnvSpec, family_of
from drq.errors import UserError
from drq.presets import action_repeat_for, configure, default_dir
from drq.replay import Replay
from drq.settings import config_to_json, flat, override
from drq.training.callbacks import Callbacks
from drq.training.checkpoint import Checkpoints
from drq.training.clock import Clock
from drq.training.components import make_learner, make_stack, open_envs, settle_render
from drq.training.episodes import Episodes
from drq.training.evaluation_service import InlineEvaluation, SubprocessEvaluation
from drq.training.faults import device_faults_in_words, traces_in
from drq.training.folder import RunFolder
from drq.training.initial import begin_with
from drq.training.lock import RunLock
from drq.training.logs import Logs, require_wandb
from drq.training.loop import Loop
from drq.training.progress import Progress, duration, normalised_text, return_text
from drq.training.schedule import Schedule
from drq.training.state import RunState
from drq.training.stopping import StopSignal, Watch
from drq.training.video import NO_FFMPEG, ffmpeg_available

GPU_PRESETS = ("planet", "dreamer", "ablation")
"""Presets that a CPU needs days for."""


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves behind."""

    dir: Path
    evaluations: list[dict[str, float]]
    """Rows of eval.csv."""
    finished: bool = True
    """False: a callback has stopped it, and the same call goes on."""

    @property
    def final_return(self) -> float:
        """Mean return of the last evaluation; nan where its row was lost."""
        return self.evaluations[-1]["return_mean"] if self.evaluations else math.nan


def train(
    config: TrainConfig | str,
    *,
    agent: Agent | Mapping[str, Any] | str | None = None,
    callbacks: Iterable[object] = (),
    quiet: bool = False,
    label: str | None = None,
    **settings: Any,
) -> TrainResult:
    """Trains an agent, or resumes it if `config.dir` holds the run already.

        drq.train("toy/reach", steps=2_000, agent={"k": 1})

    Args:
        config: a task, or all settings; `drq.preset(name, task)` gives those to start from.
        agent: one of your own, constructed with what `drq.describe` gives; or the agent's settings, or its name. None:
            the one that the settings describe.
        callbacks: objects with `on_step`, `on_episode` or `on_evaluation`, as `drq.Callback` has them; one that returns
            False stops the run.
        quiet: print nothing.
        label: the run's name in comparisons (`drq report`). None: one is made from its settings.
        settings: those that differ, as on the command line: `preset="cpu"`, `seed=2`, `env={"image_size": 64}`.
    """
    if isinstance(agent, str | Mapping):
        settings["agent"], agent = agent, None
    if isinstance(config, str):
        config = configure(config, settings)
    elif not isinstance(config, TrainConfig):
        raise UserError(
            f"drq.train takes the name of a task and was given a {type(config).__name__}: register an environment of "
            'yours with Gymnasium and name it, as "gym/MyRobot-v0" (docs/own-environment.md).'
        )
    elif settings:
        config = override(config, flat(settings))
    return Trainer(config, agent=agent, callbacks=callbacks, quiet=quiet, label=label).run()


class Trainer:
    """A run that is fit to be trained."""

    loop: Loop
    """There once it is open."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        agent: Agent | None = None,
        callbacks: Iterable[object] = (),
        quiet: bool = False,
        label: str | None = None,
    ) -> None:
        """Refuses what cannot be trained. Nothing is opened, and nothing written, before `run`."""
        check(config)
        check_agent(config.agent)
        envs.check_settings(config.env, action_repeat_for(config))
        if config.num_envs > 1 and not family_of(config.task).of_the_users:
            raise UserError(f"--num-envs is for gym tasks, whose steps may be slow: leave it out for {config.task}.")
        if config.wandb:
            require_wandb()
        self.callbacks = Callbacks(callbacks)
        self.label = label
        self.device = choose_device(config.device)
        self.schedule = Schedule(config)
        self.engine = EngineSettings.resolve(config.engine, self.device, config.agent, self.schedule.total_updates)
        self._agent = agent
        if agent is not None:
            settings = agent.backend.settings if isinstance(agent.backend, FastBackend) else self.engine
            self.engine = replace(settings, eval_process=False)  # another process could not make it again
        self.folder = RunFolder(Path(config.dir or default_dir(config)))
        self.config = config = settle_render(config, self.engine, self.folder)
        self.folder.check(config)
        self.checkpoints = Checkpoints(self.folder.checkpoint)
        self.clock = Clock()
        self.progress = Progress(budget=config.steps, unit=self.schedule.unit, clock=self.clock, quiet=quiet)
        self.stop = StopSignal()
        self.watch = Watch(self.stop, self.clock.waiting, lambda text: self.progress.say(f"{config.task} {text}"))
        self._replay_bytes = 0
        """Once they are known."""

    def run(self) -> TrainResult:
        """Trains to the end of the budget, from wherever the folder's checkpoint is."""
        if self.folder.holds_finished(self.config):
            result = self._result()
            self.progress.say(
                f"{self.folder.path} is finished: {self.folder.finished_steps:,} {self.schedule.unit}, "
                f"return {return_text(result.final_return)}. Nothing to do."
            )
            return result
        self.checkpoints.check(self.device)
        # Around closing too: it fetches the last checkpoint from the device.
        with self._faults_in_words(), self.watch, ExitStack() as closing:
            self.loop = self._open(closing)
            try:
                with self.stop:
                    self.loop.train()
            except KeyboardInterrupt:
                reached, kept = self.loop.state.agent_step, self.checkpoints.newest or 0
                by = self.callbacks.stopped_by or ""
                back = "" if kept == reached else f", back to the checkpoint of {self.schedule.text(kept)}"
                self.progress.say(
                    f"Stopped at {self.schedule.text(reached)}{by and f' by {by}'}{back}. Run the same command again "
                    "to go on."
                )
                if not by:
                    raise
                return replace(self._result(), finished=False)
        # Only now: closing waits until the last checkpoint is on the disk.
        self.folder.finish(self.config.steps, self.clock.seconds)
        result = self._result()
        self.progress.say(
            f"Done in {duration(self.clock.seconds)}: return {return_text(result.final_return)}"
            f"{normalised_text(result.final_return, self.loop.spec)} after "
            f"{self.schedule.text(self.schedule.agent_steps)}. {self.folder.path}"
        )
        return result

    def _result(self) -> TrainResult:
        return TrainResult(self.folder.path, self.folder.evaluations())

    def _faults_in_words(self) -> AbstractContextManager[None]:
        return device_faults_in_words(lambda: self.checkpoints.left, lambda: self._replay_bytes)

    def _open(self, closing: ExitStack) -> Loop:
        """Makes all that a run needs, new or as its checkpoint left it."""
        config, say = self.config, self.progress.say
        closing.callback(self.progress.close)
        if self.checkpoints.exist:
            self._keep_threads(closing)
        with self.clock.waiting:
            workers = open_envs(config, self.device, closing)
            spec = workers[0].env.spec
        videos = self._records_videos(workers[0].env)
        # Early, since a process takes seconds to be ready.
        inline = InlineEvaluation(config, self.engine, self.watch.stopping, self.progress.show_evaluation)
        evaluations = SubprocessEvaluation(config, inline) if self.engine.eval_process else inline
        closing.callback(evaluations.close)
        self._replay_bytes = Replay.bytes_needed(spec, self.schedule.capacity)
        self._introduce(spec)
        learner = make_learner(config, spec, self.engine, self.schedule.capacity, self._agent)
        stacks = [make_stack(config, worker.env, self.engine) for worker in workers]
        state = RunState()
        if config.init_from and not self.checkpoints.exist:
            said, state.inherited = begin_with(config, learner)
            say(said)
        self._take_lock(closing)
        # What the last bits of a result hang on beside the settings.
        computed_with = {"device": self.device.type, "precision": self.engine.precision}
        self.folder.open(config, spec, self.label, computed_with | {"threads": torch.get_num_threads()})
        self.folder.error_file.unlink(missing_ok=True)  # of an attempt before this one
        closing.callback(self.checkpoints.close)
        restored = self.checkpoints.restore(learner, self.schedule)
        state = restored or state
        logs = Logs(
            self.folder,
            config_to_json(config),
            wandb=config.wandb,
            sizes=state.log_sizes,
            eval_rows=state.eval_rows,
            resumed_at=self.schedule.env_step(state.agent_step) if restored else None,
        )
        closing.callback(logs.close)
        for notice in filter(None, (self.checkpoints.notice, *logs.notices)):
            say(notice)
        if logs.eval.notice and state.evaluated == state.agent_step and state.agent_step not in state.pending:
            state.evaluated -= 1  # its row is lost, and the weights for it are here
        loop = Loop(
            config=config,
            spec=spec,
            folder=self.folder,
            state=state,
            schedule=self.schedule,
            clock=self.clock,
            learner=learner,
            episodes=Episodes(workers, stacks, state, learner.replay, config.seed, self.clock.waiting),
            evaluations=evaluations,
            checkpoints=self.checkpoints,
            logs=logs,
            progress=self.progress,
            callbacks=self.callbacks,
            stop=self.stop,
            watch=self.watch,
            videos=videos,
            newest_evaluation=next(reversed(self.folder.evaluations()), None),
            acting=None if self._agent is None else list(self._agent.modules.state_dict()),
        )
        if restored:
            self.clock.seconds_before = state.seconds
            say(f"Resuming at {self.schedule.text(state.agent_step)}.")
            if forgetful := loop.episodes.go_back():
                say(forgetful)
        else:
            loop.episodes.begin()
            if config.init_from:
                loop.save()  # from here on the run needs nothing of another's
        return loop

    def _keep_threads(self, closing: ExitStack) -> None:
        """Goes on with as many threads as the run began with: others would round otherwise. On a GPU none do."""
        before, now = self.folder.computed_with, torch.get_num_threads()
        if before.get("device") == self.device.type == "cpu" and now != before["threads"] <= usable_cores():
            began = before["threads"]
            self.progress.say(f"Going on with {began} threads, as it began: with {now} it would round otherwise.")
            torch.set_num_threads(began)
            closing.callback(torch.set_num_threads, now)

    def _records_videos(self, env: Environment) -> bool:
        """Whether evaluations leave videos. Where they cannot, it is said why."""
        if not self.config.eval.video:
            return False
        draws, encodes = getattr(env, "draws", True), ffmpeg_available()
        if not draws or not encodes:
            why = f": {self.config.task} has no rgb_array render mode." if encodes else f". {NO_FFMPEG}"
            self.progress.say(f"No videos will be recorded{why}")
        return draws and encodes

    def _introduce(self, spec: EnvSpec) -> None:
        """Says what begins, and what somebody may have wanted otherwise."""
        config, say, on_gpu = self.config, self.progress.say, self.device.type == "cuda"
        if spec.pixels and not on_gpu and config.preset in GPU_PRESETS:
            say(f"The preset {config.preset!r} is made for a GPU; --preset cpu is the one for this machine.")
        where = torch.cuda.get_device_name(self.device) if on_gpu else "the CPU"
        kept = f"replay of {self.schedule.capacity:,} transitions: {self._replay_bytes / 1e6:,.1f} MB"
        say(f"{config.task} on {where}; {kept}.")
        if spec.sees:
            say(f"The agent sees {spec.sees}.")
        if spec.max_episode_agent_steps is None:  # an evaluation plays whole episodes
            say("Its episodes have no time limit: unless they end by themselves, set --env.max-episode-steps.")
        if not self.schedule.total_updates:
            say(
                f"This run will make no update: --steps {config.steps:,} gives {self.schedule.agent_steps:,} agent "
                f"steps, and the first {config.agent.seed_steps:,} are random (--agent.seed-steps)."
            )

    def _take_lock(self, closing: ExitStack) -> None:
        lock = RunLock(self.folder.lock_file)
        with self.folder.writable():
            lock.take()
        closing.callback(lock.release)
        self.folder.check(self.config)  # as it is now that nobody else changes it
        closing.enter_context(traces_in(self.folder.error_file))
        closing.enter_context(self._faults_in_words())
