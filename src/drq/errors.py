"""The one exception a user should ever meet, and the hint that many of its sentences give."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches


class UserError(Exception):
    """A mistake the user can mend: one sentence that says what is wrong and what to do about it.

    The command line prints it without a traceback and exits with 2.
    """


def did_you_mean(
    name: str, known: Iterable[str], *, most: int = 1, key: Callable[[str], str] = lambda text: text
) -> str:
    """" Did you mean 'a' or 'b'?", to stand after a full stop, or nothing where nothing known is near.

    `key` gives the part of a name that is compared.
    """
    by_key = {key(each): repr(each) for each in known}
    near = [by_key[match] for match in get_close_matches(key(name), by_key, n=most)]
    return f" Did you mean {' or '.join(near)}?" if near else ""
