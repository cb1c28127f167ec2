"""The page in a real browser: it renders without an error, its filters work, its numbers are those on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chromium import Browser, find_chromium
from drq.launch import SuiteFolder
from drq.report import report
from drq.suites import Setting, Suite
from drq.suites.search import label_of, read_search
from report_runs import evaluations, fake_run, write_table

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to draw the page")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as one:
        one.appear()
        yield one


def show(browser: Browser, out: Path, *dirs: Path) -> list[str]:
    warnings = report(list(dirs), out)
    browser.open(out)
    assert browser.problems == []
    assert browser.requests == [out.resolve().as_uri()]
    return warnings


def texts(browser: Browser, selector: str) -> list[str]:
    every = f"[...document.querySelectorAll({json.dumps(selector)})]"
    found: list[str] = browser.run(f"{every}.map((node) => (node.innerText ?? node.textContent).trim())")
    return found


def count(browser: Browser, selector: str) -> int:
    return len(texts(browser, selector))


def search(browser: Browser, text: str) -> None:
    browser.run(f"document.querySelector('#search').value = {json.dumps(text)}")
    browser.run("document.querySelector('#search').dispatchEvent(new Event('input'))")


def choose(browser: Browser, system: str) -> None:
    name = json.dumps(system)
    browser.run(f"[...document.querySelectorAll('#ours option')].find((one) => one.text === {name}).selected = true")
    browser.run("document.querySelector('#ours').dispatchEvent(new Event('change'))")


def click(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector({json.dumps(selector)}).click()")
    assert browser.problems == []


def score(browser: Browser, task: str, column: str, table: int = 0) -> str:
    found: str = browser.run(
        f"""[...document.querySelectorAll('table.scores')][{table}].querySelector(
        '[data-panel="{task}"] [data-column="{column}"] .score').textContent"""
    )
    return found


def rounded(values: list[float], digits: int = 0) -> str:
    return f"{np.mean(values):,.{digits}f} ± {np.std(values, ddof=1):,.{digits}f}"


def test_one_run(browser: Browser, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "runs")
    assert show(browser, tmp_path / "r.html", tmp_path) == []
    assert texts(browser, "#summary") == ["1 run · 1 task · 1 system"]
    assert count(browser, "#curves .panel svg.chart") == 1
    assert score(browser, "planet:dmc/walker-walk", "DrQ K=2 M=2") == f"{evaluations(folder)[100_000]:.0f}"
    assert score(browser, "planet:dmc/walker-walk", "DrQ (paper)") == "612 ± 164"
    assert count(browser, "#warnings li") == 0
    assert browser.run("document.querySelector('#atari').hidden && document.querySelector('#grids').hidden") is True


def test_tables_equal_the_files(browser: Browser, tmp_path: Path) -> None:
    folders: dict[tuple[str, str], list[Path]] = {}
    for task in ("dmc/walker-walk", "dmc/cheetah-run"):
        for name, settings in (("DrQ K=2 M=2", {}), ("SAC (no augmentation)", {"augmentation": "none"})):
            where = tmp_path / "runs"
            folders[task, name] = [
                fake_run(where, task, seed, steps=500_000, level=400 + 90 * len(settings), **settings)
                for seed in (1, 2, 3)
            ]
    rows = [("cheetah_run", seed, at, seed * at / 1000, "Theirs") for seed in (1, 2) for at in (50_000, 100_000)]
    assert show(browser, tmp_path / "r.html", tmp_path / "runs", write_table(tmp_path / "t.csv", rows)) == []
    for number, budget in enumerate((100_000, 500_000)):
        for (task, name), members in folders.items():
            shown = score(browser, f"planet:{task}", name, number)
            assert shown == rounded([evaluations(folder)[budget] for folder in members])
    assert score(browser, "planet:dmc/cheetah-run", "Theirs") == rounded([100, 200])
    assert texts(browser, "#scores h3") == ["PlaNet tasks at 100k env steps", "PlaNet tasks at 500k env steps"]
    # the table beside a chart holds the mean of the evaluations at every step
    browser.run("document.querySelector('[data-panel=\"planet:dmc/walker-walk\"] details').open = true")
    browser.run("new Promise((done) => setTimeout(done, 50))")
    listed = texts(browser, '[data-panel="planet:dmc/walker-walk"] details tbody tr')
    cells = [line.split("\t") for line in listed]
    found = {cell[1]: cell[2] for cell in cells if cell[0] == "DrQ K=2 M=2"}
    members = [evaluations(folder) for folder in folders["dmc/walker-walk", "DrQ K=2 M=2"]]
    assert found == {f"{at:,}": f"{np.mean([one[at] for one in members]):.1f}" for at in members[0]}


def test_filters(browser: Browser, tmp_path: Path) -> None:
    for task in ("dmc/walker-walk", "dmc/cheetah-run", "dmc/finger-spin"):
        for seed in (1, 2):
            fake_run(tmp_path / "runs", task, seed)
            fake_run(tmp_path / "runs", task, seed, augmentation="none")
    show(browser, tmp_path / "r.html", tmp_path)
    assert texts(browser, "#curves h4") == ["Finger Spin", "Cheetah Run", "Walker Walk"]

    click(browser, "input[value='planet:dmc/cheetah-run']")  # a task off
    assert texts(browser, "#curves h4") == ["Finger Spin", "Walker Walk"]
    assert texts(browser, "table.scores tbody th") == ["Finger Spin", "Walker Walk"]
    assert count(browser, "#runs table.runs tbody tr") == 8
    click(browser, "input[value='planet:dmc/cheetah-run']")

    search(browser, "walk")
    assert texts(browser, "#curves h4") == ["Walker Walk"]
    search(browser, "zzz")
    assert texts(browser, "#curves .empty") == ["No task matches the filter."]
    search(browser, "")

    lines = "#curves .panel:first-child path.mean"
    assert count(browser, lines) == 3  # two systems and the published curve
    click(browser, "#controls .systems input[data-group=system]")
    assert count(browser, lines) == 2
    assert "DrQ K=2 M=2" not in texts(browser, "table.scores thead tr:last-child th")
    click(browser, "#published")
    assert count(browser, lines) == 1
    assert texts(browser, "table.scores thead tr:last-child th") == ["Task", "SAC (no augmentation)"]
    click(browser, "#controls .systems input[data-group=system]")
    click(browser, "#singles")
    assert count(browser, "#curves .panel:first-child path.single") == 4
    assert browser.problems == []


def test_a_run_switched_off_leaves_the_mean(browser: Browser, tmp_path: Path) -> None:
    folders = [fake_run(tmp_path / "runs", seed=seed) for seed in (1, 2, 3)]
    show(browser, tmp_path / "r.html", tmp_path)
    last = [evaluations(folder)[100_000] for folder in folders]
    assert texts(browser, "#curves .reading .value")[0] == rounded(last)
    click(browser, "#runs input[data-run='1']")
    assert texts(browser, "#curves .reading .value")[0] == rounded([last[0], last[2]])
    assert score(browser, "planet:dmc/walker-walk", "DrQ K=2 M=2") == rounded(last)  # tables count every run


def test_hovering_and_arrow_keys_read_a_chart(browser: Browser, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "runs")
    show(browser, tmp_path / "r.html", tmp_path)
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    browser.run("document.querySelector('svg.chart').scrollIntoView({ block: 'center' })")
    box = browser.run("document.querySelector('svg.chart').getBoundingClientRect().toJSON()")
    left, right = 62 / 420, 1 - 14 / 420  # the frame of the plot
    x = box["x"] + box["width"] * (left + 0.4 * (right - left))
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=box["y"] + box["height"] / 2)
    assert texts(browser, "#curves .reading .at") == ["At 40k env steps"]
    assert texts(browser, "#curves .reading .value")[0] == f"{evaluations(folder)[40_000]:.0f}"
    browser.run("document.querySelector('svg.chart').focus()")
    for key in ("ArrowLeft", "ArrowLeft"):
        browser.send("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert texts(browser, "#curves .reading .at") == ["At 20k env steps"]
    browser.send("Input.dispatchKeyEvent", type="keyDown", key="End")
    assert texts(browser, "#curves .reading .at") == ["At 100k env steps"]


def test_missing_unfinished_and_broken_runs_are_on_the_page(browser: Browser, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    fake_run(root, seed=1)
    fake_run(root, seed=2, reached=40_000, status="unfinished")
    fake_run(root, seed=3, reached=10_000, status="failed")
    started = fake_run(root, seed=4, status="unfinished")
    (started / "eval.csv").unlink()
    fake_run(root, "dmc/cheetah-run", seed=1)
    broken = fake_run(root, "dmc/cheetah-run", seed=9)
    (broken / "eval.csv").write_text("env_step,agent_step,return_mean,return_std,episodes,seconds\nrubbish\n")
    warnings = show(browser, tmp_path / "r.html", root, tmp_path / "nowhere")
    assert texts(browser, "#summary") == ["6 runs · 2 finished · 2 tasks · 1 system"]
    assert browser.run("[...document.querySelectorAll('#warnings li')].map((n) => n.textContent)") == warnings
    assert len(warnings) >= 6
    statuses = texts(browser, "#runs .status")
    assert sorted(statuses) == ["failed", "finished", "finished", "no evaluation", "no evaluation", "unfinished"]
    assert browser.run("document.querySelector('table.scores tbody tr:last-child .n').textContent") == " n 1"


def test_runs_among_published_ones_and_what_is_missing(browser: Browser, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "runs", "dmc/cheetah-run")
    for seed in (1, 2):
        fake_run(tmp_path / "runs", seed=seed)
    show(browser, tmp_path / "r.html", tmp_path / "runs")
    assert texts(browser, "#standing h3") == [
        "DrQ K=2 M=2 among published runs of DrQ: PlaNet tasks, area, 100k env steps",
        "DrQ K=2 M=2 among published runs of DrQ: PlaNet tasks, return at the budget, 100k env steps",
    ]
    z = (evaluations(folder)[100_000] - 356.99) / 39.58  # the eight distinct seeds
    cells = [line.split("\t") for line in texts(browser, "#standing .block:last-child .scroll:last-child tbody tr")]
    assert cells[0][:3] == ["Cheetah Run", "357 ± 40", "8"]
    assert [float(cell.replace("\u2212", "-")) for cell in cells[0][-2:]] == pytest.approx([z, z], abs=0.005)
    assert count(browser, "#standing .block:last-child svg.chart path.mark") == 3 + 2  # three runs, two means
    assert texts(browser, "#scores .missing") == ["Missing: DrQ K=2 M=2, seed 2: Cheetah Run."]


def test_intervals_of_runs_far_apart_stay_beside_their_labels(browser: Browser, tmp_path: Path) -> None:
    for seed, level in ((1, 50.0), (2, 1000.0)):
        fake_run(tmp_path / "runs", seed=seed, level=level)
    show(browser, tmp_path / "r.html", tmp_path / "runs")
    boxes = """[...document.querySelectorAll('#standing svg.chart')].map((chart) => {
        const [label, range] = ['text.strong', 'line.range'].map((name) => chart.querySelector(name).getBBox());
        return [label.x + label.width, range.x, range.x + range.width, chart.viewBox.baseVal.width];
    })"""
    drawn = browser.run(boxes)
    assert len(drawn) == 2
    for label_ends, begins, ends, width in drawn:
        assert label_ends < begins < ends < width


def test_finished_and_unfinished_runs_are_separate_curves(browser: Browser, tmp_path: Path) -> None:
    finished = [fake_run(tmp_path / "runs", seed=seed) for seed in (1, 2)]
    fake_run(tmp_path / "runs", seed=3, reached=40_000, status="unfinished")
    show(browser, tmp_path / "r.html", tmp_path)
    names = texts(browser, "#curves .reading .name")
    assert names == ["DrQ K=2 M=2", "DrQ K=2 M=2, unfinished", "DrQ (published curves)"]
    assert texts(browser, "#curves .reading .value")[0] == rounded([evaluations(one)[100_000] for one in finished])
    assert count(browser, "#curves path.mean.unfinished") == 1
    assert texts(browser, "#curves text.axis") == ["env steps", "return"]


def test_training_games_of_runs_that_were_evaluated_at_their_end(browser: Browser, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "runs", "atari/pong", every=100_000)
    header, _, last = (folder / "eval.csv").read_text().splitlines()
    (folder / "eval.csv").write_text(f"{header}\n{last}\n")
    rows = [f"{4 * at},{at},{'' if at < 2_000 else at / 1_000}" for at in range(1_000, 100_001, 1_000)]
    (folder / "train.csv").write_text("\n".join(["env_step,agent_step,episode_return", *rows]) + "\n")
    show(browser, tmp_path / "r.html", tmp_path)
    data = browser.run("JSON.parse(document.getElementById('data').textContent).panels[0].training")
    (games,) = data
    assert (games["x"][0], games["y"][0]) == (6_000, 4.0)  # the mean of 2, 3, 4, 5 and 6
    assert (games["x"][-1], games["y"][-1]) == (100_000, 98.0)
    assert count(browser, "#curves path.training") == 1
    click(browser, "#runs input[data-run='0']")
    assert count(browser, "#curves path.training") == 0


def test_what_was_published_beyond_a_chart_has_no_row_below_it(browser: Browser, tmp_path: Path) -> None:
    fake_run(tmp_path / "runs", preset="state", env={"observation": "state"})
    show(browser, tmp_path / "r.html", tmp_path)
    names = texts(browser, "#curves .reading .name")
    assert "SAC State (paper) at 100k" in names
    assert [name for name in names if name.endswith("500k")] == []


def test_the_name_of_an_axis_has_room_beside_its_numbers(browser: Browser, tmp_path: Path) -> None:
    for game, level in (("pong", 20), ("crazy_climber", 1e5), ("demon_attack", 1e7)):
        fake_run(tmp_path / "runs", f"atari/{game}", every=50_000, level=level)
    show(browser, tmp_path / "r.html", tmp_path)
    left = "(node) => node.getBoundingClientRect()"
    room = browser.run(
        f"""[...document.querySelectorAll('#curves svg.chart')].map((chart) => {{
        const name = [...chart.querySelectorAll('text.axis')].find((one) => one.textContent === 'return');
        const numbers = [...chart.querySelectorAll('text[text-anchor=end]:not(.axis)')].map({left});
        return Math.min(...numbers.map((one) => one.left)) - ({left})(name).right; }})"""
    )
    assert len(room) == 3
    assert min(room) > 0


def test_no_chart_is_empty_at_first(browser: Browser, tmp_path: Path) -> None:
    """Though of many systems only some are switched on."""
    for number in range(9):
        fake_run(tmp_path / "runs", label=f"a{number}")
    for task in ("toy/reach", "toy/catch"):
        fake_run(tmp_path / "runs", task, label="z")
    show(browser, tmp_path / "r.html", tmp_path)
    assert count(browser, "#curves svg.chart") == 3
    assert count(browser, "#curves .empty") == 0
    assert browser.run("document.querySelectorAll('.systems [data-group=system]:checked').length") == 9


def test_atari_aggregates_and_grids(browser: Browser, tmp_path: Path) -> None:
    for game in ("alien", "pong", "boxing"):
        for seed in (1, 2):
            fake_run(tmp_path / "runs", f"atari/{game}", seed, every=50_000, level=20)
            fake_run(tmp_path / "runs", f"atari/{game}", seed, every=50_000, level=5, augmentation="none")
    for k in (1, 2):
        for m in (1, 2):
            fake_run(tmp_path / "runs", k=k, m=m)
    show(browser, tmp_path / "r.html", tmp_path)
    headings = texts(browser, "#atari figure h3")
    assert headings == ["Median", "IQM", "Mean", "Optimality gap", "Probability of improvement"]
    assert texts(browser, "#atari tbody th")[:5] == [
        "Eff. DQN+DrQ",
        "Eff. DQN (no augmentation)",
        "DrQ(eps) (100 runs)",
        "DrQ (100 runs)",
        "Eff. DQN+DrQ (paper)",
    ]
    assert texts(browser, "#grids figure h3") == ["K and M: Walker Walk"]
    assert count(browser, "#grids td[style]") == 4
    choose(browser, "Eff. DQN (no augmentation)")
    assert texts(browser, "#atari figcaption p")[-1] == "that Eff. DQN (no augmentation) beats …"


def test_systems_of_different_games_share_no_aggregate(browser: Browser, tmp_path: Path) -> None:
    for game in ("alien", "pong", "boxing"):
        fake_run(tmp_path / "runs", f"atari/{game}", every=50_000, level=20)
    fake_run(tmp_path / "runs", "atari/pong", preset="strong", every=50_000)
    show(browser, tmp_path / "r.html", tmp_path)
    titles = [f"Atari 100k at 100k agent steps, human-normalised, over {games}" for games in ("3 games", "1 game")]
    assert texts(browser, "#atari .body > h3") == titles
    assert ["Rainbow+DrQ" in text for text in texts(browser, "#atari table")] == [False, True]
    charts = texts(browser, "#atari figure")
    assert len(charts) == 5
    assert not any("Rainbow+DrQ" in text for text in charts)
    assert all("over 3 games" in text for text in charts[:4])
    click(browser, "#controls .systems .chip:nth-child(2) input")  # Rainbow+DrQ off
    assert texts(browser, "#atari .body > h3") == titles[:1]


def test_a_search_is_a_chart_a_table_and_the_best_settings(browser: Browser, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=window.hacked=1>"
    space = {"agent.learning_rate": [1e-4, 1e-2], "agent.augmentation": ["shift", evil]}
    search, values = read_search({"first": 30_000, "space": space})
    settings = tuple(Setting(label_of(each), each) for each in values)
    suite = Suite("tune", "", "planet", ("dmc/walker-walk",), settings, (1, 2), 100_000, search=search)
    SuiteFolder(tmp_path / "tune").open(suite)
    for run in suite.runs():
        number = [setting.label for setting in settings].index(run.label)
        steps = 100_000 if number == 2 else 30_000  # it alone went on
        place = {"label": run.label, "folder": str(run.folder), "steps": steps, "level": 300 + 100 * number}
        fake_run(tmp_path / "tune", run.task, run.seed, **place, **{"batch_size": 128 + number})
    show(browser, tmp_path / "r.html", tmp_path / "tune")
    assert texts(browser, "#searches h3") == ["tune: Walker Walk"]
    assert texts(browser, "#searches svg text.strong") == ["agent.learning_rate", "agent.augmentation", "return"]
    assert count(browser, "#searches path.setting") == 4
    assert count(browser, "#searches path.stopped") == 3
    assert count(browser, "#searches path.best:not(.stopped)") == 1
    winners = [run.folder for run in suite.runs() if run.label == settings[2].label]
    first = texts(browser, "#searches tbody tr:first-child")[0].split("\t")
    assert first[:4] == ["1", "0.01", "shift", "100k"]
    assert first[4].startswith(rounded([evaluations(tmp_path / "tune" / folder)[100_000] for folder in winners]))
    assert '"agent.learning_rate" = 0.01' in texts(browser, "#searches pre.best")[0]
    assert evil in texts(browser, "#searches tbody")[0]
    assert browser.run("window.hacked") is None


def test_hundreds_of_runs(browser: Browser, tmp_path: Path) -> None:
    for task in ("dmc/walker-walk", "dmc/cheetah-run", "dmc/finger-spin"):
        for batch in (64, 128, 256, 512):
            for rate in (1e-4, 3e-4, 1e-3, 3e-3):
                for seed in range(1, 8):
                    fake_run(tmp_path / "runs" / task[4:], task, seed, batch_size=batch, learning_rate=rate)
    show(browser, tmp_path / "r.html", tmp_path)
    assert (tmp_path / "r.html").stat().st_size <= 6_000_000
    assert texts(browser, "#summary") == ["336 runs · 3 tasks · 16 systems"]
    assert count(browser, "#controls input[data-group=system]:checked") == 8  # more lines cannot be told apart
    click(browser, "#controls .systems .all button")
    assert count(browser, "#controls input[data-group=system]:checked") == 16
    assert count(browser, "#runs table.runs tbody tr") == 336
    assert count(browser, "#grids figure") == 3


def test_settings_and_videos_of_a_run(browser: Browser, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "my runs#1", videos=1, batch_size=77)
    show(browser, tmp_path / "out" / "r.html", tmp_path)  # the folder is made
    click(browser, "#runs .more button")
    assert '"batch_size": 77' in texts(browser, "#runs pre.config")[0]
    address = browser.run("document.querySelector('#runs .videos a').href")
    assert address == (folder / "videos" / "0000000.mp4").resolve().as_uri()
    assert browser.run("document.querySelector('#runs .videos a').getAttribute('href')").startswith(
        "./../my%20runs%231/"
    )
    click(browser, "#runs .more button")
    assert count(browser, "#runs pre.config") == 0


def test_names_in_files_cannot_become_markup(browser: Browser, tmp_path: Path) -> None:
    evil = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>/*script*/"
    fake_run(tmp_path / "runs", f"toy/{evil}", label=evil + "\u2028", folder="javascript:alert(1)", videos=1)
    table = write_table(tmp_path / "t.csv", [(evil, 1, 10, 5, evil), ("x", "<b>", 1, 1, "<i>")])
    show(browser, tmp_path / "r.html", tmp_path / "runs", table)
    click(browser, "#runs .more button")
    assert browser.run("window.hacked") is None
    assert count(browser, "img, #warnings b, script") == 2  # the two scripts of the page itself
    assert evil in texts(browser, "#curves h4")[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_and_fits_a_phone(browser: Browser, tmp_path: Path, scheme: str) -> None:
    for seed in (1, 2):
        fake_run(tmp_path / "runs", seed=seed)
        fake_run(tmp_path / "runs", seed=seed, k=1, m=1, label="a system with a name that is really rather long")
    try:
        browser.appear(width=360, height=740, scheme=scheme, mobile=True)
        show(browser, tmp_path / "r.html", tmp_path)
        assert browser.run("document.documentElement.scrollWidth") <= 360
        probe = """(() => {
            const channel = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            const light = (colour) => {
              const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => channel(v / 255));
              return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const page = light(getComputedStyle(document.body).backgroundColor);
            return ['body', '.lead', '#summary', '.spread', 'a', 'td.theirs .score', 'legend'].map((selector) => {
              const text = light(getComputedStyle(document.querySelector(selector)).color);
              return (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05);
            });
        })()"""
        moved = browser.run(
            """[...document.querySelectorAll('table')].map((table) => {
              const around = table.closest('.scroll');
              around.scrollLeft = 10_000;
              return table.scrollWidth - around.scrollLeft <= around.clientWidth + 1;
            })"""
        )
        assert moved  # the last column of every table can be reached
        assert all(moved)
        contrasts: list[Any] = browser.run(probe)
        assert min(contrasts) >= 4.5
        assert browser.run("matchMedia('(prefers-color-scheme: dark)').matches") is (scheme == "dark")
    finally:
        browser.appear()
