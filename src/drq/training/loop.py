"""One run, from the first random action to the last evaluation: act, step, and beside that store and update."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from drq import envs
from drq.agents import Agent, check_agent
from drq.config import TrainConfig, check
from drq.engine import DrawnStack, EngineSettings, FastBackend, Snapshot, choose_device, in_words, lacks_memory
from drq.envs import Action, Frame, Step, family_of
from drq.errors import UserError
from drq.presets import action_repeat_for, configure, default_dir
from drq.replay import Replay
from drq.settings import flat, override
from drq.training.callbacks import Callbacks, Event, RunView
from drq.training.checkpoint import Checkpoints
from drq.training.clock import Clock
from drq.training.components import (
    make_env,
    make_learner,
    make_remote_env,
    make_stack,
    names_that_act,
    settle_render,
)
from drq.training.env_worker import EnvWorker, InlineEnv, ProcessEnv, ThreadedEnv
from drq.training.evaluate import FrameStack
from drq.training.evaluation_service import EvaluationRequest, PlayedEvaluation, open_evaluation_service
from drq.training.folder import INFO, RunFolder, config_to_json, unwritable, write_atomically
from drq.training.initial import begin_with
from drq.training.lock import RunLock
from drq.training.logs import Logs, require_wandb
from drq.training.policy import TrainedPolicy
from drq.training.policy_file import PolicyFile
from drq.training.progress import Progress, duration, info_text
from drq.training.schedule import Schedule
from drq.training.seeds import Purpose, random_action, seed_for
from drq.training.state import Best, RunState, UnderWay
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
    elif settings:
        config = override(config, flat(settings))
    return Trainer(config, agent=agent, callbacks=callbacks, quiet=quiet, label=label).run()


class Trainer:
    """A run in progress."""

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
        self.config = config
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

        self.state = RunState()
        self.clock = Clock()
        self.progress = Progress(budget=config.steps, unit=self.schedule.unit, clock=self.clock, quiet=quiet)
        self.stop = StopSignal()
        self.watch = Watch(self.stop, self.clock.waiting, lambda text: self.progress.say(f"{config.task} {text}"))
        self._needed = 0
        """Bytes of the replay, once they are known."""
        self._locked = False
        """Whether the folder is this process's to write."""
        self._asked: dict[int, float] = {}
        """When evaluations were asked for, by agent step."""
        self._acting: list[str] | None = None
        """Names of the weights that the best policy is kept with."""
        self._unstored: list[tuple[Action, Step]] = []
        """Each environment's newest transition, until it is in the replay. Its frame is the newest in the stack."""

    def run(self) -> TrainResult:
        """Trains to the end of the budget, from wherever the folder's checkpoint is."""
        finished = self.folder.finished_steps
        evaluations = self.folder.evaluations()
        # One without evaluations, or with more steps than were ever asked for, is damaged: the checkpoint knows better.
        asked = self.folder.config_like(self.config.agent).steps if self.folder.config_file.exists() else 0
        whole = evaluations and finished is not None and finished <= asked
        if finished is not None and finished >= self.config.steps and whole:
            result = TrainResult(self.folder.path, evaluations)
            self.progress.say(
                f"{self.folder.path} is finished: {finished:,} {self.schedule.unit}, "
                f"return {result.final_return:.1f}. Nothing to do."
            )
            return result
        self.checkpoints.check(self.device)
        stopped = False
        # Around closing too: it fetches the last checkpoint from the device.
        with self._device_faults_in_words(), ExitStack() as closing:
            try:
                with self._device_faults_in_words():
                    self._open(closing)
                    try:
                        with self.stop, self.watch:
                            self._train()
                    except KeyboardInterrupt:
                        where, by = self.schedule.text(self.state.agent_step), self.callbacks.stopped_by or ""
                        self.progress.say(
                            f"Stopped at {where}{by and f' by {by}'}. Run the same command again to go on."
                        )
                        if not by:
                            raise
                        stopped = True
            except UserError as error:
                # Of somebody else's code, or of a device: who mends it needs the whole trace.
                if self._locked and error.__cause__ is not None:
                    trace = "".join(traceback.format_exception(error.__cause__))
                    with suppress(OSError, UserError):  # the disk may be what failed
                        write_atomically(self.folder.error_file, f"{trace}\n{error}\n")
                raise
        if stopped:
            return TrainResult(self.folder.path, self.folder.evaluations(), finished=False)
        # Only now: closing waits until the last checkpoint is on the disk.
        finish = {"steps": self.config.steps, "seconds": round(self.clock.seconds, 3)}
        try:
            write_atomically(self.folder.finished_file, json.dumps(finish) + "\n")
        except OSError as error:
            raise UserError(unwritable(self.folder.finished_file, error)) from error
        result = TrainResult(self.folder.path, self.folder.evaluations())
        self.progress.say(
            f"Done in {duration(self.clock.seconds)}: return {result.final_return:.1f}"
            f"{self._normalised(result.final_return)} after {self.schedule.text(self.schedule.agent_steps)}. "
            f"{self.folder.path}"
        )
        return result

    def _open(self, closing: ExitStack) -> None:
        """Makes all that a run needs, new or as its checkpoint left it."""
        config = self.config
        closing.callback(self.progress.close)
        self.envs = self._open_envs(closing)
        first = self.envs[0].env
        self.spec = first.spec
        self.videos = config.eval.video and ffmpeg_available()
        if config.eval.video and not self.videos:
            self.progress.say(f"No videos will be recorded. {NO_FFMPEG}")
        elif self.videos and not getattr(first, "draws", True):
            self.videos = False
            self.progress.say(f"No videos will be recorded: {config.task} has no rgb_array render mode.")
        if self.device.type == "cpu" and self.spec.pixels and config.preset in GPU_PRESETS:
            self.progress.say(
                f"The preset {config.preset!r} is made for a GPU; --preset cpu is the one for this machine."
            )
        self.evaluations = open_evaluation_service(config, self.engine, self.watch.stopping, self._show_evaluation)
        closing.callback(self.evaluations.close)
        capacity = (config.replay.capacity or self.schedule.agent_steps) // config.num_envs * config.num_envs
        self._needed = Replay.bytes_needed(self.spec, capacity)
        self.progress.say(
            f"{config.task} on {_device_name(self.device)}; replay of {capacity:,} transitions: "
            f"{self._needed / 1e9:.2f} GB."
        )
        if self.spec.sees:
            self.progress.say(f"The agent sees {self.spec.sees}.")
        if not self.schedule.total_updates:
            self.progress.say(
                f"This run will make no update: --steps {config.steps:,} gives {self.schedule.agent_steps:,} agent "
                f"steps, and the first {config.agent.seed_steps:,} are random (--agent.seed-steps)."
            )
        self.learner = make_learner(config, self.spec, self.engine, capacity, self._agent)
        self.stacks = [make_stack(config, each.env, self.engine) for each in self.envs]
        if config.init_from and not self.checkpoints.exist:
            said, self.state.inherited = begin_with(config, self.learner)
            self.progress.say(said)
        self._take_lock(closing)
        self.folder.open(config, self.spec, self.label, self._computed_with())
        self.folder.error_file.unlink(missing_ok=True)  # of an attempt before this one
        closing.callback(self.checkpoints.close)
        restored = self.checkpoints.restore(self.learner, self.schedule)
        if self.checkpoints.notice:
            self.progress.say(self.checkpoints.notice)
        self.state = restored or self.state
        self.logs = Logs(
            self.folder,
            config_to_json(config),
            wandb=config.wandb,
            sizes=self.state.log_sizes,
            eval_rows=self.state.eval_rows,
            resumed_at=self.env_step if restored else None,
        )
        closing.callback(self.logs.close)
        for notice in self.logs.notices:
            self.progress.say(notice)
        self.newest_evaluation = next(reversed(self.folder.evaluations()), None)
        if restored:
            self._return_to_episodes()
        else:
            self.state.under_way = [UnderWay(slot) for slot in range(config.num_envs)]
            self._begin_episodes(range(config.num_envs))
            if config.init_from:
                self._checkpoint()  # from here on the run needs nothing of another's

    def _open_envs(self, closing: ExitStack) -> list[EnvWorker]:
        config, opened = self.config, list[EnvWorker]()
        if config.num_envs == 1:
            opened.append((InlineEnv if self.device.type == "cuda" else ThreadedEnv)(lambda: make_env(config)))
            closing.callback(opened[0].close)
        else:
            for _ in range(config.num_envs):  # all begin to open before the first is waited for
                opened.append(ProcessEnv(make_remote_env(config)))
                closing.callback(opened[-1].close)
        return opened

    def _computed_with(self) -> dict[str, str | int]:
        """What the last bits of a result hang on beside the settings."""
        return {
            "device": self.device.type,
            "precision": self.engine.precision,
            "threads": torch.get_num_threads(),
        }

    def _take_lock(self, closing: ExitStack) -> None:
        self.folder.make()
        lock = RunLock(self.folder.lock_file)
        try:
            lock.take()
        except OSError as error:
            raise UserError(
                f"The run folder {self.folder.path} cannot be written ({error.strerror}): choose another --dir."
            ) from error
        closing.callback(lock.release)
        self._locked = True
        self.folder.check(self.config)  # as it is now that nobody else changes it

    def _train(self) -> None:
        """Agent steps to the end of the budget, and between them what is due."""
        state, schedule = self.state, self.schedule
        for agent_step, weights in state.pending.items():
            self.evaluations.resume(self.learner.agent, self._request(agent_step), weights)
        while True:
            self._save_if_due()
            if schedule.evaluation_due(state.agent_step) and state.evaluated < state.agent_step:
                self._evaluate()
            if schedule.over(state.agent_step):
                self._collect_evaluations(wait=True)
                if self.evaluations.under_way:  # the run shall stop
                    continue
                self._checkpoint()
                return
            if schedule.log_due(state.agent_step):
                self._log_train()
            self._unstored = self._step()
            state.agent_step += len(self._unstored)
            over = []
            for slot, (action, step) in enumerate(self._unstored):
                self.stacks[slot].push(step.frame)
                state.under_way[slot].score += step.score
                state.under_way[slot].actions.append(action)
                if step.done:
                    over.append(slot)
            self._end_episodes(over)
            self._tell("on_step")
            self._show_progress()

    def _step(self) -> list[tuple[Action, Step]]:
        """Chooses an action for each environment and takes it; beside that stores the transitions before, and
        updates."""
        clock, runs_ahead = self.clock, self.learner.runs_ahead
        clock.begin_step(self.envs[0].env.render_seconds)
        wait_for_actions = self._begin_actions()
        # A GPU is told of the update while it chooses the action, and so never waits for the environment. A CPU
        # updates while the environment works in a thread of its own.
        if runs_ahead:
            self._learn()
        actions = wait_for_actions()
        with clock.waiting:
            under_way = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        if not runs_ahead:
            self._learn()
        with clock.waiting:
            steps = [wait_for_step() for wait_for_step in under_way]
        clock.end_step(self.envs[0].env.render_seconds)
        return list(zip(actions, steps, strict=True))

    def _begin_actions(self) -> Callable[[], list[Action]]:
        """Begins to choose the next actions, with the weights as they are; calling the result waits for them."""
        agent_step, stacks = self.state.agent_step, self.stacks
        if self.schedule.learning(agent_step) or self.config.init_from:
            one = stacks[0].observation[None]
            return self.learner.actions(one if len(stacks) == 1 else _batch(stacks), agent_step)
        numbers = range(agent_step, agent_step + len(stacks))
        return lambda: [random_action(self.spec, self.config.seed, number) for number in numbers]

    def _learn(self) -> None:
        """Stores the newest transitions, then updates: the agent always learns from all that it has seen."""
        self._store()
        for _ in range(self.schedule.updates(self.state.agent_step)):
            self.learner.update()

    def _store(self) -> None:
        """Puts the newest transitions into the replay, if they are not there."""
        for slot, (action, step) in enumerate(self._unstored):
            newest = self.stacks[slot].newest
            self.learner.replay.add(action, step.reward, step.discount, step.done, newest, slot)
        self._unstored = []

    def _end_episodes(self, slots: Sequence[int]) -> None:
        """Counts the episodes that are over, and begins the next in their places."""
        state, scores = self.state, [self.state.under_way[slot].score for slot in slots]
        for slot in slots:
            state.episode += 1
            state.under_way[slot] = UnderWay(state.episode + len(self.envs) - 1)
        if slots:
            self._begin_episodes(slots)
        for state.last_return in scores:
            self._tell("on_episode")

    def _begin_episodes(self, slots: Iterable[int]) -> None:
        self._store()
        for slot, frame in self._reset_envs(slots).items():
            self.stacks[slot].reset(frame)
            self.learner.replay.begin(self.stacks[slot].newest, slot)

    def _reset_envs(self, slots: Iterable[int]) -> dict[int, Frame]:
        """The first frames of episodes, from the seeds that their numbers give them."""
        with self.clock.waiting:
            numbers = {slot: self.state.under_way[slot].number for slot in slots}
            under_way = {
                slot: self.envs[slot].reset(seed_for(self.config.seed, Purpose.EPISODE, number))
                for slot, number in numbers.items()
            }
            return {slot: wait_for_frame() for slot, wait_for_frame in under_way.items()}

    def _return_to_episodes(self) -> None:
        """Leads the environments back to the middle of the episodes in which the checkpoint found them."""
        self.clock.seconds_before = self.state.seconds
        self.progress.say(f"Resuming at {self.schedule.text(self.state.agent_step)}.")
        for slot, frame in self._reset_envs(range(len(self.envs))).items():
            self.stacks[slot].reset(frame)
        for actions in zip_longest(*(episode.actions for episode in self.state.under_way)):
            under_way = [(slot, self.envs[slot].step(each)) for slot, each in enumerate(actions) if each is not None]
            for slot, wait_for_step in under_way:
                self.stacks[slot].push(wait_for_step().frame)
        replay = self.learner.replay
        forgetful = [
            slot
            for slot, stack in enumerate(self.stacks)
            if not np.array_equal(stack.on_host(), replay.newest_observation(slot))
        ]
        if forgetful:
            self.progress.say(
                "The environment did not come back to the state it was left in (it is not a function of its seed and "
                "actions): the run goes on with a new episode, and is not exactly the one that was interrupted."
            )
            for slot in forgetful:
                self.state.episode += 1
                self.state.under_way[slot] = UnderWay(self.state.episode + len(self.envs) - 1)
            self._begin_episodes(forgetful)

    def _save_if_due(self) -> None:
        """Makes a checkpoint if one is due or the run shall stop, and stops it then."""
        self._collect_evaluations(wait=False)
        agent_step, stopping = self.state.agent_step, self.stop.requested
        # The last evaluation may be a long one: what was learnt until then must not hang on it.
        due = self.schedule.checkpoint_due(agent_step) or self.schedule.over(agent_step)
        if stopping or (due and self.checkpoints.newest != agent_step):
            self._checkpoint()
        if stopping:
            raise KeyboardInterrupt

    def _checkpoint(self) -> None:
        self._store()
        self.state.seconds = self.clock.seconds
        self.state.log_sizes, self.state.eval_rows = self.logs.sizes(), self.logs.eval.rows
        self.state.pending = self.evaluations.pending()
        self.checkpoints.save(self.learner, self.state)

    def _evaluate(self) -> None:
        self._collect_evaluations(wait=True, leave=1)  # where they are slower than training, it waits for them
        self._asked[self.state.agent_step] = self.clock.seconds
        with self.watch.evaluating(), self.clock.evaluating:
            self.evaluations.submit(self.learner.agent, self._request(self.state.agent_step))
        self.state.evaluated = self.state.agent_step

    def _request(self, agent_step: int) -> EvaluationRequest:
        env_step = self.schedule.env_step(agent_step)
        return EvaluationRequest(
            agent_step=agent_step,
            env_step=env_step,
            seed=seed_for(self.config.seed, Purpose.EVALUATION, agent_step),
            video=str(self.folder.videos / f"{env_step:010d}.mp4") if self.videos else None,
        )

    def _collect_evaluations(self, *, wait: bool, leave: int = 0) -> None:
        with self.clock.evaluating if wait else nullcontext():
            collected = self.evaluations.collect(wait=wait, leave=leave)
        rows = [self._log_evaluation(each) for each in collected]
        for self.newest_evaluation in rows:  # once all are logged: a callback may end the run
            self._tell("on_evaluation")

    def _log_evaluation(self, played: PlayedEvaluation) -> dict[str, float]:
        request, (scores, info) = played.request, played.result
        if request.agent_step in self._asked:
            self.clock.evaluated(self.clock.seconds - self._asked.pop(request.agent_step))
        mean, std = float(np.mean(scores)), float(np.std(scores))
        row = {
            "env_step": request.env_step,
            "agent_step": request.agent_step,
            "return_mean": mean,
            "return_std": std,
            "episodes": len(scores),
            "seconds": round(self.clock.seconds, 3),
            **{f"{INFO}{name}": value for name, value in info.items()},
        }
        self.logs.log_eval(row)
        self._keep_if_best(request.agent_step, mean, played.weights)
        self.progress.say(
            f"{self.schedule.text(request.agent_step)}: return {mean:.1f} ± {std:.1f} over {len(scores)} episodes"
            f"{self._normalised(mean)}{info_text(info)}, {duration(self.clock.seconds)}"
        )
        return row

    def _keep_if_best(self, agent_step: int, mean: float, weights: Snapshot) -> None:
        """The next checkpoint keeps what acted in the best evaluation so far, beside what comes last."""
        best = self.state.best
        if math.isfinite(mean) and (best is None or mean >= best.return_mean):
            own = weights.on_host()
            if self._acting is None:
                self._acting = list(own) if self._agent else names_that_act(self.config, self.spec, self.learner)
            policy = PolicyFile(self.config, self.spec, agent_step, {name: own[name] for name in self._acting})
            self.state.best = Best(agent_step, mean, policy)

    def _tell(self, event: Event) -> None:
        """Tells callbacks, if there are any; their errors end the run where it is, and so does a False."""
        if not self.callbacks.hear(event):
            return
        state = self.state
        run = RunView(
            config=self.config,
            dir=self.folder.path,
            agent_step=state.agent_step,
            env_step=self.env_step,
            updates=self.learner.updates,
            episodes=state.episode,
            episode_return=state.last_return,
            evaluation=self.newest_evaluation,
            policy=self._policy,
        )
        try:
            self.callbacks.tell(event, run)
        except UserError:
            self._checkpoint()
            raise
        self.stop.requested |= self.callbacks.stopped_by is not None

    def _policy(self) -> TrainedPolicy:
        """The policy as it is now."""

        def load_into(agent: Agent) -> int:
            agent.modules.load_state_dict(self.learner.agent.modules.state_dict())
            return self.state.agent_step

        return TrainedPolicy(self.config, self.spec, load_into, device="cuda" if self.device.type == "cuda" else "cpu")

    def _log_train(self) -> None:
        state = self.state
        row: dict[str, Any] = {
            "env_step": self.env_step,
            "agent_step": state.agent_step,
            "updates": self.learner.updates,
            "episode": state.episode,
            "episode_return": state.last_return if state.last_return is not None else "",
            "seconds": round(self.clock.seconds, 3),
        }
        if self.learner.updates:
            metrics = self.learner.metrics()
            for name, value in metrics.items():
                if not math.isfinite(value):
                    raise UserError(
                        f"The agent has diverged: {name} is {value} at {self.schedule.text(state.agent_step)}. The "
                        "last checkpoint stays: try a smaller --agent.learning-rate in another --dir, and see that "
                        "rewards are not huge."
                    )
            self.logs.log_train(row | metrics)

    def _show_progress(self) -> None:
        spent, budget = self.schedule.spent(self.state.agent_step), self.config.steps
        evaluations = self.schedule.evaluations_after(self.state.agent_step)
        tell = self.clock.count(spent, self.learner.updates)
        self.progress.show(spent, evaluations, self.state.last_return)
        if tell and (left := self.clock.left(budget - spent, evaluations)):
            self.progress.say(
                f"Expected: about {duration(left[0])} for the remaining {budget - spent:,} {self.schedule.unit} "
                f"on this machine, evaluations {'included' if left[1] else 'not counted'}."
            )

    def _show_evaluation(self, done: int, of: int, unit: str) -> None:
        if self.clock.evaluating.running:  # else it is played beside training
            self.progress.show_evaluation(done, of, unit)

    @contextmanager
    def _device_faults_in_words(self) -> Iterator[None]:
        """A GPU without memory, or lost: what happened, what is left, and what to do."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if (happened := in_words(error)) is None:
                raise
            kept = self.checkpoints.newest is not None or self.checkpoints.exist
            left = "The last checkpoint stays" if kept else "There is no checkpoint yet"
            if lacks_memory(error):
                raise UserError(
                    f"{happened}; the replay alone takes {self._needed / 1e9:.2f} GB. {left}: run the same command "
                    "again when there is room, or fewer runs at once; or, in another --dir, with a smaller "
                    "--replay.capacity, --agent.batch-size, --agent.k, --agent.m or --agent.hidden-dim."
                ) from error
            raise UserError(
                f"{happened}, or under MPS another process on it did. {left}: run the same command again; if it fails "
                "once more, nvidia-smi and the system's log (Xid) say what is wrong with the GPU."
            ) from error

    @property
    def env_step(self) -> int:
        return self.schedule.env_step(self.state.agent_step)

    def _normalised(self, score: float) -> str:
        """The human-normalised score of an Atari game, where human and random scores are known."""
        low, high = self.spec.random_return, self.spec.perfect_return
        if not family_of(self.config.task).scores or low is None or high is None:
            return ""
        return f", human-normalised {(score - low) / (high - low):.3f}"


def _batch(stacks: Sequence[FrameStack | DrawnStack]) -> NDArray[Any]:
    return np.stack([stack.on_host() for stack in stacks])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
