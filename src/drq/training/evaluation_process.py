"""The process that plays evaluations beside training: `python -m drq.training.evaluation_process <pipe>`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection

import torch

from drq.engine import choose_device, in_words
from drq.errors import UserError
from drq.settings import config_from_json
from drq.training.components import make_acting_agent, make_env
from drq.training.evaluation_service import (
    EvaluationRequest,
    InlineEvaluation,
    receive_weights,
    settings_beside_training,
)

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl.h."""
PROGRESS_SECONDS = 1.0
"""How often training is told how far an evaluation is."""


def end_with_training() -> None:
    """Has Linux end this process when training is killed: the pipe tells only after the evaluation under way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def serve(pipe: Connection) -> None:
    """Plays requests until the pipe closes: first the run's configuration, then request and weights by turns.

    Answers are lists of scores and info; before them come tables that say how far the evaluation is."""
    config = config_from_json(json.loads(pipe.recv_bytes()))
    engine, threads = settings_beside_training(config, choose_device(config.device))
    engine.apply_globally()
    torch.set_num_threads(threads)
    env = make_env(config)
    agent = make_acting_agent(config, env.spec, engine)
    env.close()
    said = 0.0

    def show_progress(done: int, of: int, unit: str) -> None:
        nonlocal said
        if time.monotonic() >= said + PROGRESS_SECONDS:
            said = time.monotonic()
            pipe.send_bytes(json.dumps({"done": done, "of": of, "unit": unit}).encode())

    evaluations = InlineEvaluation(config, engine, show_progress=show_progress)
    evaluations.prepare(agent)
    while True:
        request = EvaluationRequest(**json.loads(pipe.recv_bytes()))
        receive_weights(pipe, agent)
        pipe.send_bytes(json.dumps(evaluations.play(agent, request)).encode())


if __name__ == "__main__":
    end_with_training()
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, ConnectionError):
        pass  # training is over
    except UserError as error:
        print(f"drq evaluation: {error}", file=sys.stderr)
    except (RuntimeError, MemoryError) as error:
        print(f"drq evaluation: {in_words(error) or traceback.format_exc()}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(0)  # rendering contexts of a dying interpreter are not worth waiting for
