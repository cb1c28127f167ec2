"""SAC + DrQ against an independent transcription of the paper's equations, and what each of its losses may touch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from drq.agents import make_agent
from drq.agents.sac import SAC, Draws
from drq.backend import Backend, StackedFrames
from drq.config import EngineConfig, SACConfig
from drq.engine import EngineSettings, FastBackend, Learner
from drq.envs.protocol import EnvSpec
from drq.errors import UserError
from drq.replay import Batch, Replay
from drq.training.checkpoint import Checkpoints
from drq.training.state import RunState, UnderWay
from sac_paper import Paper

CPU = torch.device("cpu")
N, ACTIONS = 5, 3
PIXELS = EnvSpec("toy/tiny", (3, 23, 26), 2, "continuous", ACTIONS, 1, 100)
STATE = EnvSpec("toy/tiny", (7,), 1, "continuous", ACTIONS, 1, 100)


def make(spec: EnvSpec = PIXELS, seed: int = 0, backend: Backend | None = None, **settings: Any) -> SAC:
    config = replace(SACConfig(batch_size=N, hidden_dim=16, feature_dim=10), **settings)
    agent = make_agent(spec, config, backend or Backend(), seed)
    assert isinstance(agent, SAC)
    return agent


def random_batch(seed: int, spec: EnvSpec = PIXELS, dtype: torch.dtype = torch.float32) -> Batch:
    g = Generator().manual_seed(seed)

    def observations() -> Tensor:
        if spec.pixels:
            return torch.randint(0, 256, (N, *spec.observation_shape), generator=g, dtype=torch.uint8)
        return torch.randn(N, *spec.observation_shape, generator=g).to(dtype)

    return Batch(
        obs=observations(),
        action=(2 * torch.rand(N, ACTIONS, generator=g) - 1).to(dtype),
        reward=torch.randn(N, generator=g).to(dtype),
        discount=torch.tensor([0.99, 0.99, 0.0, 0.99, 0.0]).to(dtype),  # two ended in a terminal state
        next_obs=observations(),
    )


def train(agent: SAC, updates: int, seed: int = 0, spec: EnvSpec = PIXELS) -> None:
    g = Generator().manual_seed(seed)
    for update in range(updates):
        agent.update(random_batch(100 * seed + update, spec), agent.draw(g), agent.phase(update))


def weights_of(agent: SAC) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in agent.modules.state_dict().items()}


# The equations.


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (PIXELS, {"k": 2, "m": 2}),
        (PIXELS, {"k": 1, "m": 3}),
        (PIXELS, {"k": 1, "m": 1, "freeze_encoder": True}),
        (PIXELS, {"k": 3, "m": 1, "actor_every": 1, "target_every": 3, "tau": 0.3, "init_temperature": 0.7}),
        (STATE, {"k": 1, "m": 1}),
    ],
    ids=["K=M=2", "K=1,M=3", "RAD, frozen", "other settings", "state"],
)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_updates_are_the_papers_equations(spec: EnvSpec, settings: dict[str, Any], weighted: bool) -> None:
    """Every weight after four updates, and every transition's error, to ten digits: with the agent's own arithmetic in
    float64."""
    agent = make(spec, **settings)
    agent.modules.double()
    paper = Paper(weights_of(agent), agent.config)
    g = Generator().manual_seed(1)
    for number in range(4):
        batch, drawn = random_batch(number, spec, torch.float64), agent.draw(g)
        draws = Draws(drawn.transformations, drawn.target_noise.double(), drawn.actor_noise.double())
        if weighted:
            batch = batch._replace(weights=torch.rand(N, generator=g, dtype=torch.float64))
        result = agent.update(batch, draws, agent.phase(number))
        expected_errors, metrics = paper.update(batch, draws, number)
        assert {name: float(value) for name, value in result.metrics.items()} == pytest.approx(metrics, rel=1e-9)
        assert result.errors is not None
        assert result.errors.tolist() == pytest.approx(expected_errors, rel=1e-9)
        got = weights_of(agent)
        assert set(got) == set(paper.w)
        for name, expected in paper.w.items():
            torch.testing.assert_close(got[name], expected.detach(), rtol=1e-10, atol=1e-10, msg=f"{name}, {number}")


def test_float32_is_the_same_but_for_rounding() -> None:
    agent = make()
    paper = Paper({name: value.double() for name, value in weights_of(agent).items()}, agent.config)
    draws, batch = agent.draw(Generator().manual_seed(1)), random_batch(0)
    gradients = record_gradients(agent)
    agent.update(batch, draws, agent.phase(0))
    paper.update(batch, draws, 0)
    for step in ("critic", "actor", "temperature"):
        for name, gradient in gradients[step].items():
            expected = paper.w[name].grad
            assert expected is not None
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-3, atol=1e-5, msg=name)


# What gradients reach.


def record_gradients(agent: SAC) -> dict[str, dict[str, Tensor]]:
    """The gradients that each optimiser's loss gave, filled in as the agent updates."""
    recorded: dict[str, dict[str, Tensor]] = {}
    named = dict(agent.modules.named_parameters())

    def hook_for(step: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            recorded[step] = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
            for parameter in agent.modules.parameters():
                if all(parameter is not own for own in optimizer.param_groups[0]["params"]):
                    parameter.grad = None

        optimizer = agent.optimizers[step]
        return hook

    for step, optimizer in agent.optimizers.items():
        optimizer.register_step_pre_hook(hook_for(step))
        optimizer.register_step_post_hook(lambda *_: agent.modules.zero_grad(set_to_none=True))
    return recorded


CRITIC_PARTS = {"critic.encoder", "critic.trunk", "critic.q1", "critic.q2"}


@pytest.mark.parametrize("encoder", ["sac-ae", "impala"])
def test_each_loss_trains_what_it_should_and_nothing_else(encoder: str) -> None:
    agent = make(encoder=encoder)
    gradients = record_gradients(agent)
    agent.update(random_batch(0), agent.draw(Generator().manual_seed(1)), agent.phase(0))
    parts = {step: {".".join(name.split(".")[:2]) for name in got} for step, got in gradients.items()}
    assert parts == {
        "critic": CRITIC_PARTS,
        "actor": {"actor.trunk", "actor.mlp"},
        "temperature": {"temperature.log_alpha"},
    }
    for step, network in (("critic", agent.critic), ("actor", agent.actor), ("temperature", agent.temperature)):
        assert len(gradients[step]) == len(list(network.parameters()))
        assert all(gradient.any() for gradient in gradients[step].values())


def test_optimizers_hold_what_their_losses_train() -> None:
    agent = make()
    named = {id(parameter): name for name, parameter in agent.modules.named_parameters()}
    held = {
        step: {named[id(parameter)].split(".")[0] for parameter in optimizer.param_groups[0]["params"]}
        for step, optimizer in agent.optimizers.items()
    }
    assert held == {"critic": {"critic"}, "actor": {"actor"}, "temperature": {"temperature"}}
    for optimizer in agent.optimizers.values():
        (group,) = optimizer.param_groups
        assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.9, 0.999), 1e-8)


