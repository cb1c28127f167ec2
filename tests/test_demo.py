"""The demo, short: both agents train, the table is honest, the page opens in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chromium import Browser, find_chromium
from drq import cli
from drq.training.folder import RunFolder
from runs import drq, fails


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo")
    done = drq("demo", "--steps", "510", "--dir", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_table_says_what_the_runs_say(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    numbers = dict(re.findall(r"^(\w[\w ]*?) +(-?[\d.]+) +-?\d+%$", printed, flags=re.M))
    assert set(numbers) == {"random policy", "perfect policy", "DrQ", "no augmentation"}
    for label, name in (("DrQ", "drq"), ("no augmentation", "no-augmentation")):
        last = RunFolder(folder / name).evaluations()[-1]
        assert last["env_step"] == 510
        assert float(numbers[label]) == pytest.approx(last["return_mean"], abs=0.051)


def test_again_it_shows_what_is_there(finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, printed = finished
    before = (folder / "drq" / "eval.csv").read_bytes()
    cli.main(["demo", "--steps", "510", "--dir", str(folder)])
    assert capsys.readouterr().out.splitlines()[-9:] == printed.splitlines()[-9:]
    assert (folder / "drq" / "eval.csv").read_bytes() == before


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine to draw the page")
def test_the_page_in_a_browser(finished: tuple[Path, str]) -> None:
    executable = find_chromium()
    assert executable is not None
    with Browser(executable) as browser:
        browser.open(finished[0] / "demo.html")
        assert browser.problems == []
        assert browser.run("document.querySelectorAll('video').length") == 2
        assert browser.run("document.querySelectorAll('svg polyline').length") == 2
        pictures = browser.run("[...document.images].map((one) => [one.naturalWidth, one.src])")
        assert [width for width, _ in pictures] == [24] * 6
        assert len({picture for _, picture in pictures}) > 3  # views differ; two may be shifted alike
        said = browser.run("document.body.innerText")
        assert "This is one seed, 1" in said
        assert f"drq report {finished[0]} --out report.html" in said
        colours = []
        for scheme in ("light", "dark"):
            browser.appear(scheme=scheme)
            asked = "((node) => [getComputedStyle(node).fill, getComputedStyle(document.body).color])"
            text, ink = browser.run(f"{asked}(document.querySelector('svg text'))")
            assert text == ink
            colours.append(text)
        assert colours[0] != colours[1]
        assert browser.run("document.querySelectorAll('tbody tr').length") == 4
        browser.appear(width=390, mobile=True)
        assert browser.run("document.documentElement.scrollWidth") <= 390


def test_a_failure_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "drq").mkdir()
    (tmp_path / "drq" / "thesis.tex").write_text("important")
    said = fails(capsys, "demo", "--steps", "20", "--dir", str(tmp_path))
    assert "has something in it and is no run folder" in said
