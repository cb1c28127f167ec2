"""`drq watch`: the report of a folder as a page that follows its runs, for browsers of this machine alone.

No address names a file: videos have keys, made from those that were found in run folders. What is inside a stranger's
folder reaches the page as JSON and becomes text there, as in the report.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from drq.errors import UserError
from drq.launch import SuiteFolder, folder_status
from drq.report.benchmarks import benchmark_of, canonical_task, task_title
from drq.report.page import json_text, page_data, render, rounded
from drq.report.results import missing_runs, read_results, suite_record
from drq.suites import Run
from drq.training.folder import RunFolder, run_folders
from drq.training.lock import locked, read_holder

HOSTS = ("127.0.0.1", "localhost")
"""A page of another name that leads here (DNS rebinding) would let a stranger's script read the answers."""
FRESH_SECONDS = 1.0
"""However many browsers ask, the folder is read this often at most."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}

Json = dict[str, Any]


@dataclass(frozen=True)
class WatchArguments:
    """Shows runs and suites live, on a page that browsers of this machine can open. Ctrl-C ends it."""

    dir: Positional[Path]
    """A run folder, a suite's, or one with several."""
    port: int = 8008
    """Of 127.0.0.1. 0: any that is free."""


def watch(arguments: WatchArguments) -> None:
    """`drq watch`: serves the page until Ctrl-C."""
    if not arguments.dir.is_dir():
        raise UserError(f"{arguments.dir} is no folder: name that of a run, a suite or several, as in drq watch runs")
    with make_server(arguments.dir, arguments.port) as server:
        try:
            print(f"Watching {arguments.dir}: http://127.0.0.1:{server.server_address[1]} (Ctrl-C ends it)", flush=True)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()


def make_server(root: Path, port: int) -> ThreadingHTTPServer:
    """A server of this machine alone."""
    watched = Watched(root)
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), lambda *args: Handler(watched, *args))
    except (OSError, OverflowError):
        raise UserError(f"Port {port} of 127.0.0.1 cannot be had: choose another, or any with --port 0.") from None


class Watched:
    """A folder of runs, as it is now."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._status: tuple[float, Json] | None = None
        self._report: tuple[str, Json] | None = None
        self._videos: dict[str, Path] = {}

    def status(self) -> Json:
        """How far the runs are, what the GPUs do, and which results the report would be made of."""
        with self._lock:
            if self._status is None or time.monotonic() > self._status[0] + FRESH_SECONDS:
                self._status = time.monotonic(), self._read_status()
            return self._status[1]

    def report(self) -> Json:
        """The report's data. It is made anew when a result has changed."""
        version = self.status()["version"]
        with self._lock:
            if self._report is None or self._report[0] != version:
                runs, warnings = read_results([self.root])
                missing = missing_runs(runs, [self.root])
                data = page_data(runs, warnings, missing, lambda video: f"video/{self._key(video)}")
                self._report = version, data | {"version": version}
            return self._report[1]

    def video(self, key: str) -> Path | None:
        """The video of this key, if it still is a file of its own inside the folder."""
        path = self._videos.get(key)
        return path if path is not None and self._inside(path) else None

    def _inside(self, path: Path) -> bool:
        return path.is_file() and path.resolve() == path and path.is_relative_to(self.root)

    def _key(self, video: Path) -> str:
        key = hashlib.sha256(str(video).encode(errors="surrogateescape")).hexdigest()[:32]
        self._videos[key] = video
        return key

    def _read_status(self) -> Json:
        folders = run_folders(self.root)
        runs, stamps = [], []
        for folder in folders:
            read = folder.config_file, folder.eval_csv, folder.finished_file, folder.error_file
            stamps += [_stamp(file) for file in read]
            try:
                runs.append(self._run(folder))
            except UserError:  # the report names it
                continue
        videos = [{**run["video"], "of": f"{run['title']}, seed {run['seed']}"} for run in runs if run["video"]]
        return {
            "version": hashlib.sha256(repr(stamps).encode()).hexdigest()[:16],
            "runs": runs,
            "suites": _suites(self.root, {folder.path for folder in folders}),
            "gpus": gpus(),
            "video": max(videos, key=lambda video: float(video["time"]), default=None),
        }

    def _run(self, folder: RunFolder) -> Json:
        described = folder.description
        config = described["config"]
        task, steps = canonical_task(config["task"]), config.get("steps")
        steps = steps if type(steps) is int and steps > 0 else 1
        run = Run(config["task"], described.get("label") or config["preset"], config["seed"], steps)
        lock = folder.lock_file
        holder = read_holder(lock.read_text(errors="replace")) if not lock.is_symlink() and locked(lock) else None
        status = folder_status(folder, run, holder)
        return {
            "title": task_title(task),
            "setting": run.label,
            "seed": run.seed,
            "state": status.state,
            "error": status.error,
            "done": status.done,
            "steps": steps,
            "unit": benchmark_of(task, config["preset"]).unit,
            "rate": rounded(status.rate),
            "last": rounded(status.last_return),
            "left": rounded(status.left / status.rate) if status.state == "running" and status.rate else None,
            "video": self._last_video(folder),
        }

    def _last_video(self, folder: RunFolder) -> Json | None:
        for video in sorted(folder.videos.glob("*.mp4"), reverse=True):
            if self._inside(video):
                return {"href": f"video/{self._key(video)}", "name": video.name, "time": video.stat().st_mtime}
        return None


