"""Completion as a shell does it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from drq import cli


def printed(capsys: pytest.CaptureFixture[str], shell: str) -> str:
    cli.main(["completion", shell])
    return capsys.readouterr().out


def test_bash_completes_commands_options_and_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(capsys, "bash")

    def complete(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _drq; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert complete("drq", "ex") == ["export"]
    assert complete("drq", "train", "dmc/walker-w") == ["dmc/walker-walk"]
    assert complete("drq", "train", "--agent.epsilon-f") == ["--agent.epsilon-final"]
    assert complete("drq", "train", "--agent.reset-e") == ["--agent.reset-every"]  # of Rainbow alone
    assert complete("drq", "train", "--agent.target-e") == ["--agent.target-entropy", "--agent.target-every"]
    assert complete("drq", "export", "runs/x", "--form") == ["--format"]
    assert set(complete("drq", "")) == set(cli.COMMANDS)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_can_read_theirs(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(capsys, shell)
    assert "dmc/walker-walk" in script
    assert "agent.log-std-min" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_an_unknown_shell() -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["completion", "tcsh"])
    assert stopped.value.code == 2


def test_help_begins_with_what_people_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "toy/reach", "--help"])
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()[:17] if line.startswith("  --")]
    assert lines[:4] == ["--preset", "--steps", "--seed", "--dir"]
    assert len(lines) == 11
