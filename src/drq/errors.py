"""The one exception a user should ever meet, and the hints that many of its sentences give."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import NoReturn


class UserError(Exception):
    """A mistake the user can mend: one sentence that says what is wrong and what to do about it.

    The command line prints it without a traceback and exits with 2.
    """


class ProcessEnded(UserError):
    """A process that worked for this one has ended, as when memory ran out: another attempt may well succeed."""


class DeviceLost(UserError):
    """The GPU has failed for good in this process. Memory that PyTorch frees from then on may abort the process, with
    a C++ stack on the terminal: a command that has said the sentence leaves by `end_at_once`, with this error alive.
    """


def end_at_once(code: int) -> NoReturn:
    """Ends the process without freeing anything. What must reach a disk has been written and closed before."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def did_you_mean(
    name: str, known: Iterable[str], *, most: int = 1, key: Callable[[str], str] = lambda text: text
) -> str:
    """What stands after a full stop, " Did you mean 'a' or 'b'?", or nothing where nothing known is near.

    `key` gives the part of a name that is compared.
    """
    by_key = {key(each): repr(each) for each in known}
    near = [by_key[match] for match in get_close_matches(key(name), by_key, n=most)]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def format_of(out: Path, formats: Sequence[str]) -> str:
    """Which of the formats a file's name asks for; the first where it has no ending."""
    ending = out.suffix.lower().removeprefix(".")
    if ending and ending not in formats:
        raise UserError(f"{out} ends in none of .{', .'.join(formats)}: name it so, or say which it is (--format).")
    return ending or formats[0]


def what_failed(error: BaseException) -> str:
    """`at my_env.py, line 12 (ValueError: no room)`: what somebody else's code raised, and its innermost line. Lines of
    installed packages count where there are no others, Gymnasium's and ours never: nobody is to mend them."""
    if isinstance(error, SyntaxError):
        file, line, reason = error.filename, error.lineno, error.msg
    else:
        # Leaving out frames that are no files, as importlib's frozen ones.
        frames = [
            (frame.f_code.co_filename, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if os.path.isfile(frame.f_code.co_filename)
            and str(frame.f_globals.get("__name__")).partition(".")[0] not in ("drq", "gymnasium", "importlib")
        ]
        theirs = [each for each in frames if "site-packages" not in each[0]] or frames
        file, line = theirs[-1] if theirs else (None, None)
        try:
            reason = str(error)
        except Exception:  # it fails even at that
            reason = ""
    what = ": ".join(filter(None, (type(error).__name__, " ".join(reason.split()))))
    return f"at {os.path.basename(file)}, line {line} ({what})" if file else f"({what})"


def reason(error: BaseException) -> str:
    """What is wrong with a file, in a few words, from what reading or writing it has raised."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    name = f"{os.path.basename(error.filename)}: " if isinstance(error, OSError) and error.filename else ""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return name + str(text).partition("\n")[0]


def install_command(extra: str) -> str:
    """What brings an extra to this installation: a checkout, or a package."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "pyproject.toml").is_file():
        # By their own names: what a package index calls drq is somebody else's.
        with suppress(PackageNotFoundError):
            marked = [line.split(";") for line in requires("drq") or [] if re.search(rf"extra == .{extra}\b", line)]
            return f"pip install {' '.join(repr(package.strip()) for package, _ in marked)}"
        return f"pip install '.[{extra}]' in DrQ's folder"
    here = checkout == Path.cwd()
    return f"pip install -e '{'.' if here else checkout}[{extra}]'"
