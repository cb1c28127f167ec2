"""`drq demo`: the same agent with and without augmentation on a small pixel task, side by side."""

from __future__ import annotations

import base64
import html
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from drq.augment import parse
from drq.config import TrainConfig
from drq.cores import usable_cores
from drq.envs import make
from drq.errors import UserError
from drq.launch import job_to_json, start_worker
from drq.presets import preset
from drq.settings import override
from drq.training.folder import RunFolder
from drq.training.progress import duration

TASK = "toy/reach"
VIEWS = 5


@dataclass(frozen=True)
class DemoArguments:
    """Trains DrQ, and the same agent without augmentation, on a pixel task: minutes on two CPU cores."""

    dir: Path = Path("demo")
    """Where the runs and the page go. A finished demo is shown again, not trained again."""
    steps: int = 3_500
    """Env steps of each agent."""
    seed: int = 1
    """Another seed, another demo."""


@dataclass(frozen=True)
class Contestant:
    """One of the two agents."""

    label: str
    augmentation: str
    folder: RunFolder

    def config(self, arguments: DemoArguments) -> TrainConfig:
        """The preset's, in a folder of the demo."""
        settings = {"seed": arguments.seed, "steps": arguments.steps, "dir": str(self.folder.path), "device": "cpu"}
        return override(preset("toy", TASK), settings | {"agent.augmentation": self.augmentation})

    def done(self) -> tuple[int, str]:
        """Env steps of the last evaluation and its return."""
        rows = self.folder.evaluations()
        return (int(rows[-1]["env_step"]), f"{rows[-1]['return_mean']:.1f}") if rows else (0, "-")


def demo(arguments: DemoArguments) -> None:
    """Trains both agents, prints the table, writes the page."""
    contestants = [
        Contestant("DrQ", "shift", RunFolder(arguments.dir / "drq")),
        Contestant("no augmentation", "none", RunFolder(arguments.dir / "no-augmentation")),
    ]
    print(f"Training two agents on {TASK}, from 24x24 images: DrQ, and the same SAC without augmentation.")
    began = time.perf_counter()
    _train(contestants, arguments)
    print(f"Trained in {duration(time.perf_counter() - began)}.\n")

    spec = make(TASK, preset("toy", TASK).env, 1).spec
    assert spec.random_return is not None
    assert spec.perfect_return is not None
    references = {"random policy": spec.random_return, "perfect policy": spec.perfect_return}
    returns = references | {each.label: each.folder.evaluations()[-1]["return_mean"] for each in contestants}
    rows = [
        (name, f"{value:.1f}", f"{(value - spec.random_return) / (spec.perfect_return - spec.random_return):.0%}")
        for name, value in returns.items()
    ]
    print(f"{'':18}{'return':>8}  from random to perfect")
    for name, value, share in rows:
        print(f"{name:18}{value:>8}  {share:>6}")
    page = arguments.dir / "demo.html"
    page.write_text(_page(contestants, rows, references, arguments), encoding="utf-8")
    print("One seed each: another may go otherwise (--seed 2 --dir demo-2).")
    print(f"\nCurves, augmented views and a video of the trained agent: {page}\nNext: {_command()} train toy/catch")


def _command() -> str:
    """`make demo` leaves it in .venv, where no shell looks before that is activated."""
    return "drq" if shutil.which("drq") else os.path.relpath(Path(sys.executable).with_name("drq"))


