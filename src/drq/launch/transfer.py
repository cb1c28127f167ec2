"""Copies of a run folder that are sound at every moment, however far copying has come.

A copy is made of pieces: (kind, path, offset, data, whether it is the last of its file). The files that a checkpoint
consists of go before the latest.json that names them, what no list names any more is removed after it, and
finished.json is the last of all. Only the standard library is imported at the top: Ray carries this to its nodes.
"""

from __future__ import annotations

import importlib
import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zlib import crc32

Piece = tuple[str, str, int, bytes, bool]
WHOLE, APPEND, REMOVE = "whole", "append", "remove"
PIECE_BYTES, BATCH_BYTES = 8 * 2**20, 32 * 2**20


class FileList(NamedTuple):
    """A checkpoint's latest.json or previous.json, as it was read."""

    path: str
    text: bytes
    named: list[str]
    """The files that the checkpoint consists of."""


class Outbox:
    """What is new in a folder that holds one run, and perhaps its log, since the last look."""

    def __init__(self, root: Path, *, appends: bool = True, arrived: bool = False) -> None:
        """`appends`: whether the copy can be added to. Object stores take whole files only. `arrived`: whether the
        folder itself came from the copy, so that the checkpoint in it need not go back."""
        self.root = root
        self._appends = appends
        self._sent: dict[str, tuple[int, int]] = {}
        """Path -> size and time of what was sent of it."""
        self._checksums: dict[str, int] = {}
        """Of what was sent of files that may grow: logs, CSVs, TensorBoard's. Of those what is new is enough."""
        if arrived:
            for path in {path for each in self._look()[0] for path in each.named}:
                with suppress(FileNotFoundError):
                    self._sent[path] = _stamp(os.stat(root / path))

    def pieces(self) -> Iterator[Piece]:
        """Everything that is new, in an order that leaves a sound copy wherever it ends."""
        lists, files, finished = self._look()
        named = {path for each in lists for path in each.named}
        for path in [*files, *sorted(named)]:
            try:
                yield from self._file(path)
            except FileNotFoundError:
                if path in named:
                    return  # a checkpoint after the next has replaced it: the next look sees that one
        for each in lists:  # as it was read before: what is there now may be newer than what was sent
            key = len(each.text), hash(each.text)
            if self._sent.get(each.path) != key:
                yield WHOLE, each.path, 0, each.text, True
                self._sent[each.path] = key
        for path in [path for path in self._sent if in_checkpoint(path) and path.endswith(".safetensors")]:
            if path not in named:
                yield REMOVE, path, 0, b"", True
                del self._sent[path]
        for path in finished:
            yield from self._file(path)

    def _look(self) -> tuple[list[FileList], list[str], list[str]]:
        """Lists of checkpoints; other files; finished.json if it is there.

        What is written after something else is looked at before it, so that all it speaks of is seen too.
        """
        finished = [path for path in self._walk() if posixpath.basename(path) == "finished.json"]
        lists = []
        for path in self._walk():
            if in_checkpoint(path) and posixpath.basename(path) in ("previous.json", "latest.json"):
                text = (self.root / path).read_bytes()
                beside = posixpath.dirname(path)
                named = {name.decode() for name in re.findall(rb'"([\w.-]+\.safetensors)"', text)}
                names = [posixpath.join(beside, name) for name in named]
                if b'"dropped": true' in text:  # the replay of a finished run, which is still named
                    names = [each for each in names if (self.root / each).exists()]
                lists.append(FileList(path, text, names))
        lists.sort(key=lambda each: each.path, reverse=True)  # previous.json, then latest.json
        apart = {*finished, *(each.path for each in lists)}
        files = [path for path in self._walk() if path not in apart and not in_checkpoint(path)]
        return lists, sorted(files, key=lambda path: (posixpath.basename(path) != "config.json", path)), finished

    def _walk(self) -> Iterator[str]:
        """Files that are whole. Locks, links and what others keep beside a run (W&B) stay where they are."""
        for folder, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if name != "wandb" and not name.startswith(".")]
            for name in names:
                path = Path(folder, name)
                if not name.startswith(".") and not name.endswith(".unfinished") and not path.is_symlink():
                    yield path.relative_to(self.root).as_posix()

    def _file(self, path: str) -> Iterator[Piece]:
        before = self._sent.get(path)
        with open(self.root / path, "rb") as file:
            now = _stamp(os.fstat(file.fileno()))
            if before == now:
                return
            offset = checksum = 0
            grows = self._appends and not in_checkpoint(path)
            if grows and before and now[0] >= before[0]:
                # A run that goes on elsewhere cuts its CSVs back to its checkpoint's, and other rows may follow.
                checksum = crc32(file.read(before[0]))
                offset, checksum = (before[0], checksum) if checksum == self._checksums[path] else (0, 0)
            kind = APPEND if offset else WHOLE
            file.seek(offset)
            while True:
                data = file.read(min(PIECE_BYTES, now[0] - offset))
                last = offset + len(data) >= now[0] or not data
                yield kind, path, offset, data, last
                offset += len(data)
                checksum = crc32(data, checksum) if grows else 0
                if last:
                    break
        self._sent[path], self._checksums[path] = now, checksum


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def in_checkpoint(path: str) -> bool:
    return posixpath.basename(posixpath.dirname(path)) == "checkpoint"


