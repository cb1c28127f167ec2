"""How fast this machine trains, against a plain implementation in the same run."""

from drq.speed.command import SpeedArguments, measure, speed, to_json
from drq.speed.results import SpeedReport, host_memory

__all__ = ["SpeedArguments", "SpeedReport", "host_memory", "measure", "speed", "to_json"]
