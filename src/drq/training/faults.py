"""What ends a run before its time, in a sentence: what happened, what is left, and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drq.engine import in_words, lacks_code, lacks_memory
from drq.errors import DeviceLost, UserError
from drq.training.folder import write_atomically


def diverged(what: str, where: str, left: str) -> UserError:
    """A number that is not finite. `left`: what there is of the run, as `Checkpoints.left` says it."""
    return UserError(
        f"The agent has diverged: {what} at {where}. {left}: try a smaller --agent.learning-rate in another --dir, and "
        "see that rewards are not huge."
    )


@contextmanager
def device_faults_in_words(left: Callable[[], str], replay_bytes: Callable[[], int]) -> Iterator[None]:
    """A GPU without memory, or lost, or none that this PyTorch is for."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (happened := in_words(error)) is None:
            raise
        if lacks_memory(error):
            raise UserError(
                f"{happened}; the replay alone takes {replay_bytes() / 1e9:.2f} GB. {left()}: run the same command "
                "again when there is room, or fewer runs at once; or, in another --dir, with a smaller "
                "--replay.capacity, --agent.batch-size, --agent.k, --agent.m or --agent.hidden-dim."
            ) from error
        if lacks_code(error):
            raise UserError(
                f"{happened}: install a build that is (docs/install.md, drq doctor), or train with --device cpu."
            ) from error
        raise DeviceLost(
            f"{happened}, or under MPS another process on it did. {left()}: run the same command again; if it fails "
            "once more, nvidia-smi and the system's log (Xid) say what is wrong with the GPU."
        ) from error


@contextmanager
def traces_in(file: Path) -> Iterator[None]:
    """Leaves the whole trace of an error of ours, of somebody else's code, or of a device: who mends that needs it."""
    try:
        yield
    except Exception as error:
        of_the_user = isinstance(error, UserError)
        if cause := error.__cause__ if of_the_user else error:
            trace = "".join(traceback.format_exception(cause))
            with suppress(OSError, UserError):  # the disk may be what failed
                write_atomically(file, f"{trace}\n{error}\n" if of_the_user else trace)
        raise
