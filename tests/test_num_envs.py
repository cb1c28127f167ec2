"""Several environments side by side: `--num-envs`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import drq
from drq.config import EnvConfig, ReplayConfig, SACConfig, TrainConfig
from drq.env_check import CheckArguments, check_environment
from drq.envs import make
from drq.envs.remote import RemoteEnvironment
from drq.errors import ProcessEnded, UserError
from drq.replay import Choice, Replay
from drq.training.components import describe
from drq.training.run import Trainer
from drq.training.schedule import Schedule
from drq.training.seeds import Purpose, seed_for
from runs import OWN_ENV, StopAt, assert_same_run, rows, small


def lamps(folder: Path, count: int = 3, **changes: Any) -> TrainConfig:
    """Episodes of 14 agent steps; the counts are no multiples of 3."""
    config = small(folder, "gym/Lamp-v0", imports=(OWN_ENV,), num_envs=count, replay=ReplayConfig(200))
    return replace(config, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = Trainer(lamps(tmp_path_factory.mktemp("runs") / "whole"), quiet=True)
    trainer.run()
    return trainer


def test_agent_steps_are_counted_over_all(whole: Trainer) -> None:
    described = json.loads((whole.folder.checkpoint / "latest.json").read_text())
    assert (described["agent_step"], described["updates"]) == (120, 99)  # random until 21, the first multiple of 3
    assert [row["agent_step"] for row in rows(whole.folder.eval_csv)] == ["42", "81", "120"]
    assert described["progress"]["episode"] == 6
    assert [number for number, _ in described["progress"]["under_way"]] == [6, 7, 8]
    assert [stream["transitions_added"] for stream in described["replay"]] == [40, 40, 40]


def test_every_episode_is_whole_and_of_its_own_seed(whole: Trainer) -> None:
    """What the replay holds is what an environment alone gives for the seeds and actions."""
    replay, numbers = whole.loop.learner.replay, {0: [0, 3, 6], 1: [1, 4, 7], 2: [2, 5, 8]}
    env = make("gym/Lamp-v0", EnvConfig(image_size=24), 1)
    for stream, episodes in numbers.items():
        for place, number in enumerate(episodes):
            frame = env.reset(seed_for(1, Purpose.EPISODE, number))
            for agent_step in range(14 * place, min(14 * place + 14, 40)):
                obs, action, reward, next_obs = transition(replay, stream, agent_step)
                np.testing.assert_array_equal(obs[-3:], frame)
                step = env.step(action)
                np.testing.assert_array_equal(next_obs[-3:], step.frame)
                assert reward == np.float32(step.reward)
                frame = step.frame
            assert step.done == (place < 2)
    env.close()


def transition(replay: Replay, stream: int, number: int) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
    slot = stream * replay.stream_capacity + number
    batch = replay.gather(Choice(torch.tensor([slot])))
    obs, next_obs = (part.tensor().numpy()[0] for part in (batch.obs, batch.next_obs))  # type: ignore[union-attr]
    return obs, batch.action.numpy()[0], float(batch.reward), next_obs


def test_it_resumes_exactly(whole: Trainer, tmp_path: Path) -> None:
    assert not drq.train(lamps(tmp_path / "run"), callbacks=[StopAt(72)], quiet=True).finished
    assert drq.load(tmp_path / "run").agent_step == 72
    drq.train(lamps(tmp_path / "run"), quiet=True)
    assert_same_run(whole.folder.path, tmp_path / "run")


def test_an_environment_in_another_process_is_the_same() -> None:
    here, there = make("gym/Lamp-v0", EnvConfig(image_size=24), 2), remote()
    assert there.spec == here.spec
    for seed in (1, 2):
        np.testing.assert_array_equal(there.reset(seed), here.reset(seed))
        for _ in range(7):
            one, other = (env.step(np.ones(1, np.float32)) for env in (here, there))
            np.testing.assert_array_equal(one.frame, other.frame)
            assert one[1:] == other[1:]
    here.close()
    there.close()
    assert there._served.process.returncode == 0


def remote(task: str = "gym/Lamp-v0") -> RemoteEnvironment:
    return RemoteEnvironment(task, EnvConfig(image_size=24), 2, [OWN_ENV])


def test_what_fails_there_is_told_here_in_one_sentence() -> None:
    there = remote()
    there.reset(1)
    with pytest.raises(UserError, match=r"gym/Lamp-v0 takes actions of shape \(1,\), not \(2,\)") as raised:
        there.step(np.ones(2, np.float32))
    assert "Traceback" in str(raised.value.__cause__)
    there._served.process.kill()
    there._served.process.wait()
    with pytest.raises(ProcessEnded, match=r"A process of gym/Lamp-v0 has ended"):
        there.reset(1)
    there.close()
    unknown = remote("gym/Nothing-v0")
    with pytest.raises(UserError, match="There is no task 'gym/Nothing-v0'"):
        _ = unknown.spec
    with pytest.raises(UserError, match=r"A process of gym/Nothing-v0 has ended"):  # nobody is waited for
        unknown.reset(1)
    unknown.close()


@pytest.mark.parametrize("count", [1, 2])
def test_what_lives_once_in_a_process_trains_in_processes_of_their_own(count: int, tmp_path: Path) -> None:
    """Its evaluations too, of two episodes at once. The run is the same as in threads."""
    config = lamps(tmp_path / "run", count, task="gym/Alone-v0")
    with pytest.raises(UserError, match="RuntimeError: there is one already"):
        drq.train(config, quiet=True)
    apart = replace(config, env=replace(config.env, own_process=True))
    drq.train(apart, quiet=True)
    drq.train(lamps(tmp_path / "in threads", count), quiet=True)
    assert_same_run(tmp_path / "in threads", tmp_path / "run")
    assert len(drq.evaluate(tmp_path / "run", episodes=3, imports=[OWN_ENV]).episodes) == 3
    assert describe(apart)[0].task == "gym/Alone-v0"


def test_a_check_leaves_it_alone(tmp_path: Path) -> None:
    options = CheckArguments("gym/Alone-v0", (OWN_ENV,), steps=20, picture=tmp_path / "seen.png")
    assert "RuntimeError: there is one already" in check_environment(options)[0]
    assert check_environment(replace(options, env=EnvConfig(own_process=True))) == []


@pytest.mark.parametrize(
    ("task", "changes", "said"),
    [
        ("toy/reach", {}, "--num-envs is for gym tasks, whose steps may be slow: leave it out for toy/reach"),
        ("gym/Lamp-v0", {"num_envs": 0}, "--num-envs is 0: set it to 1 or more"),
        ("gym/Lamp-v0", {"agent": SACConfig(n_step=5, seed_steps=9)}, "--agent.seed-steps is 9: set it to 10 or more"),
        ("gym/Lamp-v0", {"replay": ReplayConfig(3)}, "--replay.capacity is 3: set it to 4 or more"),
        ("gym/Lamp-v0", {"agent": SACConfig(n_step=5), "replay": ReplayConfig(9)}, "capacity is 9: set it to 10 "),
    ],
)
def test_what_does_not_suit_is_refused(task: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        drq.train(small(tmp_path / "run", task, imports=(OWN_ENV,), **{"num_envs": 2, **changes}), quiet=True)
    assert not (tmp_path / "run").exists()


def test_counts_are_multiples() -> None:
    schedule = Schedule(small(Path(), "gym/Lamp-v0", num_envs=8, steps=100))
    assert schedule.agent_steps == 96
    steps = range(0, 97, 8)
    assert [step for step in steps if schedule.evaluation_due(step)] == [40, 80, 96]
    assert [schedule.updates(step) for step in steps][:5] == [0, 0, 0, 8, 8]
    assert schedule.total_updates == 96 - 24
