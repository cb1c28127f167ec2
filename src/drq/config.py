"""Every setting of a run. The paper's values are the defaults; what departs from them does so in `presets.py`.

`agent_step`: one decision, one stored transition. `env_step` = agent_step x action repeat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Fixed, Suppress, arg

from drq.errors import UserError

Render = Literal["auto", "paper", "fast", "ray", "cuda"]


@dataclass(frozen=True)
class EnvConfig:
    """The task as the agent sees it."""

    observation: Annotated[Literal["pixels", "state"], arg(aliases=["--observation"])] = "pixels"
    """Images, or the simulator's state vector (dmc and vector-valued gym tasks): the paper's "SAC State"."""
    action_repeat: int | None = None
    """Env steps per agent step, rewards summed over them. Unset: the preset's value for the task."""
    image_size: int = 84
    """Height and width of an observation in pixels."""
    frame_stack: int = 3
    """Consecutive frames stacked into one observation."""
    camera: int | None = None
    """Camera of a control-suite task. Unset: 0, and 2 for quadruped."""
    render: Render = "auto"
    """Control suite: `paper` is dm_control's own pixels, `fast` those with a smaller shadow map, `ray` needs no OpenGL.
    `cuda` is `ray` inside the GPU's program; `auto` the fastest that this machine has (docs/fidelity.md)."""
    physics: Literal["current", "paper"] = "current"
    """Control suite: with `paper` limbs weigh what MuJoCo made of them in the paper's time (docs/fidelity.md)."""
    no_op_steps: bool = False
    """Atari: a game begins with 0 to 29 agent steps, not 0 to 30 frames, of no action, as in much published code."""
    zero_stack: bool = False
    """Atari: a new stack has zeros, not its first frame again, and a lost life makes a new one.
    Much published code does so."""
    max_episode_steps: int | None = None
    """Time limit of an episode in env steps. Unset: the task's own."""
    image_key: str | None = None
    """Which image a gym task's agent sees, where observations are a Dict."""
    kwargs: str = "{}"
    """Arguments for a gym task's environment, as JSON or as Python has them: '{"friction": 0.5, "size": (64, 48)}'."""
    wrap: tuple[str, ...] = ()
    """Wrappers of your own around a gym task's environment, the innermost first: my_module:Wrapper."""
    own_process: bool = False
    """A process for each environment, of evaluations too: for what cannot live twice in one, or not in threads."""


@dataclass(frozen=True)
class AgentConfig:
    """What every agent has, whatever it learns with: its own settings come after."""

    augmentation: str = "shift"
    """Image transformation f: shift, cutout, hflip, vflip, rotate, intensity, none, my_module:Mine; several: f+g."""
    k: int = 2
    """Views of the next observation averaged in the target (K)."""
    m: int = 2
    """Views of the observation averaged in the loss (M). K = M = 1 is RAD; augmentation none is no DrQ."""
    batch_size: int = 512
    """Transitions in a mini-batch (N)."""
    discount: float = 0.99
    """Discount factor gamma."""
    n_step: int = 1
    """Length of the return before the bootstrap."""
    seed_steps: int = 1000
    """Agent steps with uniformly random actions before the first update."""
    updates_per_step: float = 1
    """Updates after every agent step; 0.5 is one after every second. Rules such as every 2nd count updates."""
    encoder: str = "sac-ae"
    """Convolutions: sac-ae (the paper's for control), nature (for Atari), dreamer, impala or d4pg."""


@dataclass(frozen=True)
class SACConfig(AgentConfig):
    """Soft actor-critic, regularised by DrQ."""

    learning_rate: float = 1e-3
    """Adam's learning rate for the critic, the actor and the temperature."""
    tau: float = 0.01
    """Rate of the target network's moving average."""
    target_every: int = 2
    """Updates between two moves of the target network."""
    actor_every: int = 2
    """Updates between two updates of the actor and the temperature."""
    init_temperature: float = 0.1
    """Initial entropy temperature alpha."""
    target_entropy: float | None = None
    """Entropy the temperature steers towards. Unset: minus the number of action dimensions."""
    log_std_min: float = -10.0
    """Lower bound of the policy's log standard deviation."""
    log_std_max: float = 2.0
    """Upper bound of the policy's log standard deviation."""
    freeze_encoder: bool = False
    """Leave the convolutions at their random initial values."""
    feature_dim: int = 50
    """Size of the normalised feature vector that actor and critic each compute from the convolutions."""
    hidden_dim: int = 1024
    """Hidden units of actor and critic."""
    pad: int = 4
    """Random shift: largest offset in pixels."""
    intensity_scale: float = 0.1
    """Intensity: standard deviation of the factor (the paper's text)."""


