"""Named settings. A preset changes only what it must, and says why."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drq import envs
from drq.agents import AGENTS, agent_kind, agent_name
from drq.config import (
    AgentConfig,
    DQNConfig,
    EnvConfig,
    EvalConfig,
    RainbowConfig,
    ReplayConfig,
    SACConfig,
    TrainConfig,
)
from drq.envs import family_of
from drq.errors import UserError, did_you_mean, reason
from drq.settings import flat, override, parse_json

PLANET_ACTION_REPEAT = {
    "dmc/cartpole-swingup": 8,
    "dmc/reacher-easy": 4,
    "dmc/cheetah-run": 4,
    "dmc/finger-spin": 2,
    "dmc/ball_in_cup-catch": 4,
    "dmc/walker-walk": 2,
}
"""The paper's table for the PlaNet benchmark."""


def planet(task: str) -> TrainConfig:
    """The paper's main results: batch 512, K = M = 2, the table's action repeats (else the family's)."""
    repeat = PLANET_ACTION_REPEAT.get(task, family_of(task).action_repeat)
    return TrainConfig(task=task, preset="planet", agent=SACConfig(), env=EnvConfig(action_repeat=repeat))


def dreamer(task: str) -> TrainConfig:
    """The Dreamer benchmark: as planet, with action repeat 2 for every task of the control suite."""
    env = EnvConfig(action_repeat=family_of(task).action_repeat)
    return dataclasses.replace(planet(task), preset="dreamer", env=env)


def ablation(task: str) -> TrainConfig:
    """The paper's ablations: as planet, with batch 128, which the paper chose for want of compute."""
    return dataclasses.replace(planet(task), preset="ablation", agent=SACConfig(batch_size=128))


def state(task: str) -> TrainConfig:
    """The "SAC State" upper bound, with the settings of the authors' own SAC from the simulator's state vector."""
    # The paper names none. Its first author says (discussion of the DrQ code, issue 14) that the column is his
    # pytorch_sac without action repeat; the values are those of that repository's config/agent/sac.yaml and train.yaml.
    return TrainConfig(
        task=task,
        preset="state",
        agent=SACConfig(
            augmentation="none",  # there is no image to augment
            k=1,
            m=1,
            batch_size=1024,  # sac.yaml: batch_size
            discount=0.99,  # sac.yaml: discount
            learning_rate=1e-4,  # sac.yaml: actor_lr, critic_lr, alpha_lr
            tau=0.005,  # sac.yaml: critic_tau
            target_every=2,  # sac.yaml: critic_target_update_frequency
            actor_every=1,  # sac.yaml: actor_update_frequency, which is the temperature's too
            init_temperature=0.1,  # sac.yaml: init_temperature
            log_std_min=-5.0,  # sac.yaml: log_std_bounds
            log_std_max=2.0,
            hidden_dim=1024,  # sac.yaml: hidden_dim; its hidden_depth of 2 is what every SAC here has
            seed_steps=5000,  # train.yaml: num_seed_steps
        ),
        env=EnvConfig(observation="state", frame_stack=1, action_repeat=1),  # drq issue 14: no action repeat
        replay=ReplayConfig(capacity=None),  # train.yaml: replay_buffer_capacity is num_train_steps
    )


def cpu(task: str) -> TrainConfig:
    """For laptops: the same algorithm on smaller images, batches and networks. Not the paper's numbers."""
    base = planet(task)
    return dataclasses.replace(
        base,
        preset="cpu",
        steps=50_000,
        agent=SACConfig(batch_size=64, hidden_dim=256),
        env=dataclasses.replace(base.env, image_size=48),  # a third of the pixels
        replay=ReplayConfig(capacity=50_000),
        eval=EvalConfig(episodes=3),  # software rendering makes an evaluation as dear as training
    )


def toy(task: str) -> TrainConfig:
    """The toy tasks in minutes on two CPU cores. Other tasks get what cpu gives them."""
    base = cpu(task)
    if task not in TOY_AGENTS:
        return dataclasses.replace(base, preset="toy")
    return dataclasses.replace(
        base,
        preset="toy",
        steps=3_500,
        agent=TOY_AGENTS[task],
        env=dataclasses.replace(base.env, image_size=24),
        replay=ReplayConfig(capacity=None),
        eval=EvalConfig(every=250),  # for a curve within minutes
        checkpoint_every=1_000,
        log_every=50,
    )


TOY_AGENTS: dict[str, AgentConfig] = {
    "toy/reach": SACConfig(batch_size=64, hidden_dim=256, seed_steps=500),
    "toy/catch": DQNConfig(
        encoder="sac-ae",  # the Atari encoder has no use for 24 x 24 pixels
        augmentation="shift",
        k=2,
        m=2,
        batch_size=64,
        hidden_dim=128,
        learning_rate=1e-3,  # 3,000 updates have to do
        n_step=5,  # an episode has 7
        seed_steps=500,
        epsilon_decay_steps=1_000,
        epsilon_final=0.05,
        epsilon_eval=0.0,
    ),
}


def atari100k(task: str) -> TrainConfig:
    """The paper's Atari 100k: 100k agent steps (400k frames), one evaluation of 125k agent steps at the end."""
    base = planet(task)
    return dataclasses.replace(
        base,
        preset="atari100k",
        steps=100_000,
        agent=DQNConfig(),
        env=dataclasses.replace(base.env, frame_stack=4),
        replay=ReplayConfig(capacity=None),  # unbounded
        eval=EvalConfig(every=0, min_agent_steps=125_000),
    )


