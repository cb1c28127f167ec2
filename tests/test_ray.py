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

from drq.launch.launcher import SuiteRunArguments, run_suite
from drq.report import report
from drq.suites import find_suite
from runs import assert_same_run
from test_launcher import GOOD, write_suite

ray: Any = pytest.importorskip("ray")


@dataclass
class Nodes:
    """A cluster that tests add nodes to and take nodes from."""

    cluster: Any
    folder: Path

    def add(self, name: str, **variables: str) -> Any:
        temporary = self.folder / name
        temporary.mkdir(exist_ok=True)
        given = {"TMPDIR": str(temporary), **variables}
        return self.cluster.add_node(num_cpus=1, memory=8 * 10**9, object_store_memory=10**8, env_vars=given)

    def leftovers(self, name: str) -> list[Path]:
        return list((self.folder / name).glob("drq-run-*"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8}
        cluster = Cluster(initialize_head=True, head_node_args=head)
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
        deadline = time.monotonic() + 120
        while not ready():
            assert self.is_alive(), "it ended too early"
            assert time.monotonic() < deadline, "it never came to that"
            time.sleep(0.05)

    def end(self) -> int | None:
        self.join(timeout=240)
        assert not self.is_alive()
        return self.code


def test_a_node_dies_another_joins_and_one_does_not_fit(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = write_suite(tmp_path, "checkpoint_every = 30\n", GOOD, seeds=2, steps=200)
    out, alone = tmp_path / "out", tmp_path / "alone"
    runs = [out / run.folder for run in find_suite(suite).runs()]
    other = tmp_path / "other" / "drq-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: drq\nVersion: 9.9\n")
    doomed = nodes.add("doomed")
    nodes.add("older", PYTHONPATH=os.pathsep.join([str(other.parent), os.environ.get("PYTHONPATH", "")]))

    command = Command(SuiteRunArguments(suite, dir=out, launcher="ray", address="auto"))
    command.until(lambda: any((run / "checkpoint" / "latest.json").exists() for run in runs))
    nodes.cluster.remove_node(doomed, allow_graceful=False)
    nodes.add("later")
    assert command.end() == 0
    said = capsys.readouterr().out
    assert "has drq 9.9 instead of" in said  # and the node is named
    assert "No run goes to the node" in said
    assert "its node is gone. It starts again from its last checkpoint." in said
    assert not nodes.leftovers("later")
    assert not nodes.leftovers("older")

    # The local launcher finds nothing left to do, and alone it comes to the same bits.
    assert run_suite(SuiteRunArguments(suite, dir=out, jobs=1)) == 0
    assert "Nothing to do" in capsys.readouterr().out
    assert run_suite(SuiteRunArguments(suite, dir=alone, jobs=1)) == 0
    for run in runs:
        assert_same_run(run, alone / run.relative_to(out))
    assert list(report([out], tmp_path / "report.csv", format="csv")) == []
    assert "K=1 M=1" in (tmp_path / "report.csv").read_text()
