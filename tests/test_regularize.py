"""Algorithm 1 against a double loop over transitions and views, for critics the package has never seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor, nn

from drq import regularize
from drq.augment import Augmentation, parse
from drq.backend import Backend, StackedFrames
from drq.replay import Batch

N, ACTIONS = 7, 2
SHAPE = (6, 12, 14)
SIZE = (12, 14)
K_AND_M = [(k, m) for k in (1, 2, 3, 5) for m in (1, 2, 3, 5)]
NAMES = ["none", "shift", "cutout", "rotate", "shift+intensity"]


def generator(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def random_batch(seed: int = 0) -> Batch:
    g = generator(seed)

    def images() -> Tensor:
        return torch.randint(0, 256, (N, *SHAPE), generator=g, dtype=torch.uint8)

    return Batch(
        obs=images(),
        action=torch.rand(N, ACTIONS, generator=g, dtype=torch.float64),
        reward=torch.randn(N, generator=g, dtype=torch.float64),
        discount=torch.tensor([0.99, 0.99, 0.0, 0.97, 0.5, 0.0, 1.0], dtype=torch.float64),
        next_obs=images(),
    )


def views(f: Augmentation, states: Tensor | StackedFrames, nu: Tensor) -> Tensor:
    made = Backend().views(f, states, nu)
    assert isinstance(made, Tensor)
    return made


class LinearCritic(nn.Module):
    """Somebody else's Q: linear in pixels and actions, in float64."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        g = generator(seed)
        size = SHAPE[0] * SHAPE[1] * SHAPE[2]
        self.pixels = nn.Parameter(torch.randn(size, generator=g, dtype=torch.float64) / size)
        self.actions = nn.Parameter(torch.randn(ACTIONS, generator=g, dtype=torch.float64))

    def forward(self, images: Tensor, actions: Tensor) -> Tensor:
        return images.flatten(1).double() @ self.pixels + actions @ self.actions


def run(
    f: Augmentation, batch: Batch, k: int, m: int, critic: LinearCritic, value: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """y and J_Q as an agent would ask for them."""
    drawn = regularize.draw(f, N, k, m, SIZE, generator(3))
    y = regularize.target(batch, value(views(f, batch.next_obs, drawn.nu_next)))
    q = critic(views(f, batch.obs, drawn.nu), regularize.repeat(batch.action, m))
    loss, _ = regularize.loss((q - regularize.repeat(y, m)) ** 2, batch)
    return y, loss


@pytest.mark.parametrize(("k", "m"), K_AND_M)
@pytest.mark.parametrize("name", NAMES)
def test_averages_are_those_of_a_double_loop(name: str, k: int, m: int) -> None:
    f, batch, critic, target_critic = parse(name), random_batch(), LinearCritic(0), LinearCritic(1)
    noise = torch.randn(k * N, ACTIONS, generator=generator(4), dtype=torch.float64)
    drawn = regularize.draw(f, N, k, m, SIZE, generator(3))
    assert drawn.nu.shape == (m * N, f.columns)
    assert drawn.nu_next.shape == (k * N, f.columns)
    y, loss = run(f, batch, k, m, critic, lambda seen: target_critic(seen, noise))

    def view(image: Tensor, nu: Tensor) -> Tensor:
        return f(image[None], nu[None])

    expected_y = []
    for i in range(N):
        total = torch.zeros((), dtype=torch.float64)
        for each in range(k):
            row = each * N + i  # an action of its own for each view
            total = total + target_critic(view(batch.next_obs[i], drawn.nu_next[row]), noise[row : row + 1])[0]
        expected_y.append((batch.reward[i] + batch.discount[i] * total / k).detach())
    expected_loss = torch.zeros((), dtype=torch.float64)
    for i in range(N):
        for each in range(m):
            q = critic(view(batch.obs[i], drawn.nu[each * N + i]), batch.action[i : i + 1])[0]
            expected_loss = expected_loss + (q - expected_y[i]) ** 2 / (N * m)

    torch.testing.assert_close(y, torch.stack(expected_y), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-9)
    parameters = list(critic.parameters())
    for got, expected in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected_loss, parameters), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("k", "m"), K_AND_M)
