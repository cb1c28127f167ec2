"""Policies taken away: one file, graphs for other runtimes, raw frames in, the environment's own actions out."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest
import torch

import drq
from drq.backend import Backend
from drq.config import DQNConfig, EngineConfig, EnvConfig, EvalConfig
from drq.envs.pictures import frame_of
from drq.envs.protocol import EnvSpec
from drq.training.export import TOLERANCE, ActingGraphModule
from drq.training.folder import RunFolder
from drq.training.policy_file import read_policy_file
from drq.training.seeds import Purpose, seed_for
from runs import OWN_ENV, fails, small
from runs import drq as command

RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def lamp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an action range of its own, pictures of another size, action repeat 2 and an augmentation that only
    its author has."""
    folder = tmp_path_factory.mktemp("lamp")
    (folder / "dimming.py").write_text(
        "class Dim:\n    columns = 1\n"
        "    def sample(self, count, image_size, generator):\n"
        "        import torch\n        return torch.rand(count, 1, generator=generator)\n"
        "    def __call__(self, images, nu):\n        return images.float() * (1 - nu)[:, :, None, None]\n"
    )
    sys.path.insert(0, str(folder))
    config = small(folder / "run", "gym/Lamp-v0", imports=(OWN_ENV,), engine=EngineConfig(precision="float32"))
    agent = replace(config.agent, augmentation="dimming:Dim")
    drq.train(replace(config, agent=agent, env=replace(config.env, action_repeat=2)), quiet=True)
    sys.path.remove(str(folder))
    del sys.modules["dimming"]
    return folder / "run"


@pytest.fixture(scope="module")
def catch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catch") / "run"
    agent = DQNConfig(batch_size=8, seed_steps=20, hidden_dim=16)
    env = EnvConfig(image_size=36)
    drq.train(small(folder, "toy/catch", agent=agent, env=env, eval=EvalConfig(0, 1, video=False)), quiet=True)
    return folder


