"""The kernels for batches and for Adam against plain PyTorch: on a GPU, and, their own text emulated, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from drq import regularize
from drq.agents.adam import FusedAdam
from drq.augment import NoAugmentation, RandomShift, parse
from drq.engine import kernels
from drq.engine.fused import FusedEncoding, StackedEncoding
from drq.engine.kernels.adam import ELEMENTS, MAX_PARAMETERS
from drq.envs.protocol import EnvSpec
from drq.networks.encoders import PixelEncoder
from drq.replay import Replay, StackedFrames


def filled_replay(device: str, spec: EnvSpec, n_step: int, *, capacity: int = 40, added: int = 90) -> Replay:
    """Twice round its ring, in episodes of all lengths, some of which end at a time limit, some in a terminal state."""
    replay = Replay(spec, capacity, n_step=n_step, discount=0.9, device=torch.device(device))
    random = np.random.default_rng(n_step)
    left = 0
    for _ in range(added):
        if not left:
            replay.begin(random.integers(0, 256, spec.frame_shape, dtype=np.uint8))
            left = int(random.integers(1, 12))
        left -= 1
        action = int(random.integers(4)) if spec.action_kind == "discrete" else random.uniform(-1, 1, spec.action_size)
        discount = float(random.random() < 0.5) if not left else float(random.random() > 0.1)
        frame = random.integers(0, 256, spec.frame_shape, dtype=np.uint8)
        replay.add(action, float(random.normal()), discount, not left, frame)
    return replay


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("n_step", [1, 3, 10])
def test_transitions_are_the_replays(kernel_device: str, n_step: int, kind: str) -> None:
    spec = EnvSpec("toy/any", (1, 4, 4), 3, kind, 4 if kind == "discrete" else 6, 1, None)
    replay = filled_replay(kernel_device, spec, n_step)
    random = replay.draw(300, torch.Generator(kernel_device).manual_seed(1))
    assert len(replay.slots(random).unique()) == replay.sampleable  # every transition is compared
    expected, found = replay.gather(replay.slots(random)), kernels.transitions(replay, random)
    assert torch.equal(found.action, expected.action)
    assert found.action.dtype == expected.action.dtype
    torch.testing.assert_close(found.reward, expected.reward)
    torch.testing.assert_close(found.discount, expected.discount)
    for ours, theirs in ((found.obs, expected.obs), (found.next_obs, expected.next_obs)):
        assert isinstance(ours, StackedFrames)
        assert isinstance(theirs, StackedFrames)
        assert ours.frames is replay.frames
        assert torch.equal(ours.slots, theirs.slots)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("f", [RandomShift(4), NoAugmentation()], ids=["shift", "none"])
def test_stacked_views_are_those_of_algorithm_1(
    kernel_device: str, f: RandomShift | NoAugmentation, channels: int
) -> None:
    frames = torch.randint(0, 256, (9, channels, 11, 13), dtype=torch.uint8, device=kernel_device)
    states = StackedFrames(frames, torch.randint(0, 9, (5, 4), device=kernel_device))
    nu = f.sample(3 * 5, (11, 13), torch.Generator(kernel_device).manual_seed(0))
    found = kernels.stacked_views(states, nu)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, regularize.views(f, states, nu))


def optimizers(device: str, shapes: list[tuple[int, ...]]) -> tuple[FusedAdam, FusedAdam]:
    """Equal ones, the second of which uses the kernel."""
    torch.manual_seed(0)
    initial = [torch.randn(shape, device=device) for shape in shapes]
    initial = [v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for v in initial]
    plain, ours = (
        FusedAdam([nn.Parameter(value.clone()) for value in initial], 1e-2, (0.8, 0.95), 1.5e-4) for _ in range(2)
    )
    ours.descend = kernels.adam
    return plain, ours


def assert_same_steps(plain: FusedAdam, ours: FusedAdam, steps: int, *, turned: bool = False) -> None:
    for step in range(steps):
        for one, other in zip(plain.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
            gradient = torch.randn_like(one) * 10.0 ** (step - 1)
            one.grad, other.grad = gradient, gradient.contiguous() if turned else gradient.clone()
        plain.step()
        ours.step()
    for one, other in zip(plain.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        for key, value in plain.state[one].items():
            torch.testing.assert_close(ours.state[other][key], value, rtol=1e-5, atol=1e-7)


def test_adam(kernel_device: str) -> None:
    """Sizes that fill a block and do not, that are and are not divisible by four; many, few, one."""
    plain, ours = optimizers(
        kernel_device, [(8, 3, 5, 5), (2 * ELEMENTS + 5,), (), (1,), (7,), (ELEMENTS,), (50, 33), (4,)]
    )
    assert_same_steps(plain, ours, 4)


def test_adam_where_memory_is_not_aligned(kernel_device: str) -> None:
    plain, ours = optimizers(kernel_device, [(1,)])
    for optimizer in (plain, ours):
        torch.manual_seed(1)
        storage = torch.randn(40, device=kernel_device)
        optimizer.param_groups[0]["params"] = [nn.Parameter(storage[1:30])]
    assert_same_steps(plain, ours, 2)


def test_adam_with_gradients_laid_out_otherwise(kernel_device: str) -> None:
    assert_same_steps(*optimizers(kernel_device, [(6, 3, 4, 4)]), 2, turned=True)


def test_adam_with_more_parameters_than_one_launch_takes(kernel_device: str) -> None:
    assert_same_steps(*optimizers(kernel_device, [(3,)] * (MAX_PARAMETERS + 2)), 2)


def test_stacked_views_inside_compiled_code(kernel_device: str) -> None:
    f = parse("shift+intensity")
    frames = torch.randint(0, 256, (9, 1, 11, 13), dtype=torch.uint8, device=kernel_device)
    slots = torch.randint(0, 9, (5, 4), device=kernel_device)
    nu = f.sample(10, (11, 13), torch.Generator(kernel_device).manual_seed(0))
    encoding = StackedEncoding(f)

    def views(slots: torch.Tensor, nu: torch.Tensor) -> torch.Tensor:
        return encoding.views(f, StackedFrames(frames, slots), nu)

    expected = regularize.views(f, StackedFrames(frames, slots), nu)
    for made in (views, torch.compile(views, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(made(slots, nu), expected)


def test_observations_are_encoded_as_the_encoder_does(kernel_device: str) -> None:
    encoder = PixelEncoder("sac-ae", (9, 32, 30)).to(kernel_device)
    obs = torch.randint(0, 256, (2, 9, 32, 30), dtype=torch.uint8, device=kernel_device)
    with torch.no_grad():
        expected, found = encoder(obs), FusedEncoding((3, 32, 30)).seen(encoder, obs)
    assert float((found.float() - expected).norm() / expected.norm()) < 1e-2
