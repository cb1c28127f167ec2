"""How fast this machine trains, against a plain implementation in the same run."""

from drq.speed.command import SpeedArguments, speed

__all__ = ["SpeedArguments", "speed"]
