"""Augmentations against padding and cropping by hand, and against kornia."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import kornia.augmentation as kornia_augmentation
import pytest
import torch
import torch.nn.functional as F
from kornia.geometry.transform import crop_by_indices, hflip, rotate, vflip
from torch import Generator, Tensor

from drq.agents import make_agent
from drq.augment import (
    Augmentation,
    Compose,
    Cutout,
    Flip,
    Intensity,
    NoAugmentation,
    RandomShift,
    Rotate,
    parse,
)
from drq.backend import Backend
from drq.config import DQNConfig, RainbowConfig, SACConfig
from drq.envs.protocol import EnvSpec
from drq.errors import UserError

EVERY_NAME = ["none", "shift", "cutout", "hflip", "vflip", "rotate", "intensity", "shift+intensity"]
SIZES = [(84, 84), (32, 48), (61, 33)]
EVERY_OFFSET = [(dy, dx) for dy in range(-4, 5) for dx in range(-4, 5)]


def generator(seed: int = 0, device: str = "cpu") -> Generator:
    return Generator(device).manual_seed(seed)


def random_images(count: int, size: tuple[int, int] = (84, 84), channels: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, channels, *size), generator=generator(seed), dtype=torch.uint8)


# Shift.


@pytest.mark.parametrize("size", SIZES)
def test_shift_is_replicate_pad_and_crop_for_every_offset(size: tuple[int, int]) -> None:
    height, width = size
    images = random_images(len(EVERY_OFFSET), size)
    shifted = RandomShift(4)(images, torch.tensor(EVERY_OFFSET, dtype=torch.float32))
    assert shifted.dtype == torch.uint8
    padded = F.pad(images.float(), (4, 4, 4, 4), mode="replicate")
    for each, (dy, dx) in enumerate(EVERY_OFFSET):
        crop = padded[each, :, 4 + dy : 4 + dy + height, 4 + dx : 4 + dx + width]
        assert torch.equal(shifted[each].float(), crop), (dy, dx)


def test_shift_is_kornias_crop_of_kornias_padding_for_every_offset() -> None:
    images = random_images(len(EVERY_OFFSET))
    shifted = RandomShift(4)(images, torch.tensor(EVERY_OFFSET, dtype=torch.float32))
    crop = kornia_augmentation.RandomCrop((84, 84), padding=4, padding_mode="replicate", cropping_mode="slice")
    padded = crop.precrop_padding(images.float())
    corners = torch.tensor([[0, 0], [83, 0], [83, 83], [0, 83]])  # x, y, clockwise from the top left
    origins = torch.tensor([[4 + dx, 4 + dy] for dy, dx in EVERY_OFFSET])
    assert torch.equal(shifted.float(), crop_by_indices(padded, origins[:, None] + corners[None]))


@pytest.mark.parametrize("pad", [0, 1, 4, 12])
def test_shift_offsets_are_whole_uniform_and_reach_both_ends(pad: int) -> None:
    nu = RandomShift(pad).sample(20_000, (84, 84), generator())
    width = 2 * pad + 1
    counts = torch.zeros(width, width, dtype=torch.float64)
    assert torch.equal(nu, nu.round())
    assert (int(nu.min()), int(nu.max())) == (-pad, pad)
    y, x = (nu.long() + pad).unbind(1)
    counts.index_put_((y, x), torch.ones(len(nu), dtype=torch.float64), accumulate=True)
    assert (counts > 0).all()  # every pair of offsets, so the two axes are drawn apart
    cells = width**2
    chi_squared = float(((counts - 20_000 / cells) ** 2 / (20_000 / cells)).sum())
    assert chi_squared <= (cells - 1) + 5 * (2 * (cells - 1)) ** 0.5


@pytest.mark.parametrize("name", EVERY_NAME)
def test_all_frames_of_a_stack_share_one_transformation(name: str) -> None:
    f = parse(name)
    frame = random_images(64, channels=3)
    views = f(frame.repeat(1, 3, 1, 1), f.sample(64, (84, 84), generator()))
    oldest, middle, newest = views.chunk(3, dim=1)
    assert torch.equal(oldest, middle)
    assert torch.equal(middle, newest)


@pytest.mark.parametrize("name", [name for name in EVERY_NAME if name != "none"])
def test_each_image_has_a_transformation_of_its_own(name: str) -> None:
    f = parse(name)
    one = random_images(1)
    nu = f.sample(64, (84, 84), generator())
    together = f(one.expand(64, -1, -1, -1), nu)
    assert len({view.numpy().tobytes() for view in together}) > 1
    for each in range(64):
        assert torch.equal(together[each : each + 1], f(one, nu[each : each + 1]))


# Cutout.


@pytest.mark.parametrize("size", SIZES)
def test_cutout_erases_what_kornia_erases(size: tuple[int, int]) -> None:
    images = random_images(200, size).clamp(min=1)
    nu = Cutout(p=1.0).sample(200, size, generator())
    top, left, heights, widths = nu.unbind(1)
    erased = kornia_augmentation.RandomErasing(p=1.0)(
        images.float(),
        params={
            "ys": top,
            "xs": left,
            "heights": heights,
            "widths": widths,
            "values": torch.zeros(200),
            "batch_prob": torch.ones(200),
            "forward_input_shape": torch.tensor(images.shape),
        },
    )
    cut = Cutout()(images, nu)
    assert cut.dtype == torch.uint8
    assert torch.equal(cut.float(), erased)
    # The rectangle lies inside the image: as many black pixels as its sides say.
    assert torch.equal((cut[:, 0] == 0).sum((1, 2)).float(), heights * widths)


def test_cutout_is_distributed_as_kornias() -> None:
    count, size = 40_000, (84, 84)
    nu = Cutout().sample(count, size, generator())
    used = nu[:, 2] > 0
    assert torch.equal(used, nu[:, 3] > 0)
    assert float(used.float().mean()) == pytest.approx(0.5, abs=0.01)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        theirs = kornia_augmentation.RandomErasing(p=1.0).generate_parameters(torch.Size((count, 1, *size)))
    columns = (theirs["ys"], theirs["xs"], theirs["heights"], theirs["widths"])
    for ours, kornias in zip(nu[used].unbind(1), columns, strict=True):
        assert _kolmogorov_smirnov(ours, kornias) < 0.02
    top, left, h, w = nu[used].unbind(1)
    for begins, length in ((top, h), (left, w)):  # as many touch the far edge as the near one
        near, far = (float(edge.float().mean()) for edge in (begins == 0, begins + length == 84))
        assert far == pytest.approx(near, rel=0.2)
    assert _kolmogorov_smirnov(h * w, theirs["heights"] * theirs["widths"]) < 0.02
    area = h * w / (84 * 84)
    assert 0.015 < float(area.min()) < 0.03 < 0.31 < float(area.max()) < 0.35
    ratio = h / w
    assert 0.27 < float(ratio.min()) < 0.33 < 3.0 < float(ratio.max()) < 3.7
    assert float((ratio > 1).float().mean()) == pytest.approx(0.5, abs=0.03)


def _kolmogorov_smirnov(one: Tensor, other: Tensor) -> float:
    """The largest distance between two samples' distribution functions."""
    points = torch.cat([one, other]).unique()
    below = [torch.searchsorted(sample.sort().values, points, right=True) / len(sample) for sample in (one, other)]
    return float((below[0] - below[1]).abs().max())


