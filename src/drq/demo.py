"""`drq demo`: the same agent with and without augmentation on a small pixel task, side by side."""

from __future__ import annotations

import base64
import html
import io
import os
import time
from dataclasses import dataclass
from pathlib import Path

from drq.config import TrainConfig
from drq.envs import make
from drq.errors import UserError
from drq.launch import job_to_json, start_worker
from drq.presets import preset
from drq.settings import override
from drq.training.folder import RunFolder
from drq.training.progress import duration

TASK = "toy/reach"


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
    returns = {"random policy": spec.random_return, "perfect policy": spec.perfect_return}
    returns |= {each.label: each.folder.evaluations()[-1]["return_mean"] for each in contestants}
    rows = [
        (name, f"{value:.1f}", f"{(value - spec.random_return) / (spec.perfect_return - spec.random_return):.0%}")
        for name, value in returns.items()
    ]
    print(f"{'':18}{'return':>8}  from random to perfect")
    for name, value, share in rows:
        print(f"{name:18}{value:>8}  {share:>6}")
    page = arguments.dir / "demo.html"
    page.write_text(_page(contestants, rows, spec.random_return, spec.perfect_return))
    print(f"\nCurves and a video of the trained agent: {page}")


def _train(contestants: list[Contestant], arguments: DemoArguments) -> None:
    """Each agent in a process of its own, with its share of the cores."""
    threads = max(1, (os.cpu_count() or 2) // len(contestants))
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
            last = (log.read_text().strip().splitlines() or ["no output"])[-1]
            raise UserError(f"The demo's training stopped: {last} (all of it: {log})")


def _page(contestants: list[Contestant], rows: list[tuple[str, str, str]], random: float, perfect: float) -> str:
    cells = "".join(f"<tr><th>{html.escape(a)}</th><td>{b}</td><td>{c}</td></tr>" for a, b, c in rows)
    videos = "".join(
        f'<figure><video src="data:video/mp4;base64,{base64.b64encode(newest.read_bytes()).decode()}" '
        f'controls autoplay muted loop playsinline width="240"></video><figcaption>{each.label}</figcaption></figure>'
        for each in contestants
        for newest in sorted(each.folder.videos.glob("*.mp4"))[-1:]
    )
    curves = _curves(contestants, random, perfect)
    missing = "" if videos else "<p>No video: ffmpeg is missing (pip install imageio-ffmpeg).</p>"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>DrQ demo</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse }} th, td {{ padding: .3rem 1rem .3rem 0; text-align: right }}
th:first-child {{ text-align: left }} figure {{ display: inline-block; margin: 0 1rem 1rem 0 }}
img {{ max-width: 100%; background: #fff; border-radius: 6px }}
</style></head><body>
<h1>Augmentation at work</h1>
<p>Two agents learn <code>{TASK}</code> from 24&times;24 images: the red dot has to reach the green one. They are the
same SAC; one sees its memories shifted at random by up to four pixels (DrQ, K = M = 2), the other as they were.</p>
<table><thead><tr><th></th><th>return</th><th>from random to perfect</th></tr></thead><tbody>{cells}</tbody></table>
<p><img alt="Return of both agents over env steps" src="{curves}"></p>
{videos}{missing}
</body></html>
"""


def _curves(contestants: list[Contestant], random: float, perfect: float) -> str:
    """The learning curves, as an image inside the page."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=120)
    for each, colour in zip(contestants, ("#0072b2", "#d55e00"), strict=True):
        evaluations = each.folder.evaluations()
        steps = [row["env_step"] for row in evaluations]
        means = [row["return_mean"] for row in evaluations]
        axes.plot(steps, means, label=each.label, color=colour, linewidth=2)
    for name, value in (("random policy", random), ("perfect policy", perfect)):
        axes.axhline(value, color="#777777", linestyle=":", linewidth=1)
        axes.text(0.01, value + 0.6, name, transform=axes.get_yaxis_transform(), fontsize=8, color="#777777")
    axes.set_xlabel("env steps")
    axes.set_ylabel("return")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    pyplot.close(figure)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
