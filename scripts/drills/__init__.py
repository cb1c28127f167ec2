"""Fault drills: `make drills`. Breaks small runs in every way that docs/reliability.md lists, and counts what was lost.

Runs are processes forked from this one, so that a hundred of them take minutes. Nothing may be lost: a run that went on
ends with the bits of one that was left alone, and anything else is refused in one sentence.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path.insert(0, str(TESTS))

import drq  # noqa: E402
from drq.errors import UserError  # noqa: E402
from runs import assert_same_run, small  # noqa: E402

REFUSED = 2
"""Exit code of a run that was refused in a sentence."""


@dataclass
class Outcome:
    """What came of a drill."""

    tried: int = 0
    refused: int = 0
    """Of those, how often a sentence was the answer."""
    lost: list[str] = field(default_factory=list)
    """Results that differ, tracebacks, what was let in."""


def forked(work: Callable[[], object]) -> int:
    """Begins work in a process of its own; its exit code is 0, or 2 for a sentence, or 1 for a traceback."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        torch.set_num_threads(1)
        work()
        code = 0
    except UserError as error:
        code = REFUSED if "\n" not in str(error) else 1
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(folder: Path) -> int:
    return ended(forked(lambda: drq.train(small(folder), quiet=True)))


def same_as(whole: Path, folder: Path, outcome: Outcome, what: str) -> None:
    try:
        assert_same_run(whole, folder)
    except (AssertionError, OSError) as error:
        outcome.lost.append(f"{what}: {error}")
