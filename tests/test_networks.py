"""Encoders and heads: sizes, parameter counts, initial values, and the policy's density."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from drq.agents.dqn import QNetwork
from drq.backend import Backend
from drq.config import DQNConfig, EngineConfig, SACConfig
from drq.engine import EngineSettings, FastBackend
from drq.errors import UserError
from drq.networks.encoders import ENCODERS, Convolution, PixelEncoder, StateEncoder, make_encoder, xavier_init
from drq.networks.heads import Actor, Policy, Trunk, TwinCritic, WideLinear

PLAIN = Backend()
PARAMETERS = {"sac-ae": 1_990_518, "nature": 245_174, "dreamer": 808_566, "impala": 292_214, "d4pg": 2_445_622}
"""Convolutions and trunk to 50 features on 9 x 84 x 84."""

LAYERS = {
    "sac-ae": [(32, 3, 2), (32, 3, 1), (32, 3, 1), (32, 3, 1)],
    "nature": [(32, 8, 4), (64, 4, 2), (64, 3, 1)],
    "dreamer": [(32, 4, 2), (64, 4, 2), (128, 4, 2), (256, 4, 2)],
    "d4pg": [(32, 3, 2), (32, 3, 1)],
}
"""(output channels, kernel, stride), as the publications of these encoders give them."""

TOO_SMALL = {"sac-ae": 14, "nature": 35, "dreamer": 45, "d4pg": 6}
"""The largest image each cannot work on."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def count(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def random_images(shape: tuple[int, ...], batch: int = 2) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (batch, *shape), generator=g, dtype=torch.uint8)


def pixel_by_pixel(convolved: Tensor) -> Tensor:
    """Feature vectors in the order of the package: all channels of the first pixel, then of the next in its row."""
    pixels = [convolved[:, :, y, x] for y in range(convolved.shape[2]) for x in range(convolved.shape[3])]
    return torch.cat(pixels, dim=1)


# Encoders.


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_at_the_papers_size(name: str) -> None:
    encoder = PixelEncoder(name, (9, 84, 84), PLAIN)
    assert count(encoder, Trunk(PLAIN, encoder, 50)) == PARAMETERS[name]


def test_the_five_span_the_papers_range() -> None:
    """The paper: from 220k to 2.4M parameters."""
    assert {*PARAMETERS, "impala-same"} == set(ENCODERS)  # one more, which is not the paper's
    assert 220_000 < min(PARAMETERS.values()) < 250_000
    assert 2_400_000 < max(PARAMETERS.values()) < 2_450_000


