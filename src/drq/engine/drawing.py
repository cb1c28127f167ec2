"""Frames that an environment hands over undrawn, drawn on the GPU."""

from __future__ import annotations

from drq.engine import kernels
from drq.engine.settings import EngineSettings


def draws_frames(engine: EngineSettings) -> bool:
    """Whether the engine can draw the control suite's frames itself (`--env.render cuda`)."""
    return engine.kernels and kernels.available()