def atari100k_eps(task: str) -> TrainConfig:
    """As atari100k with the epsilons published later for the same agent, and 100 evaluation games."""
    return dataclasses.replace(
        atari100k(task),
        preset="atari100k-eps",
        # Less random play at the end of training and in evaluation: median 0.313 against 0.212 in a 100-run study.
        agent=DQNConfig(epsilon_final=0.01, epsilon_eval=0.001),
        eval=EvalConfig(every=0, episodes=100),
    )


def strong(task: str) -> TrainConfig:
    """The strongest agent that augmentation alone regularises, in 100k agent steps with two updates each."""
    return dataclasses.replace(
        atari100k_eps(task),  # 100k agent steps, four frames, every transition kept, 100 evaluation games
        preset="strong",
        agent=RainbowConfig(),  # as published, each value with its reason there; docs/atari.md has the table
    )


def strong8(task: str) -> TrainConfig:
    """As strong with eight updates a step: four times the time, and with enough resets a higher score."""
    return dataclasses.replace(
        strong(task),
        preset="strong8",
        # As many updates between resets, so four times as many resets; the last one leaves time to learn.
        agent=RainbowConfig(updates_per_step=8, reset_every=5_000, last_reset=90_000),
    )


PRESETS: dict[str, Callable[[str], TrainConfig]] = {
    "planet": planet,
    "dreamer": dreamer,
    "ablation": ablation,
    "state": state,
    "cpu": cpu,
    "toy": toy,
    "atari100k": atari100k,
    "atari100k-eps": atari100k_eps,
    "strong": strong,
    "strong8": strong8,
}


def preset(name: str, task: str, agent: AgentConfig | None = None, env: EnvConfig | None = None) -> TrainConfig:
    """The settings of a preset for a task.

    Args:
        name: of the preset.
        task: such as `dmc/walker-walk`.
        agent: settings of an agent. None: the preset's own, or where the task's actions do not suit that the one which
            suits.
        env: how to make the environment, where it takes more than its name to know its actions.
    """
    config = preset_values(name, task)
    if agent is None:
        actions = envs.action_kind(task, env or config.env)
        suited = AGENTS[agent_name(config.agent)].actions == actions
        agent = config.agent if suited else next(k.config() for k in AGENTS.values() if k.actions == actions)
    return dataclasses.replace(config, agent=agent)


def preset_values(name: str, task: str) -> TrainConfig:
    """The settings of a preset, with its own agent, whether that suits the task or not."""
    if name not in PRESETS:
        raise UserError(f"There is no preset {name!r}.{did_you_mean(name, PRESETS)} Choose from {', '.join(PRESETS)}.")
    return PRESETS[name](task)


def configure(task: str, settings: Mapping[str, Any]) -> TrainConfig:
    """The run that a task and settings describe, by their names: nested (`{"agent": {"k": 1}}`) or dotted
    (`{"agent.k": 1}`). `preset` names the preset that they change, `agent` or `agent.type` the agent."""
    named = flat(dict(settings))
    task = envs.check_task(task, named.get("imports", ()))
    chosen = named.pop("preset", None) or family_of(task).preset
    type_named = named.pop("agent.type", None)
    agent = named.pop("agent", None) or type_named
    values = preset_values(chosen, task)
    own = values.agent if agent == agent_name(values.agent) else None
    config = preset(chosen, task, own or (agent_kind(agent).config() if agent else None), env_of(values, named))
    return override(config, {name: value for name, value in named.items() if name != "task"})


def env_of(values: TrainConfig, named: Mapping[str, Any]) -> EnvConfig:
    """How an environment is made, by a preset's values and what these settings, by dotted names, change in them."""
    return override(values, {name: value for name, value in named.items() if name.startswith("env.")}).env


def settings_in(file: Path) -> dict[str, Any]:
    """The settings in a TOML file or in the config.json of a run, for a run of one's own: in a folder of its own, and
    importing no module that somebody else's run names."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            found = tomllib.loads(text)
        else:
            found = {k: v for k, v in parse_json(text)["config"].items() if k not in ("dir", "imports")}
        for name in ("task", "preset"):
            if not isinstance(found.get(name, ""), str):
                raise TypeError(f"its {name} is {found[name]!r}")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"--config {file} cannot be read ({reason(error)}): give a TOML file, or the config.json of a run."
        ) from None


def action_repeat_for(config: TrainConfig) -> int:
    """Env steps per agent step of a run. Where it does not say (an `EnvConfig` of one's own, or a run folder of the
    time when presets did not write it down) it is its preset's value."""
    values = PRESETS.get(config.preset, planet)(config.task).env
    return config.env.action_repeat or values.action_repeat or family_of(config.task).action_repeat


def resolved(config: TrainConfig) -> TrainConfig:
    """The same run with everything said that its preset or its task's family would say for it."""
    env = dataclasses.replace(config.env, action_repeat=action_repeat_for(config))
    return dataclasses.replace(config, env=env)


def default_dir(config: TrainConfig) -> Path:
    """Where a run is kept when no folder is named."""
    return Path("runs") / f"{config.task.replace('/', '-')}-{config.preset}-{config.seed}"
