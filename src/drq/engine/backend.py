"""The backend that an agent and its replay are constructed with to be run fast: the same numbers but for rounding.

At best frames go from the replay to features and no view is ever written out; where the encoder is another, or the
precision, views are written in one launch and PyTorch convolves them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.optim import Optimizer

from drq.agents.protocol import Agent
from drq.augment import Augmentation, Compose, Intensity, NoAugmentation, RandomShift
from drq.backend import Average, Backend, Encoder, Entry, Pass, Rings, StackedFrames, Views
from drq.engine import kernels
from drq.engine.adam import FusedAdam, descend
from drq.engine.faults import in_words
from drq.engine.graphs import LAST, UPDATE, SideStream, SideStreams
from drq.engine.settings import EngineSettings
from drq.engine.staging import StagedStore
from drq.networks.encoders import PIXEL_VALUES, Convolution, PixelEncoder, flattened
from drq.networks.heads import WideLinear
from drq.replay import Batch, Replay, UniformSampler

P = ParamSpec("P")
T = TypeVar("T")

ALIGNED = 8
"""Outputs in 16 bytes, which tensor cores' fast kernels read and write at a time: any multiple will do for them."""
TILE = 64
"""Outputs that they compute together. On an H200, 1,024 x 39,200 inputs and 64 outputs take 33 us, 50 outputs 76 us."""
WIDE_INPUT = 4096
"""Inputs from which a layer's time is worth a copy of its weights."""
WIDE_LAYER = 10_000_000
"""Weights, from which a step is worth a launch of its own: as soon as their gradient is there, beside those of the
convolutions before them. It waits for memory, they for the tensor cores, which come first."""


class FrameViews(NamedTuple):
    """Shifted observations as references into the ring of frames."""

    frames: Tensor
    slots: Tensor
    shifts: Tensor

    def chunk(self, chunks: int) -> list[FrameViews]:
        parts = zip(self.slots.chunk(chunks), self.shifts.chunk(chunks), strict=True)
        return [FrameViews(self.frames, slots, shifts) for slots, shifts in parts]


