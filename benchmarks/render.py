"""How images drawn faster, or without OpenGL, differ from `--env.render paper`: python benchmarks/render.py [TASK ...]

Every task of the control suite, or those named, plays one episode of random actions, 20 frames at action repeat 2,
drawn in turns by `paper`, `fast` and `ray`. Differences are means over all pixels, of 255; times are medians. `as here`
draws as this machine's OpenGL does where drivers differ, `ray` as NVIDIA's does everywhere. The checksum of `ray`'s
frames is the same on every machine.

With --keep FILE: saves what this machine's OpenGL draws, by `paper` and by `fast`, of another episode.
With --against FILE: what `ray` and this machine's OpenGL draw of that, against the other machine's pixels; with
--picture OUT its `paper`, `ray` and the `paper` of here below each other, a column for each task, at twice the size.

With --gpu: the frames of `--env.render cuda`, checked, and its time. Then differences are those of the GPU's frames.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from drq.config import EnvConfig
from drq.engine import kernels
from drq.engine.kernels.raycast import RayFrames
from drq.envs import make, raycast, task_names
from drq.envs.raycast import RayCamera, compiler
from drq.envs.rendering import is_software, renderer_name
from drq.training.seeds import random_action

FRAMES = 20
KEPT_SEED, KEPT_EVERY, KEPT_FRAMES = 1, 7, 10
"""The episode of --keep: its seed, and which frames of it are kept."""
PLANET = ("cartpole-swingup", "reacher-easy", "cheetah-run", "finger-spin", "ball_in_cup-catch", "walker-walk")
Frames = Any


def camera_of(task: str) -> int:
    return 2 if task.startswith("dmc/quadruped") else 0


def play(task: str, *renders: str) -> tuple[dict[str, Frames], dict[str, float], list[Any]]:
    """Frames and median seconds to draw one, for each way; and the environments, at the end of the episode."""
    envs = {render: make(task, EnvConfig(render=render), 2) for render in renders}  # type: ignore[arg-type]
    seen = {render: [env.reset(0)] for render, env in envs.items()}
    spent: dict[str, list[float]] = {render: [] for render in renders}
    for agent_step in range(FRAMES - 1):
        action = random_action(next(iter(envs.values())).spec, 0, agent_step)
        for render, env in envs.items():
            before = env.render_seconds
            seen[render].append(env.step(action).frame)
            spent[render].append(env.render_seconds - before)
    frames = {render: np.stack(pictures) for render, pictures in seen.items()}
    return frames, {render: statistics.median(times) for render, times in spent.items()}, list(envs.values())


def replay(task: str, draw: Callable[[Any, Any], Frames]) -> Frames:
    """The same episode's frames by another way to draw a model's state."""
    env: Any = make(task, EnvConfig(observation="state"), 2)
    env.begin(0)
    simulator = env.simulator
    frames = [draw(simulator.model, simulator.data)]
    for agent_step in range(FRAMES - 1):
        env.advance(random_action(env.spec, 0, agent_step))
        frames.append(draw(simulator.model, simulator.data))
    env.close()
    return np.stack(frames)


def as_here(task: str, software: bool) -> Frames:
    eyes: list[RayCamera] = []

    def draw(model: Any, data: Any) -> Frames:
        if not eyes or eyes[-1].model is not model:
            eyes.append(RayCamera(model, 84, camera_of(task), "mesa" if software else "nvidia"))
        return raycast.draw(eyes[-1].scene(data))

    return replay(task, draw)


def on_gpu(task: str) -> Frames:
    made: list[tuple[RayCamera, RayFrames]] = []

    def draw(model: Any, data: Any) -> Frames:
        if not made or made[-1][0].model is not model:
            eye = RayCamera(model, 84, camera_of(task))
            made.append((eye, RayFrames(eye.scene(data).assets, 1, "cuda")))
        eye, frames = made[-1]
        frames.put(0, eye.scene(data))
        out = torch.empty(1, 3, 84, 84, dtype=torch.uint8, device="cuda")
        frames.draw(out)
        return out[0].cpu().numpy()

    return replay(task, draw)


def difference(one: Frames, other: Frames) -> float:
    return float(abs(one.astype(int) - other).mean())


def keep(tasks: list[str], file: str) -> None:
    kept: dict[str, Frames] = {"_renderer": np.array(renderer_name())}
    for task in tasks:
        spec = make(task, EnvConfig(observation="state"), 2).spec
        random = np.random.RandomState(KEPT_SEED)
        steps = KEPT_EVERY * (KEPT_FRAMES - 1)
        actions = [random.uniform(-1, 1, spec.action_size).astype(np.float32) for _ in range(steps)]
        name = task.removeprefix("dmc/")
        kept[f"{name}/actions"] = np.stack(actions)
        kept[f"{name}/agent_step"] = np.arange(0, steps + 1, KEPT_EVERY)
        for render in ("paper", "fast"):
            kept[f"{name}/{render}"] = kept_frames(task, render, kept).transpose(0, 2, 3, 1)
        print(task, flush=True)
    np.savez_compressed(file, **kept)


def kept_frames(task: str, render: str, kept: Any) -> Frames:
    """The frames that are kept of a task, as `render` draws them here."""
    name = task.removeprefix("dmc/")
    env: Any = make(task, EnvConfig(render=render), 2)  # type: ignore[arg-type]
    env.begin(KEPT_SEED)
    frames = [env.simulator.frame()]
    for agent_step, action in enumerate(kept[f"{name}/actions"], 1):
        env.advance(action)
        if agent_step in kept[f"{name}/agent_step"]:
            frames.append(env.simulator.frame())
    env.close()
    return np.stack(frames)


def print_against(tasks: list[str], file: str, picture: str | None) -> None:
    kept, columns = np.load(file), []
    print(f"there: {kept['_renderer']}; mean differences of 255 from its `paper`")
    print(f"{'task':30}{'its fast':>9}{'ray':>9}{'paper here':>12}")
    for task in tasks:
        name = task.removeprefix("dmc/")
        if f"{name}/paper" not in kept.files or not is_drawable(task):
            continue
        paper, fast = (kept[f"{name}/{render}"].transpose(0, 3, 1, 2) for render in ("paper", "fast"))
        ray, here = (kept_frames(task, render, kept) for render in ("ray", "paper"))
        numbers = difference(fast, paper), difference(ray, paper), difference(here, paper)
        print(f"{task:30}{numbers[0]:9.3f}{numbers[1]:9.3f}{numbers[2]:12.3f}", flush=True)
        columns.append(np.concatenate([paper[-1], ray[-1], here[-1]], axis=1))
    if picture is not None:
        image = np.concatenate(columns, axis=2).transpose(1, 2, 0).repeat(2, axis=0).repeat(2, axis=1)
        Image.fromarray(image).save(picture, optimize=True)


def is_drawable(task: str) -> bool:
    env: Any = make(task, EnvConfig(observation="state"), 2)
    env.begin(0)
    reader = RayCamera(env.simulator.model, 84, camera_of(task))
    return reader.why_undrawable(env.simulator.data) is None


def print_closeness(tasks: list[str]) -> None:
    software = is_software(renderer_name())
    print(f"{'task':30}{'fast':>9}{'as here':>9}{'ray':>9}  checksum  {'paper':>8}{'fast':>8}{'ray':>8} ms a frame")
    for task in tasks:
        if not is_drawable(task):
            print(f"{task:30}  is left to OpenGL")
            continue
        frames, seconds, envs = play(task, "paper", "fast", "ray")
        for env in envs:
            env.close()
        paper = frames["paper"]
        ways = frames["fast"], as_here(task, software), frames["ray"]
        means = "".join(f"{difference(way, paper):9.3f}" for way in ways)
        times = "".join(f"{1e3 * seconds[render]:8.2f}" for render in ("paper", "fast", "ray"))
        print(f"{task:30}{means}  {zlib.crc32(frames['ray']):08x}  {times}", flush=True)


def print_gpu(tasks: list[str]) -> None:
    print(f"{torch.cuda.get_device_name()}; differences of the GPU's frames")
    print(f"{'task':30}checksum{'from the CPU (largest)':>25}{'from paper':>12}")
    for task in filter(is_drawable, tasks):
        ours = on_gpu(task)
        frames, _, envs = play(task, "paper", *(("ray",) if compiler() else ()))
        for env in envs:
            env.close()
        beside = f"{abs(ours.astype(int) - frames['ray']).max():25d}" if compiler() else f"{'no compiler':>25}"
        print(f"{task:30}{zlib.crc32(ours):08x}{beside}{difference(ours, frames['paper']):12.3f}", flush=True)
    print(f"\nmicroseconds a frame on the GPU{'1':>9}{'10':>9}{'64':>9} frames a launch;  the host's for one")
    for task in (f"dmc/{name}" for name in (*PLANET, "quadruped-walk", "humanoid_CMU-run")):
        print(f"{task:31}" + "".join(f"{microseconds:9.1f}" for microseconds in gpu_times(task)), flush=True)


def gpu_times(task: str) -> list[float]:
    """For 1, 10 and 64 frames a launch, and of the host for packing and launching one."""
    env: Any = make(task, EnvConfig(observation="state"), 2)
    env.reset(0)
    simulator = env.simulator
    eye = RayCamera(simulator.model, 84, camera_of(task))
    frames = RayFrames(eye.scene(simulator.data).assets, 64, "cuda")
    for number in range(64):
        frames.put(number, eye.scene(simulator.data))
    times = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for count in (1, 10, 64):
        out = torch.empty(count, 3, 84, 84, dtype=torch.uint8, device="cuda")
        for repetitions in (20, 200):  # the first warm up
            torch.cuda.synchronize()
            start.record()
            for _ in range(repetitions):
                frames.draw(out)
            end.record()
            end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 200 / count)
    out, spent = torch.empty(1, 3, 84, 84, dtype=torch.uint8, device="cuda"), []
    for _ in range(200):
        torch.cuda.synchronize()
        began = time.perf_counter()
        frames.put(0, eye.scene(simulator.data))
        frames.draw(out)
        spent.append(time.perf_counter() - began)
    return [*times, statistics.median(spent) * 1e6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="as in walker-walk; all unless named")
    parser.add_argument("--gpu", action="store_true", help="check and time the CUDA kernels")
    parser.add_argument("--keep", metavar="FILE", help="save this machine's pixels")
    parser.add_argument("--against", metavar="FILE", help="compare with pixels that --keep saved on another machine")
    parser.add_argument("--picture", metavar="OUT", help="with --against: a PNG of the last frames side by side")
    options = parser.parse_args()
    if options.gpu and not kernels.available():
        parser.error("--gpu needs a CUDA GPU with bfloat16")
    tasks = [f"dmc/{task}" for task in options.tasks] or list(task_names("dmc"))
    started = time.perf_counter()
    print(f"OpenGL: {renderer_name()}; {FRAMES} frames a task")
    if options.keep:
        keep(tasks, options.keep)
    elif options.against:
        print_against(tasks, options.against, options.picture)
    else:
        print_gpu(tasks) if options.gpu else print_closeness(tasks)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
