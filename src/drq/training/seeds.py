"""Everything random on the host follows from the run's seed, a purpose and a number, so that nothing need be kept."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from drq.envs.protocol import Action, EnvSpec


class Purpose(IntEnum):
    """What a seed is for. The values are part of what a run is: never renumber them."""

    WEIGHTS = 0
    UPDATES = 1
    EPISODE = 2
    RANDOM_ACTION = 3
    EVALUATION = 4
    EVALUATION_EPISODE = 5


def seed_for(seed: int, purpose: Purpose, *numbers: int) -> int:
    """A 31-bit seed, statistically independent for every purpose and number."""
    return int(np.random.SeedSequence([seed, purpose, *numbers]).generate_state(1)[0] >> 1)


def random_action(spec: EnvSpec, seed: int, agent_step: int) -> Action:
    """The uniformly random action of one seed step."""
    rng = np.random.default_rng(seed_for(seed, Purpose.RANDOM_ACTION, agent_step))
    if spec.action_kind == "discrete":
        return int(rng.integers(spec.action_size))
    return rng.uniform(-1.0, 1.0, spec.action_size).astype(np.float32)
