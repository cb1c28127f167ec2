"""What a run is made of, from its settings."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import ExitStack
from typing import Literal

import torch

from drq import envs
from drq.agents import Agent, make_agent, make_replay
from drq.backend import Backend
from drq.config import TrainConfig
from drq.engine import (
    DrawnStack,
    EngineSettings,
    FastBackend,
    KernelError,
    Learner,
    choose_device,
    draws_frames,
    lay_out,
)
from drq.envs import Environment, EnvironmentGroup, EnvSpec, remote
from drq.envs.group import ThreadedGroup
from drq.envs.remote import RemoteEnvironment
from drq.envs.stack import FrameStack
from drq.presets import action_repeat_for
from drq.training.env_worker import EnvWorker, InlineEnv, ProcessEnv, ThreadedEnv
from drq.training.folder import RunFolder
from drq.training.policy_file import acting_weights
from drq.training.seeds import Purpose, seed_for


def settle_render(config: TrainConfig, engine: EngineSettings, folder: RunFolder) -> TrainConfig:
    """The run with `--env.render auto` as what it was when the run began, or is on this machine if it begins now."""
    if config.env.render != "auto":
        return config
    if folder.config_file.exists() and not folder.failed_at_once:
        render = folder.config_like(config.agent).env.render
    else:
        envs.import_modules(config.imports)
        rays: Literal["ray", "cuda"] | None = "cuda" if draws_frames(engine) else None
        render = envs.choose_render(config.task, config.env, "ray" if engine.device.type == "cpu" else rays)
    return dataclasses.replace(config, env=dataclasses.replace(config.env, render=render))


def make_env(config: TrainConfig) -> Environment:
    """The task of a run."""
    return remote.make(config.task, config.env, action_repeat_for(config), config.imports)


def open_envs(config: TrainConfig, device: torch.device, closing: ExitStack) -> list[EnvWorker]:
    """The environments that a run trains in."""
    opened: list[EnvWorker] = []
    for _ in range(config.num_envs):  # several, in processes, all begin to open before the first is waited for
        if config.num_envs > 1 or config.env.own_process:
            env = RemoteEnvironment(config.task, config.env, action_repeat_for(config), config.imports)
            opened.append(ProcessEnv(env))
        else:
            opened.append((InlineEnv if device.type == "cuda" else ThreadedEnv)(lambda: make_env(config)))
        closing.callback(opened[-1].close)
    return opened


def make_group(config: TrainConfig, count: int) -> EnvironmentGroup:
    """So many environments of a run's task, to play side by side."""
    if config.env.own_process:
        return ThreadedGroup(lambda: make_env(config), count)
    envs.import_modules(config.imports)
    return envs.make_group(config.task, config.env, action_repeat_for(config), count)


def describe(config: TrainConfig) -> tuple[EnvSpec, FastBackend]:
    """What an agent of one's own is constructed with: the shape of a run's task, and the backend of this machine."""
    env = make_env(config)
    spec = env.spec
    env.close()
    return spec, FastBackend(EngineSettings.resolve(config.engine, choose_device(config.device), config.agent, 0))


def make_learner(
    config: TrainConfig, spec: EnvSpec, engine: EngineSettings, capacity: int, agent: Agent | None = None
) -> Learner:
    """A new agent, or the one given, with an empty replay of so many transitions."""
    own = agent.backend if agent is not None else None
    backend = own if isinstance(own, FastBackend) else FastBackend(engine)
    agent = agent or make_agent(spec, config.agent, backend, seed_for(config.seed, Purpose.WEIGHTS))
    replay = make_replay(spec, config.agent, backend, capacity, config.num_envs)
    return Learner(agent, replay, backend, seed_for(config.seed, Purpose.UPDATES))


def make_stack(config: TrainConfig, env: Environment, engine: EngineSettings) -> FrameStack | DrawnStack:
    """What keeps the newest frames of an episode: on the host, or on the GPU where that draws them."""
    if config.env.render == "cuda" and draws_frames(engine):
        try:
            stack = DrawnStack(env.spec, engine.device)
            if envs.leave_undrawn(env):
                return stack
        except KernelError as error:
            print(f"The CPU draws: {str(error).splitlines()[0].rstrip(':.')}.", file=sys.stderr)
    return FrameStack(env.spec)


def names_that_act(config: TrainConfig, spec: EnvSpec, learner: Learner) -> list[str]:
    """Of the weights that acting computes with."""
    agent = learner.agent
    if learner.engine.device.type != "cpu":  # a GPU may compute with other copies of them: a plain agent tells
        agent = make_agent(spec, dataclasses.replace(config.agent, augmentation="none"), Backend(), seed=0)
    return acting_weights(agent, spec)


def make_acting_agent(config: TrainConfig, spec: EnvSpec, engine: EngineSettings) -> Agent:
    """An agent that only acts, once a run's weights are loaded into it."""
    agent = make_agent(spec, config.agent, FastBackend(engine), seed=0)
    lay_out(agent)
    return agent