class Handler(BaseHTTPRequestHandler):
    """Answers with the page, its data, and videos."""

    server_version, sys_version = "drq", ""
    timeout = 10.0

    def __init__(self, watched: Watched, *args: Any) -> None:
        self.watched = watched
        super().__init__(*args)

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")
        answers: dict[str, Callable[[], None]] = {
            "/": lambda: self._send("text/html; charset=utf-8", render(self.watched.report(), live=True).encode()),
            "/status.json": lambda: self._send("application/json", json_text(self.watched.status()).encode()),
            "/report.json": lambda: self._send("application/json", json_text(self.watched.report()).encode()),
        }
        try:
            if (host[0] or host[2]) not in HOSTS:
                self._refuse(403, f"This page answers to {' and '.join(HOSTS)} alone.")
            elif self.path in answers:
                answers[self.path]()
            elif (video := self.watched.video(self.path.removeprefix("/video/"))) is not None:
                self._send("video/mp4", video.read_bytes())
            else:
                self._refuse(404, "There is nothing here.")
        except UserError as error:
            self._refuse(500, str(error))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the browser has seen enough
        except OSError as error:
            self._refuse(500, f"{error.strerror}")

    def _send(self, kind: str, content: bytes, code: int = 200) -> None:
        self.send_response(code)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, code: int, sentence: str) -> None:
        self._send("text/plain; charset=utf-8", f"{sentence}\n".encode(), code)

    def log_message(self, format: str, *args: Any) -> None:
        """A line for every question would hide the one that says where the page is."""


def gpus() -> list[Json]:
    """What each GPU does, as nvidia-smi says; none where there is no such command."""
    if (command := shutil.which("nvidia-smi")) is None:
        return []
    asked = "--query-gpu=name,utilization.gpu,memory.used,memory.total"
    try:
        done = subprocess.run(
            [command, asked, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=5, check=True
        )
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
        return [
            {"name": name, "busy": int(busy), "used": int(used), "memory": int(memory)}
            for name, busy, used, memory in rows
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _stamp(file: Path) -> tuple[str, int, int]:
    try:
        found = os.lstat(file)
        return str(file), found.st_mtime_ns, found.st_size
    except OSError:
        return str(file), 0, 0


def _suites(root: Path, begun: set[Path]) -> list[Json]:
    """The suites inside a folder: how many runs they ask for, and how many of those have not begun."""
    found = []
    for place, _, files in os.walk(root):
        folder = SuiteFolder(Path(place))
        if "suite.json" in files and not folder.file.is_symlink() and (record := suite_record(folder.path)):
            waiting = sum(folder.path / run.folder not in begun for run in record.runs)
            found.append({"name": record.name, "runs": len(record.runs), "waiting": waiting})
    return found
