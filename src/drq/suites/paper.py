"""The paper's tables and figures as suites.

Where the paper leaves a choice open, the choice is written beside the suite that makes it.
"""

from __future__ import annotations

from itertools import product

from drq import presets
from drq.envs import FAMILIES
from drq.suites.suite import Setting, Suite

THREE_TASKS = ("dmc/cartpole-swingup", "dmc/cheetah-run", "dmc/walker-walk")
"""Where the paper shows three tasks without naming them."""

PLANET_TASKS = tuple(presets.PLANET_ACTION_REPEAT)

DREAMER_TASKS = (
    *("dmc/ball_in_cup-catch", "dmc/cartpole-balance", "dmc/cartpole-balance_sparse", "dmc/cartpole-swingup"),
    *("dmc/cartpole-swingup_sparse", "dmc/cheetah-run", "dmc/finger-spin", "dmc/hopper-hop", "dmc/hopper-stand"),
    *("dmc/pendulum-swingup", "dmc/reacher-easy", "dmc/reacher-hard"),
    *("dmc/walker-run", "dmc/walker-stand", "dmc/walker-walk"),
)

ENCODER_TITLES = {"sac-ae": "SAC-AE", "nature": "Nature", "dreamer": "Dreamer", "impala": "IMPALA", "d4pg": "D4PG"}

AUGMENTATION_TITLES = {
    "shift": "Random shift",
    "cutout": "Cutout",
    "hflip": "Horizontal flip",
    "vflip": "Vertical flip",
    "rotate": "Rotate",
    "intensity": "Intensity",
}

# Plain SAC has no views to average: without augmentation they would only repeat each other.
NO_AUGMENTATION = {"agent.augmentation": "none", "agent.k": 1, "agent.m": 1}

TEN_SEEDS = tuple(range(1, 11))


def _ablation(name: str, shows: str, *settings: Setting) -> Suite:
    return Suite(name, shows, "ablation", THREE_TASKS, settings, TEN_SEEDS, steps=500_000)


def _views(k: int, m: int) -> Setting:
    return Setting(f"K={k} M={m}", {"agent.k": k, "agent.m": m})


def _encoders() -> tuple[Setting, ...]:
    """The figure's augmented half is random shifts alone, K = M = 1: it comes before the paper averages views."""
    shift = {"agent.augmentation": "shift", "agent.k": 1, "agent.m": 1}
    return tuple(
        Setting(f"{title}, {name}", {"agent.encoder": encoder, **augmentation})
        for (name, augmentation), (encoder, title) in product(
            (("no augmentation", NO_AUGMENTATION), ("random shift", shift)), ENCODER_TITLES.items()
        )
    )


def _robustness() -> tuple[Setting, ...]:
    return tuple(
        Setting(
            f"batch {batch}, lr {rate:g}, temperature {temperature:g}",
            {"agent.batch_size": batch, "agent.learning_rate": rate, "agent.init_temperature": temperature},
        )
        for batch, rate, temperature in product((128, 256, 512), (1e-4, 5e-4, 1e-3, 5e-3), (0.005, 0.01, 0.05, 0.1))
    )


def _data_efficiency() -> tuple[Setting, ...]:
    """The targets and the actor move every 2nd update, however many updates an agent step has."""
    updates = {"1 x 512": (1, 512), "4 x 128": (4, 128)}
    return tuple(
        Setting(f"{system}, {name}", {"agent.updates_per_step": count, "agent.batch_size": batch, **augmentation})
        for (system, augmentation), (name, (count, batch)) in product(
            (("SAC", NO_AUGMENTATION), ("DrQ", {})), updates.items()
        )
    )


_ALL = (
    Suite(
        "planet",
        "the PlaNet benchmark: table at 100k and 500k env steps, and figure",
        preset="planet",
        tasks=PLANET_TASKS,
        settings=(Setting("DrQ"),),
        seeds=TEN_SEEDS,
        steps=500_000,  # one run serves both columns: scores at 100k are read off on the way
    ),
    Suite(
        "dreamer",
        "the Dreamer benchmark: 15 tasks, action repeat 2",
        preset="dreamer",
        tasks=DREAMER_TASKS,
        settings=(Setting("DrQ"),),
        seeds=TEN_SEEDS,
        steps=1_000_000,  # as far as the published figures and their peers are compared
    ),
    Suite(
        "atari100k",
        "Atari 100k: 26 games, Efficient DQN with and without DrQ",
        preset="atari100k",
        tasks=tuple(f"atari/{game}" for game in FAMILIES["atari"].scores),
        settings=(Setting("Eff. DQN+DrQ"), Setting("Eff. DQN", {"agent.augmentation": "none"})),
        seeds=(1, 2, 3, 4, 5),
        steps=100_000,
    ),
    _ablation("encoders", "over-fitting: five encoders with and without random shifts", *_encoders()),
    _ablation(
        "versions",
        "what each part of DrQ adds: SAC, then random shifts, target views, loss views",
        *(Setting("SAC", NO_AUGMENTATION), _views(1, 1), _views(2, 1), _views(2, 2)),
    ),
    _ablation(
        "augmentations",
        "six image augmentations in DrQ K=2 M=2",  # the paper does not say which K and M: its final ones
        *(Setting(title, {"agent.augmentation": name}) for name, title in AUGMENTATION_TITLES.items()),
    ),
    _ablation(
        "km",
        "the grid of K and M",
        *(_views(k, m) for k, m in product((1, 2, 4), (1, 2, 4))),  # the text names no values
    ),
    Suite(
        "robustness",
        "batch size x learning rate x initial temperature",
        preset="planet",
        tasks=("dmc/walker-walk", "dmc/cartpole-swingup", "dmc/finger-spin"),
        settings=_robustness(),
        seeds=(1, 2, 3),
        steps=500_000,
    ),
    Suite(
        "data-efficiency",
        "1 update of 512 against 4 of 128 at 100k env steps, with and without augmentation",
        preset="planet",
        tasks=THREE_TASKS,
        settings=_data_efficiency(),
        seeds=TEN_SEEDS,
        steps=100_000,
    ),
    _ablation(
        "frozen-encoder",
        "random convolutions with augmentation against trained ones without",
        Setting("DrQ, frozen encoder", {"agent.freeze_encoder": True}),
        Setting("SAC, trained encoder", NO_AUGMENTATION),
        Setting("DrQ, trained encoder"),
    ),
    Suite(
        "state",
        "SAC State: the upper bound, from the simulator's state",
        preset="state",
        tasks=PLANET_TASKS,
        settings=(Setting("SAC State", NO_AUGMENTATION),),
        seeds=TEN_SEEDS,
        steps=500_000,
    ),
)

SUITES = {suite.name: suite for suite in _ALL}
"""The paper's suites by name."""