# Flips, rotation, intensity, none.


@pytest.mark.parametrize(("name", "oracle"), [("hflip", hflip), ("vflip", vflip)])
def test_flips_are_kornias(name: str, oracle: object) -> None:
    assert callable(oracle)
    images = random_images(300, (32, 48))
    f = parse(name)
    nu = f.sample(300, (32, 48), generator())
    flipped = f(images, nu)
    assert flipped.dtype == torch.uint8
    chosen = nu[:, 0] > 0
    assert torch.equal(flipped[chosen], oracle(images[chosen]))
    assert torch.equal(flipped[~chosen], images[~chosen])
    assert 10 < int(chosen.sum()) < 60
    often = f.sample(50_000, (32, 48), generator(1))
    assert float(often.mean()) == pytest.approx(0.1, abs=0.005)


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid")  # of sides of one pixel
@pytest.mark.parametrize("size", [*SIZES, (2, 3), (3, 2), (1, 4), (4, 1)])
def test_rotation_is_kornias(size: tuple[int, int]) -> None:
    angles = torch.tensor([-5.0, -1.7, 0.0, 0.3, 5.0, 30.0, 90.0])
    images = random_images(len(angles), size)
    rotated = Rotate()(images, angles[:, None])
    torch.testing.assert_close(rotated, rotate(images.float(), angles), atol=0.02, rtol=0)
    torch.testing.assert_close(rotated[2], images[2].float(), atol=0.02, rtol=0)


def test_a_positive_angle_turns_counter_clockwise() -> None:
    image = torch.zeros(1, 1, 9, 9)
    image[0, 0, 4, 8] = 255.0  # the middle of the right edge
    turned = Rotate()(image, torch.tensor([[90.0]]))
    assert divmod(int(turned[0, 0].argmax()), 9) == (0, 4)  # is then the middle of the top


def test_rotation_angles_are_uniform_within_five_degrees() -> None:
    nu = Rotate().sample(50_000, (84, 84), generator())
    assert -5.0 <= float(nu.min()) < -4.99 < 4.99 < float(nu.max()) <= 5.0
    uniform = torch.linspace(-5, 5, 50_001)
    assert _kolmogorov_smirnov(nu[:, 0], uniform) < 0.01


