"""Evaluations in this process, or in one of their own beside training.

The policy of an evaluation is a copy, so where it is played changes nothing about the run. Its scores may differ in
rounding: see `settings_beside_training`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drq.agents.protocol import Agent
from drq.child import start_child
from drq.config import EngineConfig, TrainConfig
from drq.engine import EngineSettings, Snapshot
from drq.envs import family_of
from drq.errors import reason
from drq.settings import config_to_json
from drq.training.components import make_group
from drq.training.evaluate import EvaluationStopped, Evaluator, ShowProgress
from drq.training.video import save_video

MOST_THREADS_BESIDE_TRAINING = 8
"""Of PyTorch, for acting on the CPU. More would hardly be faster: on the CPU beside an H200 ten observations take
13.7 ms with one thread, 4.4 with four and 3.0 with eight."""
POLL_SECONDS = 1.0
"""How soon somebody who waits for an evaluation notices that the run shall stop."""

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class EvaluationRequest:
    """One evaluation to play."""

    agent_step: int
    env_step: int
    seed: int
    video: str | None
    """Where to put a video of the first episode."""


class PlayedEvaluation(NamedTuple):
    """An evaluation that is over."""

    request: EvaluationRequest
    weights: Snapshot
    """Those that it was played with."""
    scores: list[float]
    """Of each episode."""
    info: dict[str, float]
    """The means of numbers that the environment put into `info`."""


def make_evaluator(config: TrainConfig, agent: Agent, engine: EngineSettings, parallel: int | None = None) -> Evaluator:
    """Plays evaluation episodes of a run's task, so many at once (None: as suits the task). The agent may be changed
    between two evaluations."""
    parallel = parallel or family_of(config.task).episodes_at_once
    return Evaluator(agent, lambda count: make_group(config, count), engine, parallel)


def settings_beside_training(config: TrainConfig, device: torch.device) -> tuple[EngineSettings, int]:
    """How a process beside a run on that device acts: the engine, and how many threads PyTorch has.

    Beside a run on a GPU it is the CPU that acts, and the process never opens CUDA. A GPU gives its time in slices
    of some 2 ms to one process after the other, and training would lose one to every step of an evaluation. Scores
    may differ from those of acting on the GPU, as float32 rounds otherwise than the arithmetic of training does.
    Atari stays on the GPU (see the table of families).
    """
    if device.type == "cpu" or family_of(config.task).evaluates_on_gpu:
        engine = EngineSettings.resolve(config.engine, device, config.agent)
        return dataclasses.replace(engine, compile=False), 1
    cpu = EngineSettings.resolve(EngineConfig(precision="float32"), torch.device("cpu"), config.agent)
    # Half of what the process may use (OMP_NUM_THREADS, where a launcher divides the cores): training needs the rest.
    return cpu, max(1, min(torch.get_num_threads() // 2, MOST_THREADS_BESIDE_TRAINING))


def packed(weights: Weights) -> memoryview:
    """Weights on the host as bytes, in their order: for the other process, whose agent has the same."""
    return torch.cat([value.contiguous().view(-1).view(torch.uint8) for value in weights.values()]).numpy().data


def receive_weights(pipe: Connection, agent: Agent) -> None:
    """Gives an agent the weights that come through the pipe `packed`."""
    own = agent.modules.state_dict()
    sizes = [value.numel() * value.element_size() for value in own.values()]
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    try:
        pipe.recv_bytes_into(received.numpy().data)
    except OSError as error:
        raise EOFError("training ended while it sent them") from error
    for value, part in zip(own.values(), received.split(sizes), strict=True):
        value.copy_(part.clone().view(value.dtype).view(value.shape))  # a clone is aligned, whatever came before it


@contextlib.contextmanager
def other_weights(agent: Agent, weights: Weights) -> Iterator[None]:
    """Gives an agent other weights for a while."""
    own = {name: value.clone() for name, value in agent.modules.state_dict().items()}
    agent.modules.load_state_dict(weights)
    try:
        yield
    finally:
        agent.modules.load_state_dict(own)


class InlineEvaluation:
    """Plays evaluations of the agent as it is at the time of the request. In this process, at once: training waits."""

    def __init__(
        self,
        config: TrainConfig,
        engine: EngineSettings,
        stopping: Callable[[], bool] = lambda: False,
        show_progress: ShowProgress = lambda done, of, unit: None,
    ) -> None:
        """`stopping` says whether the run shall stop: no evaluation is waited for then."""
        self.stopping = stopping
        self.show_progress = show_progress
        self._config = config
        self._engine = engine
        self._evaluator: Evaluator | None = None
        self._done: list[PlayedEvaluation] = []
        self._stopped: dict[int, Weights] = {}

    @property
    def under_way(self) -> bool:
        """Whether an evaluation is not collected yet."""
        return bool(self._done or self._stopped)

    def submit(self, agent: Agent, request: EvaluationRequest) -> None:
        """Asks for an evaluation of the agent as it is now. It is the same agent every time, further trained."""
        try:
            played = self.play(agent, request)
            self._done.append(PlayedEvaluation(request, Snapshot.of(agent.modules.state_dict()), *played))
        except EvaluationStopped:
            self._stopped[request.agent_step] = Snapshot.of(agent.modules.state_dict()).on_host()

    def resume(self, agent: Agent, request: EvaluationRequest, weights: Weights) -> None:
        """Asks for an evaluation that was under way when the run was stopped, with the weights of that time."""
        with other_weights(agent, weights):
            self.submit(agent, request)

    def pending(self) -> dict[int, Weights]:
        """The agent steps of evaluations that are under way or were stopped, and the weights to play them with."""
        return self._stopped

    def prepare(self, agent: Agent) -> None:
        """Makes the environments, so that the first evaluation need not."""
        self._evaluator_of(agent).prepare(**self._length)

    def play(self, agent: Agent, request: EvaluationRequest) -> tuple[list[float], dict[str, float]]:
        """Scores and info, as `PlayedEvaluation` has them."""
        evaluation = self._evaluator_of(agent).evaluate(request.seed, **self._length, video=request.video is not None)
        if request.video is not None:
            try:
                # Not with its parents: a run folder that was moved away or deleted meanwhile would be there again.
                Path(request.video).parent.mkdir(exist_ok=True)
                save_video(Path(request.video), evaluation.episodes[0].video)
            except (OSError, RuntimeError) as error:  # a full disk, of which the encoder only says that it broke
                print(f"The video {request.video} could not be written ({reason(error)}).", file=sys.stderr)
        return evaluation.scores.tolist(), evaluation.info

    @property
    def _length(self) -> dict[str, Any]:
        config = self._config.eval
        return {"episodes": config.episodes, "min_agent_steps": config.min_agent_steps}

    def _evaluator_of(self, agent: Agent) -> Evaluator:
        if self._evaluator is None:
            self._evaluator = make_evaluator(self._config, agent, self._engine)
            self._evaluator.stopping = self.stopping
            self._evaluator.show_progress = self.show_progress
        return self._evaluator

    def collect(self, *, wait: bool, leave: int = 0) -> list[PlayedEvaluation]:
        """Finished evaluations, in the order of their requests. `wait`: until at most `leave` are under way, or the
        run shall stop."""
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()


class SubprocessEvaluation:
    """The same in a second Python process while training goes on. Should that one end, `fallback` plays in this process
    what it left."""

    def __init__(self, config: TrainConfig, fallback: InlineEvaluation) -> None:
        self._fallback = fallback
        self._pending: list[tuple[Agent, EvaluationRequest, Snapshot]] = []
        self._process, self._pipe = start_child("drq.training.evaluation_process")
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._pipe.send_bytes(json.dumps(config_to_json(config)).encode())

    @property
    def under_way(self) -> bool:
        return bool(self._pending)

    def submit(self, agent: Agent, request: EvaluationRequest) -> None:
        self.resume(agent, request, agent.modules.state_dict())

    def resume(self, agent: Agent, request: EvaluationRequest, weights: Weights) -> None:
        snapshot = Snapshot.of({name: weights[name] for name in agent.modules.state_dict()})
        self._pending.append((agent, request, snapshot))
        # The other process reads only between two evaluations, and training must not wait for that.
        self._sender.submit(self._send, request, snapshot)

    def pending(self) -> dict[int, Weights]:
        return {request.agent_step: weights.copies for _, request, weights in self._pending}

    def _send(self, request: EvaluationRequest, weights: Snapshot) -> None:
        with contextlib.suppress(OSError):  # it has ended: collect notices, and plays what is pending here
            self._pipe.send_bytes(json.dumps(dataclasses.asdict(request)).encode())
            self._pipe.send_bytes(packed(weights.on_host()))

    def collect(self, *, wait: bool, leave: int = 0) -> list[PlayedEvaluation]:
        done = []
        while self._pending and self._answered(wait=wait and len(self._pending) > leave):
            agent, request, weights = self._pending[0]
            try:
                answer = json.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                print("The evaluation process has ended; this process evaluates instead.", file=sys.stderr)
                try:
                    with other_weights(agent, weights.copies):
                        answer = self._fallback.play(agent, request)
                except EvaluationStopped:
                    break
            if isinstance(answer, dict):
                self._fallback.show_progress(answer["done"], answer["of"], answer["unit"])
                continue
            done.append(PlayedEvaluation(request, weights, *answer))
            self._pending.pop(0)
        return done

    def _answered(self, *, wait: bool) -> bool:
        """Whether there is an answer, or no hope for one."""
        try:
            while not self._pipe.poll(POLL_SECONDS if wait else 0):
                if not wait or self._fallback.stopping():
                    return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._sender.shutdown()
        self._pipe.close()
        self._fallback.close()


EvaluationService = InlineEvaluation | SubprocessEvaluation
