"""Compiled kernels are kept, and whatever happens to what was kept, the right code comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from drq.code_cache import code_for, folder


class Compiler:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return b"code" * 100


@pytest.fixture(autouse=True)
def _cache_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_it_is_compiled_once() -> None:
    compiler = Compiler()
    assert {code_for("sm_90 text", compiler) for _ in range(3)} == {b"code" * 100}
    assert compiler.calls == 1
    code_for("sm_100 text", compiler)
    assert compiler.calls == 2
    assert len(list(folder().iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda kept: kept[:-1], lambda _: b"", lambda kept: kept[:50] + b"x" + kept[51:]])
def test_damage_is_noticed_and_mended(damage) -> None:  # type: ignore[no-untyped-def]
    compiler = Compiler()
    code_for("text", compiler)
    (file,) = folder().iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert code_for("text", compiler) == b"code" * 100
    assert code_for("text", compiler) == b"code" * 100
    assert compiler.calls == 2


def test_where_nothing_can_be_kept_it_is_compiled_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiler = Compiler()
    for _ in range(2):
        assert code_for("text", compiler) == b"code" * 100
    assert compiler.calls == 2


def test_a_full_disk_is_left_without_half_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(file: Path, content: bytes) -> None:
        with open(file, "wb") as opened:
            opened.write(content[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half)
        assert code_for("text", Compiler()) == b"code" * 100
    assert list(folder().iterdir()) == []
    code_for("text", Compiler())
    assert len(list(folder().iterdir())) == 1
