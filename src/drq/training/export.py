"""A trained policy to take away: one file for `drq.load`, or a graph for another runtime."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils import parametrize

from drq.agents import Agent, make_agent
from drq.backend import Backend
from drq.config import AgentConfig, DQNConfig, EngineConfig
from drq.envs import EnvSpec, family_of
from drq.envs.area import Resize
from drq.errors import UserError, format_of, install_command
from drq.training.policy import TrainedPolicy, action_bounds, action_shape, read_policy
from drq.training.policy_file import PolicyFile, acting_weights, write_policy_file

Format = Literal["drq", "onnx", "pt2"]

TOLERANCE = 1e-4
"""How far a graph's action may be from ours, in parts of the action's range. Discrete actions must be the same."""

LARGEST_SIDE = 16_384
"""Pixels of the raw frames that a graph takes."""

CHECKED_FRAMES = 8
"""Stacks of random pixels that a graph is tried with before it is kept."""


def export(
    path: str | Path,
    out: str | Path,
    *,
    best: bool = False,
    format: Format | None = None,
    dtype: Literal["float32", "bf16"] = "float32",
    frame: Sequence[int] | None = None,
    imports: Sequence[str] = (),
) -> Path:
    """Writes the policy of a run to one file, with only what acting needs.

    Args:
        path: a run folder, or a file that this function wrote.
        out: the file to write.
        best: of a run folder, what acted in the evaluation with the highest mean return, not the latest checkpoint.
        format: drq, for `drq.load` and `drq eval`; onnx, or pt2 (torch.export), the network with its preprocessing as
            one graph. None: as the name of the file ends.
        dtype: how weights are kept; bf16 halves the file. What is computed with them is float32.
        frame: shape of the raw frames that a graph takes, as (480, 640, 3). None: as the agent sees them.
        imports: modules to import first, where the agent itself is one of the user's.
    """
    out = Path(out)
    if format not in (None, *get_args(Format)):
        raise UserError(f"The format is {format!r}: choose from {', '.join(get_args(Format))}.")
    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file for the policy, such as {out / 'policy.drq'}.")
    if out.exists() and not out.is_file():  # a device or a pipe, which moving the file into its place would remove
        raise UserError(f"{out} is no plain file: name one for the policy, such as policy.drq.")
    chosen = format or format_of(out, get_args(Format))
    config, spec, load_into = read_policy(path, imports, best=best)
    # In float32, whatever this machine would act in: it is what a graph is checked against.
    policy = TrainedPolicy(replace(config, engine=EngineConfig(precision="float32")), spec, load_into, device="cpu")
    if chosen == "drq":
        if frame is not None:
            raise UserError("A drq file takes frames of any size: leave --frame out, or choose --format onnx or pt2.")
        weights = _weights(policy, torch.bfloat16 if dtype == "bf16" else torch.float32)
        config = replace(config, agent=_acting_settings(config.agent, weights))
        write_policy_file(out, PolicyFile(config, spec, policy.agent_step, weights))
        return out
    if dtype == "bf16":
        rounded = {name: value.float() for name, value in _weights(policy, torch.bfloat16).items()}
        policy.agent.modules.load_state_dict(rounded, strict=False)
    graph = ActingGraphModule(_plain_agent(policy), policy.spec, frame)
    if dtype == "bf16":
        graph.keep_in_bf16()
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.stem}.unfinished.{chosen}")
    try:
        with torch.no_grad(), _exporters_quiet():
            act = (_write_onnx if chosen == "onnx" else _write_pt2)(graph, unfinished)
        _check(act, graph, policy)
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    return out


def _weights(policy: TrainedPolicy, dtype: torch.dtype) -> dict[str, Tensor]:
    state = policy.agent.modules.state_dict()
    weights = {}
    for name in acting_weights(policy.agent, policy.spec):
        value = state[name].detach().contiguous()
        weights[name] = value.to(dtype) if value.is_floating_point() else value
    return weights


def _acting_settings(agent: AgentConfig, weights: dict[str, Tensor]) -> AgentConfig:
    """Takes the value stream out of a dueling DQN's weights, half of them, and gives the settings of what is left: the
    action of the greatest value is that of the greatest advantage."""
    if not isinstance(agent, DQNConfig) or not agent.dueling:
        return agent
    for name in [name for name in weights if name.startswith(("online.value.", "online.hidden.1."))]:
        del weights[name]
    return replace(agent, dueling=False)


def _plain_agent(policy: TrainedPolicy) -> Agent:
    """The same agent in PyTorch's own words: what another runtime can be given."""
    agent = make_agent(policy.spec, replace(policy.config.agent, augmentation="none"), Backend(), seed=0)
    agent.modules.load_state_dict(policy.agent.modules.state_dict())
    agent.modules.requires_grad_(False)
    return agent