@pytest.mark.parametrize("shape", [(9, 84, 84), (4, 84, 84), (1, 64, 64), (9, 48, 48), (12, 100, 76), (3, 51, 87)])
@pytest.mark.parametrize("name", ENCODERS)
def test_any_size_and_number_of_channels(name: str, shape: tuple[int, int, int]) -> None:
    encoder = make_encoder(name, shape)
    features = encoder(random_images(shape))
    _, *sides = shape
    if name.startswith("impala"):
        channels = 32
        sides = [math.ceil(side / 8) for side in sides]  # halved three times
    else:
        channels = LAYERS[name][-1][0]
        for _, kernel, stride in LAYERS[name]:
            sides = [(side - kernel) // stride + 1 for side in sides]
    assert features.shape == (2, channels * sides[0] * sides[1]) == (2, encoder.output_size)
    assert features.dtype == torch.float32
    assert (features >= 0).all()  # a ReLU comes last
    assert (features > 0).any()


@pytest.mark.parametrize("name", LAYERS)
def test_a_width_multiplies_the_channels_of_every_layer(name: str) -> None:
    layers = [part for part in PixelEncoder(name, (3, 64, 64), PLAIN, width=2).modules() if isinstance(part, nn.Conv2d)]
    wide = [2 * channels for channels, _, _ in LAYERS[name]]
    assert [(layer.in_channels, layer.out_channels) for layer in layers] == list(zip([3, *wide], wide, strict=False))


def test_the_papers_encoder_layer_by_layer() -> None:
    encoder = PixelEncoder("sac-ae", (9, 84, 84), PLAIN)
    weights = list(encoder.parameters())
    images = random_images((9, 84, 84))
    x = images.double() / 255
    for weight, bias, stride in zip(weights[0::2], weights[1::2], (2, 1, 1, 1), strict=True):
        x = F.conv2d(x, weight.double(), bias.double(), stride).clamp(min=0)
    torch.testing.assert_close(encoder(images).double(), pixel_by_pixel(x), rtol=1e-4, atol=1e-5)


def test_impala_block_by_block() -> None:
    encoder = PixelEncoder("impala", (3, 33, 40), PLAIN)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    images = random_images((3, 33, 40))
    state = iter(parameter.double() for parameter in encoder.parameters())

    def convolve(x: Tensor) -> Tensor:
        return F.conv2d(x, next(state), next(state), padding=1)

    x = images.double() / 255
    for _ in range(3):
        x = F.max_pool2d(convolve(x), 3, 2, 1)
        for _ in range(2):
            x = x + convolve(convolve(x.relu()).relu())
    torch.testing.assert_close(encoder(images).double(), pixel_by_pixel(x.relu()), rtol=1e-4, atol=1e-3)


def same_pool(x: Tensor) -> Tensor:
    """The greatest of every second 3 x 3, with as much padding as "same" takes, of which the end gets more."""
    height, width = (math.ceil(side / 2) for side in x.shape[2:])
    above, before = ((2 * (out - 1) + 3 - side) // 2 for out, side in zip((height, width), x.shape[2:], strict=True))
    pooled = torch.empty(*x.shape[:2], height, width, dtype=x.dtype)
    for row in range(height):
        for column in range(width):
            top, left = 2 * row - above, 2 * column - before
            window = x[:, :, max(top, 0) : top + 3, max(left, 0) : left + 3]
            pooled[:, :, row, column] = window.amax((2, 3))
    return pooled


@pytest.mark.parametrize("size", [(33, 40), (84, 84)], ids=str)
def test_the_wide_impala_block_by_block(size: tuple[int, int]) -> None:
    encoder = PixelEncoder("impala-same", (4, *size), PLAIN, width=2)
    xavier_init(encoder)
    weights = list(encoder.parameters())
    assert [len(bias) for bias in weights[1::2]] == [32] * 5 + [64] * 10
    images = random_images((4, *size), batch=1)
    state = iter(parameter.double() for parameter in weights)

    def convolve(x: Tensor) -> Tensor:
        return F.conv2d(x, next(state), next(state), padding=1)

    x = images.double() / 255
    sides = []
    for _ in range(3):
        x = same_pool(convolve(x))
        sides.append(tuple(x.shape[2:]))
        for _ in range(2):
            x = x + convolve(convolve(x.relu()).relu())
    assert sides[-1] == ((5, 5) if size == (33, 40) else (11, 11))
    torch.testing.assert_close(encoder(images).double(), pixel_by_pixel(x.relu()), rtol=1e-4, atol=1e-4)


def test_the_two_impalas_differ_in_nothing_but_where_pools_pad() -> None:
    torch.manual_seed(0)
    one = PixelEncoder("impala", (3, 33, 33), PLAIN)
    other = PixelEncoder("impala-same", (3, 33, 33), PLAIN)
    other.load_state_dict(one.state_dict())
    images = random_images((3, 33, 33))
    assert torch.equal(one.layers[1](one.layers[0](images.float())), other.layers[1](other.layers[0](images.float())))
    assert torch.equal(one(images), other(images))  # 33, 17, 9: odd sides are padded alike
    even = random_images((3, 32, 32))
    assert not torch.equal(one(even), other(even))


def test_weights_keep_the_names_that_saved_runs_know_them_by() -> None:
    """Those that they would have if ReLUs were layers of their own; copies of a weight are not saved with it."""
    nature, impala = (PixelEncoder(name, (3, 40, 40), PLAIN) for name in ("nature", "impala"))
    nature.layers[0].rounded = nature.layers[0].weight.detach().bfloat16()
    assert [name for name in nature.state_dict() if "bias" not in name] == [f"layers.{at}.weight" for at in (0, 2, 4)]
    expected = []
    for first in (0, 4, 8):
        blocks = [f"layers.{first + block}.body.{layer}.weight" for block in (2, 3) for layer in (1, 3)]
        expected += [f"layers.{first}.weight", *blocks]
    assert [name for name in impala.state_dict() if "bias" not in name] == expected


def test_a_layer_multiplies_with_the_copy_of_its_weight_if_it_has_one() -> None:
    x = torch.randn(2, 3, 5, 5)
    for layer in (Convolution(PLAIN, 3, 4, 3), WideLinear(PLAIN, 5, 4)):
        nn.init.zeros_(layer.bias)
        once = layer(x)
        layer.rounded = 2 * layer.weight.detach()
        torch.testing.assert_close(layer(x), 2 * once)


def test_xavier_weights() -> None:
    layer = nn.Conv2d(16, 32, 3)
    xavier_init(layer, torch.Generator().manual_seed(0))
    limit = math.sqrt(6 / (9 * 16 + 9 * 32))
    assert 0.99 * limit < float(layer.weight.detach().abs().max()) <= limit
    assert float(layer.weight.detach().std()) == pytest.approx(limit / math.sqrt(3), rel=0.05)
    assert layer.bias is not None
    assert not layer.bias.any()


@pytest.mark.parametrize("name", ENCODERS)
def test_initial_weights_are_orthogonal_with_a_gain_of_root_two(name: str) -> None:
    encoder = PixelEncoder(name, (9, 84, 84), PLAIN)
    convolutions = [part for part in encoder.modules() if isinstance(part, nn.Conv2d)]
    assert len(convolutions) == (15 if name.startswith("impala") else len(LAYERS[name]))
    for convolution in convolutions:
        assert_orthogonal(convolution.weight.flatten(1), gain=math.sqrt(2))
        assert convolution.bias is not None
        assert not convolution.bias.any()


def assert_orthogonal(weight: Tensor, gain: float) -> None:
    weight = weight.detach().double()
    if weight.shape[0] > weight.shape[1]:
        weight = weight.T
    expected = gain**2 * torch.eye(weight.shape[0], dtype=torch.float64)
    torch.testing.assert_close(weight @ weight.T, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "size"), TOO_SMALL.items())
def test_an_image_too_small_is_refused_with_the_remedy(name: str, size: int) -> None:
    PixelEncoder(name, (9, size + 1, size + 1), PLAIN)
    with pytest.raises(UserError) as raised:
        PixelEncoder(name, (9, size, size), PLAIN)
    assert str(raised.value) == (
        f"The encoder {name!r} cannot work on images of {size}x{size}: "
        "choose larger images (--env.image-size) or another encoder (--agent.encoder)."
    )


@pytest.mark.parametrize(("name", "meant"), [("impalla", " Did you mean 'impala'?"), ("resnet", "")])
def test_a_wrong_encoder(name: str, meant: str) -> None:
    with pytest.raises(UserError) as raised:
        make_encoder(name, (9, 84, 84))
    assert str(raised.value) == (
        f"There is no encoder {name!r}.{meant} Choose from sac-ae, nature, dreamer, impala, d4pg, impala-same."
    )


def test_states_are_their_own_features() -> None:
    encoder = make_encoder("sac-ae", (17,))
    assert isinstance(encoder, StateEncoder)
    states = torch.randn(3, 17, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Trunk(PLAIN, encoder, 50)(encoder(states)), states)
    assert count(encoder, Trunk(PLAIN, encoder, 50)) == 0
    # Linear layers alone: 17 to 1024 to 1024 to mean and deviation of 6 actions.
    actor = Actor(PLAIN, encoder, 50, 1024, 6, (-10, 2))
    assert count(actor) == 17 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 12 + 12


# Heads.


def heads(
    action_size: int = 6,
    hidden: int = 1024,
    backend: Backend = PLAIN,
    shape: tuple[int, ...] = (9, 84, 84),
) -> tuple[PixelEncoder, Actor, TwinCritic]:
    encoder = PixelEncoder("sac-ae", shape, backend)
    actor = Actor(backend, encoder, 50, hidden, action_size, (-10.0, 2.0))
    return encoder, actor, TwinCritic(backend, encoder, 50, hidden, action_size)


def test_actor_and_critic_are_the_appendixs() -> None:
    encoder, actor, critic = heads()
    trunk = 39_200 * 50 + 50 + 2 * 50  # linear and LayerNorm
    assert count(actor) == trunk + (50 * 1024 + 1024) + (1024 * 1024 + 1024) + (1024 * 12 + 12)
    one_q = (56 * 1024 + 1024) + (1024 * 1024 + 1024) + (1024 + 1)
    assert count(critic) == count(encoder) + trunk + 2 * one_q


def test_heads_compute_what_the_appendix_says() -> None:
    _, actor, critic = heads(action_size=2, hidden=32)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():  # away from the zero biases and unit scales of the start
        for parameter in (*actor.parameters(), *critic.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))
    convolved, action = torch.rand(4, 39_200, generator=g), torch.rand(4, 2, generator=g)

    def features(trunk: Trunk) -> Tensor:
        assert trunk.linear is not None
        x = convolved.double() @ trunk.linear.weight.double().T + trunk.linear.bias.double()
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return (x * trunk.norm.weight.double() + trunk.norm.bias.double()).tanh()

    def three_layers(x: Tensor, mlp: nn.Sequential) -> Tensor:
        for number in (0, 2, 4):
            layer = mlp[number]
            x = x @ layer.weight.double().T + layer.bias.double()
            x = x.clamp(min=0) if number < 4 else x
        return x

    policy = actor(convolved)
    mu, raw = three_layers(features(actor.trunk), actor.mlp).chunk(2, 1)
    torch.testing.assert_close(policy.mu.double(), mu, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(policy.log_std.double(), -10 + 6 * (raw.tanh() + 1), rtol=1e-4, atol=1e-5)
    joined = torch.cat([features(critic.trunk), action.double()], 1)
    for q, mlp in zip(critic(convolved, action), (critic.q1, critic.q2), strict=True):
        assert q.shape == (4,)
        torch.testing.assert_close(q.double(), three_layers(joined, mlp)[:, 0], rtol=1e-4, atol=1e-5)


def test_initial_linear_layers_are_orthogonal_with_unit_gain() -> None:
    encoder, actor, critic = heads(hidden=128)
    before = [parameter.clone() for parameter in encoder.parameters()]
    values = QNetwork(PLAIN, encoder, 6, DQNConfig(hidden_dim=128))
    linear = [part for head in (actor, critic, values) for part in head.modules() if isinstance(part, nn.Linear)]
    assert len(linear) == 4 + 7 + 4
    for layer in linear:
        assert_orthogonal(layer.weight, gain=1.0)
        assert not layer.bias.any()
    assert not torch.equal(critic.q1[0].weight, critic.q2[0].weight)
    # A critic made later on the same encoder leaves the convolutions as they were.
    TwinCritic(PLAIN, encoder, 50, 128, 6)
    for old, new in zip(before, encoder.parameters(), strict=True):
        assert torch.equal(old, new)


def test_log_deviations_stay_within_their_bounds() -> None:
    _, actor, _ = heads(action_size=3, hidden=16)
    with torch.no_grad():
        actor.mlp[4].weight.zero_()
        actor.mlp[4].bias.copy_(torch.tensor([0.3, 0.0, -7.0, -1e6, 0.0, 1e6]))
    policy = actor(torch.zeros(1, 39_200))
    assert policy.log_std[0].tolist() == [-10.0, -4.0, 2.0]
    torch.testing.assert_close(policy.mu[0], torch.tensor([0.3, 0.0, -7.0]))


def random_policy(dtype: torch.dtype) -> tuple[Policy, Tensor]:
    g = torch.Generator().manual_seed(0)
    mu = 2 * torch.randn(500, 4, generator=g, dtype=dtype)
    log_std = 12 * torch.rand(500, 4, generator=g, dtype=dtype) - 10
    return Policy(mu, log_std), torch.randn(500, 4, generator=g, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_log_probability_is_that_of_torchs_squashed_normal(dtype: torch.dtype, tolerance: float) -> None:
    policy, noise = random_policy(dtype)
    action, log_prob = policy.sample(noise)
    squashed = TransformedDistribution(
        Normal(policy.mu, policy.log_std.exp()), [TanhTransform(cache_size=1)], validate_args=False
    )
    before_tanh = policy.mu + policy.log_std.exp() * noise
    theirs = squashed.transforms[0](before_tanh)  # so that the cache knows the inverse, which tanh forgets
    assert torch.equal(action, theirs)
    expected = Independent(squashed, 1, validate_args=False).log_prob(theirs)
    torch.testing.assert_close(log_prob, expected, rtol=tolerance, atol=tolerance)
    assert log_prob.shape == (500,)


def test_the_density_integrates_to_one() -> None:
    """Over actions, which is where the squashing's share of the log-probability matters."""
    noise = torch.linspace(-9, 9, 20_001, dtype=torch.float64)[:, None]
    for mu, log_std in [(0.0, -1.0), (0.7, 0.0), (-1.0, 0.5)]:
        policy = Policy(torch.full_like(noise, mu), torch.full_like(noise, log_std))
        action, log_prob = policy.sample(noise)
        assert float(torch.trapezoid(log_prob.exp(), action[:, 0])) == pytest.approx(1.0, abs=1e-6)


def test_far_out_actions_have_finite_probabilities_and_gradients() -> None:
    mu = torch.tensor([[60.0], [-60.0], [0.0]], requires_grad=True)
    _, log_prob = Policy(mu, torch.zeros(3, 1)).sample(torch.zeros(3, 1))
    (gradient,) = torch.autograd.grad(log_prob.sum(), [mu])
    # log(1 - tanh(x)^2) is 2 (log 2 - |x|) far out, so the log-probability grows by 2 for every unit.
    normal = -0.5 * math.log(2 * math.pi)
    far = normal - 2 * (math.log(2) - 60)
    torch.testing.assert_close(log_prob.detach(), torch.tensor([far, far, normal]))
    torch.testing.assert_close(gradient, torch.tensor([[2.0], [-2.0], [0.0]]))


def finer_than_bfloat16(values: Tensor) -> float:
    """The share of numbers that bfloat16 would change. By chance it would leave one in 65,536 as it is."""
    assert values.dtype == torch.float32
    return float((values != values.bfloat16().float()).double().mean())


def short_backend() -> FastBackend:
    engine = EngineConfig(precision="bf16", compile="off")
    return FastBackend(EngineSettings.resolve(engine, torch.device("cpu"), SACConfig()))


def test_what_leaves_the_heads_is_float32_whatever_convolutions_compute_in() -> None:
    """Not bfloat16 numbers in float32 clothes: all layers but a trunk's first keep what bfloat16 would round away."""
    shape, hidden = (9, 40, 40), 32
    encoder, actor, critic = heads(hidden=hidden, backend=short_backend(), shape=shape)
    plain = heads(hidden=hidden, shape=shape)
    for ours, theirs in zip((encoder, actor, critic), plain, strict=True):
        theirs.load_state_dict(ours.state_dict())
    images = random_images(shape, batch=24)
    convolved = encoder(images)
    assert convolved.dtype == torch.bfloat16  # it did compute in another precision
    policy = actor(convolved)
    action, log_prob = policy.sample(torch.randn(24, 6, generator=torch.Generator().manual_seed(0)))
    values = critic(convolved, action)
    for part in (*policy, action, log_prob, *values):
        assert finer_than_bfloat16(part) > 0.95
    expected = plain[0](images)
    torch.testing.assert_close(policy.mu, plain[1](expected).mu, rtol=0, atol=0.05)
    for value, exact in zip(values, plain[2](expected, action), strict=True):
        torch.testing.assert_close(value, exact, rtol=0, atol=0.05)
    gradients = torch.autograd.grad(sum(value.sum() for value in values), list(critic.parameters()))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


@pytest.mark.parametrize("settings", [{}, {"shared_hidden": True}, {"dueling": False}], ids=str)
def test_values_of_all_actions_are_float32_whatever_convolutions_compute_in(settings: dict[str, bool]) -> None:
    config = DQNConfig(hidden_dim=32, **settings)
    backend = short_backend()
    encoder = PixelEncoder("nature", (4, 44, 44), backend)
    network = QNetwork(backend, encoder, 5, config)
    images = random_images((4, 44, 44), batch=24)
    q = network(encoder(images))
    assert encoder(images).dtype == torch.bfloat16
    assert finer_than_bfloat16(q) > 0.95
    exact = QNetwork(PLAIN, PixelEncoder("nature", (4, 44, 44), PLAIN), 5, config)
    exact.load_state_dict(network.state_dict())
    torch.testing.assert_close(q, exact(exact.encoder(images)), rtol=0, atol=0.05)
