"""`drq check`: whether a task, above all one of the user's own, is fit to be trained on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tyro.conf import Positional, arg

from drq import envs
from drq.config import EnvConfig
from drq.envs import Action, Environment, EnvSpec, family_of, remote, split_task
from drq.errors import UserError, what_failed
from drq.training.seeds import random_action

ZOOM = 4
"""Pixels of the picture for each that the agent sees."""


FAINT = 16
"""Pixels that are nearer to each other than this are no picture that anyone would see much in."""


@dataclass(frozen=True)
class CheckArguments:
    """Checks an environment: spaces, types, finite values, determinism, speed; and shows what the agent will see."""

    task: Annotated[str, Positional, arg(metavar="TASK")]
    """Such as gym/MyEnv-v0."""
    imports: Annotated[tuple[str, ...], arg(aliases=["--import"])] = ()
    """Modules imported first, by name or as a file, such as the one that registers your environment."""
    steps: int = 200
    """How many agent steps to play."""
    picture: Path = Path("drq-check.png")
    """Where to put the picture of what the agent sees."""
    env: EnvConfig = field(default_factory=EnvConfig)


def check_environment(options: CheckArguments) -> list[str]:
    """Prints what is found; gives one sentence for each fault."""
    if options.steps < 1:
        return [f"--steps is {options.steps}: set it to 1 or more."]
    try:
        task = envs.check_task(options.task, options.imports)
        repeat = options.env.action_repeat or family_of(task).action_repeat
        env = remote.make(task, options.env, repeat, options.imports)
    except UserError as error:
        return [str(error)]
    faults: list[str] = []
    try:
        for line in _described(env.spec):
            print(line)
        if family_of(task).of_the_users:
            from drq.envs.gym_check import faults as faults_of

            faults.extend(faults_of(split_task(task)[1], options.env, options.steps))
        faults.extend(_played(env, options.steps, options.picture))
    except UserError as error:
        faults.append(str(error))
    except Exception as error:  # whatever the environment's own code may raise
        faults.append(f"Playing it failed {what_failed(error)}: mend that first.")
    env.close()
    return list(dict.fromkeys(faults))


def _described(spec: EnvSpec) -> Iterator[str]:
    yield spec.task
    if spec.pixels:
        shape = "x".join(map(str, (*spec.frame_shape[1:], spec.frame_shape[0])))
        yield f"  sees      {spec.sees or 'pixels'}: {shape}, {spec.frame_stack} stacked"
    else:
        yield f"  sees      a vector of {spec.frame_shape[0]} numbers"
    if spec.action_kind == "discrete":
        yield f"  actions   {spec.action_size}, discrete: DQN learns"
    else:
        low, high = spec.action_low or (-1.0,), spec.action_high or (1.0,)
        numbers = f"{spec.action_size} number{'s' * (spec.action_size != 1)}"
        yield f"  actions   {numbers} from {_bound(low)} to {_bound(high)}: SAC learns"
    limit = spec.max_episode_agent_steps
    yield f"  episodes  {f'at most {limit:,} agent steps' if limit else 'without a registered time limit'}"


def _bound(numbers: Sequence[float]) -> str:
    """One number where all are the same, otherwise each of them."""
    words = [f"{number:g}" for number in numbers]
    return words[0] if len(set(words)) == 1 else f"({', '.join(words)})"


@dataclass
class Recording:
    """What some agent steps gave."""

    frames: list[NDArray[Any]]
    rewards: list[float]
    ended: bool
    seconds: float


def _played(env: Environment, steps: int, picture: Path) -> Iterator[str]:
    spec = env.spec
    actions = [random_action(spec, 0, step) for step in range(steps)]
    first = _record(env, actions)
    print(f"  speed     {steps / first.seconds:,.0f} agent steps/s here, with one environment")
    if spec.pixels:
        _save_picture(picture, first.frames, spec)
        print(f"  picture   {picture}: what the agent sees, {spec.frame_stack} frames after each other")
    yield from _faults(spec, first, steps)
    yield from _differences(first, _record(env, actions))


def _record(env: Environment, actions: list[Action]) -> Recording:
    """Plays the actions from seed 1 on, episode after episode."""
    began, seed, ended = time.perf_counter(), 1, False
    frames, rewards = [env.reset(seed)], []
    for action in actions:
        step = env.step(action)
        frames.append(step.frame.copy())
        rewards.append(step.reward)
        if step.done:
            ended, seed = True, seed + 1
            frames.append(env.reset(seed))
    return Recording(frames, rewards, ended, time.perf_counter() - began)


def _faults(spec: EnvSpec, played: Recording, steps: int) -> Iterator[str]:
    frames = np.stack(played.frames)
    if not np.isfinite(played.rewards).all():
        yield "Rewards are not finite: mend what becomes NaN or infinite."
    if not played.ended and spec.max_episode_agent_steps is None:
        yield (
            f"No episode ended in {steps} agent steps and no time limit is registered: set --env.max-episode-steps, or "
            "see with more --steps that episodes end by themselves, since an evaluation plays whole ones."
        )
    if (frames == frames[0]).all():
        yield f"What the agent sees did not change in {steps} agent steps: show what its actions do."
    elif spec.pixels and (frames == frames[:, :, :1, :1]).all():
        yield "Pictures are of one colour all over: draw the scene before the frame is taken."
    elif spec.pixels and np.ptp(frames) < FAINT:
        yield (
            f"All pixels lie from {frames.min()} to {frames.max()} of 255, as codes do, not colours: make a picture of "
            "them in a wrapper, as --env.wrap gymnasium.wrappers:AddRenderObservation does by render()."
        )


def _differences(one: Recording, other: Recording) -> Iterator[str]:
    """Whether the same seeds and actions gave the same."""
    same_frames = [np.array_equal(a, b) for a, b in zip(one.frames, other.frames, strict=False)]
    if len(one.frames) != len(other.frames) or not all(same_frames) or one.rewards != other.rewards:
        where = "the first frame" if not same_frames[0] else "what followed the first frame"
        yield (
            f"The same seed and actions gave another episode ({where} differed): let everything random follow from "
            "reset(seed=...), as self.np_random does, and begin all else anew, or a resumed run will not be exact."
        )


def _save_picture(path: Path, frames: list[NDArray[Any]], spec: EnvSpec) -> None:
    """The frames of one observation side by side, larger."""
    stack = np.concatenate(frames[1 : 1 + spec.frame_stack], axis=2).transpose(1, 2, 0)
    image = Image.fromarray(stack[..., 0] if stack.shape[2] == 1 else stack)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        image.resize((ZOOM * image.width, ZOOM * image.height), Image.Resampling.NEAREST).save(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be written ({error}): choose another --picture, such as seen.png.") from error