class _ToFloat32(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.float()


class ActingGraphModule(nn.Module):
    """Raw frames to actions in the environment's own range, in operations that any runtime has.

    Pixels: uint8, [batch, frame_stack, height, width, channels], the oldest frame first; the stack is the caller's to
    keep. State: float32, [batch, size].
    """

    rows: Tensor
    columns: Tensor
    action_middle: Tensor
    action_half: Tensor
    action_low: Tensor
    action_high: Tensor

    def __init__(self, agent: Agent, spec: EnvSpec, frame: Sequence[int] | None) -> None:
        super().__init__()
        self._agent, self._spec = agent, spec
        self._noise_columns = tuple(agent.evaluation(1, torch.Generator()).shape[1:])
        # The layers that acting computes with, and no others: what is registered here is what a graph carries.
        used = set(acting_weights(agent, spec))
        self.layers = nn.ModuleList(
            module
            for path, module in agent.modules.named_modules()
            if any(f"{path}.{name}" in used for name, _ in module.named_parameters(recurse=False))
        )
        self.frame = self._frame_shape(frame)
        self._grey = spec.pixels and (self.frame[2], spec.frame_shape[0]) == (3, 1)
        self._resize = family_of(spec.task).resize
        self._resizes = spec.pixels and self.frame[:2] != spec.frame_shape[1:]
        if self._resizes:
            height, width = spec.frame_shape[1:]
            self.register_buffer("rows", resize_weights(self.frame[0], height, self._resize))
            self.register_buffer("columns", resize_weights(self.frame[1], width, self._resize))
        if spec.action_kind == "continuous":
            low, high = map(torch.from_numpy, action_bounds(spec))
            self.register_buffer("action_middle", (low / 2 + high / 2).float())
            self.register_buffer("action_half", (high / 2 - low / 2).float())
            self.register_buffer("action_low", low.float())
            self.register_buffer("action_high", high.float())
            self._whole = np.issubdtype(spec.action_dtype, np.integer)

    def _frame_shape(self, frame: Sequence[int] | None) -> tuple[int, ...]:
        if not self._spec.pixels:
            if frame is not None:
                raise UserError("This policy sees a state vector, no frames: leave --frame out.")
            return self._spec.frame_shape
        channels, *size = self._spec.frame_shape
        if frame is None:
            return (*size, channels)
        given = tuple(frame) if len(frame) == 3 else (*frame, channels)
        fits = len(given) == 3 and min(given) > 0 and (given[2] == channels or (given[2], channels) == (3, 1))
        shown = "x".join(map(str, frame))
        if max(given) > LARGEST_SIDE:
            raise UserError(f"--frame {shown} is too large: no side of a frame has more than {LARGEST_SIDE:,} pixels.")
        if not fits:
            raise UserError(f"--frame {shown} does not fit a policy of {channels} channels: give height x width.")
        return given

    def keep_in_bf16(self) -> None:
        """Weights that are rounded already are kept so, and become float32 when they are used."""
        for layer in self.layers:
            for name, value in list(layer.named_parameters(recurse=False)):
                parametrize.register_parametrization(layer, name, _ToFloat32(), unsafe=True)
                held: Any = layer.parametrizations
                held[name].original.data = value.detach().to(torch.bfloat16)

    def example(self, count: int) -> Tensor:
        """So many random inputs."""
        random = np.random.default_rng(0)
        if not self._spec.pixels:
            return torch.from_numpy(random.standard_normal((count, *self.frame)).astype(np.float32))
        return torch.from_numpy(random.integers(0, 256, (count, self._spec.frame_stack, *self.frame), np.uint8))

    def forward(self, frames: Tensor) -> Tensor:
        observations = self._preprocess(frames) if self._spec.pixels else frames
        noise = torch.zeros(observations.shape[0], *self._noise_columns)
        action = self._agent.act(observations, noise)
        if self._spec.action_kind == "discrete":
            return action + self._spec.action_start
        own = self.action_middle + self.action_half * action
        # Rounding may lead beyond a bound by a float32's last bit, which a strict environment refuses.
        own = torch.clamp(own, self.action_low, self.action_high).reshape(-1, *action_shape(self._spec))
        return torch.round(own).long() if self._whole else own

    def _preprocess(self, frames: Tensor) -> Tensor:
        """As `drq.envs.pictures` does it: whole numbers at every step, and float64 holds each sum exactly."""
        x = frames.permute(0, 1, 4, 2, 3).double()
        if self._grey:
            red, green, blue = x.unbind(2)
            # Luma of ITU-R 601 in parts of 65,536, as Pillow has it.
            x = torch.floor((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).unsqueeze(2)
        if self._resizes:
            if self._resize == "box":  # Pillow rounds after each direction
                x = torch.floor(x @ self.columns.mT + 0.5)
                x = torch.floor(self.rows @ x + 0.5)
            else:
                x = torch.round(self.rows @ (x @ self.columns.mT))
        return x.flatten(1, 2).float()


def resize_weights(length: int, size: int, how: Resize) -> Tensor:
    """What each of `length` pixels counts in each of `size`: [size, length], as `drq.envs.pictures.resized` has it."""
    if how == "area" and size <= length:
        edges = np.arange(size + 1) * (length / size)
        source = np.arange(length)
        overlap = np.minimum(edges[1:, None], source + 1) - np.maximum(edges[:-1, None], source)
        return torch.from_numpy(np.maximum(overlap, 0) * (size / length))
    lines = Image.fromarray(np.eye(length, dtype=np.float32)).resize((size, length), Image.Resampling.BOX)
    inside = np.ascontiguousarray(np.asarray(lines).T > 0, dtype=np.float64)
    # Pillow counts in parts of 2^22.
    return torch.from_numpy(np.floor(2**22 / inside.sum(1, keepdims=True) + 0.5) * inside / 2**22)


def _write_pt2(graph: ActingGraphModule, path: Path) -> Any:
    program = _exported(graph)
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    return lambda frames: loaded(frames).numpy()


def _write_onnx(graph: ActingGraphModule, path: Path) -> Any:
    if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]:
        raise UserError(f"--format onnx needs {' and '.join(missing)}: {install_command('onnx')}.")
    import onnxruntime

    torch.onnx.export(
        _exported(graph),
        (),
        str(path),
        input_names=["frames"],
        output_names=["action"],
        dynamic_shapes={"frames": {0: "batch"}},  # its name in the graph
        external_data=False,
        verbose=False,
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda frames: session.run(None, {"frames": frames.numpy()})[0]


@contextmanager
def _exporters_quiet() -> Iterator[None]:
    """PyTorch's exporters warn of packages that nothing here needs."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _exported(graph: ActingGraphModule) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    return torch.export.export(graph.eval(), (graph.example(2),), dynamic_shapes={"frames": {0: batch}})


def _check(act: Any, graph: ActingGraphModule, policy: TrainedPolicy) -> None:
    """Refuses a graph whose actions are not ours, one by one and as a batch."""
    examples = graph.example(CHECKED_FRAMES)
    found: NDArray[Any] = np.concatenate([act(examples), act(examples[:1])])
    ours = []
    for stack in [*examples, examples[0]]:
        policy.reset()
        for frame in stack.numpy() if policy.spec.pixels else [stack.numpy()]:
            action = policy.act(frame)
        ours.append(action)
    differs = np.abs(found.astype(np.float64) - np.stack(ours)).reshape(len(ours), -1)
    allowed: NDArray[np.float64] | float = 0.0
    if policy.spec.action_kind == "continuous":
        low, high = action_bounds(policy.spec)
        # Of what lies between two whole numbers, either may be the nearest.
        allowed = TOLERANCE * (high - low) + np.issubdtype(policy.spec.action_dtype, np.integer)
    if not np.all(differs <= allowed):
        raise UserError(
            f"The exported graph acts otherwise than the policy (by {differs.max():.2g}, more than {TOLERANCE:g} of an "
            "action's range): nothing was written; choose --format drq."
        )
