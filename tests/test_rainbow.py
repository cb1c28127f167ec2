"""Rainbow against an independent transcription of its equations, its schedules and resets. It learns in
test_learning.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drq.agents import make_agent, make_replay
from drq.agents.rainbow import Rainbow, project, rescale
from drq.agents.schedules import Resets
from drq.backend import Backend
from drq.config import EngineConfig, RainbowConfig, check
from drq.engine import EngineSettings, FastBackend, Learner
from drq.engine.adam import FusedAdam
from drq.envs.protocol import EnvSpec
from drq.errors import UserError
from drq.networks.encoders import Convolution
from drq.networks.heads import WideLinear
from drq.presets import preset
from drq.priorities import PrioritisedSampler
from drq.replay import Batch
from drq.training.evaluation_service import other_weights
from rainbow_paper import ACTIONS, SIZE, SPEC, N, Oracle, slowly_projected

SMALL: dict[str, Any] = {"batch_size": N, "hidden_dim": 12, "encoder_width": 1, "atoms": 7, "value_limit": 3.0}


def make(seed: int = 0, backend: Backend | None = None, **settings: Any) -> Rainbow:
    agent = make_agent(SPEC, RainbowConfig(**SMALL | settings), backend or Backend(), seed)
    assert isinstance(agent, Rainbow)
    return agent


def random_batch(seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)

    def images() -> Tensor:
        return torch.randint(0, 256, (N, 2, SIZE, SIZE), generator=g, dtype=torch.uint8)

    discount = torch.tensor([0.97**10, 0.0, 0.997**3])
    return Batch(
        images(), torch.randint(ACTIONS, (N,), generator=g), 2 * torch.randn(N, generator=g), discount, images()
    )


# The projection.


def test_the_projection_against_a_loop() -> None:
    g = torch.Generator().manual_seed(0)
    atoms = torch.linspace(-10, 10, 51)
    reward = torch.cat([torch.randn(40, generator=g) * 4, torch.tensor([0.0, 0.2, 0.4, 50.0, -50.0, 10.0])])
    discount = torch.cat([torch.rand(40, generator=g), torch.tensor([1.0, 1.0, 0.0, 0.97, 0.97, 0.0])])
    probabilities = torch.randn(46, 51, generator=g).softmax(1)
    found = project(reward, discount, probabilities, atoms)
    for row in range(46):
        numbers = float(reward[row]), float(discount[row]), probabilities[row].tolist(), atoms.tolist()
        assert found[row].tolist() == pytest.approx(slowly_projected(*numbers), abs=5e-5)
    torch.testing.assert_close(found.sum(1), torch.ones(46))
    # Where nothing is cut off at the ends, the mean moves as a number would.
    inside = (reward.abs() + 10 * discount) < 10
    assert inside.any()
    means = reward + discount * (probabilities @ atoms)
    torch.testing.assert_close((found @ atoms)[inside], means[inside], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[40], probabilities[40], rtol=1e-4, atol=1e-5)  # nothing earned, nothing discounted


def test_features_are_rescaled_image_by_image() -> None:
    features = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0], [4.0, 4.0, 5.0], [0.0, 0.0, 1e-5]])
    expected = [[0.0, 2 / 2.00001, 1 / 2.00001], [0.0] * 3, [0.0, 0.0, 1 / 1.00001], [0.0, 0.0, 0.5]]
    torch.testing.assert_close(rescale(features), torch.tensor(expected))
    assert rescale(features.bfloat16()).dtype == torch.float32


def test_state_vectors_keep_their_scale() -> None:
    spec = replace(SPEC, frame_shape=(7,), frame_stack=1)
    agent = Rainbow(spec, RainbowConfig(**SMALL))
    states = torch.randn(N, 7)
    torch.testing.assert_close(agent.online(2 * states), 2 * agent.online(states))  # biases start at zero


CASES: list[dict[str, Any]] = [
    {},
    {"k": 2, "m": 3},
    {"double": False, "tau": 1.0, "atoms": 2},
    {"dueling": False, "weight_decay": 0.0, "rescale_features": False},
    {"atoms": 1, "k": 2, "m": 2},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_updates_follow_the_equations(settings: dict[str, Any]) -> None:
    agent = make(learning_rate=1e-3, **settings)
    with torch.no_grad():  # biases and a target network that disagree, as they would later in training
        agent.target.load_state_dict(make(seed=1, **settings).online.state_dict())
        for parameter in agent.modules.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    oracle = Oracle(agent)
    g = torch.Generator().manual_seed(5)
    for update in range(2):
        batch, draws = random_batch(update)._replace(weights=torch.rand(N, generator=g)), agent.draw(g)
        metrics, errors = agent.update(batch, draws, agent.phase(update))
        loss, target_q, expected = oracle.update(batch, draws.nu, draws.nu_next)
        assert errors is not None
        assert errors.tolist() == pytest.approx(expected, rel=1e-4)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-4)
        assert float(metrics["target_q"]) == pytest.approx(target_q, rel=1e-4)
        for network, weights in ((agent.online, oracle.online), (agent.target, oracle.target)):
            for name, weight in network.state_dict().items():
                torch.testing.assert_close(weight.double(), weights[name].detach(), rtol=1e-4, atol=1e-5, msg=name)


def test_k_and_m_are_averages_over_views() -> None:
    """Of K targets and M losses, each by itself; the error that priorities are made of is that of the mean."""
    k, m = 3, 2
    agent, single = make(k=k, m=m), make()
    batch, draws = random_batch(0), agent.draw(torch.Generator().manual_seed(0))
    nu, nu_next = draws.nu.chunk(m), draws.nu_next.chunk(k)

    def features(agent: Rainbow, **nu: Tensor) -> list[Tensor]:
        return agent.features(batch, draws._replace(**nu))

    targets = [single.targets(batch, *features(single, nu_next=each)[1:]) for each in nu_next]
    y = agent.targets(batch, *features(agent)[1:])
    torch.testing.assert_close(y, sum(targets[1:], targets[0]) / k)
    assert float((targets[0] - targets[1]).abs().max()) > 1e-4
    errors = [single.errors(single.predictions(batch, features(single, nu=each)[0]), y) for each in nu]
    loss, per_transition, _ = agent.loss(batch, draws)
    torch.testing.assert_close(per_transition, sum(errors[1:], errors[0]).detach() / m)
    torch.testing.assert_close(loss, sum(error.mean() for error in errors) / m)


def test_the_best_action_has_the_highest_mean_of_its_distribution() -> None:
    agent = make(atoms=3, dueling=False, epsilon_eval=0.0)
    # The mean of the first is near the highest atom; the second's logits alone speak for it more.
    logits = torch.tensor([[0.0, 0.0, 5.0], [-20.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    with torch.no_grad():
        agent.target.head["advantage"].weight.zero_()
        agent.target.head["advantage"].bias.copy_(logits.flatten())
    obs = random_batch(0).obs
    assert isinstance(obs, Tensor)
    assert agent.act(obs, agent.evaluation(N, torch.Generator())).tolist() == [0] * N


# Schedules.


def test_returns_are_annealed_as_published_and_anew_after_a_reset() -> None:
    agent = make()
    for reset in (0, 36_000, 76_000, 116_000):
        for after, n_step, discount in ((0, 10, 0.970), (2_500, 7, 0.983), (5_000, 5, 0.9905), (10_000, 3, 0.997)):
            found = agent.returns(reset + after)
            assert found.n_step == n_step
            assert found.discount == pytest.approx(discount, abs=2e-4)
        assert agent.returns(reset + 30_000) == pytest.approx((3, 0.997))
    assert agent.returns(196_000) == pytest.approx((3, 0.997))
    lengths = [agent.returns(update).n_step for update in range(10_001)]
    assert lengths == sorted(lengths, reverse=True)
    constant = make(n_step=5, n_step_final=5, discount=0.99, discount_final=0.99)
    assert {constant.returns(update) for update in (0, 40, 5_000, 90_000)} == {constant.returns(0)}
    assert constant.returns(77) == pytest.approx((5, 0.99))
    assert make(anneal_updates=0).returns(0) == pytest.approx((3, 0.997))


def test_resets_come_at_the_published_agent_steps() -> None:
    """Agent step 20,000 is update 36,000: two a step since step 2,000."""
    assert make().resets.updates == (36_000, 76_000, 116_000)
    eight = preset("strong8", "atari/pong").agent
    assert isinstance(eight, RainbowConfig)
    resets = Resets.at_agent_steps(eight.reset_every, eight.last_reset, eight.seed_steps, eight.updates_per_step)
    assert resets.updates == tuple((step - 2_000) * 8 for step in range(5_000, 90_001, 5_000))
    assert make(reset_every=0).resets.updates == ()
    assert Resets.at_agent_steps(10, 40, 15, 0.5).updates == (2, 7, 12)
    assert Resets.at_agent_steps(10, 39, 10, 1.0).updates == (10, 20)  # none before the first update, nor after 39
    assert [Resets((5, 9)).since(update) for update in (0, 4, 5, 8, 9, 12)] == [0, 4, 0, 3, 0, 3]


def test_epsilon_falls_to_zero_after_the_first_updates() -> None:
    agent = make()
    wanted = {0: 1.0, 1_999: 1.0, 2_000: 1.0, 3_000: 1 - 1_000 / 2_001, 4_000: 1 / 2_001, 4_001: 0.0, 90_000: 0.0}
    assert {at: agent.epsilon(at) for at in wanted} == pytest.approx(wanted)


def test_the_target_network_acts_unless_told_otherwise() -> None:
    for target_acts in (True, False):
        agent = make(target_acts=target_acts, epsilon_eval=0.0)
        agent.target.load_state_dict(make(seed=1).online.state_dict())
        obs = torch.cat([random_batch(seed).obs for seed in range(20)])  # type: ignore[misc]
        network = agent.target if target_acts else agent.online
        expected = (network(network.encoder(obs)).softmax(2) * agent.atoms).sum(2).argmax(1)
        assert torch.equal(agent.act(obs, agent.evaluation(len(obs), torch.Generator())), expected)
        other = agent.online if target_acts else agent.target
        assert not torch.equal((other(other.encoder(obs)).softmax(2) * agent.atoms).sum(2).argmax(1), expected)


# Resets.


def filled_learner(config: RainbowConfig, seed: int = 0, settings: EngineSettings | None = None) -> Learner:
    on_cpu = EngineSettings.resolve(EngineConfig(precision="float32"), torch.device("cpu"), config)
    backend = FastBackend(settings or on_cpu)
    replay = make_replay(SPEC, config, backend, 60)
    random = np.random.default_rng(0)
    replay.begin(random.integers(0, 256, SPEC.frame_shape, dtype=np.uint8))
    for step in range(50):
        frame = random.integers(0, 256, SPEC.frame_shape, dtype=np.uint8)
        replay.add(int(random.integers(ACTIONS)), float(random.normal()), 1.0, step % 20 == 19, frame)
        if step % 20 == 19:
            replay.begin(frame)
    return Learner(make_agent(SPEC, config, backend, seed), replay, backend, seed)


def test_what_a_reset_touches_and_what_it_leaves() -> None:
    config = RainbowConfig(**SMALL, seed_steps=20, reset_every=21, last_reset=21, reset_keep=0.75)
    learner = filled_learner(config)
    agent = learner.agent
    assert isinstance(agent, Rainbow)
    assert agent.resets.updates == (2,)
    for _ in range(2):
        learner.update()
    before = {name: value.clone() for name, value in learner.state().items()}
    agent.before_update(1, 7)  # not due
    for name, value in learner.state().items():
        assert torch.equal(value, before[name]), name
    agent.before_update(2, 7)
    fresh_of: dict[str, dict[str, Tensor]] = {"online": {}, "target": {}}
    for name, value in learner.state().items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            assert not value.any(), name
            assert before[name].any(), name
        elif kind == "agent":
            network, _, weight = rest.partition(".")
            fresh = value
            if weight.startswith("encoder"):
                fresh = (value - 0.75 * before[name]) / 0.25
            fresh_of[network][weight] = fresh
            assert not torch.equal(value, before[name]) or not value.any()
        else:  # priorities and random numbers
            assert torch.equal(value, before[name]), name
    for network, weights in fresh_of.items():
        for weight, fresh in weights.items():
            if weight.endswith("bias"):
                assert float(fresh.abs().max()) < 1e-6
            else:  # Xavier's: uniform, of this width
                fan = sum(fresh.shape[:2]) * math.prod(fresh.shape[2:])
                limit = math.sqrt(6 / fan)
                assert 0.9 * limit < float(fresh.abs().max()) < 1.001 * limit, (network, weight)
                assert float(fresh.std()) == pytest.approx(limit / math.sqrt(3), rel=0.25)
    for weight, fresh in fresh_of["online"].items():
        if not weight.endswith("bias"):
            assert float((fresh - fresh_of["target"][weight]).abs().max()) > 0.1 * float(fresh.abs().max())
    # It follows from its arguments alone, and learning goes on from it.
    again = filled_learner(config)
    for _ in range(2):
        again.update()
    again.agent.before_update(2, 7)
    for name, value in learner.state().items():
        assert torch.equal(value, again.state()[name]), name
    learner.update()
    assert all(bool(parameter.isfinite().all()) for parameter in agent.modules.parameters())


def test_no_two_resets_begin_anew_alike() -> None:
    heads: list[Tensor] = []
    for seed in (7, 8):
        agent = make(seed_steps=20, reset_every=21, last_reset=21)
        agent.before_update(2, seed)
        heads += [network.head["hidden"].weight for network in (agent.online, agent.target)]
    assert all(not torch.equal(one, other) for at, one in enumerate(heads) for other in heads[:at])


def test_each_part_can_be_switched_off_by_itself() -> None:
    """Every one changes what is learnt, and leaves an agent that learns."""
    base = {**SMALL, "seed_steps": 20, "reset_every": 21, "last_reset": 21, "anneal_updates": 2}

    def learnt(**settings: Any) -> Tensor:
        learner = filled_learner(RainbowConfig(**base | settings))
        for _ in range(4):
            learner.update()
        weights = torch.cat([p.detach().flatten() for p in learner.agent.modules["online"].encoder.parameters()])
        assert bool(weights.isfinite().all())
        assert math.isfinite(learner.metrics()["loss"])
        return weights

    whole = learnt()
    assert torch.equal(whole, learnt())
    for setting in (
        *({"atoms": 1}, {"dueling": False}, {"double": False}, {"rescale_features": False}, {"prioritised": False}),
        *({"weight_decay": 0.0}, {"tau": 1.0}, {"reset_every": 0}, {"n_step": 3}, {"discount": 0.997}),
        *({"anneal_updates": 0}, {"early_bootstrap": True}, {"augmentation": "none"}),
    ):
        assert not torch.equal(whole, learnt(**setting)), setting


def test_uniform_sampling_is_the_replays_own() -> None:
    assert isinstance(filled_learner(RainbowConfig(**SMALL)).replay.sampler, PrioritisedSampler)
    uniform = filled_learner(RainbowConfig(**SMALL, prioritised=False))
    assert uniform.replay.sampler.state() == {}
    uniform.update()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_captured_updates_with_kernels_do_what_plain_pytorch_does(precision: Any) -> None:
    """Through a reset, with annealed returns and priorities."""
    config = RainbowConfig(**SMALL | {"batch_size": 8}, seed_steps=20, reset_every=21, last_reset=21, anneal_updates=4)
    found = []
    for engine in (
        EngineConfig(precision=precision, compile="off", cuda_graphs="off", kernels="off"),
        EngineConfig(precision=precision, compile="off"),
    ):
        backend = FastBackend(EngineSettings.resolve(engine, torch.device("cuda"), config))
        replay = make_replay(SPEC, config, backend, 60)
        random = np.random.default_rng(0)
        replay.begin(random.integers(0, 256, SPEC.frame_shape, dtype=np.uint8))
        for _ in range(50):
            frame = random.integers(0, 256, SPEC.frame_shape, dtype=np.uint8)
            replay.add(int(random.integers(ACTIONS)), float(random.normal()), 1.0, False, frame)
        learner = Learner(make_agent(SPEC, config, backend, 0), replay, backend, 0)
        for _ in range(4):
            learner.update()
        found.append(learner)
    plain, fast = (torch.cat([p.detach().flatten() for p in each.agent.modules.parameters()]) for each in found)
    assert found[1]._graphs
    assert float((plain - fast).norm() / plain.norm()) < (1e-4 if precision == "float32" else 0.02)


def test_rounded_copies_of_weights_change_no_bit(kernel_device: str) -> None:
    """Through updates, a reset, and weights that were loaded: those of a step, and other ones."""
    config = RainbowConfig(**SMALL, seed_steps=20, reset_every=21, last_reset=21)
    settings = EngineSettings(torch.device(kernel_device), "bf16", False, False, kernels=False, eval_process=False)
    learners = copied, plain = [filled_learner(config, settings=settings) for _ in range(2)]
    for learner in learners:
        learner.backend.kernels = True  # emulated, or compiled when first used
    copied.backend.keep_rounded(copied.agent)
    agent = copied.agent
    assert isinstance(agent, Rainbow)
    layers = [layer for layer in agent.modules.modules() if isinstance(layer, Convolution | WideLinear)]
    assert [layer.rounded is None for layer in layers].count(True) == 2  # each network's first
    assert agent.modules.state_dict().keys() == plain.agent.modules.state_dict().keys()

    def assert_same() -> None:
        for one, other in zip(agent.modules.parameters(), plain.agent.modules.parameters(), strict=True):
            assert torch.equal(one, other)
        images = random_batch(7).obs.to(kernel_device)  # type: ignore[union-attr]
        for name, network in agent.modules.items():
            other = plain.agent.modules[name]
            assert torch.equal(network(network.encoder(images)), other(other.encoder(images)))

    for _ in range(2):
        for learner in learners:
            learner.update()
        assert_same()
    others = {name: value * 0.9 for name, value in agent.modules.state_dict().items()}
    with other_weights(agent, others), other_weights(plain.agent, others):
        assert_same()
    assert_same()
    kept = {name: value.clone() for name, value in plain.state().items()}
    for learner in learners:
        learner.update()
    assert_same()
    copied.restore(kept)
    copied.updates -= 1
    copied.update()
    assert_same()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_wide_layer_steps_ahead_of_the_convolutions(
    weight_decay: float, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bits, of all that is kept, through a reset and weights that were loaded."""
    wide = SMALL | {"hidden_dim": 256}
    config = RainbowConfig(**wide, weight_decay=weight_decay, seed_steps=20, reset_every=21, last_reset=21)
    settings = EngineSettings(torch.device(kernel_device), "bf16", False, False, kernels=False, eval_process=False)
    learners = ahead, plain = [filled_learner(config, settings=settings) for _ in range(2)]
    for learner in learners:
        learner.backend.kernels = True  # emulated, or compiled when first used
        learner.backend.keep_rounded(learner.agent)
    order: list[list[str]] = []
    step = FusedAdam._step

    def recorded(optimizer: FusedAdam, asked: Any, *rest: Any) -> Any:
        names = {parameter: name for name, parameter in ahead.agent.modules.named_parameters()}
        order.append([names[parameter] for parameter in asked])
        return step(optimizer, asked, *rest)

    for update in range(4):
        plain.update()
        with monkeypatch.context() as patch:
            patch.setattr("drq.engine.backend.WIDE_LAYER", 1000)
            patch.setattr(FusedAdam, "_step", recorded)
            ahead.update()
        first, rest = order
        assert first == ["online.head.hidden.weight"]
        assert first[0] not in rest
        order.clear()
        expected = plain.state()
        for name, value in ahead.state().items():
            assert torch.equal(value, expected[name]), name
        for weight, copied in ahead.backend.rounded.items():
            assert torch.equal(weight.to(copied.dtype), copied)
        if update == 2:
            for learner in learners:
                learner.restore({name: value.clone() for name, value in expected.items()})


