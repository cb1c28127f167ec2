"""`drq suite prune`: finished runs keep their weights and drop their replay, nearly all of their disk space."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from drq.errors import UserError
from drq.launch.stores import store_at
from drq.launch.suite_folder import SuiteFolder
from drq.training.checkpoint import drop_replay, replay_files


@dataclass(frozen=True)
class SuitePruneArguments:
    """Frees the disk space of a suite's finished runs: weights, curves and videos stay, replays go."""

    dir: Positional[Path]
    """The suite's folder."""
    yes: bool = False
    """Do not ask."""


def prune_suite(args: SuitePruneArguments) -> int:
    """`drq suite prune DIR`. 1: somebody was asked and said no."""
    if store_at(args.dir) is not None:
        raise UserError(f"{args.dir} is a store, and only folders on a disk can be pruned: name one.")
    suite = SuiteFolder(args.dir)
    found = {}
    for run in suite.read().runs:
        folder = suite.run_folder(run)
        if folder.finished_steps >= run.steps and (files := replay_files(folder.checkpoint)):
            found[run] = sum(path.stat().st_size for path in files)
    if not found:
        print(f"No finished run in {args.dir} has a replay. Nothing to do.")
        return 0
    print(f"The replays of {len(found)} finished runs in {args.dir} take {sum(found.values()) / 1e9:.2f} GB.")
    print("Without them a run still evaluates, exports and reports; it can no longer go on with more steps.")
    if not args.yes and not _agreed():
        print("Nothing was removed. (--yes does not ask.)")
        return 1
    freed, asked_for = 0, set(suite.read().runs)  # by now, and perhaps with more steps
    try:
        for run, size in found.items():
            if run in asked_for and suite.claim(run):  # else somebody goes on with it
                drop_replay(suite.run_folder(run).checkpoint)
                suite.release(run)
                freed += size
    finally:
        suite.close()
    print(f"Freed {freed / 1e9:.2f} GB.")
    return 0


def _agreed() -> bool:
    try:
        return input("Remove them? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
