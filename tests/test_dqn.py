"""DQN against an independent transcription of its equations, and on tasks it must learn or resume exactly."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drq.agents import make_agent
from drq.agents.dqn import DQN
from drq.backend import Backend
from drq.config import DQNConfig, EngineConfig, EvalConfig, TrainConfig
from drq.engine import EngineSettings, FastBackend
from drq.envs.protocol import EnvSpec
from drq.presets import preset
from drq.replay import Batch
from drq.training.run import train
from runs import assert_same_run, rows

SIZE, ACTIONS, N = 36, 5, 6
SPEC = EnvSpec("atari/tiny", (1, SIZE, SIZE), 2, "discrete", ACTIONS, 4, None)


def make(seed: int = 0, backend: Backend | None = None, **settings: Any) -> DQN:
    agent = make_agent(SPEC, DQNConfig(batch_size=N, hidden_dim=24, **settings), backend or Backend(), seed)
    assert isinstance(agent, DQN)
    return agent


def random_batch(seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)

    def images() -> Tensor:
        return torch.randint(0, 256, (N, 2, SIZE, SIZE), generator=g, dtype=torch.uint8)

    discount = torch.tensor([0.99**10, 0.0, 0.99**10, 0.99**3, 0.99, 0.0])
    action = torch.randint(ACTIONS, (N,), generator=g)
    return Batch(images(), action, 3 * torch.randn(N, generator=g), discount, images())


def values(agent: DQN, obs: Tensor) -> Tensor:
    found: Tensor = agent.online(agent.online.encoder(obs))
    return found


# An independent transcription: one image at a time, one view at a time, Adam and the clipping by hand.


def oracle_augment(image: Tensor, nu: Tensor) -> Tensor:
    """Pad by 4, crop at the offset, multiply: on [0, 1]."""
    dy, dx, r = (float(number) for number in nu)
    padded = F.pad(image[None].double() / 255, (4, 4, 4, 4), mode="replicate")[0]
    top, left = 4 + int(dy), 4 + int(dx)
    return padded[:, top : top + SIZE, left : left + SIZE] * (1 + 0.05 * r)


def oracle_q(w: dict[str, Tensor], image: Tensor, *, dueling: bool, shared: bool) -> Tensor:
    x = image[None]
    for layer, stride in ((0, 4), (2, 2), (4, 1)):
        weight, bias = w[f"encoder.layers.{layer}.weight"], w[f"encoder.layers.{layer}.bias"]
        x = F.conv2d(x, weight, bias, stride).clamp(min=0)
    x = x.flatten()

    def hidden(stream: int) -> Tensor:
        return (w[f"hidden.{stream}.weight"] @ x + w[f"hidden.{stream}.bias"]).clamp(min=0)

    advantage = w["advantage.weight"] @ hidden(0) + w["advantage.bias"]
    if not dueling:
        return advantage
    value = w["value.weight"] @ hidden(0 if shared else 1) + w["value.bias"]
    return value + advantage - advantage.sum() / len(advantage)


class Oracle:
    """Weights and optimiser state as plain dictionaries, in float64."""

    def __init__(self, agent: DQN) -> None:
        self.c = agent.config
        self.online = {name: p.detach().double().clone() for name, p in agent.online.state_dict().items()}
        self.target = {name: p.detach().double().clone() for name, p in agent.target.state_dict().items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.online.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.online.items()}
        self.updates = 0

    def q(self, w: dict[str, Tensor], image: Tensor) -> Tensor:
        return oracle_q(w, image, dueling=self.c.dueling, shared=self.c.shared_hidden)

    def update(self, batch: Batch, nu: Tensor, nu_next: Tensor) -> tuple[dict[str, float], list[float]]:
        """Gives metrics, and each transition's error, averaged over views."""
        c = self.c
        assert isinstance(batch.obs, Tensor)
        assert isinstance(batch.next_obs, Tensor)
        w = {name: p.requires_grad_(True) for name, p in self.online.items()}
        losses, targets, predicted = [], [], []
        errors = [0.0] * N
        for i in range(N):
            bootstrap = 0.0
            for k in range(c.k):
                view = oracle_augment(batch.next_obs[i], nu_next[k * N + i])
                chooser = self.online if c.double else self.target
                best = int(self.q(chooser, view).argmax())
                bootstrap += float(self.q(self.target, view)[best].detach()) / c.k
            y = float(batch.reward[i]) + float(batch.discount[i]) * bootstrap
            targets.append(y)
            for m in range(c.m):
                q = self.q(w, oracle_augment(batch.obs[i], nu[m * N + i]))[int(batch.action[i])]
                error = (q - y).abs()
                if c.loss == "squared":
                    error = error**2
                else:
                    error = 0.5 * error**2 if float(error.detach()) < 1 else error - 0.5
                errors[i] += float(error.detach()) / c.m
                losses.append(error if batch.weights is None else error * batch.weights[i].double())
                predicted.append(float(q.detach()))
        loss = sum(losses[1:], losses[0]) / len(losses)
        gradients = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        self.updates += 1
        for name in w:
            g = gradients[name] * min(1.0, c.max_grad_norm / norm)
            if c.freeze_encoder and name.startswith("encoder"):
                continue
            self.first[name] = c.adam_beta1 * self.first[name] + (1 - c.adam_beta1) * g
            self.second[name] = c.adam_beta2 * self.second[name] + (1 - c.adam_beta2) * g**2
            mean = self.first[name] / (1 - c.adam_beta1**self.updates)
            spread = (self.second[name] / (1 - c.adam_beta2**self.updates)).sqrt()
            moved = w[name].detach() - c.learning_rate * mean / (spread + c.adam_eps)
            self.online[name] = moved
        if self.updates % c.target_every == 0:
            self.target = {name: p.detach().clone() for name, p in self.online.items()}
        metrics = {
            "loss": float(loss.detach()),
            "q": sum(predicted) / len(predicted),
            "target_q": sum(targets) / N,
            "grad_norm": norm,
        }
        return metrics, errors


