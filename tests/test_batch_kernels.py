"""The kernels for batches against plain PyTorch: on a GPU, and, their own text emulated, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drq.augment import Augmentation, Compose, Intensity, RandomShift, parse
from drq.backend import Backend, StackedFrames
from drq.engine import kernels
from drq.engine.backend import FrameViews
from drq.engine.kernels import runtime
from drq.envs.protocol import EnvSpec
from drq.networks.encoders import PixelEncoder
from drq.replay import Replay, UniformSampler
from emulation import Recorded, fast_backend, two_gigabytes


def filled_replay(
    device: str, spec: EnvSpec, n_step: int, *, capacity: int = 40, added: int = 90, early: bool = False
) -> Replay:
    """Twice round its ring, in episodes of all lengths, some of which end at a time limit, some in a terminal state."""
    replay = Replay(spec, capacity, n_step=n_step, discount=0.9, early_bootstrap=early, backend=Backend(device))
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


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("n_step", [1, 3, 10])
def test_transitions_are_the_replays(kernel_device: str, n_step: int, kind: str, early: bool) -> None:
    actions = 4 if kind == "discrete" else 6
    spec = EnvSpec("toy/any", (1, 4, 4), 3, kind, actions, 1, None, zero_stack=n_step == 3)  # type: ignore[arg-type]
    replay = filled_replay(kernel_device, spec, n_step, early=early)
    random = replay.draw(300, torch.Generator(kernel_device).manual_seed(1))
    choice = UniformSampler().choose(replay, random)
    assert len(choice.slots.unique()) == replay.sampleable  # every transition is compared
    expected, found = replay.gather(choice), kernels.transitions(replay, random)
    assert found.slots is not None
    assert torch.equal(found.slots, choice.slots)
    assert torch.equal(found.action, expected.action)
    assert found.action.dtype == expected.action.dtype
    torch.testing.assert_close(found.reward, expected.reward)
    torch.testing.assert_close(found.discount, expected.discount)
    for ours, theirs in ((found.obs, expected.obs), (found.next_obs, expected.next_obs)):
        assert isinstance(ours, StackedFrames)
        assert isinstance(theirs, StackedFrames)
        assert ours.frames is replay.rings.frames
        assert torch.equal(ours.slots, theirs.slots)


def otherwise(slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers of another type, not next to each other in memory."""
    return torch.stack([slots.to(dtype), torch.full_like(slots, -1, dtype=dtype)], dim=-1)[..., 0]


INTEGERS = pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)


@INTEGERS
def test_transitions_of_slots_that_lie_otherwise(kernel_device: str, dtype: torch.dtype) -> None:
    """As a sampler of one's own may choose them."""
    spec = EnvSpec("toy/any", (1, 4, 4), 3, "discrete", 4, 1, None)
    replay = filled_replay(kernel_device, spec, 3)
    choice = UniformSampler().choose(replay, replay.draw(7, torch.Generator(kernel_device)))
    expected = replay.gather(choice)
    found = kernels.transitions(replay, choice._replace(slots=otherwise(choice.slots, dtype)))
    assert torch.equal(found.action, expected.action)
    torch.testing.assert_close(found.reward, expected.reward)


def assert_views_are_those_of_algorithm_1(device: str, f: Augmentation, channels: int, stack: int) -> torch.Tensor:
    frames = torch.randint(0, 256, (9, channels, 11, 13), dtype=torch.uint8, device=device)
    states = StackedFrames(frames, torch.randint(0, 9, (5, stack), device=device))
    nu = f.sample(3 * 5, (11, 13), torch.Generator(device).manual_seed(0))
    return assert_same_views(f, states, nu)


