"""Devices, precision, compilation, CUDA graphs, kernels: the only room that knows about them."""

from drq.engine.backend import FastBackend, lay_out
from drq.engine.drawing import DrawnStack, draws_frames
from drq.engine.faults import in_words, lacks_code, lacks_memory
from drq.engine.kernels import KernelError
from drq.engine.learner import HostActor, Learner, to_action
from drq.engine.settings import EngineSettings, choose_device
from drq.engine.snapshot import Snapshot

__all__ = [
    "DrawnStack",
    "EngineSettings",
    "FastBackend",
    "HostActor",
    "KernelError",
    "Learner",
    "Snapshot",
    "choose_device",
    "draws_frames",
    "in_words",
    "lacks_code",
    "lacks_memory",
    "lay_out",
    "to_action",
]
