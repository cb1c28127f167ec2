"""MPS daemons: started and stopped with their context, never left behind, never somebody else's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drq.launch import mps
from drq.launch.mps import DaemonFailed, NoMPS, daemon_of_others, mps_if_possible
from drq.launch.node import MpsKeeper
from fake_mps import FakeMPS, pretend_gpu


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMPS:
    fake = FakeMPS(tmp_path)
    pretend_gpu(monkeypatch, fake, tmp_path)
    return fake


def test_a_daemon_lives_as_long_as_its_context(fake: FakeMPS) -> None:
    before = dict(os.environ)
    with mps_if_possible() as variables:
        assert set(variables) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
        pipes, logs = (Path(variables[name]) for name in (mps.PIPES, mps.LOGS))
        assert fake.folder == pipes.parent == logs.parent
        assert pipes.is_dir()
        assert logs.is_dir()
        # Sockets are made there, and their paths have room for 107 characters.
        assert len(str(pipes / "control_privileged")) < 80
        assert os.environ == before  # the variables are for whom they are given to
    assert fake.calls[1:] == ["get_server_list", f"quit -t {mps.QUIT_SECONDS}"]
    assert fake.gone()


@pytest.mark.parametrize(
    ("visible", "daemons"),
    [
        (None, "unset"),
        ("2,3", "unset"),  # numbers would begin anew from 0
        ("GPU-5ad2", "GPU-5ad2"),
        ("GPU-5ad2, GPU-77e1", "GPU-5ad2, GPU-77e1"),
        ("0,GPU-5ad2", "unset"),
    ],
)
def test_a_gpu_has_the_same_name_with_and_without_the_daemon(
    fake: FakeMPS, monkeypatch: pytest.MonkeyPatch, visible: str | None, daemons: str
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with mps_if_possible() as variables:
        assert "CUDA_VISIBLE_DEVICES" not in variables
        assert fake.calls[0].startswith(f"start visible={daemons} log=")
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_machines_without_it_go_without_a_word(
    tmp_path: Path, fake: FakeMPS, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with mps_if_possible() as variables:
        assert variables == {}
    pretend_gpu(monkeypatch, None, tmp_path)
    with mps_if_possible() as variables:
        assert variables == {}
    with pytest.raises(NoMPS, match="nvidia-cuda-mps-control is not on the PATH"), mps.start_mps():
        pass
    assert fake.calls == []
    assert capsys.readouterr() == ("", "")


def test_somebody_elses_daemon_is_used_and_left_alone(
    fake: FakeMPS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    monkeypatch.setenv(mps.PIPES, str(theirs))
    with pytest.raises(NoMPS, match="where no daemon runs: unset it"), mps.start_mps():
        pass
    with mps_if_possible() as variables:  # they have said where to look, and that is respected
        assert variables == {}
    assert not daemon_of_others()
    (theirs / "control").touch()
    assert daemon_of_others()
    with mps.start_mps() as variables:
        assert variables == {}
    monkeypatch.delenv(mps.PIPES)
    monkeypatch.setattr(mps, "DEFAULT_PIPES", theirs)  # where every CUDA program looks
    with mps.start_mps() as variables:
        assert variables == {}
    assert fake.calls == []
    assert (theirs / "control").exists()


@pytest.mark.parametrize(
    ("behaviour", "client", "said"),
    [
        ({"start": "echo; echo no such luck >&2; exit 1"}, None, "-d failed (no such luck)"),
        ({"start": "exit 3"}, None, "-d failed (3)"),
        ({}, "import sys; sys.exit('CUDA error 805')", "could not compute under it (CUDA error 805)"),
        ({"servers": ":"}, None, "has started no server"),
        ({}, "import time; time.sleep(60)", "hung for 1 s"),
    ],
)
def test_what_does_not_work_is_said_in_a_line_and_done_without(
    behaviour: dict[str, str],
    client: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeMPS(tmp_path, **behaviour)
    pretend_gpu(monkeypatch, fake, tmp_path)
    if client is not None:
        monkeypatch.setattr(mps, "CLIENT", client)
        monkeypatch.setattr(mps, "CLIENT_SECONDS", 1.0 if "sleep" in client else 60.0)
    monkeypatch.setattr(mps, "CLIENT_ATTEMPTS", 2)
    with mps_if_possible() as variables:
        assert variables == {}
        assert fake.gone()
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("Going on without MPS: ")
    assert said in line
    assert captured.out == ""


def test_a_server_that_is_still_starting_is_waited_for(
    fake: FakeMPS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = tmp_path / "tried"
    refused = f"import pathlib, sys\nif not pathlib.Path({str(tried)!r}).exists():\n"
    refused += f"    pathlib.Path({str(tried)!r}).touch(); sys.exit('CUDA error 807')\n"
    monkeypatch.setattr(mps, "CLIENT", refused + mps.CLIENT)
    with mps.start_mps() as variables:
        assert variables


def test_a_daemon_that_will_not_quit_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, quit in enumerate(("sleep 300", "exit 1")):
        folder = tmp_path / str(number)
        folder.mkdir()
        fake = FakeMPS(folder, quit=quit)
        pretend_gpu(monkeypatch, fake, folder)
        monkeypatch.setattr(mps, "QUIT_SECONDS", 0.2)
        with mps.start_mps():
            pass
        assert fake.gone()


def test_the_number_of_a_daemon_that_died_may_be_anybodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMPS(tmp_path, quit="exit 1")
    pretend_gpu(monkeypatch, fake, tmp_path)
    with mps_if_possible() as variables:
        assert mps.if_it_still_works(variables) is variables
        number = Path(variables[mps.PIPES]) / f"{mps.PROGRAM}.pid"
        os.kill(int(number.read_text()), signal.SIGKILL)
        innocent = subprocess.Popen(["sleep", "300"], start_new_session=True)
        number.write_text(f"{innocent.pid}\n")
    assert innocent.poll() is None
    innocent.kill()
    innocent.wait()


def test_an_error_inside_is_passed_on_and_ends_the_daemon(fake: FakeMPS) -> None:
    with pytest.raises(KeyboardInterrupt), mps_if_possible():
        raise KeyboardInterrupt
    assert fake.calls[-1].startswith("quit")
    assert fake.gone()
    # An error of this kind from within is not mistaken for one of the daemon.
    with pytest.raises(DaemonFailed, match="mine"), mps_if_possible():
        raise DaemonFailed("mine")


HOLDER = """
import sys, time
from pathlib import Path
import pytest
from fake_mps import FakeMPS, pretend_gpu
from drq.launch.mps import start_mps
folder = Path(sys.argv[1])
fake = FakeMPS(folder)
pretend_gpu(pytest.MonkeyPatch(), fake, folder)
with start_mps():
    print(fake.folder, flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_daemon_is_left_behind_by_a_process_that_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert holder.stdout is not None
    folder = Path(holder.stdout.readline().strip())
    assert folder.is_dir()
    fake = FakeMPS(tmp_path)  # writes the program anew: not while somebody runs it
    assert fake.folder == folder
    holder.send_signal(number)
    holder.communicate(timeout=60)
    assert fake.gone()
    assert fake.calls[-1] == "quit -t 120"  # its runs have time to write their checkpoints


STUB = """
int cuInit(unsigned flags) { return %d; }
int cuDeviceGet(int *device, int number) { *device = 7; return number; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return device == 7 ? 0 : 101; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("code", [0, 805])
def test_the_first_client_takes_a_context_by_the_driver(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mps.CLIENT
    fake = FakeMPS(tmp_path)
    pretend_gpu(monkeypatch, fake, tmp_path)
    monkeypatch.setattr(mps, "CLIENT", real)
    (tmp_path / "stub.c").write_text(STUB % code)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "stub.c")], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    if code:
        monkeypatch.setattr(mps, "CLIENT_ATTEMPTS", 1)
        with pytest.raises(DaemonFailed, match=f"CUDA error {code}"), mps.start_mps():
            pass
    else:
        with mps.start_mps() as variables:
            assert variables


def test_a_node_of_a_cluster_has_one_daemon_for_all_its_runs(fake: FakeMPS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as Ray has it for what asks for no GPU
    keeper = MpsKeeper()
    given = {mps.PIPES: str(fake.folder / "pipe"), mps.LOGS: str(fake.folder / "log")}
    assert keeper.variables() == keeper.variables() == given
    assert [call.split()[0] for call in fake.calls] == ["start", "get_server_list"]
    keeper.try_out()
    assert keeper.variables()  # a run failed, and MPS did not
    keeper._context.__exit__(None, None, None)  # what remains of it when its actor ends
    assert fake.gone()