class FastBackend(Backend):
    """A device with what the engine's settings make of it."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings.device)
        self.settings = settings
        self.factors = torch.bfloat16 if settings.precision == "bf16" else None
        """What convolutions and wide layers multiply in; None: in the type of the weights."""
        self.kernels = False
        """Whether there are ours, which `prepare` has compiled."""
        self.fused = False
        """Whether convolutions go through our kernels, straight from the replay's frames."""
        self.rounded: dict[Tensor, Tensor] = {}
        """Weights and averages of them with the copies that their layers multiply with: Adam writes both at once."""
        self._copied: dict[Tensor, int] = {}
        """In which version a weight was copied. PyTorch counts what it writes, and not what our kernels do."""
        self._frame_shape: tuple[int, ...] = ()
        self._augmentations: list[tuple[Augmentation, Begun | None]] = []
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._most_together = 0
        """Images that all passes of an update can have to go through residual encoders at once."""
        self._uncompilable = False
        """Whether torch.compile has failed here."""
        self._sides = SideStreams() if settings.cuda_graphs else None
        self._side: kernels.Side = SideStream(UPDATE) if settings.cuda_graphs else kernels.InTurn()
        self._last: kernels.Side = SideStream(LAST) if settings.cuda_graphs else kernels.InTurn()

    def prepare(self, agent: Agent, replay: Replay) -> None:
        """Chooses among kernels for an agent and its replay, and lays out the weights accordingly.

        Kernels are compiled here: where that fails, PyTorch's do it, and a line says so.
        """
        self.kernels = self.fused = False  # another agent may have been prepared for before
        self._most_together = 0
        if self.settings.kernels and kernels.available():
            try:
                self.kernels = True
                self._compile_kernels(agent, replay)
            except kernels.KernelError as error:
                self.kernels = self.fused = False
                self._most_together = 0
                reason = str(error).splitlines()[0].rstrip(":.")
                print(f"Going on with PyTorch's kernels: {reason}.", file=sys.stderr)
        if not self.fused:
            lay_out(agent)
        if self.kernels and not self.fused:
            self.keep_rounded(agent)
        self.settings.apply_globally()

    def keep_rounded(self, agent: Agent) -> None:
        """Gives layers copies of their weights in the type that they multiply in, so that no update has to make them:
        where an optimiser moves an average, and the two are all that an update writes."""
        if self.factors is None:
            return
        optimizers = [optimizer for optimizer in agent.optimizers.values() if isinstance(optimizer, FusedAdam)]
        ours = [(o.average, o.param_groups[0]["params"]) for o in optimizers]
        kept = {w for average, own in ours if average and _in_float32(own) for w in (*own, *average.weights)}
        # The first convolution divides its weights before it multiplies with them.
        first = [module.layers[0] for module in agent.modules.modules() if isinstance(module, PixelEncoder)]
        for layer in agent.modules.modules():
            if isinstance(layer, Convolution | WideLinear) and layer.weight in kept and layer not in first:
                copy = torch.empty_like(layer.weight, dtype=self.factors, requires_grad=layer.weight.requires_grad)
                layer.rounded = self.rounded[layer.weight] = copy
                layer.register_load_state_dict_post_hook(lambda *_: self.refresh())  # type: ignore[no-untyped-call]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes anew the copies of weights that were written by something else than a step: loaded, or reset."""
        for weight, copy in self.rounded.items():
            if self._copied.get(weight) != weight._version:
                copy.copy_(weight)
                self._copied[weight] = weight._version

    def _compile_kernels(self, agent: Agent, replay: Replay) -> None:
        kernels.transitions_kernel(replay, uniform=type(replay.sampler) is UniformSampler)
        kernels.store_kernel(replay.rings)
        for optimizer in agent.optimizers.values():
            if isinstance(optimizer, FusedAdam):
                decay = optimizer.param_groups[0]["weight_decay"] > 0
                kernels.adam_kernels(decay=decay, average=optimizer.average is not None)
        encoders = [module for module in agent.modules.modules() if isinstance(module, PixelEncoder)]
        # Each of these is a shift, or nothing, which is a shift by nothing.
        shifts = all(_is_shift(f) for f, _ in self._augmentations)
        if self.factors and encoders and self._augmentations and shifts and all(_fusable(e, replay) for e in encoders):
            slots = torch.zeros(1, replay.spec.frame_stack, dtype=torch.int64, device=self.device)
            kernels.prepare(replay.rings.frames, slots, _parameters(encoders[0])[0])
            self._frame_shape = replay.spec.frame_shape
            self.fused = True
            return
        convolutions = [module for module in agent.modules.modules() if isinstance(module, Convolution)]
        for channels in {module.out_channels for module in convolutions if module.relu}:
            kernels.bias_kernels("bias_relu", channels, self.factors or torch.float32)
        for channels in {module.out_channels for module in convolutions if module.pool}:
            kernels.bias_kernels("bias_pool", channels, self.factors or torch.float32)
        for encoder in encoders if self.factors else ():  # what convolves and does more, for every size in it
            image = torch.zeros(1, *replay.spec.observation_shape, dtype=torch.uint8, device=self.device)
            with torch.no_grad():
                kernels.compile_together(functools.partial(_launch_all, encoder, image))
        if self.factors and encoders and all(each.name == "impala-same" for each in encoders):
            image = torch.zeros(1, *replay.spec.observation_shape, device=self.device)
            with torch.no_grad():
                weights = _multiplied(encoders[0])
            self._most_together = kernels.most_together([each.weight for each in weights], *image.shape[2:])
            if self._most_together:
                kernels.compile_together(functools.partial(kernels.launch_all, image, weights))
        for _, begun in self._augmentations if replay.spec.pixels else ():
            if begun is not None:
                kernels.stacked_kernel(
                    replay.rings.frames,
                    replay.spec.frame_stack,
                    shifted=begun.shifted,
                    multiplied=begun.intensity is not None,
                )

    # Networks.

    def convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        *,
        stride: int = 1,
        padding: int = 0,
        relu_first: bool = False,
        relu: bool = False,
        pool: bool = False,
        plus: Tensor | None = None,
    ) -> Tensor:
        factors = self.factors or weight.dtype
        x, weight = x.to(factors), weight.to(factors)
        countable = len(x) * max(x.shape[1], len(weight)) * x.shape[2] * x.shape[3] < kernels.MOST_ELEMENTS
        ours = self.kernels and countable and x.device.type == self.device.type
        if relu_first:
            x = F.relu(x)
        if ours and stride == padding == 1 and pool and kernels.conv_pool_suits(weight, *x.shape[2:]):
            result = kernels.conv_pool(x, weight, bias)
        elif ours and (relu or pool):
            # One launch for the bias and what follows it, one for their gradients.
            after = kernels.bias_pool if pool else kernels.bias_relu
            result = after(F.conv2d(x, weight, None, stride, padding), bias)
        else:
            bias = bias.to(factors)
            result = super().convolution(x, weight, bias, stride=stride, padding=padding, relu=relu, pool=pool)
        return result if plus is None else plus + result

    def wide_linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        factors, outputs = self.factors or weight.dtype, len(weight)
        x, w, b = x.to(factors), weight.to(factors), bias.to(factors)
        missing = -outputs % TILE
        if self.settings.on_tensor_cores and outputs % ALIGNED and weight.shape[1] >= WIDE_INPUT:
            # A few outputs more, of zero weights, which are dropped: the function stays the same.
            return F.linear(x, F.pad(w, (0, 0, 0, missing)), F.pad(b, (0, missing)))[:, :outputs].to(bias.dtype)
        return F.linear(x, w, b).to(bias.dtype)

    # Views.

    def augmentation(self, f: Augmentation) -> Augmentation:
        self._augmentations.append((f, _begun_by_kernel(f)))
        return f

    def views(self, f: Augmentation, states: Tensor | StackedFrames, nu: Tensor) -> Views:
        if self.kernels and isinstance(states, StackedFrames) and states.frames.dtype == torch.uint8:
            if self.fused and _is_shift(f):
                slots = states.slots.repeat(nu.shape[0] // states.slots.shape[0], 1)
                shifts = nu.int() if nu.shape[1] else torch.zeros(len(nu), 2, dtype=torch.int32, device=nu.device)
                return FrameViews(states.frames, slots, shifts)
            for known, begun in self._augmentations:  # one that we were not told of is made plainly
                if known is f and begun is not None and len(nu) <= kernels.MOST_VIEWS:
                    views = kernels.stacked_views(states, nu, shifted=begun.shifted, intensity=begun.intensity)
                    return begun.rest(views, nu[:, begun.columns :])
        return super().views(f, states, nu)

    def encode(self, encoder: Encoder, observations: Views) -> Tensor:
        if isinstance(observations, FrameViews):
            return kernels.encode_views(*observations, *_parameters(encoder))
        assert isinstance(observations, Tensor)
        if self.fused and observations.dtype == torch.uint8:
            # Frames that happen to lie in the order in which they are stacked.
            frames = observations.contiguous().view(-1, *self._frame_shape)
            slots = torch.arange(len(frames), device=frames.device).view(len(observations), -1)
            unshifted = torch.zeros(len(observations), 2, dtype=torch.int32, device=frames.device)
            return kernels.encode_views(frames, slots, unshifted, *_parameters(encoder))
        if self._most_together and not torch.is_grad_enabled():
            together = self._together([Pass(encoder, observations, False)])
            if together is not None:
                return together[0]
        return encoder(observations)

    def encode_with_both(self, encoder: Encoder, other: Encoder, views: Views) -> tuple[Tensor, Tensor]:
        if isinstance(views, FrameViews):
            return kernels.encode_views_two(*views, *_parameters(encoder), *_parameters(other))
        return super().encode_with_both(encoder, other, views)

    def encode_each(self, passes: Sequence[Pass]) -> list[Tensor]:
        features = self._together(passes)
        if features is None:
            self._mark()  # the views are there
            first, *rest = passes
            features = [self.run(self._encode, *first), *(self.run_beside(self._encode, *each) for each in rest)]
        self._mark()
        return features

    def _encode(self, encoder: Encoder, views: Views, trained: bool) -> Tensor:
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            return self.encode(encoder, views)

    def _together(self, passes: Sequence[Pass]) -> list[Tensor] | None:
        """All at once, where there are kernels for it: of one network or two, the first pass alone with a way back."""
        first, *rest = passes
        in_order = sorted(passes, key=lambda each: each.encoder is not first.encoder)  # the kernels' order
        own = sum(each.encoder is first.encoder for each in passes)
        views = [each.views for each in in_order if isinstance(each.views, Tensor)]
        fits = len(views) == len(passes) and sum(map(len, views)) <= self._most_together
        networks = {id(each.encoder) for each in passes}
        if not fits or len(networks) > 2 or any(each.trained for each in rest):
            return None
        other = _multiplied(in_order[-1].encoder) if len(networks) == 2 else []
        trained = first.trained and torch.is_grad_enabled()
        given = kernels.Passes(views[:own], views[own:], other, trained, self._side)
        features = kernels.encode_passes(given, _multiplied(first.encoder))
        found = {id(each): flattened(of_it) for each, of_it in zip(in_order, features, strict=True)}
        return [found[id(each)] for each in passes]

    # Updates.

    def adam(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        average: Average | None = None,
    ) -> Optimizer:
        parameters = list(parameters)
        # Chosen when it first steps, after `prepare`; each has one of its own, as it keeps a counter.
        return FusedAdam(
            parameters,
            learning_rate,
            betas,
            eps,
            lambda: (
                kernels.Adam(self.device, decay=weight_decay > 0, average=average is not None)
                if self.kernels and _in_float32(parameters)
                else descend
            ),
            weight_decay,
            average,
            self.rounded,
        )

    def descend(
        self, optimizer: Optimizer, loss: Tensor, parameters: Sequence[nn.Parameter], max_norm: float | None = None
    ) -> Tensor | None:
        if not isinstance(optimizer, FusedAdam):
            return super().descend(optimizer, loss, parameters, max_norm)
        optimizer.zero_grad(set_to_none=True)
        wide = max(parameters, key=torch.numel)
        ahead = max_norm is None and wide.numel() >= WIDE_LAYER

        def step_ahead(_: Tensor) -> None:
            with self._last.apart():
                optimizer.step_ahead(wide)

        with optimizer.leaf(wide).register_post_accumulate_grad_hook(step_ahead) if ahead else nullcontext():
            loss.backward(inputs=[optimizer.leaf(parameter) for parameter in parameters])
        norm = optimizer.clip_and_step(max_norm)
        if ahead:  # a stream that has no part in a capture must not be waited for in it
            self._last.join()
        return norm

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self.settings.compile or self._uncompilable:
            return function(*args, **kwargs)
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, dynamic=False)
        try:
            # On a CPU gradients are compiled here too, not by `backward`, where nothing would notice a library that an
            # earlier run was killed while writing.
            on_cpu = self.device.type == "cpu"
            with functorch_config.patch(force_non_lazy_backward_lowering=True) if on_cpu else nullcontext():
                result: T = self._compiled[function](*args, **kwargs)
        except Exception as error:  # of a compiler that is missing, among others: what is raised then, nobody promises
            if in_words(error) is not None:
                raise
            result = function(*args, **kwargs)  # pure, so that a fault of its own shows here again
            self._uncompilable = True
            error = getattr(error, "inner_exception", error)  # PyTorch's own says at times only that there is one
            reason = str(error).partition("\n")[0].rstrip(":.") or type(error).__name__
            remedy = " Delete that file, and later runs compile again." if getattr(error, "path", None) else ""
            print(f"Going on without torch.compile: {reason}.{remedy}", file=sys.stderr)
        return result

    def run_beside(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._sides is None:
            return self.run(function, *args, **kwargs)
        with self._sides.next():
            return self.run(function, *args, **kwargs)

    def begin_update(self) -> None:
        """Says that an update begins here: all that `run_beside` may read has been launched."""
        if self._sides is not None:
            self._sides.begin()

    def _mark(self) -> None:
        """Says that more has been launched which it may read."""
        if self._sides is not None:
            self._sides.mark()

    # The replay.

    def store(self, rings: Rings) -> Callable[[Entry], None]:
        if not self.settings.kernels and self.device.type == "cpu":
            return super().store(rings)
        return StagedStore(rings, lambda: self.kernels)

    def batch(self, replay: Replay, random: Tensor) -> Batch:
        """`Replay.batch`, in one launch where the choice is uniform."""
        if not self.kernels:
            return replay.batch(random)
        if type(replay.sampler) is UniformSampler:  # one derived from it may choose otherwise
            return kernels.transitions(replay, random)
        return kernels.transitions(replay, replay.sampler.choose(replay, random))


@dataclass(frozen=True)
class Begun:
    """How a kernel begins an augmentation: it stacks, shifts and multiplies in one launch."""

    shifted: bool
    """Or only stacked."""
    intensity: float | None
    columns: int
    """Of ν that are used up."""
    rest: Augmentation
    """What comes after."""


def _in_float32(parameters: Iterable[Tensor]) -> bool:
    """As our kernels have weights. An agent of somebody's own may have others, such as the logarithm of a number."""
    return all(parameter.dtype == torch.float32 for parameter in parameters)


def _is_shift(f: Augmentation) -> bool:
    """By any number of pixels, or by none. One derived from them may do something else, as below."""
    return type(f) in (RandomShift, NoAugmentation)


def _begun_by_kernel(f: Augmentation) -> Begun | None:
    first, *rest = f.parts if type(f) is Compose else (f,)
    if not _is_shift(first):
        return None
    intensity, columns = None, first.columns
    if rest and type(rest[0]) is Intensity:
        intensity = rest[0].scale
        columns += rest[0].columns
        rest = rest[1:]
    return Begun(first.columns > 0, intensity, columns, Compose(tuple(rest)))


def _fusable(encoder: PixelEncoder, replay: Replay) -> bool:
    """Whether it is made of the layers that there are kernels for."""
    if encoder.name not in ("sac-ae", "d4pg"):
        return False
    return kernels.supported(replay.rings.frames, _parameters(encoder)[0])


def _parameters(encoder: Encoder) -> tuple[list[Tensor], list[Tensor]]:
    assert isinstance(encoder, PixelEncoder)
    convolutions = [layer for layer in encoder.layers if isinstance(layer, nn.Conv2d)]
    return [layer.weight for layer in convolutions], [layer.bias for layer in convolutions if layer.bias is not None]


def _multiplied(encoder: Encoder) -> list[kernels.Weights]:
    """What its convolutions multiply with in bfloat16, the first one's divided as `PixelEncoder` does it, and their
    biases."""
    assert isinstance(encoder, PixelEncoder)
    first, *rest = (module for module in encoder.modules() if isinstance(module, Convolution))
    weights = [
        first.weight / PIXEL_VALUES,
        *(layer.weight if layer.rounded is None else layer.rounded for layer in rest),
    ]
    given = (weight.to(torch.bfloat16, memory_format=torch.channels_last) for weight in weights)
    return [kernels.Weights(weight, layer.bias) for weight, layer in zip(given, (first, *rest), strict=True)]


def _launch_all(encoder: PixelEncoder, image: Tensor) -> None:
    """What an encoder launches, and the first layer for its gradient."""
    encoder(image)
    first = encoder.layers[0]
    assert isinstance(first, Convolution)
    if first.pool:
        kernels.conv_pool_gradient_kernels(first.weight.bfloat16(), *image.shape[2:])


def lay_out(agent: Agent) -> None:
    """Puts weights into the order in which tensor cores, and vectorised CPUs, read images without turning them.

    Rounding depends on it: whatever acts with an agent's weights lays them out alike.
    """
    agent.modules.to(memory_format=torch.channels_last)  # type: ignore[call-overload, unused-ignore]