def frames(count: int, *shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return RANDOM.integers(0, 256, (count, *shape), np.uint8)


def test_a_file_acts_as_the_run_does(lamp: Path, tmp_path: Path) -> None:
    file = drq.export(lamp, tmp_path / "lamp.drq")
    run, policy = drq.load(lamp), drq.load(file)
    for frame in frames(5, 30, 40, 3):
        assert np.array_equal(policy.act(frame), run.act(frame))
    half = drq.export(file, tmp_path / "half.drq", dtype="bf16")
    assert half.stat().st_size < 0.55 * file.stat().st_size
    run.reset()
    near = drq.load(half)
    for frame in frames(5, 30, 40, 3):
        assert np.abs(near.act(frame) - run.act(frame)).max() < 0.05
    # Only what acting needs: the actor, and the convolutions that the critic trained.
    checkpoint = sum(part.stat().st_size for part in (lamp / "checkpoint").glob("state-*"))
    assert file.stat().st_size < checkpoint / 4


def test_a_file_of_a_dueling_network_has_its_advantages_alone_and_acts_alike(catch: Path, tmp_path: Path) -> None:
    file = drq.export(catch, tmp_path / "catch.drq")
    held = read_policy_file(file)
    assert not [name for name in held.weights if "value" in name or "hidden.1" in name]
    run, policy = drq.load(catch), drq.load(file)
    shown = frames(50, 36, 36, 3)
    assert [policy.act(frame) for frame in shown] == [run.act(frame) for frame in shown]
    again = drq.load(drq.export(file, tmp_path / "again.drq"))
    policy.reset()
    assert [again.act(frame) for frame in shown] == [policy.act(frame) for frame in shown]


def test_a_file_is_loaded_and_played_where_only_its_environment_is(lamp: Path, tmp_path: Path) -> None:
    """In another process, folder and without the augmentation's module; acting needs the environment's neither."""
    file = drq.export(lamp, tmp_path / "lamp.drq")
    assert "dimming" not in sys.modules
    done = command("eval", str(file), "--import", OWN_ENV, "--episodes", "2", "--json", "--stochastic", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    played = json.loads(done.stdout)
    assert [episode["agent_steps"] for episode in played["episodes"]] == [7, 7]
    assert played["return_mean"] == pytest.approx(np.mean([episode["return"] for episode in played["episodes"]]))


def test_a_folders_modules_are_not_imported(lamp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a stranger's: the user names what shall be imported."""
    monkeypatch.delitem(sys.modules, "own_env", raising=False)
    monkeypatch.delitem(gymnasium.registry, "Lamp-v0", raising=False)
    assert drq.load(lamp).agent_step == 60  # acting needs no environment
    with pytest.raises(drq.UserError, match="nothing is run that you do not name: if you trust it, add --import"):
        drq.evaluate(lamp, episodes=1)
    assert "own_env" not in sys.modules


def test_a_wrapper_that_a_folder_names_is_not_imported(lamp: Path, tmp_path: Path) -> None:
    plain = json.loads((lamp / "config.json").read_text())
    plain["config"]["env"]["wrap"] = ["not_ours:Wrapper"]
    shutil.copytree(lamp, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps(plain))
    with pytest.raises(drq.UserError, match=r"code of the module not_ours, .* add --import not_ours"):
        drq.evaluate(tmp_path / "run", episodes=1, imports=[OWN_ENV])


def test_actions_are_in_the_environments_own_range(lamp: Path, tmp_path: Path) -> None:
    policy = drq.load(lamp)
    assert (policy.spec.action_low, policy.spec.action_high) == ((-2.0,), (2.0,))
    with torch.no_grad():
        policy.agent.modules["actor"].mlp[-1].bias.fill_(9.0)  # tanh gives 1
    assert policy.act(frames(1, 30, 40, 3)[0]) == pytest.approx([2.0])
    old = json.loads((lamp / "config.json").read_text())
    for name in ("action_low", "action_high", "action_shape", "action_start", "sees"):
        del old["spec"][name]
    folder = RunFolder(tmp_path)
    folder.config_file.write_text(json.dumps(old))
    assert folder.spec.action_low == ()  # as of an earlier version: [-1, 1]


def test_frames_of_any_kind_and_size_are_seen_as_in_training(lamp: Path) -> None:
    policy = drq.load(lamp)
    image = frames(1, 30, 40, 3)[0]
    action = policy.act(image)
    for other in (image.transpose(2, 0, 1), image / 255, frame_of(image, (3, 24, 24))):
        policy.reset()
        assert np.allclose(policy.act(other), action)
    for wrong, said in (
        (image[..., :2], "1 or 3 channels"),
        (image[..., 0], "trained in colour"),
        (image.astype(int), "uint8"),
        (image * 1.0, r"within \[0, 1\]"),
    ):
        with pytest.raises(drq.UserError, match=said):
            policy.act(wrong)


@pytest.mark.parametrize("form", ["pt2", "onnx"])
def test_a_graph_in_bf16_acts_as_the_file_in_bf16(form: Literal["pt2", "onnx"], lamp: Path, tmp_path: Path) -> None:
    """Rounded weights, float32 arithmetic: what the export itself has checked, once more from the files."""
    if form == "onnx":
        pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime") if form == "onnx" else None
    half = drq.export(lamp, tmp_path / f"half.{form}", format=form, dtype="bf16")
    policy = drq.load(drq.export(lamp, tmp_path / "half.drq", dtype="bf16"))
    stack = frames(policy.spec.frame_stack, 24, 24, 3)
    expected = [policy.act(frame) for frame in stack][-1]
    if runtime is None:
        program = torch.export.load(half)
        kept = [value for value in program.state_dict.values() if value.is_floating_point()]
        assert {value.dtype for value in kept if value.numel() > 100} == {torch.bfloat16}
        action = program.module()(torch.from_numpy(stack[None])).numpy()[0]
    else:
        assert half.stat().st_size < drq.export(lamp, tmp_path / "whole.onnx", format="onnx").stat().st_size
        action = runtime.InferenceSession(str(half)).run(None, {"frames": stack[None]})[0][0]
    assert np.abs(action - expected).max() <= 4 * TOLERANCE  # of a range of 4


def test_several_environments_at_once_are_refused(lamp: Path) -> None:
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")])
    with pytest.raises(drq.UserError, match=r"takes one environment.*policy\.reset\(done\)"):
        drq.wrap(envs, drq.load(lamp))  # type: ignore[arg-type]
    envs.close()


@pytest.mark.parametrize("run", ["lamp", "catch"])
def test_a_batch_acts_as_each_alone(run: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(run)
    batch, alone = drq.load(path), [drq.load(path) for _ in range(3)]
    batch.reset(np.ones(3, bool))  # there is nothing to forget yet
    for step in range(4):
        if step == 2:
            batch.reset(np.array([False, True, False]))
            alone[1].reset()
        images = frames(3, 36, 36, 3)
        together = batch.act(images)
        single = [policy.act(image) for policy, image in zip(alone, images, strict=True)]
        assert np.allclose(together, single, atol=1e-5)
    with pytest.raises(drq.UserError, match=r"call reset\(\)"):
        batch.act(frames(2, 36, 36, 3))
    with pytest.raises(drq.UserError, match=r"reset\(\) has 2 places and act\(\) had 3 frames"):
        batch.reset(np.ones(2, bool))


def test_a_wrapped_environment_is_what_training_played(lamp: Path) -> None:
    """Action repeat, frames and resets: the same return as `drq.evaluate` of the same seed."""
    played = drq.evaluate(lamp, episodes=1, seed=3, imports=[OWN_ENV])
    policy = drq.load(lamp, imports=[OWN_ENV])
    env = drq.wrap(gymnasium.make("Lamp-v0"), policy)
    seed = seed_for(seed_for(3, Purpose.EVALUATION), Purpose.EVALUATION_EPISODE, 0)
    for _ in range(2):
        frame, _ = env.reset(seed=seed)
        total, steps, done = 0.0, 0, False
        while not done:
            frame, reward, terminated, truncated, _ = env.step(policy.act(frame))
            total, steps, done = total + float(reward), steps + 1, terminated or truncated
        assert (total, steps) == (pytest.approx(played.mean), 7)


@pytest.mark.parametrize(
    ("task", "channels", "frame"),
    [
        ("gym/x", 3, (24, 24, 3)),
        ("gym/x", 3, (100, 131, 3)),
        ("gym/x", 1, (61, 90, 3)),
        ("gym/x", 1, (20, 30, 1)),
        ("atari/x", 1, (210, 160, 3)),
    ],
)
def test_preprocessing_in_a_graph_is_that_of_training(task: str, channels: int, frame: tuple[int, ...]) -> None:
    spec = EnvSpec(task, (channels, 24, 24), 2, "continuous", 1, 1, None)
    agent = drq.SAC(spec, drq.SACConfig(hidden_dim=8, feature_dim=4), Backend())
    graph = ActingGraphModule(agent, spec, frame)
    images = frames(2, *frame)
    seen = np.concatenate([frame_of(image, spec.frame_shape, graph._resize) for image in images])
    found = graph._preprocess(torch.from_numpy(images)[None])[0].numpy()
    # Where the mean of areas lies halfway between two grey levels OpenCV's float32 decides.
    assert np.mean(found != seen) <= (0.002 if task == "atari/x" else 0)


@pytest.mark.parametrize(("run", "format", "frame"), [("lamp", "pt2", (30, 40)), ("catch", "onnx", None)])
def test_graphs_act_as_the_policy(
    run: str, format: Any, frame: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = request.getfixturevalue(run)
    file = drq.export(path, tmp_path / f"policy.{format}", format=format, frame=frame)
    policy = drq.load(path, device="cpu")
    shape = (30, 40, 3) if run == "lamp" else (36, 36, 3)
    stacks = frames(3, policy.spec.frame_stack, *shape)
    if format == "pt2":
        graph = torch.export.load(file).module()
        found = graph(torch.from_numpy(stacks)).numpy()
        acting = read_policy_file(drq.export(path, tmp_path / "policy.drq")).weights.values()
        assert sum(p.numel() for p in graph.parameters()) == sum(weight.numel() for weight in acting)
    else:
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(file)
        assert [put.shape[0] for put in (*session.get_inputs(), *session.get_outputs())] == ["batch", "batch"]
        (found,) = session.run(None, {"frames": stacks})
    for stack, action in zip(stacks, found, strict=True):
        policy.reset()
        ours = [policy.act(frame) for frame in stack][-1]
        assert np.abs(action - ours).max() <= 4 * TOLERANCE


@pytest.mark.parametrize(("low", "high", "dtype"), [(0, 200, "uint8"), (7, 7, "float16")])
def test_actions_are_of_the_environments_type(low: int, high: int, dtype: str, lamp: Path, tmp_path: Path) -> None:
    """Whole numbers are rounded; a component may have one value only."""
    run = Path(shutil.copytree(lamp, tmp_path / "run"))
    described = json.loads((run / "config.json").read_text())
    described["spec"] |= {"action_low": [low], "action_high": [high], "action_dtype": dtype}
    (run / "config.json").write_text(json.dumps(described))
    policy = drq.load(drq.export(run, tmp_path / "policy.drq"), device="cpu")
    graph = torch.export.load(drq.export(run, tmp_path / "policy.pt2")).module()
    stack = frames(1, policy.spec.frame_stack, 24, 24, 3)
    action = [policy.act(frame) for frame in stack[0]][-1]
    assert gymnasium.spaces.Box(low, high, (1,), np.dtype(dtype).type).contains(action)
    found = graph(torch.from_numpy(stack))[0]
    assert found.dtype == (torch.int64 if dtype == "uint8" else torch.float32)
    assert abs(float(found) - float(action[0])) <= (high > low)


def test_a_graphs_actions_are_within_bounds_to_the_last_bit() -> None:
    low, high = (float(np.float32(bound)) for bound in (0.1, 0.3))
    spec = EnvSpec("gym/x", (3,), 1, "continuous", 1, 1, None, action_low=(low,), action_high=(high,))
    agent = drq.SAC(spec, drq.SACConfig(hidden_dim=8, feature_dim=4), Backend())
    agent.act = lambda observations, noise: observations[:, :1]  # type: ignore[method-assign]
    found = ActingGraphModule(agent, spec, None)(torch.tensor([[-1.0] * 3, [1.0] * 3]))
    assert found.flatten().tolist() == [low, high]


def test_a_graph_that_acts_otherwise_is_not_kept(lamp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ActingGraphModule._preprocess
    monkeypatch.setattr(ActingGraphModule, "_preprocess", lambda self, x: original(self, x).flip(1))
    with pytest.raises(drq.UserError, match="acts otherwise than the policy"):
        drq.export(lamp, tmp_path / "policy.pt2", format="pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--out", "x.drq", "--frame", "480x640"), "takes frames of any size"),
        (("--out", "x.pt2", "--format", "pt2", "--frame", "480,640"), "write it as 480x640x3"),
        (("--out", "x.pt2", "--format", "pt2", "--frame", "9x9x9x9"), "does not fit a policy of 3 channels"),
        (("--out", "x.pt2", "--format", "pt2", "--frame", "9999999999x1x3"), "--frame 9999999999x1x3 is too large"),
        (("--out", "."), "is a folder"),
        (("--out", "x.pt"), "x.pt ends in none of .drq, .onnx, .pt2: name it so"),
    ],
)
def test_mistakes(
    args: tuple[str, ...], said: str, lamp: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert said in fails(capsys, "export", str(lamp), *args)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_what_its_name_says_and_open_to_all_who_may_read(catch: Path, tmp_path: Path) -> None:
    """safetensors makes files that only their owner can read."""
    (tmp_path / "plain").touch()
    for name in ("x.pt2", "x.drq"):
        drq.export(catch, tmp_path / name)
    assert {file.stat().st_mode for file in tmp_path.iterdir()} == {(tmp_path / "plain").stat().st_mode}
    assert {file.stat().st_mode for file in (catch / "checkpoint").iterdir()} == {(tmp_path / "plain").stat().st_mode}
    torch.export.load(tmp_path / "x.pt2")
    drq.load(tmp_path / "x.drq")


def test_a_file_that_is_no_policy(tmp_path: Path) -> None:
    (tmp_path / "x.drq").write_text("not a policy at all")
    with pytest.raises(drq.UserError, match="is no policy that `drq export` wrote"):
        drq.load(tmp_path / "x.drq")


def test_a_window_without_a_screen(lamp: Path) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    with pytest.raises(drq.UserError, match="There is no screen"):
        drq.evaluate(lamp, render="human", imports=[OWN_ENV])
