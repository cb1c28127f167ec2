"""The kernels for batches and for Adam against plain PyTorch: on a GPU, and, their own text emulated, on the CPU."""

from __future__ import annotations

import copy
import functools
import math
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drq.augment import Augmentation, Compose, Intensity, RandomShift, parse
from drq.backend import Average, Backend, StackedFrames
from drq.engine import EngineSettings, FastBackend, kernels
from drq.engine.adam import FusedAdam
from drq.engine.backend import FrameViews
from drq.engine.graphs import WARMUPS, Captured
from drq.engine.kernels import runtime
from drq.engine.kernels.adam import ELEMENTS, MAX_AVERAGED, MAX_PARAMETERS
from drq.envs.protocol import EnvSpec
from drq.networks.encoders import PixelEncoder
from drq.replay import Replay, UniformSampler


def fast_backend(device: str) -> FastBackend:
    """With kernels, emulated or not."""
    settings = EngineSettings(torch.device(device), "float32", False, False, kernels=True, eval_process=False)
    backend = FastBackend(settings)
    backend.kernels = True
    return backend


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
    shape = 2**31 // (3 * 8 * 8) + 2, 3, 8, 8
    if kernel_device == "cpu":
        frames = torch.from_numpy(np.zeros(shape, np.uint8))  # of which only what is written is ever there
    else:
        frames = torch.zeros(shape, dtype=torch.uint8, device=kernel_device)
    frames[-2:] = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    slots = torch.tensor([[0, shape[0] - 2, shape[0] - 1]], device=kernel_device)
    f = parse("shift")
    assert_same_views(f, StackedFrames(frames, slots), f.sample(2, (8, 8), torch.Generator(kernel_device)))


class Recorded(TorchDispatchMode):
    """Operators that do more than look at memory otherwise: on a GPU, launches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not operator.is_view and operator.namespace != "profiler":
            self.names.append(operator.name())
        return operator(*args, **kwargs or {})


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


def optimizers(
    device: str, shapes: list[tuple[int, ...]], weight_decay: float = 0.0
) -> tuple[FusedAdam, FusedAdam]:
    """Equal ones, the second of which uses the kernel."""
    torch.manual_seed(0)
    ours_on = torch.device(device)
    initial = [torch.randn(shape, device=device) for shape in shapes]
    initial = [v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for v in initial]
    rates = 1e-2, (0.8, 0.95), 1.5e-4
    parameters, others = ([nn.Parameter(value.clone()) for value in initial] for _ in range(2))
    plain = FusedAdam(parameters, *rates, weight_decay=weight_decay)
    ours = FusedAdam(others, *rates, lambda: kernels.Adam(ours_on, decay=weight_decay > 0), weight_decay)
    return plain, ours


def test_parameters_in_double_precision_are_left_to_pytorch(kernel_device: str) -> None:
    """As the logarithm of a temperature is that numpy has taken."""
    plain, ours = (nn.Parameter(torch.tensor(np.log(0.1), device=kernel_device)) for _ in range(2))
    backend = fast_backend(kernel_device)
    for parameter, on in ((plain, Backend(kernel_device)), (ours, backend)):
        optimizer = on.adam([parameter], 0.1)
        for _ in range(3):
            on.descend(optimizer, (parameter + 2) ** 2, [parameter])
    assert ours.dtype == torch.float64
    assert ours.item() != np.log(0.1)
    torch.testing.assert_close(ours, plain)


def assert_same_steps(
    plain: FusedAdam, ours: FusedAdam, steps: int, *, max_norm: float | None = None, turned: bool = False
) -> None:
    for step in range(steps):
        for one, other in zip(plain.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
            gradient = torch.randn_like(one) * 10.0 ** (step - 1)
            one.grad, other.grad = gradient, gradient.contiguous() if turned else gradient.clone()
        if max_norm is None:
            plain.step()
            ours.step()
        else:
            torch.testing.assert_close(ours.clip_and_step(max_norm), plain.clip_and_step(max_norm))
    for one, other in zip(plain.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        for key, value in plain.state[one].items():
            # Means are sums whose parts may cancel: what is lost then is a share of the parts.
            torch.testing.assert_close(ours.state[other][key], value, rtol=1e-5, atol=1e-6)


SHAPES = [(8, 3, 5, 5), (2 * ELEMENTS + 5,), (), (1,), (7,), (ELEMENTS,), (50, 33), (4,)]
"""That fill a block and do not, that are and are not divisible by four; many, few, one."""
NORM = 0.1 * sum(math.prod(shape) for shape in SHAPES) ** 0.5
"""Of the first gradients, about; later ones are ten times as large each."""
CLIPPING = pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])


@pytest.mark.parametrize("max_norm", [None, 1e-3, NORM, 10 * NORM, 1e6])
def test_adam(kernel_device: str, max_norm: float | None) -> None:
    """Clipped far below the gradients' norm, near it, and far above it, which is not at all."""
    assert_same_steps(*optimizers(kernel_device, SHAPES), 4, max_norm=max_norm)