@pytest.mark.gpu
def test_a_wide_layer_steps_ahead_in_a_captured_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream of its own, to the same bits."""
    config = RainbowConfig(**SMALL | {"batch_size": 8, "hidden_dim": 512, "encoder_width": 4}, seed_steps=20)
    found = []
    for wide in (1000, 10**9):
        monkeypatch.setattr("drq.engine.backend.WIDE_LAYER", wide)
        engine = EngineConfig(precision="bf16", compile="off")
        learner = filled_learner(config, settings=EngineSettings.resolve(engine, torch.device("cuda"), config))
        for _ in range(20):
            learner.update()
        assert learner._graphs
        found.append(learner.state())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


# Settings.


def test_initial_weights_are_xaviers_with_zero_biases() -> None:
    parts = [part for part in make(hidden_dim=64).online.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    assert len(parts) == 15 + 3
    for part in parts:
        outputs, inputs, *kernel = part.weight.shape
        limit = math.sqrt(6 / ((inputs + outputs) * math.prod(kernel)))
        assert 0.97 * limit < float(part.weight.detach().abs().max()) <= limit
        assert part.bias is not None
        assert not part.bias.any()


def test_the_presets_are_the_published_agent() -> None:
    agent = preset("strong", "atari/pong").agent
    assert isinstance(agent, RainbowConfig)
    built = make_agent(
        EnvSpec("atari/pong", (1, 84, 84), 4, "discrete", 6, 4, None), replace(agent, hidden_dim=8), Backend("meta"), 0
    )
    assert isinstance(built, Rainbow)
    convolutions = [part for part in built.online.modules() if isinstance(part, nn.Conv2d)]
    assert [part.out_channels for part in convolutions] == [64] * 5 + [128] * 10
    assert built.online.encoder.output_size == 15_488
    assert built.online.head["advantage"].out_features == 51 * 6
    check(preset("strong", "atari/pong"))
    check(preset("strong8", "atari/pong"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_step": 3, "n_step_final": 4}, "--agent.n-step-final is more than --agent.n-step, 3"),
        ({"atoms": 0}, "--agent.atoms is 0: set it to 1 or more"),
        ({"encoder_width": 0}, "--agent.encoder-width is 0: set it to 1 or more"),
        ({"reset_keep": 1.5}, "--agent.reset-keep is 1.5: set it between 0 and 1"),
        ({"weight_decay": -0.1}, "--agent.weight-decay is -0.1: set it to 0 or more"),
        ({"value_limit": 0.0}, "--agent.value-limit is 0.0: set it above 0"),
    ],
)
def test_settings_that_no_run_can_work_with(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(replace(preset("strong", "atari/pong"), agent=RainbowConfig(**settings)))