def assert_same_views(f: Augmentation, states: StackedFrames, nu: torch.Tensor) -> torch.Tensor:
    """Bit for bit."""
    device = nu.device.type
    ours = fast_backend(device)
    found, expected = ours.views(ours.augmentation(f), states, nu), Backend(device).views(f, states, nu)
    assert isinstance(found, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    return found


IN_ONE_LAUNCH = pytest.mark.parametrize("name", ["shift", "none", "shift+intensity", "none+intensity"])


@pytest.mark.parametrize(("channels", "stack"), [(1, 4), (3, 3), (3, 4), (1, 1)])
@IN_ONE_LAUNCH
def test_stacked_views_are_those_of_algorithm_1(kernel_device: str, name: str, channels: int, stack: int) -> None:
    f = parse(name, intensity_scale=0.3)
    found = assert_views_are_those_of_algorithm_1(kernel_device, f, channels, stack)
    assert found.is_contiguous(memory_format=torch.channels_last)


class HalfIntensity(Intensity):
    """What somebody may derive."""

    def __call__(self, images: torch.Tensor, nu: torch.Tensor) -> torch.Tensor:
        return super().__call__(images, nu / 2)


class Backwards(RandomShift):
    def __call__(self, images: torch.Tensor, nu: torch.Tensor) -> torch.Tensor:
        return super().__call__(images, -nu)


@pytest.mark.parametrize(
    "f",
    [
        parse("shift+cutout"),
        parse("shift+intensity+cutout"),
        parse("shift+intensity+intensity"),
        parse("shift+hflip+intensity"),
        Compose((parse("shift"), HalfIntensity())),
        Compose((Backwards(), parse("intensity"))),
        Backwards(),
    ],
)
def test_what_an_augmentation_does_after_the_kernel(kernel_device: str, f: Augmentation) -> None:
    assert_views_are_those_of_algorithm_1(kernel_device, f, 1, 4)


class Fine:
    """Draws in double precision, which then all of ν is in."""

    columns = 1

    def sample(self, count: int, _size: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
        return torch.rand(count, 1, generator=generator, device=generator.device, dtype=torch.float64)

    def __call__(self, images: torch.Tensor, nu: torch.Tensor) -> torch.Tensor:
        return images * (nu[:, :, None, None] < 0.5)


def test_views_of_numbers_in_double_precision(kernel_device: str) -> None:
    assert_views_are_those_of_algorithm_1(kernel_device, Compose((parse("shift"), Fine())), 1, 4)


@INTEGERS
def test_views_of_slots_that_lie_otherwise(kernel_device: str, dtype: torch.dtype) -> None:
    frames = torch.randint(0, 256, (9, 3, 5, 6), dtype=torch.uint8, device=kernel_device)
    slots = otherwise(torch.randint(0, 9, (4, 3), device=kernel_device), dtype)
    f = parse("shift")
    assert_same_views(f, StackedFrames(frames, slots), f.sample(8, (5, 6), torch.Generator(kernel_device)))


def test_more_views_than_a_launch_has_room_for(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    kernel = runtime.kernel
    monkeypatch.setattr(runtime, "kernel", lambda name, *rest: asked.append(name) or kernel(name, *rest))
    frames = torch.randint(0, 256, (9, 1, 2, 2), dtype=torch.uint8, device=kernel_device)
    states = StackedFrames(frames, torch.randint(0, 9, (2**15, 2), device=kernel_device))
    f = parse("shift")
    assert_same_views(f, states, f.sample(2**16, (2, 2), torch.Generator(kernel_device)))
    assert asked == []


def test_views_of_more_than_two_gigabytes_of_frames(kernel_device: str) -> None:
    frames = two_gigabytes(kernel_device, (3, 8, 8))
    frames[-2:] = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    slots = torch.tensor([[0, len(frames) - 2, len(frames) - 1]], device=kernel_device)
    f = parse("shift")
    assert_same_views(f, StackedFrames(frames, slots), f.sample(2, (8, 8), torch.Generator(kernel_device)))


@IN_ONE_LAUNCH
def test_stacked_views_are_made_in_one_launch(kernel_device: str, name: str) -> None:
    backend = fast_backend(kernel_device)
    f = backend.augmentation(parse(name))
    frames = torch.zeros(9, 1, 11, 13, dtype=torch.uint8, device=kernel_device)
    states = StackedFrames(frames, torch.zeros(5, 4, dtype=torch.int64, device=kernel_device))
    nu = f.sample(10, (11, 13), torch.Generator(kernel_device))
    with Recorded() as recorded:
        backend.views(f, states, nu)
    assert recorded.names == ["drq::stacked_views"]


@pytest.mark.parametrize("name", ["shift", "shift+intensity", "none+intensity", "shift+hflip"])
def test_stacked_views_inside_compiled_code(kernel_device: str, name: str) -> None:
    backend = fast_backend(kernel_device)
    f = backend.augmentation(parse(name))
    frames = torch.randint(0, 256, (9, 1, 11, 13), dtype=torch.uint8, device=kernel_device)
    slots = torch.randint(0, 9, (5, 4), device=kernel_device)
    nu = f.sample(10, (11, 13), torch.Generator(kernel_device).manual_seed(0))

    def views(slots: torch.Tensor, nu: torch.Tensor) -> torch.Tensor:
        made = backend.views(f, StackedFrames(frames, slots), nu)
        assert isinstance(made, torch.Tensor)
        return made

    expected = Backend(kernel_device).views(f, StackedFrames(frames, slots), nu)
    for made in (views, torch.compile(views, backend="aot_eager", fullgraph=True)):
        assert torch.equal(made(slots, nu), expected)


def test_observations_are_encoded_as_the_encoder_does(kernel_device: str) -> None:
    encoder = PixelEncoder("sac-ae", (9, 32, 30), Backend()).to(kernel_device)
    obs = torch.randint(0, 256, (2, 9, 32, 30), dtype=torch.uint8, device=kernel_device)
    backend = fast_backend(kernel_device)
    backend.fused, backend._frame_shape = True, (3, 32, 30)
    with torch.no_grad():
        expected, found = encoder(obs), backend.encode(encoder, obs)
    assert float((found.float() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("name", ["shift", "none"])
def test_views_that_are_never_written_out_are_encoded_as_those_that_are(kernel_device: str, name: str) -> None:
    """From the replay's frames to features: of all views, of some of them, and by two encoders at once."""
    f = parse(name)
    encoder, other = (PixelEncoder("d4pg", (6, 20, 23), Backend()).to(kernel_device) for _ in range(2))
    frames = torch.randint(0, 256, (9, 3, 20, 23), dtype=torch.uint8, device=kernel_device)
    states = StackedFrames(frames, torch.randint(0, 9, (3, 2), device=kernel_device))
    nu = f.sample(2 * 3, (20, 23), torch.Generator(kernel_device).manual_seed(0))
    ours, plain = fast_backend(kernel_device), Backend(kernel_device)
    ours.fused = True
    views, expected_views = ours.views(f, states, nu), plain.views(f, states, nu)
    assert isinstance(views, FrameViews)
    assert isinstance(expected_views, torch.Tensor)

    def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.shape == expected.shape
        assert float((found.float() - expected).norm() / expected.norm()) < 1e-2

    with torch.no_grad():
        for part, expected_part in zip(views.chunk(2), expected_views.chunk(2), strict=True):
            assert_close(ours.encode(encoder, part), encoder(expected_part))
        both = ours.encode_with_both(encoder, other, views)
        for found, each in zip(both, (encoder, other), strict=True):
            assert_close(found, each(expected_views))