def test_distributions_weights_and_errors_are_those_of_a_loop(k: int, m: int, weighted: bool) -> None:
    """Targets that are distributions over returns; transitions that do not all count the same."""
    atoms = 4
    per_view = torch.rand(k * N, atoms, generator=generator(0), dtype=torch.float64).softmax(1).requires_grad_()
    y = regularize.mean_over_views(per_view, N)
    assert not y.requires_grad
    for i in range(N):
        for atom in range(atoms):
            by_hand = sum(float(per_view.detach()[view * N + i, atom]) for view in range(k)) / k
            assert float(y[i, atom]) == pytest.approx(by_hand, rel=1e-12)

    batch = random_batch()
    if weighted:
        batch = batch._replace(weights=torch.rand(N, generator=generator(1), dtype=torch.float64))
    predicted = torch.rand(m * N, atoms, generator=generator(2), dtype=torch.float64).softmax(1).requires_grad_()
    cross_entropies = -(regularize.repeat(y, m) * predicted.log()).sum(1)
    loss, errors = regularize.loss(cross_entropies, batch)
    assert errors.shape == (N,)
    assert not errors.requires_grad

    expected_loss = torch.zeros((), dtype=torch.float64)
    for i in range(N):
        own = [-(y[i] * predicted[view * N + i].log()).sum() for view in range(m)]
        unweighted = sum(float(error.detach()) for error in own) / m
        assert float(errors[i]) == pytest.approx(unweighted, rel=1e-12)
        expected_loss = expected_loss + sum(own) / m * (1 if batch.weights is None else batch.weights[i]) / N
    torch.testing.assert_close(loss, expected_loss)
    (gradient,), (expected,) = (torch.autograd.grad(each, [predicted]) for each in (loss, expected_loss))
    torch.testing.assert_close(gradient, expected)


def test_views_are_laid_out_view_by_view() -> None:
    f = parse("intensity", intensity_scale=1.0)
    images = torch.arange(1, N + 1, dtype=torch.uint8)[:, None, None, None].expand(N, *SHAPE)
    nu = torch.arange(3 * N, dtype=torch.float32)[:, None]
    got = views(f, images, nu)[:, 0, 0, 0]
    expected = [(1 + i) * (1 + view * N + i) for view in range(3) for i in range(N)]
    assert got.tolist() == expected
    assert regularize.repeat(torch.arange(N), 3).tolist() == list(range(N)) * 3
    assert regularize.repeat(torch.zeros(N, 4, 5), 2).shape == (2 * N, 4, 5)


@pytest.mark.parametrize("name", NAMES)
def test_one_view_each_is_the_plain_algorithm_on_perturbed_images(name: str) -> None:
    f, batch, critic, target_critic = parse(name), random_batch(), LinearCritic(0), LinearCritic(1)
    y, loss = run(f, batch, 1, 1, critic, lambda seen: target_critic(seen, batch.action))
    drawn = regularize.draw(f, N, 1, 1, SIZE, generator(3))
    obs, next_obs = f(batch.obs, drawn.nu), f(batch.next_obs, drawn.nu_next)
    plain_y = (batch.reward + batch.discount * target_critic(next_obs, batch.action)).detach()
    plain_loss = torch.nn.functional.mse_loss(critic(obs, batch.action), plain_y)
    torch.testing.assert_close(y, plain_y)
    torch.testing.assert_close(loss, plain_loss)


@pytest.mark.parametrize(("k", "m"), K_AND_M)
def test_without_augmentation_it_is_the_plain_algorithm(k: int, m: int) -> None:
    batch, critic, target_critic = random_batch(), LinearCritic(0), LinearCritic(1)
    fixed_policy = torch.full((ACTIONS,), 0.5, dtype=torch.float64)
    y, loss = run(
        parse("none"), batch, k, m, critic, lambda seen: target_critic(seen, fixed_policy.expand(len(seen), -1))
    )
    plain_y = batch.reward + batch.discount * target_critic(batch.next_obs, fixed_policy.expand(N, -1))
    plain_loss = torch.nn.functional.mse_loss(critic(batch.obs, batch.action), plain_y.detach())
    torch.testing.assert_close(y, plain_y.detach())
    torch.testing.assert_close(loss, plain_loss)
    (gradient,) = torch.autograd.grad(loss, [critic.pixels])
    (plain_gradient,) = torch.autograd.grad(plain_loss, [critic.pixels])
    torch.testing.assert_close(gradient, plain_gradient)


