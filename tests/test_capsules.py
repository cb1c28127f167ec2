"""Limbs of the control suite as light as in the paper's time (`--env.physics paper`)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import drq
from drq.config import EnvConfig
from drq.envs import make
from drq.envs.dmc import ControlSuite
from drq.errors import UserError
from runs import small

STATE = EnvConfig(observation="state")
THEN = EnvConfig(observation="state", physics="paper")
DENSITY = 1000.0


def model(name: str, config: EnvConfig) -> Any:
    domain, task = name.split("-")
    return ControlSuite(domain, task, config).model


def fields(model: Any) -> dict[str, Any]:
    return {name: value for name in dir(model) if isinstance(value := getattr(model, name, None), np.ndarray)}


@pytest.mark.parametrize("limb", ["torso", "right_thigh", "right_leg", "left_foot"])
def test_a_capsule_weighs_as_a_cylinder_half_a_radius_longer_at_both_ends(limb: str) -> None:
    now, then = model("walker-walk", STATE), model("walker-walk", THEN)
    (geom,) = (i for i in range(now.ngeom) if now.geom_bodyid[i] == now.body(limb).id)
    radius, length = now.geom_size[geom][0], 2 * now.geom_size[geom][1]
    mass = DENSITY * math.pi * radius**2 * (length + radius)
    across, along = mass * (3 * radius**2 + (length + radius) ** 2) / 12, mass * radius**2 / 2
    found = then.body(limb)
    assert found.mass == pytest.approx(mass, rel=1e-5)
    assert sorted(found.inertia) == pytest.approx(sorted([across, across, along]), rel=1e-5)
    exact = DENSITY * math.pi * radius**2 * (length + 4 / 3 * radius)  # with both half spheres
    assert now.body(limb).mass == pytest.approx(exact, rel=1e-5)


def test_limbs_weigh_what_was_published_then() -> None:
    """Gym's Hopper has a thigh and a leg of the same size; of its version 2 they are in every table of masses."""
    then = model("walker-walk", THEN)
    assert then.body("right_thigh").mass == pytest.approx(3.92699082, rel=1e-6)
    assert then.body("right_leg").mass == pytest.approx(2.71433605, rel=1e-6)


def test_all_that_follows_from_masses_follows() -> None:
    now, then = model("finger-spin", STATE), model("finger-spin", THEN)
    assert then.body_subtreemass[0] == pytest.approx(then.body_mass.sum())
    harder = now.dof_M0 / then.dof_M0
    assert harder.tolist() == pytest.approx([1.1, 1.16, 1.19], abs=0.07)
    hinge = int(now.joint("hinge").dofadr[0])
    assert (then.dof_invweight0 / now.dof_invweight0)[hinge] == pytest.approx(harder[hinge], rel=1e-3)


@pytest.mark.parametrize("name", ["finger-spin", "walker-walk", "cheetah-run"])
def test_nothing_but_weight_changes(name: str) -> None:
    """Neither what collides nor how the camera sees it."""
    now, then = (model(name, config) for config in (STATE, THEN))
    before, after = fields(now), fields(then)
    changed = {field for field, value in before.items() if not np.array_equal(value, after[field])}
    assert {"body_mass", "body_inertia", "dof_M0"} <= changed
    of_weight = {"body_mass", "body_inertia", "body_ipos", "body_iquat", "body_subtreemass", "body_invweight0"}
    of_weight |= {"dof_M0", "dof_invweight0", "dof_length", "actuator_acc0", "cam_poscom0", "light_poscom0"}
    for field in changed - of_weight:
        np.testing.assert_allclose(after[field], before[field], rtol=1e-9, atol=1e-12, err_msg=field)
    for statistic in ("extent", "center", "meansize"):
        assert np.array_equal(getattr(now.stat, statistic), getattr(then.stat, statistic))


def test_a_mass_that_the_file_sets_stays() -> None:
    now, then = model("cheetah-run", STATE), model("cheetah-run", THEN)
    assert then.body_mass.sum() == pytest.approx(now.body_mass.sum())
    assert then.body("torso").mass[0] > now.body("torso").mass[0]  # of whom less is half spheres


def test_without_capsules_nothing_changes() -> None:
    now, then = fields(model("lqr-lqr_2_1", STATE)), fields(model("lqr-lqr_2_1", THEN))
    for field, value in now.items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(then[field], value, rtol=1e-9, atol=1e-12, err_msg=field)


def test_a_stroke_spins_the_spinner_faster() -> None:
    """What it is about: the same force for the same time."""
    reached = []
    for config in (STATE, THEN):
        simulator = ControlSuite("finger", "spin", config)
        simulator.begin(1)
        hinge = int(simulator.model.joint("hinge").dofadr[0])
        simulator.data.qvel[:] = 0
        simulator.data.qfrc_applied[hinge] = -1.0
        simulator.advance(np.zeros(2, np.float32))
        reached.append(float(simulator.data.qvel[hinge]))
    assert reached[1] / reached[0] == pytest.approx(1.19, abs=0.03)


def test_a_run_keeps_it(tmp_path: Path) -> None:
    config = small(tmp_path / "run", "dmc/finger-spin", steps=60, env=THEN)
    drq.train(config, quiet=True)
    policy = drq.load(tmp_path / "run")
    assert policy.config.env.physics == "paper"
    drq.export(tmp_path / "run", tmp_path / "spin.drq")
    assert drq.load(tmp_path / "spin.drq").config.env.physics == "paper"


def test_what_has_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"cannot be worked out, as it has meshes: leave out --env\.physics"):
        make("dmc/dog-walk", THEN, 1)
    with pytest.raises(UserError, match=r"--env\.physics paper is for the control suite, not toy/reach: leave it out"):
        make("toy/reach", EnvConfig(physics="paper"), 1)


def test_the_page_says_how_much_heavier_limbs_are_now() -> None:
    page = (Path(__file__).parent.parent / "docs/fidelity.md").read_text().partition("## The weight of limbs")[2]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+)[^|]*\|$", page, flags=re.M)
    tasks = {"finger": "spin", "walker": "walk", "hopper": "hop", "ball_in_cup": "catch"}
    tasks |= {"reacher": "easy", "cheetah": "run", "cartpole": "swingup"}
    assert [domain for domain, *_ in rows] == list(tasks)
    for domain, *told in rows:
        now, then = (model(f"{domain}-{tasks[domain]}", config) for config in (STATE, THEN))
        most = [
            float(np.max(getattr(now, field)[first:] / getattr(then, field)[first:]))
            for field, first in (("body_mass", 1), ("body_inertia", 1), ("dof_M0", 0))
        ]
        assert [f"{ratio:.2f}" for ratio in most] == told
    for unchanged in ("pendulum-swingup", "swimmer-swimmer6", "fish-swim", "point_mass-easy", "lqr-lqr_2_1"):
        now, then = (model(unchanged, config) for config in (STATE, THEN))
        np.testing.assert_allclose(now.dof_M0, then.dof_M0, rtol=1e-9)
