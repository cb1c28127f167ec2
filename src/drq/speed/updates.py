"""How long updates and acting take, and in how much memory.

Every time is the median over blocks of a synchronised wall clock: wait for the device, read the clock, do the work,
wait, read it again. So what the host does counts as much as what the device does. Warm-up (compilation, capture of
graphs) comes before. Contents are random: zeros can be faster than real images.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from drq.agents import make_agent, make_replay
from drq.config import SACConfig, TrainConfig
from drq.engine import EngineSettings, FastBackend, Learner
from drq.envs import EnvSpec, family_of
from drq.presets import action_repeat_for
from drq.replay import ACTION, DISCOUNT, DONE, REWARD, Replay
from drq.speed.plain_reference import HostReplay, PlainDrQ
from drq.speed.results import ActingSpeed, Comparison, Contender, Timing, UpdateSpeed, host_memory
from drq.training.schedule import Schedule

ACTION_SIZE = 6
"""Of Cheetah Run and Walker Walk; also the number of actions in Pong."""
EPISODE_AGENT_STEPS = 250
"""Length of the episodes in a replay of random contents: that of Cheetah Run."""

Updates = Callable[[int], None]
"""Does so many updates. On a GPU it may return before they are done."""


class Work(NamedTuple):
    """Something to measure updates of."""

    name: str
    config: TrainConfig


@dataclass(frozen=True)
class Effort:
    """How much is spent on a measurement."""

    blocks: int
    block_seconds: float
    """A block is as many updates as fill this time, but at least two."""
    warmup_updates: int


def spec_for(config: TrainConfig) -> EnvSpec:
    """The shape of a run's task, without its simulator."""
    family = family_of(config.task)
    size = config.env.image_size
    return EnvSpec(
        task=config.task,
        frame_shape=(family.channels, size, size),
        frame_stack=config.env.frame_stack,
        action_kind=family.action_kind or "continuous",
        action_size=ACTION_SIZE,
        action_repeat=action_repeat_for(config),
        max_episode_agent_steps=EPISODE_AGENT_STEPS,
    )


def random_replay(config: TrainConfig, backend: FastBackend) -> Replay:
    """A full replay of random episodes, made at once instead of step by step."""
    spec = spec_for(config)
    capacity = Schedule(config).capacity
    replay = make_replay(spec, config.agent, backend, capacity)
    number = torch.arange(capacity)
    episode, age = number // EPISODE_AGENT_STEPS, number % EPISODE_AGENT_STEPS
    frame = number + episode  # every episode has one frame more than transitions
    rows = torch.empty(capacity, replay.rings.rows.shape[1])
    rows[:, REWARD].uniform_()
    rows[:, DISCOUNT] = 1.0
    rows[:, DONE] = (age == EPISODE_AGENT_STEPS - 1).float()
    if spec.action_kind == "discrete":
        rows[:, ACTION] = torch.randint(ACTION_SIZE, (capacity,)).float()
    else:
        rows[:, ACTION:].uniform_(-1.0, 1.0)
    part = {
        "rows": rows,
        "places": torch.stack([frame % replay.stream_frames, age], dim=1),
        "oldest_frame": frame - age.clamp(max=spec.frame_stack - 1),
        "frames": torch.empty(0, *spec.frame_shape, dtype=replay.rings.frames.dtype),
    }
    counters = {
        "transitions_added": capacity,
        "frames_added": int(frame[-1]) + 2,
        "oldest": 0,
        "age": capacity % EPISODE_AGENT_STEPS or -1,
    }
    replay.rings.frames.random_(0, 256)  # drawn where they are kept, since they are many
    replay.restore([([(capacity, counters["frames_added"])], part)], [counters])
    for slot in range(capacity):  # each gets a priority, where there are any
        replay.sampler.stored(replay, slot)
    return replay


def make_learner(config: TrainConfig, engine: EngineSettings, replay: Replay | None = None) -> Learner:
    """A learner with a full replay, its own or one that it shares."""
    backend = FastBackend(engine)
    replay = replay or random_replay(config, backend)
    agent = make_agent(replay.spec, config.agent, backend, config.seed)
    return Learner(agent, replay, backend, config.seed)


def updates_of(learner: Learner | PlainDrQ) -> Updates:
    settings = learner if isinstance(learner, PlainDrQ) else learner.engine

    def run(count: int) -> None:
        settings.apply_globally()  # another contender may have set the switches otherwise
        for _ in range(count):
            learner.update()

    return run


