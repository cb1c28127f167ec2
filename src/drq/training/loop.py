"""The steps of training: act, step the environments, and beside that store and update; between steps, what is due."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from drq.config import TrainConfig
from drq.engine import Learner, Snapshot
from drq.envs import Action, EnvSpec, Step
from drq.errors import UserError
from drq.training.callbacks import Callbacks, Event, RunView
from drq.training.checkpoint import Checkpoints
from drq.training.clock import Clock
from drq.training.components import names_that_act
from drq.training.episodes import Episodes
from drq.training.evaluation_service import EvaluationRequest, EvaluationService, PlayedEvaluation
from drq.training.faults import diverged
from drq.training.folder import INFO, RunFolder
from drq.training.logs import Logs
from drq.training.policy import TrainedPolicy
from drq.training.policy_file import PolicyFile
from drq.training.progress import Progress, duration, info_text, normalised_text, return_text
from drq.training.schedule import Schedule
from drq.training.seeds import Purpose, random_action, seed_for
from drq.training.state import Best, RunState
from drq.training.stopping import StopSignal, Watch


@dataclass
class Loop:
    """A run that is open, new or where its checkpoint left it."""

    config: TrainConfig
    spec: EnvSpec
    folder: RunFolder
    state: RunState
    """What is saved, and found again."""
    schedule: Schedule
    clock: Clock
    learner: Learner
    episodes: Episodes
    evaluations: EvaluationService
    checkpoints: Checkpoints
    logs: Logs
    progress: Progress
    callbacks: Callbacks
    stop: StopSignal
    watch: Watch
    videos: bool
    """Whether every evaluation leaves one."""
    newest_evaluation: dict[str, float] | None
    """The last row of eval.csv."""
    acting: list[str] | None
    """Names of the weights that the best policy is kept with. None: not found out yet."""
    _asked: dict[int, float] = field(default_factory=dict)
    """When evaluations were asked for, by agent step."""

    def train(self) -> None:
        """Agent steps to the end of the budget, and between them what is due. KeyboardInterrupt: the run shall stop,
        and has its checkpoint."""
        state, schedule = self.state, self.schedule
        with self.watch.evaluating(), self.clock.evaluating:
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
                self.save()
                return
            if schedule.log_due(state.agent_step):
                self._log()
            actions, steps = self._step()
            state.agent_step += len(steps)
            for state.last_return in self.episodes.advance(actions, steps):
                self._tell("on_episode")
            self._tell("on_step")
            self._show_progress()

    def _step(self) -> tuple[list[Action], list[Step]]:
        """Chooses an action for each environment and takes it; beside that stores the transitions before, and
        updates."""
        clock, runs_ahead = self.clock, self.learner.runs_ahead
        clock.begin_step(self.episodes.render_seconds)
        wait_for_actions = self._begin_actions()
        # A GPU is told of the update while it chooses the action, and so never waits for the environment. A CPU
        # updates while the environment works in a thread of its own.
        if runs_ahead:
            self._learn()
        actions = wait_for_actions()
        wait_for_steps = self.episodes.begin_steps(actions)
        if not runs_ahead:
            self._learn()
        steps = wait_for_steps()
        clock.end_step(self.episodes.render_seconds)
        return actions, steps

    def _begin_actions(self) -> Callable[[], list[Action]]:
        """Begins to choose the next actions, with the weights as they are; calling the result waits for them."""
        agent_step, config = self.state.agent_step, self.config
        if self.schedule.learning(agent_step) or config.init_from:
            return self.learner.actions(self.episodes.observations, agent_step)
        numbers = range(agent_step, agent_step + config.num_envs)
        return lambda: [random_action(self.spec, config.seed, number) for number in numbers]

    def _learn(self) -> None:
        """Stores the newest transitions, then updates: the agent always learns from all that it has seen."""
        self.episodes.store()
        for _ in range(self.schedule.updates(self.state.agent_step)):
            self.learner.update()

    def _save_if_due(self) -> None:
        """Makes a checkpoint if one is due or the run shall stop, and stops it then."""
        self._collect_evaluations(wait=False)
        agent_step, stopping = self.state.agent_step, self.stop.requested
        # The last evaluation may be a long one: what was learnt until then must not hang on it.
        due = self.schedule.checkpoint_due(agent_step) or self.schedule.over(agent_step)
        if stopping or (due and self.checkpoints.newest != agent_step):
            self.save()
        if stopping:
            raise KeyboardInterrupt

    def save(self) -> None:
        self.episodes.store()
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
        request, weights, scores, info = played
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
        self._keep_if_best(request.agent_step, mean, weights)
        self.progress.say(
            f"{self.schedule.text(request.agent_step)}: return {return_text(mean, std)} "
            f"over {len(scores)} episode{'s' * (len(scores) != 1)}"
            f"{normalised_text(mean, self.spec)}{info_text(info)}, {duration(self.clock.seconds)}"
        )
        return row

    def _keep_if_best(self, agent_step: int, mean: float, weights: Snapshot) -> None:
        """The next checkpoint keeps what acted in the best evaluation so far, beside what comes last."""
        best = self.state.best
        if math.isfinite(mean) and (best is None or mean >= best.return_mean):
            self.acting = self.acting or names_that_act(self.config, self.spec, self.learner)
            own = weights.on_host()
            policy = PolicyFile(self.config, self.spec, agent_step, {name: own[name] for name in self.acting})
            self.state.best = Best(agent_step, mean, policy)

    def _tell(self, event: Event) -> None:
        """Tells callbacks, if there are any; their errors end the run where it is, and so does a False."""
        if not self.callbacks.hear(event):
            return
        run = RunView(
            config=self.config,
            dir=self.folder.path,
            agent_step=self.state.agent_step,
            env_step=self.schedule.env_step(self.state.agent_step),
            updates=self.learner.updates,
            episodes=self.state.episode,
            episode_return=self.state.last_return,
            evaluation=self.newest_evaluation,
            policy=self._policy,
        )
        try:
            self.callbacks.tell(event, run)
        except UserError:
            self.save()
            raise
        self.stop.requested |= self.callbacks.stopped_by is not None

    def _policy(self) -> TrainedPolicy:
        """The policy as it is now."""
        weights, on_gpu = self.learner.agent.modules.state_dict(), self.learner.engine.device.type == "cuda"
        policy = PolicyFile(self.config, self.spec, self.state.agent_step, weights)
        return TrainedPolicy(self.config, self.spec, policy.load_into, device="cuda" if on_gpu else "cpu")

    def _log(self) -> None:
        """A row of train.csv, once there are updates to tell of."""
        state, metrics = self.state, self.learner.metrics() if self.learner.updates else {}
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise diverged(f"{name} is {value}", self.schedule.text(state.agent_step), self.checkpoints.left)
        if metrics:
            row = {
                "env_step": self.schedule.env_step(state.agent_step),
                "agent_step": state.agent_step,
                "updates": self.learner.updates,
                "episode": state.episode,
                "episode_return": state.last_return if state.last_return is not None else "",
                "seconds": round(self.clock.seconds, 3),
            }
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