CASES: list[dict[str, Any]] = [
    {},
    {"k": 2, "m": 3},
    {"loss": "squared", "k": 2, "m": 3},
    {"target_every": 2},
    {"target_every": 2, "double": False, "k": 2, "m": 3},
    {"max_grad_norm": 0.01, "learning_rate": 1e-3, "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_eps": 1e-2},
    {"dueling": False, "target_every": 3},
    {"shared_hidden": True},
]


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_updates_follow_the_equations(settings: dict[str, Any], weighted: bool) -> None:
    agent = make(**settings)
    if agent.copies_target:  # a target network that disagrees, as it would later in training
        agent.target.load_state_dict(make(seed=1, **settings).online.state_dict())
    oracle = Oracle(agent)
    g = torch.Generator().manual_seed(5)
    for update in range(4):
        batch, draws = random_batch(update), agent.draw(g)
        if weighted:
            batch = batch._replace(weights=torch.rand(N, generator=g))
        metrics, errors = agent.update(batch, draws, agent.phase(update))
        expected, expected_errors = oracle.update(batch, draws.nu, draws.nu_next)
        assert errors is not None
        assert errors.tolist() == pytest.approx(expected_errors, rel=1e-4, abs=1e-6)
        for name, value in expected.items():
            assert float(metrics[name]) == pytest.approx(value, rel=1e-4, abs=1e-6), name
        for name, weight in agent.online.state_dict().items():
            torch.testing.assert_close(weight.double(), oracle.online[name], rtol=1e-4, atol=2e-6)
        for name, weight in agent.target.state_dict().items():
            torch.testing.assert_close(weight.double(), oracle.target[name].detach(), rtol=1e-4, atol=2e-6)


def test_views_of_state_and_next_state_are_drawn_independently() -> None:
    draws = make(k=3, m=3).draw(torch.Generator().manual_seed(0))
    assert draws.nu.shape == draws.nu_next.shape == (3 * N, 3)
    assert not torch.equal(draws.nu, draws.nu_next)
    assert len({tuple(row) for row in draws.nu.tolist()}) == 3 * N


def test_gradients_are_scaled_down_to_the_norm_and_never_up() -> None:
    for limit in (0.01, 1e6):
        agent = make(max_grad_norm=limit)
        before = float(agent.update(random_batch(0), agent.draw(torch.Generator()), False).metrics["grad_norm"])
        after = torch.stack([p.grad.square().sum() for p in agent.trained if p.grad is not None]).sum().sqrt()
        assert float(after) == pytest.approx(min(before, limit), rel=1e-3)
        assert before > 0.01


def test_a_frozen_encoder_stays_as_it_was() -> None:
    agent = make(freeze_encoder=True)
    before = {name: p.clone() for name, p in agent.online.state_dict().items()}
    agent.update(random_batch(0), agent.draw(torch.Generator()), False)
    changed = {name for name, p in agent.online.state_dict().items() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if not name.startswith("encoder")}


def test_the_dueling_head_centres_advantages() -> None:
    agent = make()
    assert agent.online.value is not None
    with torch.no_grad():  # with no features left, the biases alone speak
        agent.online.advantage.weight.zero_()
        agent.online.value.weight.zero_()
        agent.online.advantage.bias.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]))
        agent.online.value.bias.fill_(7.0)
    q = values(agent, torch.zeros(1, 2, SIZE, SIZE, dtype=torch.uint8))
    assert q.tolist() == [[4.0, 5.0, 6.0, 7.0, 13.0]]


def test_hidden_units_of_each_kind_of_head() -> None:
    sizes = {
        name: [layer.out_features for layer in make(**settings).online.hidden]
        for name, settings in {"own": {}, "shared": {"shared_hidden": True}, "plain": {"dueling": False}}.items()
    }
    assert sizes == {"own": [24, 24], "shared": [24], "plain": [24]}


