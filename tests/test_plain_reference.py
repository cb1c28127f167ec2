"""The plain reference computes what our agent computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drq.agents import make_agent
from drq.agents.sac import SAC
from drq.config import EngineConfig, SACConfig
from drq.engine import EngineSettings
from drq.replay import Choice, UniformSampler
from drq.speed.plain_reference import PAD, HostReplay, PlainDraws, PlainDrQ, shift
from drq.speed.updates import random_replay
from test_speed import BATCH, CPU, plain_backend, tiny


def shift_oracle(image: np.ndarray[Any, Any], dy: int, dx: int) -> np.ndarray[Any, Any]:
    height, width = image.shape[1:]
    padded = np.pad(image, ((0, 0), (PAD, PAD), (PAD, PAD)), mode="edge")
    return padded[:, PAD + dy : PAD + dy + height, PAD + dx : PAD + dx + width]


def test_plain_shift_pads_and_crops() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (81, 3, 11, 13)).astype(np.float32)
    offsets = np.array([(dy, dx) for dy in range(-PAD, PAD + 1) for dx in range(-PAD, PAD + 1)])
    found = shift(torch.from_numpy(images), torch.from_numpy(offsets))
    expected = np.stack([shift_oracle(*each) for each in zip(images, *offsets.T, strict=True)])
    np.testing.assert_array_equal(found.numpy(), expected)


def test_plain_draws_every_offset_and_every_transition() -> None:
    memory = HostReplay((9, 36, 36), 2, capacity=20)
    plain = PlainDrQ(memory, CPU, batch_size=2000, hidden_dim=16, k=1, m=3)
    draws = plain.draw()
    assert draws.shifts.shape == (3, 2000, 2)
    assert draws.next_shifts.shape == (1, 2000, 2)
    assert set(draws.shifts.unique().tolist()) == set(range(-PAD, PAD + 1))
    assert set(draws.indices.tolist()) == set(range(20))


NETWORKS = ("critic", "target", "actor")
CONVOLVED = 11  # 36 pixels after four convolutions


def as_theirs(parameter: Tensor) -> Tensor:
    """Our convolved features are ordered (row, column, channel), theirs (channel, row, column)."""
    parameter = parameter.detach().clone()
    if parameter.shape[-1:] != (32 * CONVOLVED**2,):
        return parameter
    return parameter.unflatten(1, (CONVOLVED, CONVOLVED, 32)).permute(0, 3, 1, 2).flatten(1)


class Pair:
    """Our agent and the plain reference with the same weights and the same transitions."""

    def __init__(self, k: int, m: int, *, copy_per_view: bool = True) -> None:
        work = tiny("planet", "dmc/cheetah-run", k=k, m=m)
        assert isinstance(work.config.agent, SACConfig)
        torch.manual_seed(1)  # the same transitions whichever tests came before
        backend = plain_backend()
        self.replay = random_replay(work.config, backend)
        agent = make_agent(self.replay.spec, work.config.agent, backend, seed=3)
        assert isinstance(agent, SAC)
        self.agent = agent
        batch = self.replay.gather(Choice(torch.arange(self.replay.capacity)))
        memory = HostReplay((9, 36, 36), 6, self.replay.capacity)
        memory.obs[...] = batch.obs.tensor().numpy()  # type: ignore[union-attr]
        memory.next_obs[...] = batch.next_obs.tensor().numpy()  # type: ignore[union-attr]
        memory.action[...] = batch.action.numpy()
        memory.reward[:, 0] = batch.reward.numpy()
        memory.not_done[:, 0] = batch.discount.numpy() / 0.99
        self.plain = PlainDrQ(memory, CPU, batch_size=BATCH, k=k, m=m, hidden_dim=16, copy_per_view=copy_per_view)
        with torch.no_grad():
            for theirs, ours in zip(self.plain_parameters(), self.our_parameters(), strict=True):
                theirs.copy_(ours)
        self.generator = torch.Generator().manual_seed(5)
        self.doubled = False

    def double(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has both compute in float64. In float32 they soon part: Adam's first step is little more than the gradient's
        sign, and that is sometimes rounding's."""
        monkeypatch.setattr(Tensor, "float", Tensor.double)
        for module in (self.agent.modules, *(getattr(self.plain, name) for name in NETWORKS)):
            module.double()
        self.plain.log_alpha.data = self.plain.log_alpha.double().detach()
        memory = self.plain.replay
        memory.action, memory.reward = memory.action.astype(np.float64), memory.reward.astype(np.float64)
        batch = self.replay.gather(Choice(torch.arange(self.replay.capacity)))
        memory.not_done = batch.discount.double().numpy()[:, None] / 0.99
        self.doubled = True

    def plain_parameters(self) -> list[Tensor]:
        parts = [getattr(self.plain, name) for name in NETWORKS]
        return [self.plain.log_alpha, *(p for part in parts for p in part.parameters())]

    def our_parameters(self) -> list[Tensor]:
        """Copies of ours, in the plain reference's order."""
        parts = [getattr(self.agent, name) for name in NETWORKS]
        ours = [self.agent.temperature.log_alpha, *(p for part in parts for p in part.parameters())]
        return [as_theirs(parameter) for parameter in ours]

    def update(self, *, wrong_shift: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """One update of both with the same random numbers; their losses and ours."""
        drawn = self.agent.draw(self.generator)
        slots = UniformSampler().choose(self.replay, self.replay.draw(BATCH, self.generator)).slots
        phase = self.agent.phase(self.plain.updates)
        batch = self.replay.gather(Choice(slots))
        if self.doubled:
            noise = {"target_noise": drawn.target_noise.double(), "actor_noise": drawn.actor_noise.double()}
            drawn = drawn._replace(**noise)
            numbers = {name: getattr(batch, name).double() for name in ("action", "reward", "discount")}
            batch = batch._replace(**numbers)
        ours, _ = self.agent.update(batch, drawn, phase)
        k, m = self.plain.k, self.plain.m
        shifts = drawn.transformations.nu.long().view(m, BATCH, 2)
        theirs = self.plain.update(
            PlainDraws(
                slots.numpy(),
                shifts.flip(-1) if wrong_shift else shifts,
                drawn.transformations.nu_next.long().view(k, BATCH, 2),
                drawn.target_noise.view(k, BATCH, -1),
                drawn.actor_noise,
            )
        )
        return theirs, ours


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    difference = sum(float((f - e).square().sum()) for f, e in zip(found, expected, strict=True))
    return (difference / sum(float(e.square().sum()) for e in expected)) ** 0.5


@pytest.mark.parametrize(("k", "m"), [(2, 2), (1, 1), (3, 1), (1, 3)])
def test_plain_reference_and_our_agent_compute_the_same_function(
    k: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(k, m)
    pair.double(monkeypatch)
    before = pair.our_parameters()
    for number in range(4):
        theirs, ours = pair.update()
        assert set(theirs) == ({"critic_loss", "actor_loss"} if number % 2 == 0 else {"critic_loss"})
        for name, loss in theirs.items():
            torch.testing.assert_close(loss, ours[name], rtol=1e-9, atol=1e-9)
        if number == 1:  # no actor's loss has gone through the critic since
            found = [p.grad for p in pair.plain.critic.parameters()]
            expected = [as_theirs(p.grad) for p in pair.agent.critic.parameters()]  # type: ignore[arg-type]
            assert relative_error(found, expected) < 1e-8  # type: ignore[arg-type]
    theirs_moved, ours_moved = (
        [(after - start).detach() for after, start in zip(parameters, before, strict=True)]
        for parameters in (pair.plain_parameters(), pair.our_parameters())
    )
    assert all(move.any() for move in ours_moved)
    assert relative_error(theirs_moved, ours_moved) < 1e-6


def test_copying_images_once_changes_nothing() -> None:
    pair, other = Pair(2, 2), Pair(2, 2, copy_per_view=False)
    other.plain.replay = pair.plain.replay
    draws = pair.plain.draw()
    torch.testing.assert_close(pair.plain.update(draws), other.plain.update(draws), rtol=0, atol=0)


def test_the_comparison_would_notice_another_augmentation() -> None:
    theirs, ours = Pair(2, 2).update(wrong_shift=True)
    assert abs(float(theirs["critic_loss"] - ours["critic_loss"])) > 1e-4 * float(ours["critic_loss"])


def test_its_convolutions_are_chosen_by_time_and_ours_by_rule() -> None:
    """Timed against each other, convolutions are others in each process, and with them the last bits."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul.allow_tf32
    engine = EngineSettings.resolve(EngineConfig(precision="tf32", kernels="off"), torch.device("cuda"), SACConfig())
    plain = PlainDrQ(HostReplay((9, 36, 36), 2, capacity=4), CPU, batch_size=2, hidden_dim=16)
    with cudnn.flags(enabled=True):  # puts back at its end what is set within
        plain.apply_globally()
        assert (cudnn.benchmark, cudnn.deterministic) == (True, False)
        engine.apply_globally()
        assert (cudnn.benchmark, cudnn.deterministic) == (False, True)
    torch.backends.cuda.matmul.allow_tf32 = products
