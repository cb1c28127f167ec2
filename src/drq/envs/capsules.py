"""Limbs as light as when the published curves were recorded.

MuJoCo works out masses and moments of inertia from shapes. Until version 2.1.0 it took a capsule for a cylinder that is
longer by half a radius at both ends; from 2.1.1 (December 2021) on it counts the two half spheres exactly, as its
changelog says. The suite's models are the same files, but most of their limbs are capsules: those of finger, hopper and
walker are 2 to 10% heavier since, and up to a third harder to turn.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from drq.errors import UserError

LOADING = Lock()
"""Held from loading a model until it is lightened: MuJoCo writes out the last one that the process has loaded."""
_OF_BODIES = "body_mass", "body_inertia", "body_ipos", "body_iquat"
_SEEN = "extent", "center", "meansize"
"""Statistics of a model that drawing depends on."""
_LIGHT: dict[str, Any] = {}
"""Models as they were then, by task."""


def lighten(physics: Any, task: str) -> None:
    """Gives the bodies of dm_control's physics, the last that was loaded, the masses and inertias of that time."""
    from mujoco import MjData, mj_setConst

    model = physics.model.ptr
    if task not in _LIGHT:  # an evaluation has ten of one task
        _LIGHT[task] = _compiled_as_then(physics, task)
    for name in _OF_BODIES:
        getattr(model, name)[:] = getattr(_LIGHT[task], name)
    # What follows from them. It also works out anew what the model's file says of its size.
    seen = {name: np.copy(getattr(model.stat, name)) for name in _SEEN}
    mj_setConst(model, MjData(model))
    for name, value in seen.items():
        setattr(model.stat, name, value)


def _compiled_as_then(physics: Any, task: str) -> Any:
    """The model with cylinders in place of its capsules: another shape, and that time's inertia."""
    from dm_control.mujoco.wrapper import core
    from mujoco import MjSpec, mjtGeom

    model = physics.model.ptr
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.xml")
        core.save_last_parsed_model_to_xml(str(file), physics.model)
        try:
            spec = MjSpec.from_file(str(file))
            total = spec.compile().body_mass.sum()
        except ValueError as error:  # files beside the model's own, as dog has
            raise UserError(
                f"The inertia that {task} had in the paper's time cannot be worked out, as it has meshes: "
                "leave out --env.physics."
            ) from error
    if not np.isclose(total, model.body_mass.sum(), rtol=1e-4):  # the file set it, which is not written out
        spec.compiler.settotalmass = model.body_mass.sum()
    for geom in spec.geoms:
        if geom.type == mjtGeom.mjGEOM_CAPSULE:
            geom.type = mjtGeom.mjGEOM_CYLINDER
            radius, half_length, _ = geom.size
            geom.size = radius, half_length + radius / 2, 0.0
    return spec.compile()
