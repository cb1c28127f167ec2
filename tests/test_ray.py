"""A real Ray cluster of several nodes on this machine. Each node has a folder of its own for what is temporary, and so
shares no file with the suite's folder."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drq.launch import ray_pool
from drq.launch.launcher import Launch, SuiteRunArguments, run_suite
from drq.report import report
from drq.suites import find_suite
from drq.training.folder import RunFolder
from runs import assert_same_run
from test_launcher import GOOD, SEARCH, write_suite

ray: Any = pytest.importorskip("ray")


def started(start: Callable[[], Any]) -> Any:
    """Ray gives up on a node that has not started in 30 s, which a busy machine may need longer for."""
    for _ in range(4):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    pytest.skip("this machine is too busy to start a Ray node")


@dataclass
class Nodes:
    """A cluster that tests add nodes to and take nodes from."""

    cluster: Any
    folder: Path

    def add(self, name: str, **variables: str) -> Any:
        temporary = self.folder / name
        temporary.mkdir(exist_ok=True)
        given = {"TMPDIR": str(temporary), **variables}
        return started(
            lambda: self.cluster.add_node(num_cpus=1, memory=8 * 10**9, object_store_memory=10**8, env_vars=given)
        )

    def leftovers(self, name: str) -> list[Path]:
        return list((self.folder / name).glob("drq-run-*"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # what else this machine does is as urgent
        patch.setenv("OMP_NUM_THREADS", "1")
        # Five refusals tell that a node is gone: one every half second, not every three. A busy node has 10 s for each.
        quick = {"health_check_period_ms": 500}
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8, "_system_config": quick}
        cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        try:
            yield Nodes(cluster, tmp_path_factory.mktemp("nodes"))
        finally:
            ray.shutdown()
            cluster.shutdown()


class Command(threading.Thread):
    """`drq suite run` beside the test. Ray starts nodes in the main thread only."""

    def __init__(self, arguments: SuiteRunArguments) -> None:
        super().__init__()
        self._arguments = arguments
        self.code: int | None = None
        self.start()

    def run(self) -> None:
        self.code = run_suite(self._arguments)

    def until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 400
        while not ready():
            assert self.is_alive(), "it ended too early"
            assert time.monotonic() < deadline, "it never came to that"
            time.sleep(0.05)

    def end(self) -> int | None:
        self.join(timeout=900)
        assert not self.is_alive()
        return self.code


def test_a_node_dies_another_joins_and_one_does_not_fit(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough that on a quiet machine, too, none is over before another node's refusal is heard.
    suite = write_suite(tmp_path, "checkpoint_every = 30\n", GOOD, seeds=2, steps=600)
    out, alone = tmp_path / "out", tmp_path / "alone"
    runs = [out / run.folder for run in find_suite(suite).runs()]
    other = tmp_path / "other" / "drq-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: drq\nVersion: 9.9\n")
    doomed = nodes.add("doomed")
    nodes.add("older", PYTHONPATH=os.pathsep.join([str(other.parent), os.environ.get("PYTHONPATH", "")]))

    said: list[str] = []
    monkeypatch.setattr(Launch, "_say", lambda self, text: said.append(text))
    command = Command(SuiteRunArguments(suite, dir=out, launcher="ray", address="auto"))
    command.until(lambda: any((run / "checkpoint" / "latest.json").exists() for run in runs))
    command.until(lambda: any("No run goes to the node" in line for line in said))
    nodes.cluster.remove_node(doomed, allow_graceful=False)
    nodes.add("later")
    assert command.end() == 0
    text = "\n".join(said)
    assert "has drq 9.9 instead of" in text
    assert "its node is gone. It starts elsewhere from its last checkpoint." in text
    assert not nodes.leftovers("later")
    assert not nodes.leftovers("older")

    # A search in a store that the nodes copy to themselves; this machine has what it shows.
    search = write_suite(tmp_path, SEARCH, steps=60, name="search")
    store = tmp_path / "store"
    monkeypatch.chdir(tmp_path)
    assert run_suite(SuiteRunArguments(search, dir=Path(f"file://{store}"), launcher="ray", address="auto")) == 0
    finished = {path.parent: RunFolder(path.parent).finished_steps for path in store.rglob("finished.json")}
    assert sorted(finished.values()) == [30, 60]
    winner = max(finished, key=lambda path: finished[path])
    assert not list((winner / "checkpoint").glob("replay-*"))
    assert (store / "best.toml").exists()
    shown = next((tmp_path / "runs").iterdir()) / winner.relative_to(store)
    assert (shown / "eval.csv").read_bytes() == (winner / "eval.csv").read_bytes()
    assert not (shown / "checkpoint").exists()

    # The local launcher finds nothing left to do, and alone it comes to the same bits.
    assert run_suite(SuiteRunArguments(suite, dir=out, jobs=1)) == 0
    assert "Nothing to do" in said[-1]
    assert run_suite(SuiteRunArguments(suite, dir=alone, jobs=2)) == 0
    for run in runs:
        assert_same_run(run, alone / run.relative_to(out))
    assert list(report([out], tmp_path / "report.csv", format="csv")) == []
    assert "K=1 M=1" in (tmp_path / "report.csv").read_text()


TELL = """
import os, pathlib, time
names = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "A_SECRET", "RAY_AUTH_TOKEN"
told = pathlib.Path({told!r})
if pathlib.Path(__file__).parent != told.parent:  # not in the launcher, which imports it as well
    (told / " ".join(os.environ.get(name, "-") for name in names)).touch()
    until = time.monotonic() + 300
    while len(list(told.iterdir())) < 2 and time.monotonic() < until:  # one that ends first would lend its GPU
        time.sleep(0.1)
"""


def test_each_run_has_its_gpu_its_modules_and_no_secret(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = started(lambda: nodes.cluster.add_node(num_cpus=2, num_gpus=2, memory=8 * 10**9, object_store_memory=10**8))
    told = tmp_path / "told"
    told.mkdir()
    # A name that no other test has: one that this process has imported before would travel in its place.
    (tmp_path / "tell_gpu.py").write_text(TELL.format(told=str(told)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("A_SECRET", "in the launcher's shell")
    suite = Path(write_suite(tmp_path, GOOD, seeds=2, steps=30))
    text = suite.read_text().replace('device = "cpu"', 'device = "auto"')
    suite.write_text('imports = ["tell_gpu"]\n' + text)
    told_all = ray_pool.job_to_json  # but for the GPU, which is none
    monkeypatch.setattr(ray_pool, "job_to_json", lambda *args, on_gpu, **given: told_all(*args, **given))
    arguments = SuiteRunArguments(
        str(suite), dir=tmp_path / "out", launcher="ray", address="auto", gpus_per_run=1, imports=("tell_gpu",)
    )
    assert run_suite(arguments) == 0
    assert {path.name for path in told.iterdir()} == {"0 PCI_BUS_ID - -", "1 PCI_BUS_ID - -"}
    nodes.cluster.remove_node(node)
