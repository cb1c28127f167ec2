"""What is due when."""

from __future__ import annotations

from drq.config import TrainConfig
from drq.envs import family_of
from drq.errors import UserError
from drq.presets import action_repeat_for


class Schedule:
    """When a run learns, logs, evaluates, makes a checkpoint and ends.

    Questions are asked by agent step. Settings count in the unit of the budget: env steps, for Atari agent steps.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._action_repeat = action_repeat_for(config)
        self._counts_env_steps = family_of(config.task).budget_counts == "env_step"
        self.unit = "env steps" if self._counts_env_steps else "agent steps"
        """Of the budget, in words."""
        self._cost = self._action_repeat if self._counts_env_steps else 1
        """What an agent step takes of the budget."""
        self._together = config.num_envs
        """Agent steps that are taken at the same time: counts of them are multiples of it."""
        self.agent_steps = config.steps // self._cost // self._together * self._together
        """Length of the run."""
        if self.agent_steps < 1:
            least = self._cost * self._together
            raise UserError(f"--steps {config.steps} is less than one agent step ({least}): raise it.")

    @property
    def capacity(self) -> int:
        """Transitions that the replay keeps, the same number for each environment."""
        return (self._config.replay.capacity or self.agent_steps) // self._together * self._together

    @property
    def total_updates(self) -> int:
        """Of the whole run."""
        return self.updates_until(self.agent_steps)

    def env_step(self, agent_step: int) -> int:
        return agent_step * self._action_repeat

    def spent(self, agent_step: int) -> int:
        """How much of the budget the first so many agent steps took."""
        return agent_step * self._cost

    def over(self, agent_step: int) -> bool:
        return agent_step == self.agent_steps

    def learning(self, agent_step: int) -> bool:
        """Whether the agent acts, and learns; before that, actions are random."""
        return agent_step >= self._config.agent.seed_steps

    def updates(self, agent_step: int) -> int:
        """How many updates belong to this agent step, and to those taken with it: with 0.5 a step there is one in
        every second."""
        return self.updates_until(agent_step + self._together) - self.updates_until(agent_step)

    def updates_until(self, agent_step: int) -> int:
        """How many updates belong to the first so many agent steps."""
        agent, together = self._config.agent, self._together
        seed_steps = -(-agent.seed_steps // together) * together  # the next multiple: actions are chosen together
        return int(max(agent_step - seed_steps, 0) * agent.updates_per_step)

    def evaluation_due(self, agent_step: int) -> bool:
        return self._passed(agent_step, self._config.eval.every) or self.over(agent_step)

    def evaluations_after(self, agent_step: int) -> int:
        """How many are still to come after this agent step; the last one is at the end."""
        every, last = self._config.eval.every, self.spent(self.agent_steps)
        before_last = (last - self._cost * self._together) // every - self.spent(agent_step) // every if every else 0
        return before_last + 1

    def checkpoint_due(self, agent_step: int) -> bool:
        return self._passed(agent_step, self._config.checkpoint_every)

    def log_due(self, agent_step: int) -> bool:
        return self._passed(agent_step, self._config.log_every)

    def text(self, agent_step: int) -> str:
        """A count in the budget's unit; for Atari in frames as well, since both are called steps."""
        env_step = self.env_step(agent_step)
        if self._counts_env_steps:
            return f"{env_step:,} env steps"
        return f"{agent_step:,} agent steps ({env_step:,} frames)"

    def _passed(self, agent_step: int, every: int) -> bool:
        """Whether the newest agent step, or one taken with it, took the budget to a multiple of `every`, or over it."""
        spent = self.spent(agent_step)
        return every > 0 < spent and spent // every > (spent - self._cost * self._together) // every
