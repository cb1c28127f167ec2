"""`drq watch`: the page follows what happens in a folder, and shows nobody else anything of it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from chromium import Browser, find_chromium
from drq.report.watch import gpus, make_server
from drq.training.lock import RunLock
from report_runs import fake_run
from runs import fails

HOSTILE = "<img src=x onerror=window.hacked=1>"
CHROMIUM = find_chromium()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    (tmp_path / "runs").mkdir()
    with make_server(tmp_path / "runs", 0) as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.05,))
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def ask(server: ThreadingHTTPServer, path: str, host: str = "localhost") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def status(server: ThreadingHTTPServer) -> Any:
    code, content = ask(server, "/status.json")
    assert code == 200
    return json.loads(content)


def write_training(folder: Path) -> None:
    rows = "".join(f"{at},{at // 2},{at / 100},0.5\n" for at in range(10_000, 31_000, 1_000))
    (folder / "train.csv").write_text(f"env_step,agent_step,seconds,episode_return\n{rows}")


def test_what_a_run_under_way_is_said_to_do(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert status(server)["runs"] == []
    assert ask(server, "/")[0] == 200
    begun = fake_run(runs, reached=30_000, status="unfinished", videos=2)
    fake_run(runs, seed=2)
    write_training(begun)
    asked = [{"task": "dmc/walker-walk", "label": "a", "seed": seed, "steps": 9} for seed in (1, 2, 3)]
    suite = {"format": 1, "name": "mine", "shows": "", "preset": "planet", "settings": {}, "runs": asked}
    (runs / "suite.json").write_text(json.dumps(suite))
    lock = RunLock(begun / ".lock")
    lock.take()
    time.sleep(1.1)  # it was read within this second
    now = status(server)
    lock.release()
    running, finished = sorted(now["runs"], key=lambda run: str(run["seed"]))
    assert (running["state"], running["done"], running["steps"]) == ("running", 30_000, 100_000)
    assert (running["rate"], running["left"]) == (100, 700)
    assert (finished["state"], finished["left"]) == ("finished", None)
    assert now["suites"] == [{"name": "mine", "runs": 3, "waiting": 3}]
    newest = sorted((begun / "videos").glob("*.mp4"))[-1]
    newest.write_bytes(b"film")
    assert running["video"]["name"] == newest.name
    assert ask(server, f"/{running['video']['href']}") == (200, b"film")


def test_others_are_refused(server: ThreadingHTTPServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for host in ("127.0.0.1:8008", "localhost", "localhost:1"):
        assert ask(server, "/status.json", host)[0] == 200
    for host in ("attacker.example", "attacker.example:80", "localhost.attacker.example", "127.0.0.1.nip.io", ""):
        assert ask(server, "/status.json", host)[0] == 403


def test_no_file_is_served_but_videos_inside(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    """A folder of a stranger may hold links to whatever is on the disk."""
    (tmp_path / "secret").mkdir()
    for name in ("secret.mp4", "secret/0.mp4"):
        (tmp_path / name).write_bytes(b"secret")
    linked = fake_run(tmp_path / "runs", seed=1, videos=1)
    (linked / "videos" / "9999999999.mp4").symlink_to(tmp_path / "secret.mp4")
    folder = fake_run(tmp_path / "runs", seed=2)
    (folder / "videos").symlink_to(tmp_path / "secret")
    other = fake_run(tmp_path / "elsewhere", seed=3)
    (tmp_path / "runs" / "link").symlink_to(other)
    now = status(server)
    (run,) = now["runs"]  # one behind a link, or with a folder of it behind one, is not looked at
    assert (run["seed"], run["video"]["name"]) == (1, "0000000.mp4")
    report = json.loads(ask(server, "/report.json")[1])
    links = [href for each in report["runs"] for _, href in each["videos"]]
    assert len(links) == 2
    assert all(b"secret" not in ask(server, f"/{href}")[1] for href in links)
    relative = linked.relative_to(tmp_path / "runs")
    for path in (f"/{relative}/config.json", "/../secret.mp4", "/video/../../secret.mp4", "/video/", "//etc/passwd"):
        code, content = ask(server, path)
        assert (code, content) == (404, b"There is nothing here.\n")
    # A video that became a link after it was found:
    video = next((linked / "videos").glob("0*.mp4"))
    video.unlink()
    video.symlink_to(tmp_path / "secret.mp4")
    assert ask(server, f"/{run['video']['href']}")[0] == 404


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to draw the page")
def test_the_page_follows_a_run(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "runs", reached=30_000, status="unfinished", label=HOSTILE)
    write_training(folder)
    assert CHROMIUM is not None
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    with Browser(CHROMIUM) as browser:
        browser.open(address)

        def until(script: str) -> None:
            """Patience is long, as machines are busy; nothing hangs on how long it took."""
            for _ in range(600):
                with suppress(RuntimeError):  # the page is just loading itself anew
                    if browser.run(script):
                        return
                time.sleep(0.1)
            raise AssertionError(script)

        until("document.querySelectorAll('#live tbody tr').length === 1")
        said = browser.run("document.querySelector('#live tbody tr').innerText")
        assert "30,000 / 100,000 env steps" in said
        assert HOSTILE in said
        assert browser.run("document.querySelector('#curves svg.chart') !== null")
        browser.run("document.querySelector('#singles').click()")  # what the reader has chosen stays
        with open(folder / "eval.csv", "a") as file:
            file.write("40000,20000,543.21,1,10,400\n")
        until("document.querySelector('#live tbody tr').innerText.includes('543.2')")
        until("document.querySelector('#curves').textContent.includes('543')")
        assert browser.run("document.querySelector('#singles').checked")
        fake_run(tmp_path / "runs", "dmc/cheetah-run", seed=2)  # a chart that was not there
        until("document.querySelectorAll('#curves svg.chart').length === 2")
        until("document.querySelectorAll('#live tbody tr').length === 2")
        assert browser.run("window.hacked") is None
        assert browser.problems == []
        assert all(request.startswith(address) for request in browser.requests)


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drq", "watch", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(f"Watching {tmp_path}: http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_a_folder_or_port_that_cannot_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with make_server(tmp_path, 0) as taken:
        port = str(taken.server_address[1])
        for arguments, said in (([str(tmp_path), "--port", port], "--port 0"), ([str(tmp_path / "no")], "no folder")):
            assert said in fails(capsys, "watch", *arguments)


def test_gpus_are_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'NVIDIA H200, 87, 1024, 143771'\n")
    os.chmod(command, 0o755)
    assert gpus() == [{"name": "NVIDIA H200", "busy": 87, "used": 1024, "memory": 143771}]
    command.write_text("#!/bin/sh\necho '[Unknown Error]'\n")
    assert gpus() == []
