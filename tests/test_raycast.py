"""The ray caster draws what MuJoCo's OpenGL renderer draws, and a GPU the same as a CPU."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from packaging.version import Version

from drq.config import EnvConfig
from drq.engine.kernels.raycast import RayFrames
from drq.envs import make
from drq.envs.cameras import Camera
from drq.envs.dmc import ControlSuite
from drq.envs.raycast import RayCamera, draw
from drq.envs.rendering import is_software, renderer_name
from drq.errors import UserError
from environments import needs_compiler, needs_gl

SIZE = 84
pytestmark = needs_compiler
papers_floor = pytest.mark.skipif(Version(version("mujoco")) >= Version("3.12"), reason="it draws another floor")

TASKS = (
    *("cartpole-swingup", "walker-walk", "reacher-easy", "ball_in_cup-catch", "finger-spin", "fish-swim"),
    *("stacker-stack_4", "quadruped-fetch", "lqr-lqr_2_1"),
)

# Every shape, a mirror that is a box, textures flat and around, one seen from behind, one that is veiled.
EVERYTHING = """
<mujoco>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".4 .6 .8" rgb2="0 0 .1" width="64" height="64"/>
    <texture name="checks" type="2d" builtin="checker" rgb1=".1 .2 .3" rgb2=".8 .7 .2" width="50" height="50"/>
    <texture name="around" type="cube" builtin="gradient" rgb1="1 0 0" rgb2="0 1 0" width="32" height="32"/>
    <material name="floor" texture="checks" texrepeat="3 3" texuniform="true"/>
    <material name="shrunk" texture="checks" texrepeat="2 3"/>
    <material name="ball" texture="around"/>
    <material name="mirror" reflectance=".5" rgba=".3 .3 .3 1"/>
  </asset>
  <worldbody>
    <light pos="-1 -1 3" dir=".3 .3 -1" diffuse=".6 .6 .6" castshadow="true"/>
    <light pos="1 0 3" dir="-.3 0 -1" directional="true" diffuse=".3 .2 .2" castshadow="true"/>
    <camera name="eye" pos="0 -2.4 1.3" xyaxes="1 0 0 0 .45 .9"/>
    <geom type="plane" size="2 1.5 .2" material="floor"/>
    <geom type="plane" size=".4 .4 .1" pos="-.9 -.6 .4" euler="100 0 20" rgba=".2 .8 .2 1"/>
    <geom type="box" size=".7 .4 .1" pos="0 0 .1" material="mirror"/>
    <geom type="sphere" size=".2" pos="0 0 .5" material="ball"/>
    <geom type="capsule" size=".08 .2" pos="-.5 0 .5" euler="30 20 0" rgba=".8 .2 .2 1"/>
    <geom type="ellipsoid" size=".1 .2 .3" pos=".5 0 .6" rgba=".2 .2 .8 1"/>
    <geom type="cylinder" size=".15 .1" pos=".9 .2 .3" euler="40 0 0" material="shrunk"/>
    <geom type="box" size=".1 .15 .2" pos="-1 .3 .3" euler="10 20 30" rgba=".7 .7 .1 1"/>
    <geom type="sphere" size=".2" pos=".3 -.7 .5" rgba=".1 .9 .9 .4"/>
    <geom type="box" size=".1 .1 .1" pos=".4 -.4 .6" rgba=".9 .1 .9 .5"/>
  </worldbody>
