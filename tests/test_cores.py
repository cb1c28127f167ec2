"""How many cores a process takes for itself."""

from __future__ import annotations

import pytest

from drq.cores import allotted_cores, usable_cores


@pytest.mark.parametrize(("share", "cores"), [("1", 1), ("6", 6), ("0", 1)])
def test_what_a_launcher_gives(share: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", share)
    assert allotted_cores() == cores


@pytest.mark.parametrize("share", [None, "", "4,2", "many"])
def test_all_where_nobody_says(share: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    if share is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", share)
    assert allotted_cores() == usable_cores() >= 1
