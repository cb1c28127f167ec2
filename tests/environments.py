"""What tests of environments share: what a machine must have to draw, a player, and a model that changes its colour."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from drq.envs import Action, EnvSpec
from drq.envs.raycast import compiler
from drq.envs.rendering import choose_backend, missing_libraries

needs_gl = pytest.mark.skipif(bool(missing_libraries(choose_backend())), reason="no OpenGL libraries")
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


def random_action(spec: EnvSpec, rng: np.random.Generator) -> Action:
    if spec.action_kind == "discrete":
        return int(rng.integers(spec.action_size))
    return rng.uniform(-1, 1, spec.action_size).astype(np.float32)


def paint_red(physics: Any) -> None:
    """Gives a task of the control suite another model, as some do themselves."""
    model = copy.copy(physics.model)
    model.geom_rgba[:] = [1, 0, 0, 1]
    model.mat_rgba[:] = [1, 0, 0, 1]
    physics._reload_from_model(model)


def red_pixels(frame: NDArray[Any]) -> int:
    red, green, _ = frame.astype(int)
    return int((red > green + 100).sum())
