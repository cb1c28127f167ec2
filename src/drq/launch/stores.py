"""`--dir s3://bucket/runs`: a suite whose folder is on one of fsspec's file systems.

Runs work on local disks and are copied there. What a command shows (tables, reports) it reads from a local copy of all
but the checkpoints, below runs/.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from drq.errors import UserError
from drq.launch.pools import Ended, Job, LocalPool
from drq.launch.suite_folder import SuiteFolder
from drq.launch.transfer import Outbox, RunStore, below
from drq.suites import Run, slug
from drq.training.lock import read_holder, this_process

COPY_SECONDS = 10.0
"""Between two looks at what a run on this machine has to be copied."""
BEAT_SECONDS = 30.0
SILENT_SECONDS = 300.0
"""A command that has not been heard of for so long has died."""
OWNER = ".owner"


def store_at(path: Path | None) -> RunStore | None:
    """The store that a path names, which as a path has lost a slash of its `//`; None for a folder of this machine."""
    parts = re.fullmatch(r"([a-z][a-z0-9+.]+):/+(.*)", str(path or ""))
    if parts is None:
        return None
    scheme, rest = parts.groups()
    store = RunStore(f"{scheme}:///{rest}" if scheme in ("file", "local") else f"{scheme}://{rest}")
    try:
        store.fs.exists(store.at(""))
    except ImportError as error:
        raise UserError(f"{store.url} needs a package ({error}): pip install it, or choose another --dir.") from None
    except Exception as error:  # whatever a storage's library raises: no network, no key, no such protocol
        raise UserError(f"{store.url} cannot be reached ({error}): mend that, or choose another --dir.") from error
    return store


def local_copy(path: Path) -> Path:
    """The folder itself, or where the copy of a store's small files is, brought up to date."""
    store = store_at(path)
    if store is None:
        return path
    folder = shown_at(store)
    store.fetch("", folder, checkpoints=False)
    return folder


def shown_at(store: RunStore) -> Path:
    return Path("runs") / slug(store.url)


@contextmanager
def stored(store: RunStore, folder: SuiteFolder) -> Iterator[None]:
    """Within this context the suite in a store is this command's, with its small files in a local folder."""
    with owned(store):
        store.fetch("", folder.path, checkpoints=False)
        try:
            yield
        finally:
            ours = (piece for piece in Outbox(folder.path, appends=False).pieces() if _of_the_launcher(piece[1]))
            store.write(ours)


@contextmanager
def owned(store: RunStore) -> Iterator[None]:
    """Within this context the suite in a store is this command's; UserError where it is another's."""
    text = store.read_text(OWNER) or ""
    other = read_holder(text)  # None: nobody, or nothing that a command wrote
    beat_at = json.loads(text).get("beat") if other else None
    if other and not other.gone and isinstance(beat_at, float) and time.time() - beat_at < SILENT_SECONDS:
        raise UserError(
            f"{store.url} is being worked on by {other}: wait for it, or stop it; commands on many machines can share "
            "a folder on a disk, but not a store."
        )
    me, over = this_process()._asdict(), threading.Event()

    def beat() -> None:
        store.write_text(OWNER, json.dumps({**me, "beat": time.time()}))

    def keep_beating() -> None:
        while not over.wait(BEAT_SECONDS):
            with suppress(Exception):  # a store that is away for a moment
                beat()

    beat()
    thread = threading.Thread(target=keep_beating, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        store.fs.rm_file(store.at(OWNER))


def _of_the_launcher(path: str) -> bool:
    """Whether a file is the launcher's own and not a run's: what runs printed, and why they failed."""
    top = ("suite.json", "best.toml")
    return path in top or PurePosixPath(path).parts[0] == "logs" or path.endswith("/error.txt")


class StoredPool(LocalPool):
    """Processes on this machine, whose folders come from a store and are copied to it."""

    def __init__(self, folder: SuiteFolder, slots: Sequence[Mapping[str, str]], store: RunStore) -> None:
        super().__init__(folder, slots)
        self._store = store
        self._outboxes: dict[Run, Outbox] = {}
        self._copied: dict[Run, float] = {}

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with super().at_work():
            try:
                yield
            finally:
                self.ended()  # what was dropped of the last ones

    def start(self, job: Job) -> None:
        path, name = self._folder.path / job.run.folder, job.run.folder.as_posix()
        shutil.rmtree(path, ignore_errors=True)  # what is in the store counts: somebody else may have gone on with it
        self._store.take(name, uuid.uuid4().hex)
        self._store.fetch(name, self._folder.path, checkpoints=True)
        self._outboxes[job.run] = Outbox(path, appends=False, arrived=True)
        super().start(job)

    def ended(self) -> list[Ended]:
        over = super().ended()
        for run, outbox in list(self._outboxes.items()):
            alive = run in self._processes
            if alive and time.monotonic() < self._copied.get(run, 0.0) + COPY_SECONDS:
                continue
            self._copied[run] = time.monotonic()
            try:
                self._store.write(below(run.folder.as_posix(), outbox.pieces()))
            except Exception as error:  # whatever a storage's library raises
                if not alive:
                    raise UserError(
                        f"{self._store.url} cannot be written ({error}): mend that, and run the same command again."
                    ) from error
                self.notices.append(f"{run} was not copied to {self._store.url} ({error}). It is tried again.")
                continue
            # Once more after its end has been seen to: then its replay may have been dropped.
            if not alive and all(run != each.run for each in over):
                del self._outboxes[run]
        return over