def test_a_frozen_encoder_gets_no_gradient_and_stays() -> None:
    agent = make(freeze_encoder=True)
    before = weights_of(agent)
    gradients = record_gradients(agent)
    train(agent, 4)
    assert not any(name.startswith("critic.encoder") for name in gradients["critic"])
    after = weights_of(agent)
    for name in before:
        frozen = ".encoder." in name
        assert torch.equal(before[name], after[name]) == frozen, name


def test_acting_leaves_no_trace() -> None:
    agent = make()
    before = weights_of(agent)
    obs = random_batch(0).obs
    assert isinstance(obs, Tensor)
    action = agent.act(obs, agent.exploration(N, 0, Generator().manual_seed(0)))
    assert not action.requires_grad
    assert action.shape == (N, ACTIONS)
    assert (action.abs() <= 1).all()
    assert all(torch.equal(before[name], value) for name, value in weights_of(agent).items())


# What is shared.


def test_actor_and_critic_share_the_convolutions_and_nothing_else() -> None:
    agent = make()
    train(agent, 2)  # or all biases are zero
    obs, noise = random_batch(0).obs, torch.zeros(N, ACTIONS)
    assert isinstance(obs, Tensor)
    before = agent.act(obs, noise)

    def acts_differently_after_changing(parameter: Tensor) -> bool:
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.5).add_(0.1)
        changed = not torch.equal(agent.act(obs, noise), before)
        with torch.no_grad():
            parameter.copy_(kept)
        return changed

    read_by_actor = {
        name for name, parameter in agent.modules.named_parameters() if acts_differently_after_changing(parameter)
    }
    # Of the last layer the second half makes deviations, which a sample without noise does not show.
    own = {name for name, _ in agent.modules.named_parameters() if name.startswith("actor.")}
    convolutions = {name for name, _ in agent.modules.named_parameters() if name.startswith("critic.encoder.")}
    assert len(convolutions) == 8
    assert read_by_actor == own | convolutions
    # One set of convolutions beside the target's: none hides in the actor.
    addresses = [parameter.data_ptr() for parameter in agent.modules.parameters()]
    assert len(addresses) == len(set(addresses))
    assert sum(parameter.dim() == 4 for parameter in agent.modules.parameters()) == 4 + 4


