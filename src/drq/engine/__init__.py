"""Devices, precision, compilation, CUDA graphs, kernels: the only room that knows about them."""

from drq.engine.backend import FastBackend, lay_out
from drq.engine.drawing import DrawnStack, draws_frames
from drq.engine.kernels import KernelError
from drq.engine.learner import Actor, Learner, to_action
from drq.engine.settings import EngineSettings, choose_device

__all__ = [
    "Actor",
    "DrawnStack",
    "EngineSettings",
    "FastBackend",
    "KernelError",
    "Learner",
    "choose_device",
    "draws_frames",
    "lay_out",
    "to_action",
]