def test_the_target_is_out_of_the_gradients_reach() -> None:
    f, batch, critic = parse("shift"), random_batch(), LinearCritic(0)
    learnt = batch._replace(reward=batch.reward.requires_grad_())  # as one that a network of its own gives
    y, loss = run(f, learnt, 2, 2, critic, lambda seen: critic(seen, regularize.repeat(batch.action, 2)))
    assert not y.requires_grad
    (gradient,) = torch.autograd.grad(loss, [critic.actions])
    # The gradient of the left side alone: 2/NM Σ (Q - y) a.
    drawn = regularize.draw(f, N, 2, 2, SIZE, generator(3))
    actions = regularize.repeat(batch.action, 2)
    with torch.no_grad():
        error = critic(f(batch.obs.repeat(2, 1, 1, 1), drawn.nu), actions) - y.repeat(2)
    torch.testing.assert_close(gradient, 2 * (error[:, None] * actions).mean(0))


def test_where_the_return_ended_the_next_state_does_not_count() -> None:
    batch = random_batch()
    y, _ = run(parse("shift"), batch, 2, 1, LinearCritic(), lambda seen: torch.full((len(seen),), 1e6).double())
    ended = batch.discount == 0
    torch.testing.assert_close(y[ended], batch.reward[ended])
    assert (y[~ended] > 1e5).all()


def test_all_transformations_are_drawn_independently() -> None:
    n = 4_000
    drawn = regularize.draw(parse("shift"), n, 2, 3, SIZE, generator(0))
    # Offsets of every view of the same transitions, as columns: ν first, then ν'.
    columns = torch.cat([part.view(-1, n, 2).permute(1, 0, 2).flatten(1) for part in drawn], dim=1)
    assert columns.shape == (n, (3 + 2) * 2)
    correlation = torch.corrcoef(columns.T) - torch.eye(10)
    assert float(correlation.abs().max()) < 5 / n**0.5


def test_transformations_are_of_images_of_the_given_size() -> None:
    """The furthest cutouts end at its edges, which a square would not have told apart."""
    for nu in regularize.draw(parse("cutout"), 500, 2, 3, SIZE, generator(0)):
        ends = (nu[:, :2] + nu[:, 2:])[nu[:, 2] > 0]
        assert tuple(ends.amax(0).tolist()) == SIZE


def test_no_update_repeats_the_transformations_of_another() -> None:
    g = generator(0)
    first, second = (regularize.draw(parse("shift"), 50, 2, 2, SIZE, g) for _ in range(2))
    parts = [*first, *second]
    assert all(not torch.equal(one, other) for at, one in enumerate(parts) for other in parts[:at])


def test_states_may_be_references_into_a_ring_of_frames() -> None:
    frames = torch.randint(0, 256, (30, 2, *SIZE), generator=generator(1), dtype=torch.uint8)
    slots = torch.randint(0, 30, (N, 3), generator=generator(2))
    f = parse("shift")
    nu = f.sample(2 * N, SIZE, generator(3))
    images = torch.stack([torch.cat([frames[slot] for slot in row]) for row in slots.tolist()])
    assert images.shape == (N, *SHAPE)
    assert torch.equal(views(f, StackedFrames(frames, slots), nu), views(f, images, nu))


def test_any_loss_and_states_without_pixels_will_do() -> None:
    """A Huber loss of a tabular critic on state vectors, with an augmentation of one's own."""

    class Jitter:
        columns = 1

        def sample(self, count: int, image_size: tuple[int, int], generator: Generator) -> Tensor:
            return torch.rand(count, 1, generator=generator)

        def __call__(self, images: Tensor, nu: Tensor) -> Tensor:
            return images + nu

    f = Jitter()
    states = torch.arange(12.0).view(4, 3)
    batch = Batch(states, torch.zeros(4), torch.ones(4), torch.full((4,), 0.5), states)
    drawn = regularize.draw(f, 4, 3, 2, (0, 0), generator(0))
    y = regularize.target(batch, views(f, states, drawn.nu_next).sum(1))
    jitter = drawn.nu_next.view(3, 4)
    torch.testing.assert_close(y, 1 + 0.5 * (states.sum(1) + 3 * jitter.mean(0)))
    q = views(f, states, drawn.nu).mean(1)
    loss, _ = regularize.loss(torch.nn.functional.huber_loss(q, regularize.repeat(y, 2), reduction="none"), batch)
    by_hand = [
        float(torch.nn.functional.huber_loss(states[i].mean() + drawn.nu[view * 4 + i, 0], y[i]))
        for i in range(4)
        for view in range(2)
    ]
    assert float(loss) == pytest.approx(sum(by_hand) / 8, rel=1e-5)