def filled_learner(seed: int, **settings: Any) -> Learner:
    backend = FastBackend(EngineSettings.resolve(EngineConfig(), CPU, SACConfig()))
    replay = Replay(PIXELS, 60, backend=backend)
    chance = np.random.default_rng(0)
    for agent_step in range(80):
        if agent_step % 25 == 0:
            replay.begin(chance.integers(0, 256, PIXELS.frame_shape, dtype=np.uint8))
        replay.add(
            chance.uniform(-1, 1, ACTIONS).astype(np.float32),
            float(chance.normal()),
            1.0,
            agent_step % 25 == 24,
            chance.integers(0, 256, PIXELS.frame_shape, dtype=np.uint8),
        )
    return Learner(make(seed=seed, backend=backend, **settings), replay, backend, seed)


@pytest.mark.parametrize("freeze", [False, True])
def test_tying_survives_save_and_load(tmp_path: Path, freeze: bool) -> None:
    learner = filled_learner(0, freeze_encoder=freeze)
    for _ in range(3):
        learner.update()
    checkpoints = Checkpoints(tmp_path / "checkpoint")
    actions = torch.rand(5, ACTIONS, generator=Generator().manual_seed(0)).numpy()
    run = RunState(agent_step=80, episode=3, under_way=[UnderWay(3, 0.5, list(actions))], last_return=1.5, seconds=2.25)
    checkpoints.save(learner, run)
    checkpoints.close()

    other = filled_learner(1, freeze_encoder=freeze)
    again = Checkpoints(tmp_path / "checkpoint")
    restored = again.restore(other)
    again.close()
    assert restored is not None
    (episode,) = restored.under_way
    assert np.array_equal(episode.actions, actions)
    assert replace(episode, actions=[]) == UnderWay(3, 0.5)
    assert replace(restored, under_way=[]) == replace(run, under_way=[])
    one, two = learner.agent, other.agent
    assert isinstance(one, SAC)
    assert isinstance(two, SAC)
    obs, noise = random_batch(0).obs, torch.zeros(N, ACTIONS)
    assert isinstance(obs, Tensor)
    assert torch.equal(one.act(obs, noise), two.act(obs, noise))
    # The loaded actor still reads the loaded critic's convolutions, and Adam still trains those.
    for _ in range(3):
        learner.update()
        other.update()
    first, second = weights_of(one), weights_of(two)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(one.act(obs, noise), two.act(obs, noise))
    before = two.act(obs, noise)
    with torch.no_grad():
        two.critic.encoder.layers[0].weight.mul_(2.0)  # type: ignore[union-attr, operator]
    assert not torch.equal(two.act(obs, noise), before)


def test_tying_survives_a_state_dict() -> None:
    one, two = make(seed=0), make(seed=1)
    train(one, 3)
    two.modules.load_state_dict(one.modules.state_dict())
    obs, noise = random_batch(0).obs, torch.ones(N, ACTIONS)
    assert isinstance(obs, Tensor)
    assert torch.equal(one.act(obs, noise), two.act(obs, noise))
    train(two, 2, seed=5)
    assert not torch.equal(one.act(obs, noise), two.act(obs, noise))  # copied, not shared between the agents


# What happens when.


def test_the_every_nth_rules_count_updates() -> None:
    agent = make(actor_every=3, target_every=2)
    changes = []
    g = Generator().manual_seed(0)
    for number in range(7):
        before = weights_of(agent)
        agent.update(random_batch(number), agent.draw(g), agent.phase(number))
        after = weights_of(agent)
        changes.append({name.split(".")[0] for name in before if not torch.equal(before[name], after[name])})
    with_actor, with_target = {"actor", "temperature"}, {"target"}
    assert changes == [
        {"critic"} | (with_actor if number % 3 == 0 else set()) | (with_target if number % 2 == 0 else set())
        for number in range(7)
    ]


def test_the_target_begins_as_a_copy_and_is_never_trained() -> None:
    agent = make()
    for online, averaged in zip(agent.critic.parameters(), agent.target.parameters(), strict=True):
        assert torch.equal(online, averaged)
        assert online.data_ptr() != averaged.data_ptr()
        assert not averaged.requires_grad