@dataclass(frozen=True)
class DiscreteConfig(AgentConfig):
    """What agents of discrete actions have. The paper's Atari table."""

    augmentation: str = "shift+intensity"
    """Image transformation f: shift, cutout, hflip, vflip, rotate, intensity, none, my_module:Mine; several: f+g."""
    k: int = 1
    """Views of the next observation averaged in the target (K)."""
    m: int = 1
    """Views of the observation averaged in the loss (M)."""
    batch_size: int = 32
    """Transitions in a mini-batch."""
    learning_rate: float = 1e-4
    """Adam's learning rate."""
    adam_beta1: float = 0.9
    """Adam's beta 1."""
    adam_beta2: float = 0.999
    """Adam's beta 2."""
    adam_eps: float = 1.5e-4
    """Adam's epsilon."""
    double: bool = True
    """The online network chooses the next action, the target network rates it."""
    epsilon_final: float = 0.1
    """Exploration epsilon after its decay."""
    epsilon_decay_steps: int = 5000
    """Agent steps over which epsilon falls from 1, once learning has begun."""
    epsilon_eval: float = 0.05
    """Epsilon of evaluation episodes."""
    pad: int = 4
    """Random shift: largest offset in pixels."""
    intensity_scale: float = 0.05
    """Intensity: standard deviation of the factor (the paper's Atari code)."""


@dataclass(frozen=True)
class DQNConfig(DiscreteConfig):
    """Efficient DQN (double, dueling, n-step), regularised by DrQ; with augmentation none the paper's Efficient DQN."""

    n_step: int = 10
    """Length of the multi-step return."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to this norm."""
    target_every: int = 1
    """Updates between two copies into the target network. At 1, the paper's value, target and online agree."""
    dueling: bool = True
    """Separate value and advantage streams."""
    hidden_dim: int = 512
    """Hidden units of the head."""
    shared_hidden: bool = False
    """One hidden layer for both streams of the dueling head instead of one each (docs/atari.md)."""
    loss: Literal["huber", "squared"] = "huber"
    """Residual of the temporal-difference error; Huber's delta is 1."""
    seed_steps: int = 1600
    """Agent steps before the first update (the minimum replay size)."""
    encoder: str = "nature"
    """Convolutions: sac-ae, nature (the paper's), dreamer, impala or d4pg."""
    freeze_encoder: bool = False
    """Leave the convolutions at their random initial values."""


@dataclass(frozen=True)
class RainbowConfig(DiscreteConfig):
    """Rainbow for 100,000 steps, regularised by DrQ: distributional, dueling, double, with priorities, annealed
    returns, a wide residual encoder and resets (docs/atari.md). Each part can be switched off by itself."""

    discount: float = 0.97
    """Discount factor gamma at the start and after a reset: a near horizon is learnt first."""
    discount_final: float = 0.997
    """Gamma once it is annealed. The same as the other: no annealing."""
    n_step: int = 10
    """Length of the returns at the start and after a reset: long ones spread rewards soon."""
    n_step_final: int = 3
    """Their length once it is annealed: short ones are less biased by old actions. As n_step: no annealing."""
    anneal_updates: int = 10_000
    """Updates over which both are annealed exponentially, anew after each reset. 0: the final values at once."""
    early_bootstrap: bool = False
    """The published code's slip: bootstrap one step before the return's end, blind to a terminal state there."""
    atoms: int = 51
    """Of the distribution over returns (C51). 1: plain values with a Huber loss."""
    value_limit: float = 10.0
    """The atoms lie between minus this and this."""
    dueling: bool = True
    """Separate value and advantage, on the same hidden units."""
    hidden_dim: int = 2048
    """Hidden units of the head."""
    encoder: str = "impala-same"
    """Convolutions: impala-same, or sac-ae, nature, dreamer, impala or d4pg."""
    encoder_width: int = 4
    """The encoder's channels, times this."""
    rescale_features: bool = True
    """Bring the features of every image to [0, 1]: resets and decay change their scale."""
    weight_decay: float = 0.1
    """Decay of matrices, not of biases, apart from the gradient (AdamW). 0: none."""
    tau: float = 0.005
    """Rate of the target network's moving average, after every update. 1: a copy."""
    target_acts: bool = True
    """The target network acts, in training and evaluation: it is steadier. Otherwise the online one does."""
    prioritised: bool = True
    """Replay transitions in proportion to their priorities. Otherwise all alike."""
    priority_exponent: float = 0.5
    """A priority is the cross-entropy to this power."""
    priority_correction: float = 0.5
    """Transitions count in the loss as 1 over their probability to this power."""
    reset_every: int = 20_000
    """Agent steps between resets: the head anew, the encoder in part; the replay stays. 0: none."""
    last_reset: int = 60_000
    """No reset after this agent step: what is left is for learning."""
    reset_keep: float = 0.5
    """Share of the encoder's weights that a reset keeps; the rest is fresh (shrink and perturb)."""
    epsilon_final: float = 0.0
    """Exploration epsilon after its decay."""
    epsilon_decay_steps: int = 2001
    """Agent steps over which epsilon falls from 1, once learning has begun."""
    epsilon_eval: float = 0.001
    """Epsilon of evaluation episodes."""
    seed_steps: int = 2000
    """Agent steps before the first update."""
    updates_per_step: float = 2
    """Updates after every agent step."""