def seconds_for(run: Updates, count: int, device: torch.device) -> float:
    """Wall-clock seconds until so many updates are done."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    started = time.perf_counter()
    run(count)
    wait()
    return time.perf_counter() - started


def time_in_turns(contenders: Mapping[str, Updates], effort: Effort, device: torch.device) -> dict[str, Timing]:
    """Times a block of each in turn, again and again, so that whatever else changes here meets all of them alike.

    Call it after their warm-up. A first pair of updates, not counted, says how many fill a block. Blocks have an even
    number of updates: every second one trains the actor too.
    """
    sizes = {
        name: 2 * min(max(round(effort.block_seconds / seconds_for(run, 2, device)), 1), 500)
        for name, run in contenders.items()
    }
    blocks: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(effort.blocks):
        for name, run in contenders.items():
            blocks[name].append(1e3 * seconds_for(run, sizes[name], device) / sizes[name])
    return {name: Timing(statistics.median(ms), ms, sizes[name]) for name, ms in blocks.items()}


def measure_updates(work: Work, engine: EngineSettings, effort: Effort) -> UpdateSpeed:
    """The updates of one learner."""
    with _clean_device(engine) as device_bytes:
        started = time.perf_counter()
        run = updates_of(make_learner(work.config, engine))
        seconds_for(run, effort.warmup_updates, engine.device)
        ready = time.perf_counter() - started
        timing = time_in_turns({work.name: run}, effort, engine.device)[work.name]
        found = UpdateSpeed(
            name=work.name,
            batch_size=work.config.agent.batch_size,
            k=work.config.agent.k,
            m=work.config.agent.m,
            replay_capacity=Schedule(work.config).capacity,
            timing=timing,
            ready_seconds=ready,
            device_bytes=device_bytes(),
            host_bytes=host_memory("VmRSS"),
        )
        del run
    return found


def compare(
    work: Work,
    engines: Mapping[str, EngineSettings],
    plain: Mapping[str, Mapping[str, bool]],
    plain_capacity: int,
    effort: Effort,
) -> Comparison:
    """The same work by our engines and by variants of the plain reference, in turns; the first engine is the measure.

    `plain` maps a name to options of `PlainDrQ`. All variants share one memory of `plain_capacity` transitions:
    stacked, the paper's 100,000 would take 12.7 GB, and a tenth of that is already more than any cache holds.
    """
    agent = work.config.agent
    assert isinstance(agent, SACConfig)
    first = next(iter(engines.values()))
    with _clean_device(first):
        contenders: dict[str, Updates] = {}
        replay = random_replay(work.config, FastBackend(first))
        for name, engine in engines.items():
            contenders[name] = updates_of(make_learner(work.config, engine, replay))
            seconds_for(contenders[name], effort.warmup_updates, first.device)
        channels, height, width = replay.spec.observation_shape
        memory = HostReplay((channels, height, width), ACTION_SIZE, plain_capacity)
        memory.fill(np.random.default_rng(work.config.seed))
        for name, options in plain.items():
            contenders[name] = updates_of(
                PlainDrQ(
                    memory,
                    first.device,
                    batch_size=agent.batch_size,
                    k=agent.k,
                    m=agent.m,
                    feature_dim=agent.feature_dim,
                    hidden_dim=agent.hidden_dim,
                    **options,
                )
            )
            seconds_for(contenders[name], effort.warmup_updates, first.device)
        timings = time_in_turns(contenders, effort, first.device)
        del replay, memory, contenders
    ours = next(iter(timings.values()))
    found = [_against(ours, name, timing) for name, timing in timings.items()]
    return Comparison(work.name, agent.batch_size, agent.k, agent.m, plain_capacity, found)


def _against(ours: Timing, name: str, timing: Timing) -> Contender:
    turns = [theirs / mine for theirs, mine in zip(timing.blocks_ms, ours.blocks_ms, strict=True)]
    return Contender(name, timing, timing.ms / ours.ms, (min(turns), max(turns)))


def measure_acting(work: Work, engine: EngineSettings, observations: int, calls: int) -> ActingSpeed:
    """From observations to actions, the drawing of exploration's numbers included."""
    with _clean_device(engine):
        spec = spec_for(work.config)
        backend = FastBackend(engine)
        agent = make_agent(spec, work.config.agent, backend, work.config.seed)
        learner = Learner(agent, Replay(spec, 1, backend=backend), backend, work.config.seed)
        shape = (calls, observations, *spec.observation_shape)
        images = np.random.default_rng(work.config.seed).integers(0, 256, shape, dtype=np.uint8)
        seconds = []
        for batch in (*images[:5], *images):  # the first are the warm-up
            started = time.perf_counter()
            noise = agent.exploration(observations, 0, learner.acting_generator)
            learner.actor.act(batch, noise)  # returns when the actions are on the host
            seconds.append(time.perf_counter() - started)
        del agent, learner
    return ActingSpeed(observations, 1e3 * statistics.median(seconds[-calls:]), calls)


@contextmanager
def _clean_device(engine: EngineSettings) -> Iterator[Callable[[], int | None]]:
    """Frees what earlier measurements left; yields the most bytes that PyTorch held on the GPU since then."""
    on_gpu = engine.device.type == "cuda"

    def free() -> None:
        if engine.compile:
            torch.compiler.reset()  # compiled code keeps its agent alive, and a function may have only so many shapes
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(engine.device)

    free()
    before = torch.cuda.memory_reserved(engine.device) if on_gpu else 0
    try:
        yield lambda: torch.cuda.max_memory_reserved(engine.device) - before if on_gpu else None
    finally:
        free()