@pytest.mark.parametrize(("target_entropy", "rises"), [(None, False), (-30.0, False), (30.0, True)])
def test_the_temperature_steers_towards_the_target_entropy(target_entropy: float | None, rises: bool) -> None:
    """A fresh policy on three actions has more than -3 nats."""
    agent = make(target_entropy=target_entropy)
    assert agent.target_entropy == (-3.0 if target_entropy is None else target_entropy)
    assert float(agent.temperature().detach()) == pytest.approx(0.1)
    with torch.no_grad():
        agent.actor.mlp[4].bias[ACTIONS:] = 1.0  # a wide one
    metrics, _ = agent.update(random_batch(0), agent.draw(Generator().manual_seed(0)), agent.phase(0))
    assert -3.0 < float(metrics["entropy"]) < 30.0
    # Adam's first step is the learning rate, whatever the gradient.
    moved = math.log(float(metrics["alpha"])) - math.log(0.1)
    assert moved == pytest.approx(1e-3 if rises else -1e-3, rel=1e-2)


# Inputs.


def test_references_into_the_ring_of_frames_are_as_good_as_images() -> None:
    g = Generator().manual_seed(0)
    frames = torch.randint(0, 256, (40, *PIXELS.frame_shape), generator=g, dtype=torch.uint8)
    slots = torch.randint(0, 40, (2, N, PIXELS.frame_stack), generator=g)
    by_reference = random_batch(0)._replace(
        obs=StackedFrames(frames, slots[0]), next_obs=StackedFrames(frames, slots[1])
    )
    whole = by_reference._replace(obs=frames[slots[0]].flatten(1, 2), next_obs=frames[slots[1]].flatten(1, 2))
    one, two = make(), make()
    draws = one.draw(Generator().manual_seed(1))
    one.update(by_reference, draws, one.phase(0))
    two.update(whole, draws, two.phase(0))
    first, second = weights_of(one), weights_of(two)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_draws_are_all_that_is_random() -> None:
    one, two = make(), make()
    for number in range(3):
        draws = one.draw(Generator().manual_seed(number))
        assert draws.target_noise.shape == (2 * N, ACTIONS)
        assert draws.actor_noise.shape == (N, ACTIONS)
        torch.manual_seed(number)
        one.update(random_batch(number), draws, one.phase(number))
        torch.manual_seed(number + 1)
        two.update(random_batch(number), draws, two.phase(number))
    first, second = weights_of(one), weights_of(two)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_noise_is_standard_normal_and_the_generators_alone() -> None:
    agent = make(STATE, batch_size=20_000)

    def noises(seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        g = Generator().manual_seed(0)
        draws = agent.draw(g)
        return draws.target_noise, draws.actor_noise, agent.exploration(20_000, 0, g)

    for noise, again in zip(noises(1), noises(2), strict=True):
        assert torch.equal(noise, again)
        moments = [float((noise**power).mean()) for power in (1, 2, 3, 4)]
        assert moments == pytest.approx([0, 1, 0, 3], abs=0.15)


def test_the_seed_decides_the_initial_weights_and_disturbs_nobody() -> None:
    torch.manual_seed(5)
    one = weights_of(make(seed=1))
    here = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(here, torch.rand(3))
    again, other = weights_of(make(seed=1)), weights_of(make(seed=2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["critic.encoder.layers.0.weight"], other["critic.encoder.layers.0.weight"])


def test_evaluation_acts_with_the_mean() -> None:
    agent = make()
    obs = random_batch(0).obs
    assert isinstance(obs, Tensor)
    policy = agent.actor(agent.critic.encoder(obs))
    action = agent.act(obs, agent.evaluation(N, Generator().manual_seed(0)))
    torch.testing.assert_close(action, policy.mu.tanh())


def test_discrete_actions_are_refused_with_the_remedy() -> None:
    spec = replace(PIXELS, task="toy/catch", action_kind="discrete")
    with pytest.raises(UserError) as raised:
        make_agent(spec, SACConfig(), Backend(), 0)
    assert str(raised.value) == (
        "toy/catch has discrete actions and SAC needs continuous ones: use --agent dqn or rainbow."
    )


def test_defaults_are_the_papers_tables() -> None:
    table = {
        "augmentation": "shift",
        "pad": 4,
        "k": 2,
        "m": 2,
        "batch_size": 512,
        "discount": 0.99,
        "n_step": 1,
        "learning_rate": 1e-3,
        "tau": 0.01,
        "target_every": 2,
        "actor_every": 2,
        "init_temperature": 0.1,
        "target_entropy": None,
        "log_std_min": -10,
        "log_std_max": 2,
        "seed_steps": 1000,
        "updates_per_step": 1,
        "encoder": "sac-ae",
        "freeze_encoder": False,
        "feature_dim": 50,
        "hidden_dim": 1024,
        "intensity_scale": 0.1,
    }
    assert vars(SACConfig()) == table