@dataclass(frozen=True)
class ReplayConfig:
    """The replay memory. It lives beside the agent: on the GPU when that learns there, on the CPU otherwise."""

    capacity: int | None = 100_000
    """Transitions kept. Unset (None): as many as the run has agent steps."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation: its own environments, the mean (greedy) action, no augmentation."""

    every: int = 10_000
    """Env steps (Atari: agent steps) between evaluations. 0: only at the end."""
    episodes: int = 10
    """Episodes in an evaluation."""
    min_agent_steps: int = 0
    """Go on with whole episodes until this many agent steps are played (Atari's 125k), whatever `episodes` says."""
    video: bool = True
    """Record one episode of every evaluation, its first 5,000 agent steps."""


@dataclass(frozen=True)
class EngineConfig:
    """How the mathematics is run. None of it changes what is computed, beyond rounding."""

    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    """Arithmetic of convolutions and linear layers. auto: bf16 on devices that have it, else float32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile the update. auto: on a GPU, for runs of 100,000 updates or more, where it pays."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Capture updates and acting as CUDA graphs. auto: on a GPU."""
    kernels: Literal["auto", "on", "off"] = "auto"
    """CUDA kernels of our own (convolutions, batches, replay, Adam). auto: on GPUs and shapes they are made for."""
    eval_process: Literal["auto", "on", "off"] = "auto"
    """Evaluate in a process of its own, beside training. auto: on a GPU."""


