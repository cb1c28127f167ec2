"""CUDA graphs: record a function's kernels once, replay them with one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Generator

from drq.agents.protocol import Agent
from drq.engine.snapshot import FETCHING
from drq.replay import Sampler

T = TypeVar("T")

WARMUPS = 3
"""Runs before the capture: compilation and lazy initialisation are not capturable."""
FIRST, UPDATE, LAST = -2, -1, 0
"""Of streams, which comes first where there is work for all of them."""


class Captured(Generic[T]):
    """A function without arguments, recorded as a CUDA graph. Its results live in memory that a replay overwrites."""

    def __init__(self, function: Callable[[], T], generators: list[Generator]) -> None:
        side = torch.cuda.Stream(priority=UPDATE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUPS):
                function()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)
        with FETCHING, torch.cuda.graph(self._graph, stream=torch.cuda.Stream(priority=UPDATE)):
            self.result = function()

    def replay(self) -> T:
        self._graph.replay()
        return self.result


class SideStreams:
    """Streams for parts of an update that run beside what it has launched since `mark`, and beside each other.

    Dozens of small kernels follow the convolutions, and each fills a small part of a GPU, as do the last convolutions
    of a small batch: the targets' run while the predictions' do. A captured graph keeps the branches.
    """

    def __init__(self) -> None:
        self._streams: list[torch.cuda.Stream] = []
        self._used = 0
        self._marked = torch.cuda.Event()

    def begin(self) -> None:
        """An update begins."""
        self._used = 0
        self.mark()

    def mark(self) -> None:
        """All that the side streams may read has been launched."""
        self._marked.record()

    @contextmanager
    def next(self) -> Iterator[None]:
        """Within it, work goes to a stream that the update has not used: results of an earlier part may still be read
        when their memory is free for that part's stream alone."""
        if self._used == len(self._streams):
            # What runs here comes first where both have work: then its small kernels are what runs beside convolutions.
            self._streams.append(torch.cuda.Stream(priority=FIRST))
        stream = self._streams[self._used]
        self._used += 1
        stream.wait_event(self._marked)
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)


class SideStream:
    """One more stream, for what nothing that is launched next waits for."""

    def __init__(self, priority: int) -> None:
        self._priority = priority
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within it, work comes after what has been launched so far, and beside what is launched next."""
        self._stream = self._stream or torch.cuda.Stream(priority=self._priority)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Has what is launched from here on wait for all that was launched apart."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@contextmanager
def without_a_trace(agent: Agent, sampler: Sampler, generator: Generator) -> Iterator[None]:
    """Undoes, in place, what warm-up runs did to weights, optimisers, priorities and random numbers."""
    tensors = [*agent.modules.parameters(), *agent.modules.buffers(), *sampler.state().values()]
    weights = [tensor.detach().clone() for tensor in tensors]
    states = {
        id(parameter): {key: value.clone() for key, value in state.items()}
        for optimizer in agent.optimizers.values()
        for parameter, state in optimizer.state.items()
    }
    random = generator.get_state()
    yield
    with torch.no_grad():
        for tensor, saved in zip(tensors, weights, strict=True):
            tensor.copy_(saved)
        for optimizer in agent.optimizers.values():
            for parameter, state in optimizer.state.items():
                before = states.get(id(parameter))
                for key, value in state.items():
                    # A state made by the warm-up was empty before it, and Adam's starts from zero.
                    value.copy_(before[key]) if before else value.zero_()
    generator.set_state(random)
