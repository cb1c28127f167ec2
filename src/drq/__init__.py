"""DrQ: train agents from pixels.

    import drq
    result = drq.train("toy/reach")
    policy = drq.load(result.dir)
    action = policy.act(image)

The public names are imported when they are first used, so that `drq --help` is quick and `drq doctor` can report a
package that is missing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drq.agents import Agent, make_agent
    from drq.agents.sac import SAC
    from drq.augment import parse as augmentation
    from drq.backend import Backend, Views
    from drq.config import (
        DQNConfig,
        EngineConfig,
        EnvConfig,
        EvalConfig,
        RainbowConfig,
        ReplayConfig,
        SACConfig,
        TrainConfig,
    )
    from drq.errors import UserError
    from drq.presets import preset
    from drq.training.callbacks import Callback, RunView
    from drq.training.components import describe
    from drq.training.export import export
    from drq.training.policy import TrainedPolicy, evaluate, load, wrap
    from drq.training.run import TrainResult, train

    __version__: str

_HOMES = {
    "drq.agents": ("Agent", "make_agent"),
    "drq.agents.sac": ("SAC",),
    "drq.backend": ("Backend", "Views"),
    "drq.augment": ("augmentation",),
    "drq.config": (
        *("DQNConfig", "EngineConfig", "EnvConfig", "EvalConfig"),
        *("RainbowConfig", "ReplayConfig", "SACConfig", "TrainConfig"),
    ),
    "drq.errors": ("UserError",),
    "drq.presets": ("preset",),
    "drq.training.callbacks": ("Callback", "RunView"),
    "drq.training.components": ("describe",),
    "drq.training.run": ("TrainResult", "train"),
    "drq.training.export": ("export",),
    "drq.training.policy": ("TrainedPolicy", "evaluate", "load", "wrap"),
}

__all__ = [
    "SAC",
    "Agent",
    "Backend",
    "Callback",
    "DQNConfig",
    "EngineConfig",
    "EnvConfig",
    "EvalConfig",
    "RainbowConfig",
    "ReplayConfig",
    "RunView",
    "SACConfig",
    "TrainConfig",
    "TrainResult",
    "TrainedPolicy",
    "UserError",
    "Views",
    "augmentation",
    "describe",
    "evaluate",
    "export",
    "load",
    "make_agent",
    "preset",
    "train",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), "parse" if name == "augmentation" else name)
    raise AttributeError(f"module 'drq' has no attribute {name!r}")


def _version() -> str:
    # Not above: it takes three times as long as all that is, and a Ctrl-C meanwhile would show a trace.
    from importlib import metadata

    try:
        return metadata.version("drq")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