def _train(contestants: list[Contestant], arguments: DemoArguments) -> None:
    """Each agent in a process of its own, with its share of the cores."""
    threads = max(1, usable_cores() // len(contestants))
    logs = [arguments.dir / f"{each.folder.path.name}.log" for each in contestants]
    processes = [
        start_worker(job_to_json(each.config(arguments), None), log, {"OMP_NUM_THREADS": str(threads)})
        for each, log in zip(contestants, logs, strict=True)
    ]
    try:
        shown = ""
        while any(process.poll() is None for process in processes):
            line = "   ".join(
                f"{each.label}: {step:,} / {arguments.steps:,} steps, return {value}"
                for each in contestants
                for step, value in [each.done()]
            )
            if line != shown:
                print(line, flush=True)
                shown = line
            time.sleep(0.5)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()
    for process, log in zip(processes, logs, strict=True):
        if process.returncode:
            last = (log.read_text().strip().splitlines() or ["it left no word, as on a full disk"])[-1]
            raise UserError(f"The demo's training stopped: {last} (all of it: {log})")


def _page(
    contestants: list[Contestant],
    rows: list[tuple[str, str, str]],
    references: dict[str, float],
    arguments: DemoArguments,
) -> str:
    cells = "".join(f"<tr><th>{html.escape(a)}</th><td>{b}</td><td>{c}</td></tr>" for a, b, c in rows)
    videos = "".join(
        f'<figure><video src="{_data("video/mp4", newest.read_bytes())}" '
        f'controls autoplay muted loop playsinline width="240"></video><figcaption>{each.label}</figcaption></figure>'
        for each in contestants
        for newest in sorted(each.folder.videos.glob("*.mp4"))[-1:]
    )
    missing = "" if videos else "<p>No video: ffmpeg is missing (pip install imageio-ffmpeg).</p>"
    next_steps = "".join(
        f"<dt>{what}</dt><dd><code>{html.escape(f'{_command()} {words}')}</code></dd>"
        for what, words in (
            ("All about these two runs:", f"report {arguments.dir} --out report.html"),
            ("Is it luck?", "demo --seed 2 --dir demo-2"),
            ("Another task, as quick:", "train toy/catch"),
            ("The control suite, hours:", "train dmc/cartpole-swingup --preset cpu"),
        )
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>DrQ demo</title>
<style>
:root {{ color-scheme: light dark; --drq: #0072b2; --none: #d55e00 }}
@media (prefers-color-scheme: dark) {{ :root {{ --drq: #56b4f0; --none: #f58d4a }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse }} th, td {{ padding: .3rem 1rem .3rem 0; text-align: right }}
th:first-child {{ text-align: left }} figure {{ display: inline-block; margin: 0 1rem 1rem 0 }}
figure img {{ width: 96px; image-rendering: pixelated; border-radius: 4px }}
dd {{ margin: 0 0 .6rem }} svg {{ max-width: 100%; height: auto }} svg text {{ font-size: 13px; fill: currentColor }}
@media (max-width: 40rem) {{ svg text {{ font-size: 20px }} }}
</style></head><body>
<h1>Augmentation at work</h1>
<p>Two agents learn <code>{TASK}</code> from 24&times;24 images: the red dot has to reach the green one. They are the
same SAC; one sees its memories shifted at random by up to four pixels (DrQ, K = M = 2), the other as they were.</p>
{_views(arguments.seed)}
<table><thead><tr><th></th><th>return</th><th>from random to perfect</th></tr></thead><tbody>{cells}</tbody></table>
<p>This is one seed, {arguments.seed}: another gives other curves. How much is luck only several can say.</p>
{_curves(contestants, references)}
<div>{videos}{missing}</div>
<h2>What next</h2>
<dl>{next_steps}</dl>
</body></html>
"""


def _data(kind: str, content: bytes) -> str:
    """A file inside the page."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _views(seed: int) -> str:
    """A frame as it is remembered, and views of it as DrQ's updates see them."""
    import torch
    from imageio.v3 import imwrite

    config = preset("toy", TASK)
    frame = torch.from_numpy(make(TASK, config.env, 1).reset(seed))[None]
    shift = parse(config.agent.augmentation)
    nu = shift.sample(VIEWS, (frame.shape[2], frame.shape[3]), torch.Generator().manual_seed(seed))
    views = torch.cat([frame, shift(frame.expand(VIEWS, -1, -1, -1), nu)]).permute(0, 2, 3, 1).to(torch.uint8).numpy()
    names = ["as remembered", *(f"view {number + 1}" for number in range(VIEWS))]
    return "".join(
        f'<figure><img alt="{name}" src="{_data("image/png", imwrite("<bytes>", view, extension=".png"))}">'
        f"<figcaption>{name}</figcaption></figure>"
        for name, view in zip(names, views, strict=True)
    )


def _curves(contestants: list[Contestant], references: dict[str, float]) -> str:
    """The learning curves, in the page's own colours."""
    curves = [[(row["env_step"], row["return_mean"]) for row in each.folder.evaluations()] for each in contestants]
    last = max(step for curve in curves for step, _ in curve)

    def place(step: float, value: float) -> str:
        return f"{60 + 560 * step / last:.1f},{270 - 250 * max(value, 0.0) / 50:.1f}"

    parts = []
    for value in range(0, 51, 10):
        x, y = place(0, value).split(",")
        parts.append(f'<path d="M{x} {y}H620" stroke="currentColor" opacity=".15"/>')
        parts.append(f'<text x="50" y="{float(y) + 4:.1f}" text-anchor="end">{value}</text>')
    for step in (0, last / 2, last):
        x, _ = place(step, 0).split(",")
        parts.append(f'<text x="{x}" y="290" text-anchor="middle">{step:,.0f}</text>')
    parts.append('<text x="340" y="318" text-anchor="middle">env steps</text>')
    parts.append('<text x="14" y="145" text-anchor="middle" transform="rotate(-90 14 145)">return</text>')
    for name, reference in references.items():
        x, y = place(0, reference).split(",")
        parts.append(f'<path d="M{x} {y}H620" stroke="currentColor" stroke-dasharray="2 4"/>')
        parts.append(f'<text x="66" y="{float(y) - 5:.1f}">{name}</text>')
    heights = [float(place(*curve[-1]).split(",")[1]) + 4 for curve in curves]
    if abs(heights[0] - heights[1]) < 24:  # their names would be written over each other
        apart = 12 if heights[0] > heights[1] else -12
        heights = [heights[0] + apart, heights[1] - apart]
    for each, curve, height, colour in zip(contestants, curves, heights, ("--drq", "--none"), strict=True):
        points = " ".join(place(*point) for point in curve)
        style = f'style="stroke:var({colour})"'
        parts.append(f'<polyline points="{points}" fill="none" stroke-width="2.5" {style}/>')
        parts.append(f'<text x="626" y="{height:.1f}" style="fill:var({colour})">{each.label}</text>')
    label = "Return of both agents over env steps"
    return f'<svg viewBox="0 0 800 330" role="img" aria-label="{label}">{"".join(parts)}</svg>'