@dataclass(frozen=True)
class TrainConfig:
    """One run."""

    task: Annotated[str, Fixed, Suppress]
    """`dmc/<domain>-<task>`, `gym/<id>`, `toy/<name>` or `atari/<game>`; `drq tasks` lists them."""
    preset: Annotated[str, Fixed, Suppress]
    """The named settings this run started from."""
    agent: AgentConfig
    """The learning algorithm."""
    seed: int = 1
    """Everything random follows from it."""
    steps: int = 500_000
    """Budget: env steps (Atari: agent steps)."""
    dir: str | None = None
    """Run folder. Unset: runs/<task>-<preset>-<seed>."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the agent learns."""
    num_envs: int = 1
    """Environments of a gym task stepped together, each in a process. Agent steps and updates are counted over all."""
    init_from: str | None = None
    """Begin with the weights of another run, by its folder, or of an exported file. Resuming does not need it again."""
    init_replay: bool = False
    """Begin with the replay of that run folder too."""
    imports: Annotated[tuple[str, ...], arg(aliases=["--import"])] = ()
    """Modules imported first, such as the one that registers your environment (`--import`)."""
    checkpoint_every: int = 10_000
    """Env steps (Atari: agent steps) between checkpoints."""
    log_every: int = 1_000
    """Env steps (Atari: agent steps) between rows of train.csv."""
    wandb: bool = False
    """Log to Weights & Biases as well. It is an extra, `wandb`."""
    wandb_project: str = "drq"
    """Project of Weights & Biases that the run is in."""
    wandb_entity: str | None = None
    """User or team there that owns it. Unset: your own."""
    wandb_group: str | None = None
    """Runs of one group are shown together there."""
    wandb_tags: tuple[str, ...] = ()
    """Words to find the run by."""
    wandb_offline: bool = False
    """Send nothing: what is logged stays in the run folder, for `wandb sync`."""
    env: EnvConfig = field(default_factory=EnvConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


_ANY_COUNT = 1, math.inf
_NOT_NEGATIVE = 0, math.inf
MOST_EPISODES = 10**7
"""Of an evaluation."""
_LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("checkpoint_every", "log_every"), _ANY_COUNT),
    **dict.fromkeys(("eval.every", "eval.min_agent_steps"), _NOT_NEGATIVE),
    **{"steps": (1, 10**12), "num_envs": (1, 256), "seed": (0, 2**63 - 1), "eval.episodes": (1, MOST_EPISODES)},
    **{"env.image_size": (-math.inf, 4096), "env.frame_stack": (-math.inf, 1000)},
    **{"agent.k": (1, 1000), "agent.m": (1, 1000), "agent.batch_size": (1, 10**6), "agent.n_step": (1, 10**4)},
    **{"agent.feature_dim": (1, 10**5), "agent.hidden_dim": (1, 10**5), "agent.updates_per_step": (-math.inf, 10**5)},
    **dict.fromkeys(("agent.n_step_final", "agent.target_every", "agent.actor_every"), _ANY_COUNT),
    **dict.fromkeys(("agent.epsilon_decay_steps", "agent.atoms", "agent.encoder_width"), _ANY_COUNT),
    **dict.fromkeys(("agent.anneal_updates", "agent.reset_every", "agent.last_reset"), _NOT_NEGATIVE),
    **dict.fromkeys(("agent.weight_decay", "agent.priority_exponent", "agent.priority_correction"), _NOT_NEGATIVE),
    **dict.fromkeys(("agent.adam_eps", "agent.intensity_scale"), _NOT_NEGATIVE),
    "agent.pad": (0, 1024),
}
"""The least and the most of settings. Beyond the most no machine gets, and a slip of the pen does."""


def check(config: TrainConfig) -> None:
    """Refuses numbers that no run can work with, naming the flag."""
    agent = config.agent
    limits = _LIMITS | {
        # An update needs one transition to learn from, whose return of n steps is complete.
        "replay.capacity": (max(agent.n_step, 2) * config.num_envs, 10**9),
        "agent.seed_steps": (max(agent.n_step, 1) * config.num_envs, 10**12),
        "agent.log_std_max": (getattr(agent, "log_std_min", -math.inf), math.inf),
    }
    for name, (least, most) in limits.items():
        part, _, setting = name.rpartition(".")
        value = getattr(getattr(config, part) if part else config, setting, None)  # not every agent has each
        if value is not None and not least <= value <= most:  # nan is neither
            bound = f"{most:,} or less" if value > most else f"{least} or more"
            raise UserError(f"--{name.replace('_', '-')} is {value}: set it to {bound}.")
    for name in ("learning_rate", "init_temperature", "max_grad_norm", "updates_per_step", "value_limit"):
        if not getattr(agent, name, 1.0) > 0:
            raise UserError(f"--agent.{name.replace('_', '-')} is {getattr(agent, name)}: set it above 0.")
    for name in ("discount", "discount_final", "tau", "epsilon_final", "epsilon_eval", "reset_keep"):
        if not 0 <= getattr(agent, name, 0.0) <= 1:
            raise UserError(f"--agent.{name.replace('_', '-')} is {getattr(agent, name)}: set it between 0 and 1.")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(agent, name, 0.0) < 1:
            raise UserError(f"--agent.{name.replace('_', '-')} is {getattr(agent, name)}: set it from 0 to below 1.")
    if config.init_replay and config.init_from is None:
        raise UserError("--init-replay says what to take from a run: name that with --init-from too.")
    if getattr(agent, "n_step_final", 1) > agent.n_step:
        raise UserError(
            f"--agent.n-step-final is more than --agent.n-step, {agent.n_step}: returns may only become shorter."
        )
