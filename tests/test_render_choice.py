"""`--env.render auto`: what it becomes, and that a run keeps what it became."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest
import torch

from drq import envs, evaluate, train
from drq.config import EngineConfig, EnvConfig, EvalConfig, ReplayConfig, SACConfig, TrainConfig
from drq.engine import EngineSettings, draws_frames, kernels
from environments import needs_compiler

AUTO = EnvConfig(render="auto")
CARTPOLE = "dmc/cartpole-swingup"


def tiny(folder: Path, **env: Any) -> TrainConfig:
    """A run of seconds."""
    return TrainConfig(
        task=CARTPOLE,
        preset="cpu",
        steps=320,
        dir=str(folder),
        device="cpu",
        agent=SACConfig(batch_size=8, hidden_dim=16, seed_steps=10),
        env=EnvConfig(**{"action_repeat": 8, "image_size": 48, **env}),
        replay=ReplayConfig(capacity=200),
        eval=EvalConfig(every=0, episodes=1, video=False),
    )


def recorded(folder: Path) -> str:
    render: str = json.loads((folder / "config.json").read_text())["config"]["env"]["render"]
    return render


@needs_compiler
@pytest.mark.parametrize(
    ("task", "config", "rays", "expected"),
    [
        (CARTPOLE, AUTO, "ray", "ray"),
        (CARTPOLE, AUTO, "cuda", "cuda"),
        ("dmc/quadruped-escape", AUTO, "cuda", "fast"),  # terrain
        (CARTPOLE, dataclasses.replace(AUTO, observation="state"), "cuda", "fast"),
        ("toy/reach", AUTO, "cuda", "fast"),
    ],
)
def test_auto_casts_rays_where_they_can_draw(task: str, config: EnvConfig, rays: Any, expected: str) -> None:
    assert envs.choose_render(task, config, rays) == expected


@needs_compiler
@pytest.mark.parametrize(("missing", "expected"), [([], "fast"), (["libEGL.so.1"], "ray")])
def test_beside_a_gpu_without_kernels_opengl_draws_if_it_is_there(
    monkeypatch: pytest.MonkeyPatch, missing: list[str], expected: str
) -> None:
    monkeypatch.setattr("drq.envs.dmc.missing_libraries", lambda _: missing)
    assert envs.choose_render(CARTPOLE, AUTO, None) == expected


@pytest.mark.parametrize("rays", ["ray", "cuda"])
def test_auto_is_opengl_without_a_compiler(monkeypatch: pytest.MonkeyPatch, rays: Any) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert envs.choose_render(CARTPOLE, AUTO, rays) == "fast"


def test_a_gpu_draws_unless_kernels_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: True)
    gpu = torch.device("cuda")
    asked = {choice: EngineConfig(kernels=choice, precision="float32") for choice in ("auto", "off")}  # type: ignore[arg-type]
    drawing = {choice: draws_frames(EngineSettings.resolve(own, gpu, SACConfig())) for choice, own in asked.items()}
    assert drawing == {"auto": True, "off": False}


@needs_compiler
@pytest.mark.parametrize("render", ["auto", "cuda"])
def test_an_environment_without_a_gpu_casts_rays(render: Any) -> None:
    frames = [envs.make(CARTPOLE, EnvConfig(render=way), 8).reset(0) for way in (render, "ray")]
    np.testing.assert_array_equal(*frames)


@needs_compiler
def test_a_run_records_what_auto_became_and_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = tiny(tmp_path, render="auto")
    train(auto, quiet=True)
    assert recorded(tmp_path) == "ray"
    monkeypatch.setattr(envs, "choose_render", lambda *_, **__: pytest.fail("it was settled when the run began"))
    further = dataclasses.replace(auto, steps=400)
    assert train(further, quiet=True).evaluations[-1]["env_step"] == 400
    assert recorded(tmp_path) == "ray"


@needs_compiler
def test_videos_need_no_opengl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("imageio_ffmpeg")
    for module in ("drq.envs.rendering", "drq.envs.dmc"):
        monkeypatch.setattr(f"{module}.missing_libraries", lambda _: ["libEGL.so.1"])
    for context in ("GLContext", "MjrContext", "Renderer"):
        monkeypatch.setattr(f"mujoco.{context}", lambda *_: pytest.fail("OpenGL is asked for"))
    config = tiny(tmp_path, render="auto")
    train(dataclasses.replace(config, eval=dataclasses.replace(config.eval, video=True)), quiet=True)
    [video] = (tmp_path / "videos").iterdir()
    pictures = imageio.mimread(video, memtest=False)
    assert {picture.shape for picture in pictures} == {(256, 256, 3)}
    assert len(pictures) == 126  # a state before and after each of an episode's agent steps
    assert max(picture.std() for picture in pictures) > 20


@needs_compiler
def test_auto_goes_on_with_a_run_of_any_renderer(tmp_path: Path) -> None:
    """And a run that was drawn by a GPU is evaluated, and goes on, without one."""
    train(tiny(tmp_path, render="cuda"), quiet=True)
    assert recorded(tmp_path) == "cuda"
    assert evaluate(tmp_path, episodes=1).mean >= 0
    auto = dataclasses.replace(tiny(tmp_path, render="auto"), steps=400)
    train(auto, quiet=True)
    assert recorded(tmp_path) == "cuda"
