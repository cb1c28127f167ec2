"""`drq completion bash|zsh|fish`: a script that completes commands, options and tasks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tyro

Shell = Literal["bash", "zsh", "fish"]


def options_of(arguments: Any, default: Any = None) -> list[str]:
    """Every option of a command, given what tyro reads its arguments into."""
    given = {} if default is None else {"default": default}
    parser = tyro.extras.get_parser(arguments, config=(tyro.conf.AvoidSubcommands,), **given)
    assert isinstance(parser, argparse.ArgumentParser)
    names = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    return sorted(set(names))


def script(shell: Shell, words: Mapping[str, Sequence[str]]) -> str:
    """What the shell is to read. `words` are those that each command may be followed by."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](words)


def _bash(words: Mapping[str, Sequence[str]]) -> str:
    cases = "\n".join(f"        {command}) words='{' '.join(follow)}' ;;" for command, follow in words.items())
    return f"""# drq completion bash > ~/.local/share/bash-completion/completions/drq
_drq() {{
    local words=''
    if [ "$COMP_CWORD" -eq 1 ]; then
        words='{" ".join(words)}'
    else case "${{COMP_WORDS[1]}}" in
{cases}
    esac; fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _drq drq
"""


def _zsh(words: Mapping[str, Sequence[str]]) -> str:
    cases = "\n".join(f"        {command}) candidates=({' '.join(follow)}) ;;" for command, follow in words.items())
    return f"""#compdef drq
# eval "$(drq completion zsh)" in ~/.zshrc, after compinit
_drq() {{
    local -a candidates
    if (( CURRENT == 2 )); then
        candidates=({" ".join(words)})
    else case ${{words[2]}} in
{cases}
    esac; fi
    compadd -a candidates
    (( CURRENT == 2 )) || _files
}}
compdef _drq drq
"""


def _fish(words: Mapping[str, Sequence[str]]) -> str:
    lines = ["# drq completion fish > ~/.config/fish/completions/drq.fish"]
    lines.append(f"complete -c drq -n __fish_use_subcommand -f -a '{' '.join(words)}'")
    for command, follow in words.items():
        here = f"complete -c drq -n '__fish_seen_subcommand_from {command}'"
        lines += [f"{here} -l {word.removeprefix('--')}" for word in follow if word.startswith("--")]
        if plain := [word for word in follow if not word.startswith("--")]:
            lines.append(f"{here} -a '{' '.join(plain)}'")
    return "\n".join(lines) + "\n"