@pytest.mark.parametrize("scale", [0.05, 0.1])
def test_intensity_is_the_papers_formula(scale: float) -> None:
    images = random_images(4)
    r = torch.tensor([-2.0, 0.0, 0.5, 2.0])
    scaled = parse("intensity", intensity_scale=scale)(images, r[:, None])
    for image, number, got in zip(images.double(), r.tolist(), scaled, strict=True):
        torch.testing.assert_close(got.double(), image * (1.0 + scale * number), rtol=1e-6, atol=0)
    assert float(scaled.max()) > 255.0  # not clamped


def test_intensity_clips_a_standard_normal_at_two() -> None:
    nu = Intensity().sample(100_000, (84, 84), generator())[:, 0]
    assert (float(nu.min()), float(nu.max())) == (-2.0, 2.0)
    # Beyond two lie 2.275% of a standard normal on each side.
    assert float((nu == 2.0).float().mean()) == pytest.approx(0.02275, abs=0.002)
    assert float((nu == -2.0).float().mean()) == pytest.approx(0.02275, abs=0.002)
    normal = torch.distributions.Normal(0.0, 1.0).icdf(torch.linspace(1e-6, 1 - 1e-6, 100_001)).clamp(-2, 2)
    assert _kolmogorov_smirnov(nu, normal) < 0.01


def test_none_hands_the_images_back() -> None:
    images = random_images(3)
    f = NoAugmentation()
    nu = f.sample(3, (84, 84), generator())
    assert nu.shape == (3, 0)
    assert f(images, nu) is images


# All of them.


@pytest.mark.parametrize("name", EVERY_NAME)
def test_runs_on_the_device_of_the_data(name: str, device: str) -> None:
    source = generator(5, device)
    f = parse(name)
    images = random_images(6, (40, 40)).to(device)
    before = images.clone()
    nu = f.sample(6, (40, 40), source)
    views = f(images, nu)
    assert nu.shape == (6, f.columns)
    assert nu.dtype == torch.float32
    assert nu.device.type == views.device.type == device
    assert views.shape == images.shape
    assert torch.equal(images, before)
    torch.testing.assert_close(views.cpu(), f(images.cpu(), nu.cpu()), atol=0.02, rtol=0)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_the_generator_alone_decides(name: str) -> None:
    f = parse(name)
    torch.manual_seed(1)
    first = f.sample(50, (84, 84), generator(7))
    torch.manual_seed(2)
    assert torch.equal(first, f.sample(50, (84, 84), generator(7)))
    if f.columns:
        assert not torch.equal(first, f.sample(50, (84, 84), generator(8)))


def test_parameters_follow_the_names() -> None:
    assert parse("shift") == RandomShift(4)
    assert parse("shift", pad=7) == RandomShift(7)
    assert parse("intensity", intensity_scale=0.05) == Intensity(0.05)
    assert parse("intensity") == Intensity() == Intensity(0.1)
    assert parse("shift+intensity") == Compose((RandomShift(4), Intensity(0.1)))
    assert parse("cutout") == Cutout(0.5, (0.02, 0.33), (0.3, 3.3))
    assert (parse("hflip"), parse("vflip")) == (Flip(False, 0.1), Flip(True, 0.1))
    assert parse("rotate") == Rotate(5.0)


@pytest.mark.parametrize("config", [SACConfig, DQNConfig, RainbowConfig])
def test_agents_augment_as_their_settings_say_images_of_their_size_and_no_states(config: type[Any]) -> None:
    name = "shift+intensity+cutout"
    settings = config(augmentation=name, pad=7, intensity_scale=0.3, encoder="d4pg", hidden_dim=8)
    spec = EnvSpec("toy/tiny", (3, 30, 40), 1, "continuous" if config is SACConfig else "discrete", 2, 1, None)
    agent = make_agent(spec, settings, Backend(), 0)
    draws = agent.draw(generator())
    nu = getattr(draws, "transformations", draws).nu
    f = Compose((RandomShift(7), Intensity(0.3), Cutout()))
    assert torch.equal(nu, f.sample(len(nu), (30, 40), generator()))
    assert agent.f == f
    of_states = make_agent(replace(spec, frame_shape=(5,)), settings, Backend(), 0)
    assert of_states.f == NoAugmentation()


def test_the_leftmost_comes_first() -> None:
    images = random_images(8, (40, 40))
    shift, cut = RandomShift(4), Cutout()
    nu = torch.tensor([[4.0, -4.0, 10.0, 12.0, 9.0, 7.0]]).repeat(8, 1)
    shifted_then_cut = parse("shift+cutout")(images, nu)
    cut_then_shifted = parse("cutout+shift")(images, nu.roll(4, dims=1))
    assert torch.equal(shifted_then_cut, cut(shift(images, nu[:, :2]), nu[:, 2:]))
    assert torch.equal(cut_then_shifted, shift(cut(images, nu[:, 2:]), nu[:, :2]))
    assert not torch.equal(shifted_then_cut, cut_then_shifted)


