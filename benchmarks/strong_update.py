"""An update of the preset `strong`: is it right, how long does it take, and where does the time go?

    python benchmarks/strong_update.py                 a GPU, under a minute; what there was no time for is said
    python benchmarks/strong_update.py --budget 180    all of it
    python benchmarks/strong_update.py --check-only    also on a CPU, with a small network

First captured updates with our kernels are held against eager ones of plain PyTorch, from the same start with the same
random numbers. Then updates are timed: blocks of so many as fill 0.2 s, the wall clock from a waited-for device to the
next, the median of five. Last, the kernels of the fastest way by the time they take, and in how many blocks, and each
convolution by itself as cuDNN does it: by rule, as for gradients of weights here, and chosen by timing. Behind these,
the engine's own: the first layer with its pool, the others with what stands around them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from drq.agents import make_agent, make_replay
from drq.config import EngineConfig, RainbowConfig
from drq.engine import EngineSettings, FastBackend, Learner
from drq.engine.graphs import Captured
from drq.engine.kernels.conv_same import Weights, block_size, convolve
from drq.engine.kernels.many import Packing, packed
from drq.envs.protocol import EnvSpec
from drq.networks import make_encoder
from drq.networks.encoders import Convolution
from drq.presets import preset

PONG = EnvSpec("atari/pong", (1, 84, 84), 4, "discrete", 6, 4, None)
FILLED = 2_000
"""Transitions in the replay. Priorities of all its 100,000 slots are summed all the same."""
APART = {"float32": 0.02, "tf32": 0.3, "bf16": 0.5}
"""How far the two ways may be apart after the updates, as a share of how far they went: Adam makes a step of full size
from a gradient of any size, so that what is left after rounding counts as much as what is large."""


@dataclass(frozen=True)
class Arguments:
    """Checks, times and profiles updates of the preset `strong`."""

    budget: float = 55.0
    """Seconds of timing after which nothing new is begun, but for the profile. Checks come before, and the first
    on a machine compile all kernels."""
    check_only: bool = False
    """Leave out the times."""
    rows: int = 30
    """Of the table of kernels."""


def make_learner(agent: RainbowConfig, engine: EngineConfig, device: torch.device, capacity: int) -> Learner:
    backend = FastBackend(EngineSettings.resolve(engine, device, agent))
    replay = make_replay(PONG, agent, backend, capacity)
    random = np.random.default_rng(0)
    replay.begin(random.integers(0, 256, PONG.frame_shape, dtype=np.uint8))
    for step in range(min(FILLED, capacity)):
        frame = random.integers(0, 256, PONG.frame_shape, dtype=np.uint8)
        replay.add(int(random.integers(6)), float(random.integers(-1, 2)), 1.0, step % 250 == 249, frame)
        if step % 250 == 249:
            replay.begin(frame)
    return Learner(make_agent(PONG, agent, backend, seed=0), replay, backend, seed=0)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# Right?


def weights_of(learner: Learner) -> Tensor:
    return torch.cat([parameter.detach().flatten().double().cpu() for parameter in learner.agent.modules.parameters()])


def check(device: torch.device) -> bool:
    """Four updates through a reset, with annealed returns, in every precision of the device. With priorities where
    rounding is too fine to let the two ways choose other transitions."""
    small = dataclasses.replace(
        preset("strong", "atari/pong").agent,
        **{"seed_steps": 100, "reset_every": 101, "last_reset": 101, "anneal_updates": 4, "k": 2, "m": 2},
        **{"batch_size": 8, "hidden_dim": 128, "encoder_width": 1 if device.type == "cpu" else 4},
    )
    assert isinstance(small, RainbowConfig)
    right = True
    for precision in ("float32", "tf32", "bf16") if device.type == "cuda" else ("float32",):
        config = dataclasses.replace(small, prioritised=precision == "float32")
        asked: dict[str, Any] = {"precision": precision, "compile": "off"}
        plain = make_learner(config, EngineConfig(**asked, cuda_graphs="off", kernels="off"), device, FILLED)
        fast = make_learner(config, EngineConfig(**asked), device, FILLED)
        began = weights_of(plain)
        for learner in (plain, fast):
            for _ in range(4):
                learner.update()
        expected = weights_of(plain)
        apart = float((weights_of(fast) - expected).norm() / (expected - began).norm())
        good = apart < APART[precision]
        told = f"weights {apart:.4f} apart of the way they went"
        if config.prioritised:
            theirs, ours = (learner.state()["sampler.priorities"].double() for learner in (plain, fast))
            priorities = float((ours / theirs - 1).abs().max())
            good = good and priorities < 0.01
            told += f", priorities within {priorities:.3%}"
        right = right and good
        print(f"{precision:8} {'as plain PyTorch' if good else 'DIFFERENT'}: {told}", flush=True)
    return right


# How long?


class Way(NamedTuple):
    views: int
    precision: str
    compiled: bool
    prioritised: bool = True

    def __str__(self) -> str:
        kind = "compiled" if self.compiled else "not compiled"
        return f"K = M = {self.views}, {self.precision}, {kind}, {'priorities' if self.prioritised else 'uniform'}"


WAYS = (
    Way(1, "bf16", False),
    Way(1, "bf16", True),
    Way(1, "tf32", True),
    Way(1, "tf32", False),
    Way(2, "bf16", False),
    Way(1, "bf16", False, prioritised=False),
    Way(2, "bf16", True),
)
"""What is most asked for comes first."""


def time_updates(learner: Learner) -> float:
    """Milliseconds an update."""

    def block(updates: int) -> float:
        wait()
        started = time.perf_counter()
        for _ in range(updates):
            learner.update()
        wait()
        return (time.perf_counter() - started) / updates

    block(10)
    updates = max(2, round(0.2 / block(5)))
    return 1e3 * statistics.median(block(updates) for _ in range(5))


def timed(until: float, device: torch.device) -> Iterator[tuple[Way, float, Learner]]:
    agent = preset("strong", "atari/pong").agent
    assert isinstance(agent, RainbowConfig)
    for way in WAYS:
        if time.perf_counter() > until:
            print(f"{way}: no time left; give it a larger --budget")
            continue
        config = dataclasses.replace(agent, k=way.views, m=way.views, prioritised=way.prioritised)
        asked: dict[str, Any] = {"precision": way.precision, "compile": "on" if way.compiled else "off"}
        started = time.perf_counter()
        learner = make_learner(config, EngineConfig(**asked), device, 100_000)
        learner.update()
        wait()
        ready = time.perf_counter() - started
        torch.cuda.reset_peak_memory_stats()
        ms = time_updates(learner)
        held = torch.cuda.max_memory_reserved() / 2**30
        told = f"{ms:.3f} ms an update, {1e3 / ms:.0f} a second; ready in {ready:.1f} s, {held:.1f} GiB"
        print(f"{way}: {told}", flush=True)
        yield way, ms, learner


def profile(way: Way, learner: Learner, rows: int) -> None:
    updates = 20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(updates):
            learner.update()
        wait()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    launches: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            launches[event["name"]].append(event)
    times = {name: sum(event["dur"] for event in own) / updates for name, own in launches.items()}
    count = sum(map(len, launches.values())) / updates
    print(f"\n{way}: {count:.0f} launches an update, kernels {sum(times.values()) / 1e3:.3f} ms together")
    print(f"{'us an update':>14}{'launches':>10}{'blocks':>16}  kernel")
    for name, time_taken in sorted(times.items(), key=lambda item: -item[1])[:rows]:
        blocks = [math.prod(event["args"].get("grid", ())) for event in launches[name]]
        few, many = min(blocks), max(blocks)
        cut = f"{few:,}" if few == many else f"{few:,} to {many:,}"
        print(f"{time_taken:14.1f}{len(launches[name]) / updates:10.1f}{cut:>16}  {name[:110]}")


# Its convolutions


class Layer(NamedTuple):
    channels: int
    out: int
    size: int


def layers_of(agent: RainbowConfig) -> Counter[Layer]:
    """The convolutions of its encoder, and how often it has each."""
    found: Counter[Layer] = Counter()
    encoder = make_encoder(agent.encoder, PONG.observation_shape, width=agent.encoder_width)
    for module in encoder.modules():
        if isinstance(module, Convolution):
            module.register_forward_pre_hook(
                lambda layer, seen: found.update([Layer(layer.in_channels, layer.out_channels, seen[0].shape[-1])])
            )
    encoder(torch.zeros(1, *PONG.observation_shape))
    return found


REPLAYS, IN_A_GRAPH = 10, 20


def microseconds(function: Callable[[], Any]) -> float:
    """Of one call, without what launching costs."""
    graph = Captured(lambda: [function() for _ in range(IN_A_GRAPH)], [])
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(REPLAYS):
        graph.replay()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) * 1e3 / (REPLAYS * IN_A_GRAPH)


def time_convolutions(agent: RainbowConfig) -> None:
    batch, layers = agent.batch_size, layers_of(agent)
    headings = "".join(f"{heading:>18}" for heading in ("forward", "input gradient", "weight gradient"))
    print(f"\n{f'convolutions of {batch} images, us (TFLOP/s)':43}{headings}")
    for by_timing in (False, True):
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = by_timing, not by_timing
        for layer, times in layers.items():
            made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
            shapes = (batch, layer.channels, layer.size, layer.size), (layer.out, layer.channels, 3, 3)
            x, weight = (torch.randn(shape, **made).contiguous(memory_format=torch.channels_last) for shape in shapes)
            once, forward = [1, 1], functools.partial(F.conv2d, x, weight, padding=1)
            given = torch.randn_like(forward()), x, weight, None, once, once, once, False, [0, 0], 1
            back = functools.partial(torch.ops.aten.convolution_backward, *given)
            ways = forward, *(functools.partial(back, which) for which in ([True, False, False], [False, True, False]))
            flops = 2 * 9 * layer.channels * layer.out * layer.size**2 * batch
            taken = [microseconds(way) for way in ways]
            told = "".join(f"{f'{time_taken:.1f} ({flops / time_taken / 1e6:.0f})':>18}" for time_taken in taken)
            how = "by timing" if by_timing else "by rule"
            name = f"{times} x {layer.channels} to {layer.out} at {layer.size}, {how}"
            print(f"{name:43}{told}", flush=True)
    time_first_layer(batch, next(iter(layers)))
    for layer in list(layers)[1:]:
        time_layer(batch, layer)


def time_first_layer(batch: int, layer: Layer) -> None:
    """With its bias and pool, by the kernels of the engine."""
    of_type: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randint(256, (batch, layer.channels, layer.size, layer.size), device="cuda").to(**of_type)
    weight, bias = torch.randn(layer.out, layer.channels, 3, 3, **of_type) / 255, torch.zeros(layer.out, device="cuda")
    x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
    out, place = torch.ops.drq.conv_pool(x, weight, bias)
    gradient = torch.randn_like(out)
    ways = (
        functools.partial(torch.ops.drq.conv_pool, x, weight, bias),
        functools.partial(torch.ops.drq.conv_pool_weight, gradient, place, x),
    )
    forward, of_weight = (f"{microseconds(way):.1f}" for way in ways)
    print(f"{'the first with bias and pool, our kernels':43}{forward:>18}{'':18}{of_weight:>18}")


def time_layer(batch: int, layer: Layer) -> None:
    """All passes of an update at once, as the beginning of a residual block; and the way back of one, as its end."""

    def images(count: int, channels: int) -> Tensor:
        shape = count, channels, layer.size, layer.size
        return torch.randn(shape, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last)

    weight = torch.randn(layer.out, layer.channels, 3, 3, device="cuda") / layer.channels
    weight = weight.to(torch.bfloat16, memory_format=torch.channels_last)
    ways = []
    for count, turned in ((3 * batch, False), (batch, True)):
        channels, out = reversed(layer[:2]) if turned else layer[:2]
        (pack,) = packed([Packing(weight, block_size(channels, out, layer.size, layer.size).channels, turned)])
        x, made, around = images(count, channels), images(count, out), {"gate": images(count, out)}
        bias = None if turned else torch.randn(out, device="cuda")
        asked: dict[str, Any] = around | {"plus": images(count, out), "sums": True} if turned else {"relu": True}
        ways.append(functools.partial(convolve, x, made, Weights(pack, bias), relu_first=not turned, **asked))
    forward, of_input = (f"{microseconds(way):.1f}" for way in ways)
    name = f"{layer.channels} to {layer.out} at {layer.size}, ours: {3 * batch}, back {batch}"
    print(f"{name:43}{forward:>18}{of_input:>18}")


def main(arguments: Arguments) -> None:
    """Checks, then times, then profiles."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    right = check(device)
    if not arguments.check_only and device.type == "cuda":
        best: tuple[Way, float, Learner] | None = None
        for found in timed(time.perf_counter() + arguments.budget, device):
            if found[0].views == 1 and found[0].prioritised and (best is None or found[1] < best[1]):
                best = found
            torch.cuda.empty_cache()
        assert best is not None
        profile(best[0], best[2], arguments.rows)
        agent = preset("strong", "atari/pong").agent
        assert isinstance(agent, RainbowConfig)
        time_convolutions(agent)
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