</mujoco>
"""


def everything() -> tuple[Any, Any, int]:
    import mujoco

    model = mujoco.MjModel.from_xml_string(EVERYTHING)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data, 0


def played(task: str, steps: int = 30) -> tuple[Any, Any, int]:
    """A model, a state of it after some random steps, and the camera that looks at it."""
    domain, name = task.split("-", 1)
    simulator = ControlSuite(domain, name, EnvConfig())
    simulator.begin(3)
    random = np.random.RandomState(0)
    for _ in range(steps):
        simulator.advance(random.uniform(-1, 1, simulator.action_size).astype(np.float32))
    return simulator.model, simulator.data, 2 if domain == "quadruped" else 0


def scene(task: str) -> tuple[Any, Any, int]:
    return everything() if task == "everything" else played(task)


def opengl(model: Any, data: Any, camera: int) -> NDArray[np.uint8]:
    eye = Camera(model, SIZE, camera, None)
    try:
        return eye.draw(data).copy()
    finally:
        eye.close()


@needs_gl
@papers_floor
@pytest.mark.parametrize("task", [*TASKS, "everything"])
def test_pixels_are_those_of_opengl(task: str) -> None:
    model, data, camera = scene(task)
    software = is_software(renderer_name())
    eye = RayCamera(model, SIZE, camera, "mesa" if software else "nvidia")
    ours = draw(eye.scene(data)).transpose(1, 2, 0)
    difference = abs(ours.astype(int) - opengl(model, data, camera))
    assert difference.mean() <= (0.5 if software else 1.0)
    assert (difference.max(-1) > 40).mean() < 0.004


@pytest.mark.parametrize("driver", ["nvidia", "mesa"])
@pytest.mark.parametrize("task", ["everything", "walker-walk", "lqr-lqr_2_1"])
def test_a_gpu_draws_the_same(kernel_device: str, task: str, driver: Any) -> None:
    """To the last bit. The second frame is of another state, and the image's size is no multiple of a tile's."""
    model, data, camera = scene(task)
    size = 84 if driver == "nvidia" else 37
    eye = RayCamera(model, size, camera, driver)
    frames = RayFrames(eye.scene(data).assets, 3, kernel_device)
    expected = []
    for number in range(2):
        if number:
            import mujoco

            mujoco.mj_step(model, data, 5)
        expected.append(draw(eye.scene(data)))
        frames.put(number, eye.scene(data))
    out = torch.zeros(3, 3, size, size, dtype=torch.uint8, device=kernel_device)
    frames.draw(out[:2])
    np.testing.assert_array_equal(out[:2].cpu().numpy(), np.stack(expected))
    assert not out[2].any()


def test_an_environment_draws_without_opengl(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("OpenGL was asked for")

    monkeypatch.setattr("drq.envs.dmc.Camera", refuse)
    monkeypatch.setattr("drq.envs.dmc.require_rendering", refuse)
    env = make("dmc/cartpole-swingup", EnvConfig(render="ray"), 2)
    first = env.reset(0)
    assert first.shape == (3, SIZE, SIZE)
    assert first.std() > 10
    assert env.render().shape[2] == 3
    again = make("dmc/cartpole-swingup", EnvConfig(render="ray"), 2)
    np.testing.assert_array_equal(again.reset(0), first)
    step = env.step(np.ones(1, np.float32))
    assert (step.frame != first).any()


def test_a_picture_does_not_depend_on_those_before() -> None:
    """What a thread keeps from frame to frame (corners, the sky) belongs to one camera and one direction."""
    states = [scene(task) for task in ("walker-walk", "everything", "quadruped-fetch")]
    eyes = [RayCamera(model, SIZE, camera) for model, _, camera in states]
    first = [draw(eye.scene(data)) for eye, (_, data, _) in zip(eyes, states, strict=True)]
    for _ in range(2):
        for eye, (_, data, _), frame in zip(eyes, states, first, strict=True):
            np.testing.assert_array_equal(draw(eye.scene(data)), frame)


@needs_gl
def test_what_it_cannot_draw_opengl_draws(capsys: pytest.CaptureFixture[str]) -> None:
    task = "dmc/quadruped-escape"
    envs = [make(task, EnvConfig(render=render), 2) for render in ("ray", "ray", "paper")]  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert said == f"{task} has a height field, which --env.render ray cannot draw: OpenGL draws it.\n"
    np.testing.assert_array_equal(envs[0].reset(0), envs[2].reset(0))
    for env in envs:
        env.close()


MESH = '<asset><mesh name="m" vertex="0 0 0 1 0 0 0 1 0 0 0 1"/></asset>'
SHADOW = '<light pos="0 0 3" castshadow="true"/>'


@pytest.mark.parametrize(
    ("assets", "world", "reason"),
    [
        ("", '<geom size=".1"/>', None),
        (MESH, '<geom type="mesh" mesh="m"/>', "meshes"),
        (MESH, '<geom type="mesh" mesh="m" group="3"/>', None),  # not shown
        ("", '<geom type="plane" size="0 1 .1"/>', "an infinite plane"),
        ("", 2 * SHADOW, None),
        ("", 3 * SHADOW, "more than two lights with shadows"),
        ("", 8 * '<light pos="0 0 3" castshadow="false"/>', "more than 8 lights"),
        ("", 191 * '<geom size=".1"/>', "more than 190 shapes"),
        ('<visual><quality offsamples="8"/></visual>', "", "another quality than four samples a pixel"),
        ('<visual><quality numslices="250"/></visual>', "", "finer shapes than expected"),
    ],
)
def test_what_it_cannot_draw_is_known(assets: str, world: str, reason: str | None) -> None:
    import mujoco

    xml = f'<mujoco>{assets}<worldbody><camera pos="0 -3 1"/>{world}</worldbody></mujoco>'
    model = mujoco.MjModel.from_xml_string(xml)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    assert RayCamera(model, SIZE, 0).why_undrawable(data) == reason


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler: .*apt-get install g\+\+.*--env.render fast"):
        make("dmc/cartpole-swingup", EnvConfig(render="ray"), 2)