def test_a_composition_draws_each_part_and_keeps_their_columns_apart() -> None:
    f = parse("rotate+shift+none+intensity+hflip")
    nu = f.sample(2_000, (40, 40), generator())
    assert nu.shape == (2_000, f.columns) == (2_000, 1 + 2 + 0 + 1 + 1)
    assert 4.9 < float(nu[:, 0].abs().max()) <= 5.0
    assert set(nu[:, 1:3].flatten().tolist()) == set(range(-4, 5))
    assert float(nu[:, 3].abs().max()) == 2.0
    assert set(nu[:, 4].tolist()) == {0.0, 1.0}


# Names.

CHOICES = "Choose from none, shift, cutout, hflip, vflip, rotate, intensity, joined by '+'."


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("shfit", f"There is no augmentation 'shfit'. Did you mean 'shift'? {CHOICES}"),
        ("shift+rotation", f"There is no augmentation 'rotation'. Did you mean 'rotate'? {CHOICES}"),
        ("blur", f"There is no augmentation 'blur'. {CHOICES}"),
        ("shift+", f"There is no augmentation ''. {CHOICES}"),
        ("", f"There is no augmentation ''. {CHOICES}"),
        ("shift intensity", f"There is no augmentation 'shift intensity'. Did you mean 'intensity'? {CHOICES}"),
    ],
)
def test_a_wrong_name(name: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(name)
    assert str(raised.value) == sentence


OWN = """
class Brighter:
    columns = 1

    def sample(self, count, image_size, generator):
        import torch
        return 10 * torch.ones(count, 1)

    def __call__(self, images, nu):
        return images + nu[:, :, None, None]

class Cropped(Brighter):
    def __call__(self, images, nu):
        return images[..., 1:]

class Flat(Brighter):
    def __call__(self, images, nu):
        return images * nu[:, :, :, 5]

brighter = Brighter()
number = 3
"""


TWENTY = EnvSpec("toy/any", (3, 20, 20), 3, "continuous", 2, 1, None)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`my_augmentations` in the current folder, which an installed command does not have on its path."""
    (tmp_path / "my_augmentations.py").write_text(OWN)
    (tmp_path / "broken_augmentations.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "my_augmentations", raising=False)


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize("reference", ["my_augmentations:Brighter", "my_augmentations:brighter"])
def test_an_augmentation_of_ones_own(reference: str) -> None:
    images = random_images(4, (20, 20))
    f: Augmentation = parse(reference)
    assert torch.equal(f(images, f.sample(4, (20, 20), generator())), images + 10.0)
    both = parse(f"shift+{reference}")
    nu = both.sample(4, (20, 20), generator())
    assert torch.equal(both(images, nu), RandomShift()(images, nu[:, :2]) + 10.0)
    make_agent(TWENTY, SACConfig(augmentation=f"shift+{reference}", hidden_dim=8), Backend(), 0)  # not refused


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Cropped", r"draws \(2, 3\) and gives \(2, 9, 20, 19\) for two images: make it .* give \(2, 9, 20, 20\)"),
        ("Flat", r"failed at my_augmentations.py, line 18 \(IndexError: too many indices.*\): mend that first"),
    ],
)
def test_one_that_does_not_work_is_refused_before_training(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_agent(TWENTY, SACConfig(augmentation=f"shift+my_augmentations:{name}"), Backend(), 0)


REMEDY = "write my_module:my_augmentation, with my_module in the current folder or installed."


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        (
            "no_such_module:f",
            "The augmentation 'no_such_module:f' cannot be imported "
            f"(ModuleNotFoundError: No module named 'no_such_module'): {REMEDY}",
        ),
        (
            "my_augmentations:darker",
            "The augmentation 'my_augmentations:darker' cannot be imported "
            f"(AttributeError: module 'my_augmentations' has no attribute 'darker'): {REMEDY}",
        ),
        (
            "broken_augmentations:f",
            "The augmentation 'broken_augmentations:f' cannot be imported "
            f"(ZeroDivisionError: division by zero): {REMEDY}",
        ),
        (
            ":f",
            f"The augmentation ':f' cannot be imported (ValueError: Empty module name): {REMEDY}",
        ),
        (
            "my_augmentations:number",
            "'my_augmentations:number' is not an augmentation: "
            "give it columns, sample and __call__ as docs/extending.md shows.",
        ),
    ],
)
def test_a_wrong_reference(reference: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(f"shift+{reference}")
    assert str(raised.value) == sentence
