"""Machine code kept from one run to the next: compiling takes seconds at every start."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_UNKEPT = OSError, RuntimeError
"""A file that is not there, a disk that is full or cannot be written, a user without a home."""


def folder() -> Path:
    """$XDG_CACHE_HOME/drq/kernels, which is ~/.cache/drq/kernels where nothing else is set. Free to be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drq" / "kernels"


def code_for(key: str, compile: Callable[[], bytes]) -> bytes:
    """The code that belongs to everything it was made from; compiled if it is not there, or damaged.

    Where nothing can be kept, it is compiled every time.
    """
    name = hashlib.sha256(key.encode()).hexdigest()
    with suppress(*_UNKEPT):
        checksum, code = _split((folder() / name).read_bytes())
        if hashlib.sha256(code).digest() == checksum:
            return code
    code = compile()
    with suppress(*_UNKEPT):
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder()) as own:  # a full disk leaves nothing behind
            unfinished = Path(own) / name
            unfinished.write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(unfinished, folder() / name)
    return code


def _split(kept: bytes) -> tuple[bytes, bytes]:
    length = hashlib.sha256().digest_size
    return kept[:length], kept[length:]
