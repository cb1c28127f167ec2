"""The doctor finds every fault it knows, says what to do about it, and fails only when training would."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from drq.doctor import Check, examine, main, verdict
from drq.engine import kernels
from drq.envs.raycast import compiler
from drq.machine import GPU, BrokenGPU, Machine, Renderer, ReplaySize, free_memory, probe

ROOT = Path(__file__).resolve().parent.parent
GB = 10**9

VERSIONS = {
    "torch": "2.13.0",
    "mujoco": "3.11.0",
    "dm_control": "1.0.44",
    "gymnasium": "1.4.0",
    "numpy": "2.4.6",
    "tyro": "1.0.16",
    "rich": "15.0.0",
    "tensorboard": "2.21.0",
    "imageio": "2.38.1",
    "imageio-ffmpeg": "0.7.0",
    "pillow": "13.0.0",
    "safetensors": "0.8.0",
    "scipy": "1.17.1",
    "matplotlib": "3.11.2",
    "ale-py": "0.12.1",
}

HEALTHY = Machine(
    python=(3, 12, 1),
    drq="0.1.0",
    commit="0123456789ab",
    versions=VERSIONS,
    import_errors={},
    cuda="13.0",
    gpu=GPU("NVIDIA H200", 150 * GB, 149 * GB, bf16=True),
    cuda_warning=None,
    nvidia_device=True,
    cpu_cores=16,
    memory_free=100 * GB,
    compiler=True,
    python_headers=True,
    rays="cuda",
    renderer=Renderer("NVIDIA H200/PCIe/SSE2", software=False),
    replay=ReplaySize(100_000, 2_200_000_000),
    directory=Path("runs"),
    writable=True,
    disk_free=50 * GB,
    ffmpeg="/usr/bin/ffmpeg",
)
LAPTOP: dict[str, Any] = {"gpu": None, "cuda": None, "nvidia_device": False}


def without(*names: str) -> dict[str, str]:
    return {name: version for name, version in VERSIONS.items() if name not in names}


def faults(machine: Machine) -> list[Check]:
    return [check for check in examine(machine) if check.status != "ok"]


def test_a_healthy_machine_has_no_faults_and_shows_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert faults(HEALTHY) == []
    assert main(look=lambda directory: HEALTHY) == 0
    report = " ".join(capsys.readouterr().out.split())
    for shown in ("3.12.1", "0123456789ab", "2.13.0, CUDA 13.0", "1.0.44", "0.12.1", "NVIDIA H200/PCIe/SSE2"):
        assert shown in report
    assert "149.0 GB of 150.0 GB free, bf16" in report
    assert "100,000 transitions) takes 2.2 GB" in report
    assert "pip install -e '.[wandb]'" in report  # rich would swallow the brackets as markup
    assert "Training would work here." in report


# What changes on the healthy machine, which check notices, and words of its message: the fault, then the remedy.
FAILURES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"python": (3, 10, 4)}, "python", "3.10.4 is too old", "Python 3.11"),
    ({"versions": without("torch")}, "torch", "missing", "pip install 'torch>=2.11'"),
    ({"versions": VERSIONS | {"torch": "2.9.1+cu128"}}, "torch", "2.9.1+cu128 is too old", "'torch>=2.11'"),
    ({"import_errors": {"torch": "OSError: libcudart.so"}}, "torch", "libcudart", "--force-reinstall"),
    ({"versions": without("rich")}, "rich", "missing", "pip install 'rich>=13'"),
    ({"versions": VERSIONS | {"gymnasium": "2.0"}}, "gymnasium", "too new", "'gymnasium>=1.2,<2'"),
    (
        {"import_errors": {"tensorboard": "ModuleNotFoundError: No module named 'grpc'"}},
        "tensorboard",
        "grpc",
        "`pip install tensorboard==2.21.0`",
    ),
    ({"versions": without("dm_control")}, "dm_control", "missing", "dm_control==1.0.44 mujoco==3.11.0"),
    ({"versions": VERSIONS | {"mujoco": "4.0.1"}}, "mujoco", "too new", "dm_control==1.0.44 mujoco==3.11.0"),
    ({"rays": None, "renderer": "Drawing needs libEGL: type `apt-get x`."}, "renderer", "libEGL", "apt-get x"),
    ({"gpu": BrokenGPU("GT 710", "no kernel image")}, "gpu", "no kernel image", "--device cpu"),
    ({"gpu": GPU("A", 4 * GB, GB, True)}, "replay memory", "1.0 GB on the GPU", "--device cpu"),
    (LAPTOP | {"memory_free": GB}, "replay memory", "1.0 GB of memory", "--replay.capacity 36000"),
    ({"disk_free": 2 * GB}, "disk", "2.0 GB is free", "--dir"),
    ({"writable": False}, "disk", "cannot be written", "--dir"),
]


@pytest.mark.parametrize(("change", "name", "fault", "remedy"), FAILURES)
def test_failures(change: dict[str, Any], name: str, fault: str, remedy: str) -> None:
    machine = replace(HEALTHY, **change)
    [failure] = [check for check in examine(machine) if check.status == "failure"]
    assert failure.name == name
    assert fault in failure.message
    assert remedy in failure.message
    assert "\n" not in failure.message
    assert failure.message.endswith(".")
    assert main(look=lambda directory: machine) == 1


WARNINGS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"versions": VERSIONS | {"mujoco": "3.12.0"}}, "images", "drawn differently", "mujoco==3.11.0"),
    ({"versions": VERSIONS | {"dm_control": "1.0.38"}}, "images", "not known", "dm_control==1.0.44"),
    ({"rays": None, "renderer": Renderer("llvmpipe 15", True)}, "renderer", "llvmpipe 15 is software", "EGL"),
    (LAPTOP, "gpu", "none", "--preset cpu"),
    ({"gpu": None, "cuda": None}, "gpu", "built for the CPU alone", "CUDA build"),
    ({"gpu": None, "cuda_warning": "driver too old"}, "gpu", "driver too old", "older than 13.0"),
    ({"compiler": False}, "C compiler", "missing", "apt-get install gcc"),
    ({"python_headers": False}, "C compiler", "Python.h", "apt-get install python3-dev"),
    ({"gpu": GPU("A", 6 * GB, 5 * GB, True)}, "replay memory", "5.0 GB on the GPU", "--replay.capacity"),
    ({"ffmpeg": None}, "ffmpeg", "no videos", "pip install imageio-ffmpeg"),
]


@pytest.mark.parametrize(("change", "name", "fault", "remedy"), WARNINGS)
def test_warnings_do_not_fail(change: dict[str, Any], name: str, fault: str, remedy: str) -> None:
    machine = replace(HEALTHY, **change)
    [warning] = faults(machine)
    assert (warning.name, warning.status) == (name, "warning")
    assert fault in warning.message
    assert remedy in warning.message
    assert "\n" not in warning.message
    assert warning.message.endswith(".")
    assert main(look=lambda directory: machine) == 0


def test_software_rendering_without_a_gpu_asks_for_no_driver() -> None:
    machine = replace(HEALTHY, **LAPTOP, rays=None, renderer=Renderer("softpipe", software=True))
    [warning] = [check for check in faults(machine) if check.name == "renderer"]
    assert "softpipe is software" in warning.message
    assert "driver" not in warning.message


@pytest.mark.parametrize(
    ("rays", "said", "fault"),
    [
        ("cuda", "`cuda`: the GPU's own program draws, without OpenGL", False),
        ("ray", "takes `ray`: the CPU draws, without OpenGL", False),
        (None, "`apt-get install g++`", True),
    ],
)
def test_what_auto_would_draw_with_is_said(rays: Any, said: str, fault: bool) -> None:
    """No OpenGL, or a slow one, is a fault where nothing else draws; what needs it is said."""
    machine = replace(HEALTHY, **LAPTOP, rays=rays)
    assert said in {check.name: check.message for check in examine(machine)}["ray caster"]
    for renderer in ("No OpenGL: `apt-get x`.", Renderer("llvmpipe", software=True)):
        check = {check.name: check for check in examine(replace(machine, renderer=renderer))}["renderer"]
        assert (check.status != "ok") == fault
        assert not isinstance(renderer, str) or "apt-get x" in check.message


def test_a_package_that_waits_for_a_missing_one_says_so() -> None:
    error = {"scipy": "ModuleNotFoundError: No module named 'numpy'"}
    checks = {check.name: check for check in faults(replace(HEALTHY, versions=without("numpy"), import_errors=error))}
    assert "install numpy first" in checks["scipy"].message


def test_the_control_suite_on_a_new_python_is_installed_without_labmaze() -> None:
    machine = replace(HEALTHY, python=(3, 13, 0), versions=without("dm_control"))
    [failure] = faults(machine)
    assert "pip install --no-deps dm_control==1.0.44" in failure.message


def test_the_verdict_tells_which_tasks_still_train() -> None:
    undrawn = replace(HEALTHY, rays=None, renderer="No OpenGL: `apt-get install libegl1`.")
    assert "Toy and gym tasks would train" in verdict(examine(undrawn))
    full = replace(undrawn, disk_free=0)
    assert "Toy and gym tasks would train" not in verdict(examine(full))
    assert "warnings above (1)" in verdict(examine(replace(HEALTHY, ffmpeg=None)))


def test_without_torch_only_torch_is_blamed() -> None:
    machine = replace(HEALTHY, versions=without("torch"), cuda=None, gpu=None, replay=None)
    assert [check.name for check in faults(machine)] == ["torch"]


def test_probing_finds_this_machine(tmp_path: Path) -> None:
    machine = probe(tmp_path / "not" / "there" / "yet")
    assert machine.python == sys.version_info[:3]
    assert machine.versions["torch"] == metadata.version("torch")
    assert machine.import_errors == {}
    assert machine.cuda == torch.version.cuda
    assert isinstance(machine.gpu, GPU) == torch.cuda.is_available()
    # 100,000 frames of 84 x 84 x 3 and at most a twentieth more for the rest.
    assert machine.replay is not None
    assert 100_000 * 84 * 84 * 3 < machine.replay.bytes < 1.05 * 100_000 * 84 * 84 * 3
    assert machine.rays == (None if compiler() is None else "cuda" if kernels.available() else "ray")
    assert machine.writable
    assert machine.disk_free > 0
    assert machine.ffmpeg is not None
    assert subprocess.run([machine.ffmpeg, "-version"], capture_output=True, check=False).returncode == 0
    assert not (tmp_path / "not").exists()


def test_a_folder_in_place_of_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    assert not probe(tmp_path / "runs").writable


def test_missing_opengl_libraries_reach_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("drq.envs.rendering.missing_libraries", lambda backend: ["libEGL.so.1"])
    machine = probe(tmp_path)
    assert isinstance(machine.renderer, str)
    assert "libEGL.so.1" in machine.renderer
    assert "apt-get install" in machine.renderer


def test_a_gpu_that_cannot_work_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_kernel(*size: int, device: str) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device.\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GT 710")
    monkeypatch.setattr(torch, "ones", no_kernel)
    gpu = probe(tmp_path).gpu
    reason = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    assert gpu == BrokenGPU("GT 710", reason)


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_a_gpu_that_draws_nothing_leaves_it_to_the_cpu_where_there_is_no_opengl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = GPU("Tesla T4", 16 * GB, 15 * GB, bf16=False)
    monkeypatch.setattr("drq.machine._cuda", lambda: ("13.0", gpu, None))
    monkeypatch.setattr(kernels, "available", lambda: False)
    for lacking, rays in (([], None), (["libEGL.so.1"], "ray")):
        monkeypatch.setattr("drq.envs.rendering.missing_libraries", lambda backend, lacking=lacking: lacking)
        assert probe(tmp_path).rays == rays


@pytest.mark.gpu
def test_a_working_gpu_is_described(tmp_path: Path) -> None:
    gpu = probe(tmp_path).gpu
    assert isinstance(gpu, GPU)
    assert gpu.name == torch.cuda.get_device_name()
    assert 0 < gpu.free <= gpu.total == torch.cuda.get_device_properties(0).total_memory


def test_free_memory_respects_the_limit_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert free_memory(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal:  16000000 kB\nMemAvailable:  8000000 kB\n")
    assert free_memory(tmp_path) == 8_000_000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) == 8_000_000 * 1024
    (group / "memory.max").write_text("4000000000\n")
    (group / "memory.current").write_text("3000000000\n")
    (group / "memory.stat").write_text("anon 1000000000\ninactive_file 500000000\n")
    assert free_memory(tmp_path) == 1_500_000_000


HIDE = """
import importlib.metadata, runpy, sys
hidden = set(sys.argv[1].split(","))
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Hide())
find = importlib.metadata.version
def version(name):
    if name in hidden:
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)
importlib.metadata.version = version
runpy.run_module("drq.doctor", run_name="__main__")
"""


@pytest.mark.parametrize("hidden", ["torch", "numpy", "mujoco", "dm_control", "rich,tyro,imageio_ffmpeg"])
def test_missing_packages_are_reported_without_a_traceback(hidden: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", HIDE, hidden]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "`drq train dmc/walker-walk` would fail here" in done.stdout
    for name in hidden.split(","):
        line = next(line for line in done.stdout.splitlines() if line.strip().startswith(name.replace("_f", "-f")))
        assert "failure" in line
