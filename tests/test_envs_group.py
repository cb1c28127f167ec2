"""Environments side by side: each slot gives what a single environment gives, to the bit."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from drq.config import EnvConfig
from drq.envs import Action, Environment, EnvironmentGroup, Frame, Step, make, make_group, task_names
from drq.envs.cameras import TiledCamera, Tiles, grid
from drq.envs.dmc import make as make_dmc
from drq.envs.dmc_group import ControlSuiteGroup, RayGroup
from drq.envs.group import ThreadedGroup
from drq.errors import UserError
from environments import needs_compiler, needs_gl, paint_red, random_action, red_pixels

STATE = EnvConfig(observation="state")
OPENGL = EnvConfig(render="fast")


@contextmanager
def group_and_singles(
    task: str, config: EnvConfig, action_repeat: int, count: int
) -> Iterator[tuple[EnvironmentGroup, list[Environment]]]:
    with ExitStack() as stack:
        group = stack.enter_context(closing(make_group(task, config, action_repeat, count)))
        singles = [stack.enter_context(closing(make(task, config, action_repeat))) for _ in range(count)]
        assert group.spec == singles[0].spec
        yield group, singles


def assert_same_step(one: Step, other: Step) -> None:
    assert np.array_equal(one.frame, other.frame)
    assert one.frame.dtype == other.frame.dtype
    assert one.frame.flags["C_CONTIGUOUS"]
    assert one[1:] == other[1:]


def assert_plays_like_singles(group: EnvironmentGroup, singles: list[Environment]) -> None:
    """All slots at once, some of them, and one or two that begin anew while the others go on."""
    rng = np.random.default_rng(0)
    kept: list[tuple[Frame, Frame]] = []

    def reset(seeds: dict[int, int]) -> None:
        frames = group.reset(seeds)
        assert frames.keys() == seeds.keys()
        for slot, seed in seeds.items():
            assert np.array_equal(frames[slot], singles[slot].reset(seed))
            kept.append((frames[slot], frames[slot].copy()))

    def step(*slots: int) -> None:
        actions = {slot: random_action(group.spec, rng) for slot in slots}
        steps = group.step(actions)
        assert steps.keys() == actions.keys()
        for slot, action in actions.items():
            assert_same_step(steps[slot], singles[slot].step(action))
            kept.append((steps[slot].frame, steps[slot].frame.copy()))

    reset({0: 10, 1: 11, 2: 12})
    assert not np.array_equal(kept[0][0], kept[1][0])
    step(0, 1, 2)
    step(2, 0)
    reset({1: 20})
    step(1)
    step(0, 1, 2)
    reset({2: 21, 0: 22})
    step(1, 2)
    step(0, 1, 2)
    assert all(np.array_equal(frame, copied) for frame, copied in kept), "a frame changed after it was handed over"


@needs_gl
@pytest.mark.parametrize(
    ("name", "render"),
    [
        ("cartpole-swingup", "fast"),
        ("cheetah-run", "fast"),
        ("walker-walk", "fast"),
        ("reacher-easy", "fast"),
        ("finger-spin", "fast"),
        ("ball_in_cup-catch", "fast"),
        ("quadruped-walk", "fast"),
        ("walker-walk", "paper"),  # it differs in the size of the shadow map alone
        ("quadruped-walk", "paper"),
    ],
)
def test_frames_drawn_together_are_those_of_single_environments(name: str, render: Literal["paper", "fast"]) -> None:
    with group_and_singles(f"dmc/{name}", EnvConfig(render=render), 2, 3) as (group, singles):
        assert isinstance(group, ControlSuiteGroup)
        assert_plays_like_singles(group, singles)


@needs_compiler
@pytest.mark.parametrize("name", ["walker-walk", "ball_in_cup-catch", "finger-turn_hard", "swimmer-swimmer6"])
def test_frames_cast_together_are_those_of_single_environments(name: str) -> None:
    with group_and_singles(f"dmc/{name}", EnvConfig(render="ray", image_size=33), 2, 3) as (group, singles):
        assert isinstance(group, RayGroup)
        assert_plays_like_singles(group, singles)


@needs_gl
@pytest.mark.parametrize("name", ["finger-turn_hard", "point_mass-hard", "swimmer-swimmer6"])
def test_models_that_differ_between_episodes_are_each_drawn_as_they_are(name: str) -> None:
    with group_and_singles(f"dmc/{name}", EnvConfig(image_size=33, render="fast"), 2, 3) as (group, singles):
        assert isinstance(group, ControlSuiteGroup)
        assert_plays_like_singles(group, singles)


@needs_gl
def test_terrain_is_each_environments_own() -> None:
    with group_and_singles("dmc/quadruped-escape", EnvConfig(image_size=40), 2, 3) as (group, singles):
        assert_plays_like_singles(group, singles)


@pytest.mark.parametrize(
    ("task", "config", "action_repeat"),
    [
        ("toy/reach", EnvConfig(image_size=24), 2),
        ("toy/catch", EnvConfig(image_size=24), 1),
        ("dmc/walker-walk", STATE, 4),
        ("gym/Pendulum-v1", STATE, 2),
    ],
)
def test_other_environments_play_like_single_ones(task: str, config: EnvConfig, action_repeat: int) -> None:
    with group_and_singles(task, config, action_repeat, 3) as (group, singles):
        assert_plays_like_singles(group, singles)


def what_a_context_keeps(model: Any) -> dict[str, Any]:
    """All that MuJoCo reads of a model when it makes a rendering context, and not again when it draws."""
    kept = {
        name: getattr(model, name)
        for name in dir(model)
        if name.startswith(("tex_", "mesh_", "skin_", "hfield_", "mat_tex"))
    }
    planes = model.geom_type == 0
    kept["planes"] = model.geom_size[planes]
    kept["scale"] = np.array([model.stat.extent, model.stat.meansize])
    for part in (model.vis.map, model.vis.quality, model.vis.rgba):
        kept |= {f"{part!r:.20} {name}": getattr(part, name) for name in dir(part) if not name.startswith("_")}
    return {name: value for name, value in kept.items() if not callable(value)}


def test_no_episode_changes_what_a_context_keeps_but_those_with_terrain() -> None:
    for task in task_names("dmc"):
        env = make_dmc(task.partition("/")[2], STATE, 2)
        before = copy.deepcopy(what_a_context_keeps(env.simulator.model))
        assert len(before) > 30
        env.begin(1)
        kept = what_a_context_keeps(env.simulator.model)
        changed = [name for name in before if not np.array_equal(before[name], kept[name], equal_nan=True)]
        assert bool(changed) == env.simulator.has_terrain, (task, changed)


@needs_gl
def test_one_context_and_one_read_back_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    import mujoco
    from OpenGL import GL

    counts = {"contexts": 0, "drawn": 0, "read": 0}

    def counted(name: str, original: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return count

    monkeypatch.setattr(mujoco, "GLContext", counted("contexts", mujoco.GLContext))
    monkeypatch.setattr(mujoco, "mjr_render", counted("drawn", mujoco.mjr_render))
    monkeypatch.setattr(mujoco, "mjr_readPixels", counted("read", mujoco.mjr_readPixels))
    monkeypatch.setattr(GL, "glReadPixels", counted("read", GL.glReadPixels))
    with closing(make_group("dmc/cartpole-swingup", EnvConfig(image_size=24, render="fast"), 8, 7)) as group:
        group.reset({slot: slot for slot in range(7)})
        # A slot or two are also drawn alone, for comparison.
        assert counts["read"] <= 1 + 2
        counts["drawn"] = counts["read"] = 0
        for _ in range(2):
            group.step({slot: np.zeros(1, np.float32) for slot in range(7)})
    assert counts == {"contexts": 1, "drawn": 14, "read": 2}


@needs_gl
def test_a_group_may_be_used_from_any_thread() -> None:
    action = np.ones(1, np.float32)
    with (
        closing(make_group("dmc/cartpole-swingup", OPENGL, 8, 6)) as group,
        closing(make("dmc/cartpole-swingup", OPENGL, 8)) as single,
        ThreadPoolExecutor(1) as elsewhere,
    ):
        assert np.array_equal(group.reset({5: 3})[5], single.reset(3))
        assert_same_step(elsewhere.submit(group.step, {5: action}).result()[5], single.step(action))
        assert_same_step(group.step({5: action})[5], single.step(action))


@needs_gl
@pytest.mark.parametrize(
    ("name", "config", "agent_steps"),
    [
        ("walker-walk", OPENGL, 27),
        ("cheetah-run", EnvConfig(render="fast"), 3),
        ("quadruped-walk", EnvConfig(image_size=40, render="fast"), 2),
        ("quadruped-escape", EnvConfig(image_size=40, render="fast"), 2),  # terrain: each draws for itself
        ("dog-run", EnvConfig(image_size=40, render="fast"), 2),  # a skin
        ("point_mass-hard", EnvConfig(image_size=40, render="fast"), 2),  # tendons
        ("humanoid_CMU-run", EnvConfig(image_size=40, render="fast"), 2),  # many geoms
        ("swimmer-swimmer6", EnvConfig(image_size=40, render="fast"), 2),  # a light that each episode puts elsewhere
        pytest.param("swimmer-swimmer6", EnvConfig(image_size=40, render="ray"), 2, marks=needs_compiler),
    ],
)
def test_pictures_for_videos_are_the_single_environments_and_leave_frames_alone(
    name: str, config: EnvConfig, agent_steps: int
) -> None:
    """Kept as snapshots while the episode goes on, drawn when it is over, and in a second episode again."""
    with group_and_singles(f"dmc/{name}", config, 2, 2) as (group, singles):
        rng = np.random.default_rng(0)
        for seed in (1, 2):
            group.reset({0: 0, 1: seed})
            singles[1].reset(seed)
            snapshots, expected = [group.snapshot(1)], [singles[1].render()]
            for _ in range(agent_steps):
                action = random_action(group.spec, rng)
                assert_same_step(group.step({0: action, 1: action})[1], singles[1].step(action))
                snapshots.append(group.snapshot(1))
                expected.append(singles[1].render())
            pictures = group.develop(snapshots)
            assert len(pictures) == len(expected)
            for picture, of_single in zip(pictures, expected, strict=True):
                assert np.array_equal(picture, of_single)
                assert picture.dtype == of_single.dtype
                assert picture.flags["C_CONTIGUOUS"]
            assert not np.array_equal(expected[0], expected[-1])


@needs_gl
def test_pictures_of_several_slots_are_developed_together_in_the_order_asked_for() -> None:
    with group_and_singles("dmc/reacher-easy", EnvConfig(image_size=24, render="fast"), 2, 3) as (group, singles):
        group.reset({slot: slot for slot in range(3)})
        snapshots = [group.snapshot(slot) for slot in (2, 0, 1)]
        pictures = group.develop(snapshots)
        for slot, picture in zip((2, 0, 1), pictures, strict=True):
            singles[slot].reset(slot)
            assert np.array_equal(picture, singles[slot].render())
        # A snapshot is not used up.
        assert np.array_equal(group.develop(snapshots[1:]), pictures[1:])
        assert group.develop([]) == []


@needs_gl
def test_pictures_are_read_back_in_few_goes_from_one_buffer_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    from OpenGL import GL

    read: list[int] = []
    made: list[Tiles] = []
    closed: list[Tiles] = []
    original_read, original_init, original_close = GL.glReadPixels, Tiles.__init__, Tiles.close

    def noted_read(*args: Any) -> Any:
        read.append(args[2])
        return original_read(*args)

    def noted_init(self: Tiles, *args: Any) -> None:
        made.append(self)
        original_init(self, *args)

    def noted_close(self: Tiles) -> None:
        closed.append(self)
        original_close(self)

    monkeypatch.setattr(GL, "glReadPixels", noted_read)
    monkeypatch.setattr(Tiles, "__init__", noted_init)
    monkeypatch.setattr(Tiles, "close", noted_close)
    with closing(make_group("dmc/cartpole-swingup", EnvConfig(image_size=24, render="fast"), 8, 3)) as group:
        group.reset({slot: slot for slot in range(3)})
        read.clear()
        snapshots = [group.snapshot(1) for _ in range(60)]
        assert read == []
        assert len(made) == 1
        for _ in range(2):
            assert len(group.develop(snapshots)) == 60
        assert len(read) == 2 * 3
        assert max(read) <= 2048
        assert len(made) == 2
        assert closed == []
    assert closed == made


@needs_gl
@pytest.mark.skipif(sys.platform != "linux", reason="reads memory in use from /proc")
def test_snapshots_leave_nothing_behind() -> None:
    def megabytes() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

    with closing(make_group("dmc/cartpole-swingup", EnvConfig(image_size=24, render="fast"), 8, 2)) as group:
        group.reset({0: 0, 1: 1})
        snapshots = [group.snapshot(0) for _ in range(100)]
        del snapshots
        before = megabytes()
        for _ in range(4_000):
            group.snapshot(0)
        assert megabytes() - before < 40  # at 10 kB or more each


@needs_gl
def test_a_model_rebuilt_by_the_task_is_drawn_anew() -> None:
    envs = [make_dmc("cartpole-swingup", OPENGL, 2) for _ in range(2)]
    with closing(ControlSuiteGroup(envs)) as group:
        assert [red_pixels(frame) for frame in group.reset({0: 0, 1: 0}).values()] == [0, 0]
        paint_red(envs[1].simulator._physics)
        steps = group.step({slot: np.zeros(1, np.float32) for slot in range(2)})
    assert red_pixels(steps[0].frame) == 0
    assert red_pixels(steps[1].frame) > 50


@needs_gl
def test_pictures_too_large_for_one_buffer_get_one_each() -> None:
    for size, kind in ((512, ControlSuiteGroup), (513, ThreadedGroup)):
        assert isinstance(make_group("dmc/cartpole-swingup", EnvConfig(image_size=size, render="fast"), 8, 10), kind)


def test_a_grid_holds_all_tiles_in_a_buffer_no_longer_than_needed() -> None:
    for count in range(1, 40):
        columns, rows = grid(count)
        assert columns * rows >= count
        assert (max(columns, rows) - 1) ** 2 < count


class Together:
    """One that resets and steps only if two others do so at the same time, and that notes its threads."""

    spec = make("toy/reach", STATE, 1).spec
    render_seconds = 0.0

    def __init__(self, meeting: threading.Barrier) -> None:
        self.meeting = meeting
        self.threads = {threading.get_ident()}

    def reset(self, seed: int) -> Frame:
        self.threads.add(threading.get_ident())
        self.meeting.wait(timeout=20)
        return np.zeros(4, np.float32)

    def step(self, action: Action) -> Step:
        self.threads.add(threading.get_ident())
        self.meeting.wait(timeout=20)
        return Step(np.zeros(4, np.float32), 0.0, 1.0, False, 0.0)

    def render(self) -> NDArray[np.uint8]:
        self.threads.add(threading.get_ident())
        return np.zeros((8, 8, 3), np.uint8)

    def close(self) -> None:
        self.threads.add(threading.get_ident())


def test_each_environment_lives_in_one_thread_and_all_work_at_once() -> None:
    envs: list[Together] = []
    meeting = threading.Barrier(3)

    def new() -> Together:
        envs.append(Together(meeting))
        return envs[-1]

    group = ThreadedGroup(new, 3)
    group.reset(dict.fromkeys(range(3), 0))
    group.develop([group.snapshot(slot) for slot in range(3)])
    group.step({slot: np.zeros(2, np.float32) for slot in range(3)})
    group.close()
    assert [len(env.threads) for env in envs] == [1, 1, 1]
    assert len(set().union(*(env.threads for env in envs)) - {threading.get_ident()}) == 3


def test_those_made_before_one_that_fails_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []
    monkeypatch.setattr(Together, "close", lambda env: closed.append(env))
    envs = [Together(threading.Barrier(1)) for _ in range(2)]
    with pytest.raises(IndexError, match="pop from empty list"):
        ThreadedGroup(envs.pop, 3)
    assert len(closed) == 2


@pytest.mark.parametrize(
    "task", ["toy/reach", pytest.param("dmc/reacher-easy", marks=needs_gl), "gym/MountainCarContinuous-v0"]
)
def test_mistakes_are_said_as_a_single_environment_says_them(task: str) -> None:
    config = STATE if task.startswith("gym") else EnvConfig(image_size=24)
    with closing(make_group(task, config, 1, 2)) as group:
        size = group.spec.action_size
        group.reset({0: 0})
        with pytest.raises(UserError, match=r"call reset\(seed\) before step"):
            group.step({slot: np.zeros(size, np.float32) for slot in range(2)})
        with pytest.raises(UserError, match="not finite"):
            group.step({0: np.full(size, np.nan, np.float32)})


@pytest.mark.parametrize(
    ("task", "config", "said"),
    [
        ("dmc/walker-wlak", STATE, "Did you mean 'dmc/walker-walk'"),
        ("toy/raech", STATE, "Did you mean 'toy/reach'"),
        ("dmc/walker-walk", EnvConfig(frame_stack=0), "--env.frame-stack is 0"),
        ("toy/reach", EnvConfig(image_size=0), "--env.image-size is 0"),
    ],
)
def test_impossible_groups_are_refused(task: str, config: EnvConfig, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_group(task, config, 2, 2)


@needs_gl
def test_an_opengl_that_draws_tiles_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then every environment draws for itself, and frames are right all the same."""
    original = TiledCamera.draw

    def off_by_one(self, states):  # type: ignore[no-untyped-def]
        images = original(self, states)
        return {number: image if number == 0 else image ^ 1 for number, image in images.items()}

    monkeypatch.setattr(TiledCamera, "draw", off_by_one)
    with group_and_singles("dmc/cartpole-swingup", EnvConfig(image_size=32, render="fast"), 8, 3) as (group, singles):
        for slot, frame in group.reset({slot: slot for slot in range(3)}).items():
            assert np.array_equal(frame, singles[slot].reset(slot))
        action = np.array([0.3], dtype=np.float32)
        stepped = group.step(dict.fromkeys(range(3), action))
        assert np.array_equal(stepped[2].frame, singles[2].step(action).frame)
        assert np.array_equal(group.develop([group.snapshot(2)])[0], singles[2].render())


@needs_gl
def test_snapshots_from_before_it_was_noticed_are_pictures_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TiledCamera.draw

    def off_by_one(self, states):  # type: ignore[no-untyped-def]
        return {number: image ^ number for number, image in original(self, states).items()}

    monkeypatch.setattr(TiledCamera, "draw", off_by_one)
    with group_and_singles("dmc/cartpole-swingup", EnvConfig(image_size=32, render="fast"), 8, 2) as (group, singles):
        snapshots = []
        for slot in range(2):
            assert np.array_equal(group.reset({slot: slot})[slot], singles[slot].reset(slot))
            snapshots.append(group.snapshot(slot))
        for picture, single in zip(group.develop(snapshots), singles, strict=True):
            assert np.array_equal(picture, single.render())