@CLIPPING
def test_adam_with_decay(kernel_device: str, max_norm: float | None) -> None:
    plain, ours = optimizers(kernel_device, SHAPES, weight_decay=0.5)
    _, without = optimizers(kernel_device, SHAPES)
    assert_same_steps(plain, ours, 4, max_norm=max_norm)
    for each in (ours, without):
        for parameter in each.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in without.param_groups[0]["params"]]
    without.step()
    after = [parameter.detach().clone() for parameter in without.param_groups[0]["params"]]
    _, decayed = optimizers(kernel_device, SHAPES, weight_decay=0.5)
    for parameter in decayed.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    decayed.step()
    for parameter, began, ended in zip(decayed.param_groups[0]["params"], before, after, strict=True):
        if parameter.ndim > 1:
            torch.testing.assert_close(parameter.detach(), ended - 1e-2 * 0.5 * began, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(parameter, ended)  # to the bit: a vector does not decay


@pytest.mark.parametrize("tau", [0.005, 0.7, 1.0])
@CLIPPING
def test_adam_with_an_average_and_rounded_copies(kernel_device: str, max_norm: float | None, tau: float) -> None:
    """As PyTorch, which steps, then moves the average, then rounds. Some parameters have a copy in bfloat16, and their
    gradients with it; one has no gradient at all, and its average moves all the same."""
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [*SHAPES, *[(6,)] * MAX_AVERAGED]
    initial = [torch.randn(shape, device=kernel_device) for shape in shapes]
    initial = [v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for v in initial]
    mine, theirs = ([nn.Parameter(value.clone()) for value in initial] for _ in range(2))
    followers, expected = ([value * 0.5 for value in initial] for _ in range(2))
    rounded = {w: w.detach().bfloat16() for each in (mine, followers) for w in each[2::2]}
    rates = 1e-2, (0.8, 0.95), 1.5e-4
    plain = FusedAdam(theirs, *rates, weight_decay=0.5, average=Average(expected, tau))
    kernel = functools.partial(kernels.Adam, torch.device(kernel_device), decay=True, average=True)
    ours = FusedAdam(mine, *rates, kernel, 0.5, Average(followers, tau), rounded)
    for _ in range(3):
        for one, other in zip(theirs[1:], mine[1:], strict=True):
            ours.leaf(other).grad = gradient = torch.randn_like(ours.leaf(other))
            one.grad = gradient.to(torch.float32, copy=True)
        norms = [optimizer.clip_and_step(max_norm) for optimizer in (plain, ours)]
        torch.testing.assert_close(*norms)
    pairs = [*zip(mine, theirs, strict=True), *zip(followers, expected, strict=True)]
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for weight, copied in rounded.items():
        assert torch.equal(copied, weight.bfloat16())


@pytest.mark.parametrize("blocks", [1, 2, 300])
def test_the_norm_of_few_and_many_blocks(kernel_device: str, blocks: int) -> None:
    """More than a block has threads, too: the last block adds up several sums with each of them."""
    _, ours = optimizers(kernel_device, [(ELEMENTS * (blocks - 1) + 1,)])
    (parameter,) = ours.param_groups[0]["params"]
    for _ in range(2):
        parameter.grad = torch.randn_like(parameter)
        norm = ours.clip_and_step(1.0)
        torch.testing.assert_close(norm.double(), parameter.grad.double().norm())


def test_a_limit_that_is_not_reached_changes_no_bit(kernel_device: str) -> None:
    _, free = optimizers(kernel_device, SHAPES)
    _, limited = optimizers(kernel_device, SHAPES)
    for one, other in zip(free.param_groups[0]["params"], limited.param_groups[0]["params"], strict=True):
        one.grad = other.grad = torch.randn_like(one)
    free.step()
    limited.clip_and_step(1e6)
    for one, other in zip(free.param_groups[0]["params"], limited.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_clipping_gradients_without_a_direction(kernel_device: str, value: float) -> None:
    plain, ours = optimizers(kernel_device, [(9,), (3,)])
    for optimizer in (plain, ours):
        first, second = optimizer.param_groups[0]["params"]
        first.grad, second.grad = torch.zeros_like(first), torch.full_like(second, value)
    expected = plain.clip_and_step(1.0)
    torch.testing.assert_close(ours.clip_and_step(1.0), expected, equal_nan=True)
    for one, other in zip(plain.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(other, one, equal_nan=True)


def test_equal_steps_give_equal_bits(kernel_device: str) -> None:
    def trained() -> list[torch.Tensor]:
        _, ours = optimizers(kernel_device, [*SHAPES, *[(3,)] * MAX_PARAMETERS])
        norms = []
        for _ in range(3):
            for parameter in ours.param_groups[0]["params"]:
                parameter.grad = torch.randn_like(parameter)
            norms.append(ours.clip_and_step(1.0))
        return [*norms, *ours.param_groups[0]["params"]]

    first = trained()
    for _ in range(3):
        for one, other in zip(first, trained(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("max_norm", "launches"), [(None, ["adam"]), (1.0, ["gradient_norm", "adam"])])
def test_launches_of_a_step(
    kernel_device: str, max_norm: float | None, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    kernel = runtime.kernel

    def counting(name: str, *args: Any) -> Any:
        def launch(*arguments: Any) -> None:
            made.append(name)
            inner.launch(*arguments)

        inner = kernel(name, *args)
        return types.SimpleNamespace(launch=launch)

    monkeypatch.setattr(runtime, "kernel", counting)
    plain, ours = optimizers(kernel_device, SHAPES)
    assert_same_steps(plain, ours, 1)  # makes the moments
    made.clear()
    with Recorded() as recorded:
        ours.step() if max_norm is None else ours.clip_and_step(max_norm)
    assert made == launches
    assert set(recorded.names) <= {"aten::empty.memory_format"}


def test_nothing_but_the_state_of_adam_is_saved(kernel_device: str) -> None:
    """A checkpoint of one way of stepping goes on in the other."""
    plain, ours = optimizers(kernel_device, [(9,), (3,)])
    assert_same_steps(plain, ours, 2, max_norm=1.0)
    assert ours.state_dict().keys() == plain.state_dict().keys()
    assert ours.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    plain.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert_same_steps(plain, ours, 2, max_norm=1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not kernels.available(), reason="needs a CUDA GPU with bfloat16")
def test_steps_as_a_graph() -> None:
    """The norm and the counted steps are those of the replay, and the blocks' counter goes on."""
    _, eager = optimizers("cuda", SHAPES)
    _, replayed = optimizers("cuda", SHAPES)
    gradients = [torch.randn_like(parameter) for parameter in eager.param_groups[0]["params"]]
    for optimizer in (eager, replayed):
        for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
            parameter.grad = gradient
    graph = Captured(lambda: replayed.clip_and_step(1.0), [])
    for _ in range(WARMUPS):
        eager.clip_and_step(1.0)
    for factor in (2.0, 0.1):
        torch._foreach_mul_(gradients, factor)
        assert torch.equal(graph.replay(), eager.clip_and_step(1.0))
    for one, other in zip(eager.param_groups[0]["params"], replayed.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)
        assert eager.state[one]["step"] == replayed.state[other]["step"] == WARMUPS + 2


@CLIPPING
def test_adam_where_memory_is_not_aligned(kernel_device: str, max_norm: float | None) -> None:
    plain, ours = optimizers(kernel_device, [(1,)])
    for optimizer in (plain, ours):
        torch.manual_seed(1)
        storage = torch.randn(40, device=kernel_device)
        optimizer.param_groups[0]["params"] = [nn.Parameter(storage[1:30])]
    assert_same_steps(plain, ours, 2, max_norm=max_norm)


@CLIPPING
def test_adam_with_gradients_laid_out_otherwise(kernel_device: str, max_norm: float | None) -> None:
    assert_same_steps(*optimizers(kernel_device, [(6, 3, 4, 4)]), 2, max_norm=max_norm, turned=True)


@CLIPPING
def test_adam_with_more_parameters_than_one_launch_takes(kernel_device: str, max_norm: float | None) -> None:
    assert_same_steps(*optimizers(kernel_device, [(3,)] * (2 * MAX_PARAMETERS + 2)), 2, max_norm=max_norm)


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