def receive(root: Path, pieces: Iterable[Piece]) -> None:
    """Writes pieces into a copy."""
    for kind, path, offset, data, last in pieces:
        target = root / inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink() or target.parent.is_symlink():
            raise ValueError(f"{target} is a link")
        if kind == REMOVE:
            target.unlink(missing_ok=True)
        elif kind == APPEND:
            with open(target, "r+b") as file:
                file.truncate(offset)
                file.seek(offset)
                file.write(data)
        else:
            unfinished = target.with_name(f".{target.name}.unfinished")
            with open(unfinished, "r+b" if offset else "wb") as file:
                file.seek(offset)
                file.write(data)
                if last:
                    file.flush()
                    os.fsync(file.fileno())
            if last:
                os.replace(unfinished, target)


def inside(path: str) -> str:
    """A relative path that leads nowhere else; ValueError for another."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise ValueError(f"{path!r} leads out of its folder")
    return path


def below(folder: str, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces of a folder as pieces of one that holds it."""
    for kind, path, offset, data, last in pieces:
        yield kind, f"{folder}/{path}", offset, data, last


def batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups that are worth a message each, and not too large for one."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece[3])
        if size >= BATCH_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


class RunStore:
    """A folder on one of fsspec's file systems (s3://bucket/runs, file:///shared/runs). It holds copies."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs: Any = None
        self._root = ""

    def __getstate__(self) -> str:
        return self.url

    def __setstate__(self, url: str) -> None:
        self.url, self._fs, self._root = url, None, ""

    @property
    def fs(self) -> Any:
        if self._fs is None:
            fsspec: Any = importlib.import_module("fsspec")
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        return self._fs

    def at(self, path: str) -> str:
        assert self.fs is not None
        return posixpath.join(self._root, path) if path else self._root

    def write(self, pieces: Iterable[Piece]) -> None:
        """Puts pieces of whole files there; each appears when it is whole."""
        file: Any = None
        for kind, path, offset, data, last in pieces:
            target = self.at(inside(path))
            if kind == REMOVE:
                if self.fs.exists(target):
                    self.fs.rm_file(target)
                continue
            if offset == 0:
                self.fs.makedirs(posixpath.dirname(target), exist_ok=True)
                file = self.fs.open(target, "wb", autocommit=False)
            file.write(data)
            if last:
                file.close()
                file.commit()

    def write_text(self, path: str, text: str) -> None:
        self.write([(WHOLE, path, 0, text.encode(), True)])

    def read_text(self, path: str) -> str | None:
        try:
            return str(self.fs.cat_file(self.at(path)).decode())
        except FileNotFoundError:
            return None

    def fetch(self, below: str, into: Path, *, checkpoints: bool) -> None:
        """Copies what is below a path to the same place in a local folder, lists of checkpoints last."""
        self.fs.invalidate_cache()
        top = self.at(below)
        found = self.fs.find(top) if self.fs.exists(top) else []
        stripped = self._root.rstrip("/") + "/"
        paths = [each[len(stripped) :] for each in found if each.startswith(stripped)]
        for path in sorted(paths, key=lambda path: (posixpath.basename(path) == "latest.json", path)):
            if (in_checkpoint(path) or path.startswith(".")) and not checkpoints:
                continue
            if posixpath.basename(path).startswith(".") or path.endswith(".unfinished"):
                continue
            target = into / inside(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_name(f".{target.name}.unfinished")
            self.fs.get_file(self.at(path), str(unfinished))
            os.replace(unfinished, target)

    def take(self, run: str, owner: str) -> None:
        """Makes a run the owner's, for a new attempt; whoever had it before finds that out before it writes again."""
        self.write([(REMOVE, posixpath.join(run, "error.txt"), 0, b"", True)])
        self.write_text(posixpath.join(run, ".owner"), owner)

    def owner(self, run: str) -> str | None:
        return self.read_text(posixpath.join(run, ".owner"))