def test_values_are_float32_in_every_precision() -> None:
    settings = EngineSettings.resolve(EngineConfig(precision="bf16"), torch.device("cpu"), DQNConfig())
    agent, exact = make(backend=FastBackend(settings)), make()
    obs = random_batch(0).obs
    assert isinstance(obs, Tensor)
    q = values(agent, obs)
    loss, errors, metrics = agent.loss(random_batch(0), agent.draw(torch.Generator()))
    assert q.dtype == loss.dtype == errors.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in metrics.values())
    # Not bfloat16 values in float32 clothes: the last layer keeps what bfloat16 would round away.
    for found in (q, errors):
        assert float((found != found.bfloat16().float()).double().mean()) > 0.9
    assert not torch.equal(q, values(exact, obs))  # it did compute in another precision
    torch.testing.assert_close(q, values(exact, obs), rtol=0.05, atol=0.02)


def test_the_target_network_is_copied_every_so_many_updates() -> None:
    agent = make(target_every=3)
    g = torch.Generator().manual_seed(0)
    equal = []
    for update in range(7):
        agent.update(random_batch(update), agent.draw(g), agent.phase(update))
        pairs = zip(agent.target.parameters(), agent.online.parameters(), strict=True)
        equal.append(all(torch.equal(a, b) for a, b in pairs))
    assert equal == [False, False, True, False, False, True, False]
    assert "target" in agent.modules
    assert "target" not in make().modules  # at period 1 it would be saved twice


def test_epsilon_falls_linearly_once_learning_begins() -> None:
    agent = make()
    wanted = {0: 1.0, 1599: 1.0, 1600: 1.0, 2850: 0.775, 4100: 0.55, 6599: 0.10018, 6600: 0.1, 100_000: 0.1}
    assert {at: agent.epsilon(at) for at in wanted} == pytest.approx(wanted)
    at_once = make(epsilon_decay_steps=0, seed_steps=10, epsilon_final=0.01)
    assert [at_once.epsilon(at) for at in (9, 10, 11)] == [1.0, 0.01, 0.01]


def test_actions_are_random_as_often_as_epsilon_says() -> None:
    agent = make(epsilon_eval=0.25)
    obs = random_batch(0).obs[:1].expand(20_000, -1, -1, -1)  # type: ignore[union-attr]
    few = obs[:1]
    greedy = int(values(agent, few).argmax())
    g = torch.Generator().manual_seed(0)

    def shares(noise: Tensor) -> list[float]:
        best = torch.full((len(noise),), greedy)
        agent._values = lambda *_: F.one_hot(best, ACTIONS).float()  # type: ignore[method-assign]
        actions = agent.act(obs, noise)
        return (torch.bincount(actions, minlength=ACTIONS) / len(noise)).tolist()

    for noise, epsilon in (
        (agent.evaluation(20_000, g), 0.25),
        (agent.exploration(20_000, 0, g), 1.0),
        (agent.exploration(20_000, 4100, g), 0.55),
        (agent.exploration(20_000, 10**6, g), 0.1),
    ):
        expected = [epsilon / ACTIONS + (1 - epsilon) * (action == greedy) for action in range(ACTIONS)]
        assert shares(noise) == pytest.approx(expected, abs=0.015)


def test_the_greedy_action_has_the_highest_value() -> None:
    agent = make(epsilon_eval=0.0)
    obs = random_batch(3).obs
    assert isinstance(obs, Tensor)
    actions = agent.act(obs, agent.evaluation(N, torch.Generator()))
    assert torch.equal(actions, values(agent, obs).argmax(1))


# Whole runs.


def pong(folder: Path) -> TrainConfig:
    """The preset, made small: episodes of 50 agent steps, evaluations of two."""
    paper = preset("atari100k", "atari/pong")
    assert isinstance(paper.agent, DQNConfig)
    return replace(
        paper,
        dir=str(folder),
        steps=160,
        agent=replace(paper.agent, seed_steps=40, batch_size=4, hidden_dim=16, epsilon_decay_steps=50),
        env=replace(paper.env, max_episode_steps=200),
        eval=EvalConfig(every=80, min_agent_steps=70, video=False),
        checkpoint_every=45,
        log_every=20,
        device="cpu",
        engine=EngineConfig(eval_process="off"),
    )


KILLED = """
import os, signal
from pathlib import Path

import torch

from drq.envs.atari import AtariEnvironment
from drq.training.run import Trainer
from test_dqn import pong

torch.set_num_threads({threads})
trainer = Trainer(pong(Path({folder!r})), quiet=True)
step = AtariEnvironment.step
def step_and_die(self, action):
    if trainer.loop.state.agent_step == 130:  # the newest checkpoint is of 90, in the middle of an episode
        trainer.checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, action)
AtariEnvironment.step = step_and_die
trainer.run()
"""


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(pong(whole), quiet=True)
    code = KILLED.format(folder=str(killed), threads=torch.get_num_threads())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    died = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not (killed / "finished.json").exists()
    train(pong(killed), quiet=True)
    assert len(rows(whole / "eval.csv")) == 2
    assert_same_run(whole, killed)
