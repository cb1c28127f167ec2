"""Encoders and heads."""

from drq.networks.encoders import (
    ENCODERS,
    Convolution,
    PixelEncoder,
    StateEncoder,
    check_encoder,
    make_encoder,
    orthogonal_init,
    xavier_init,
)
from drq.networks.heads import Actor, Policy, TwinCritic, WideLinear

__all__ = [
    "ENCODERS",
    "Actor",
    "Convolution",
    "PixelEncoder",
    "Policy",
    "StateEncoder",
    "TwinCritic",
    "WideLinear",
    "check_encoder",
    "make_encoder",
    "orthogonal_init",
    "xavier_init",
]
