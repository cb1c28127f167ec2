"""`drq speed` measures all it says. No time is judged."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro

from drq.config import EngineConfig, EnvConfig, ReplayConfig, SACConfig
from drq.engine import EngineSettings, FastBackend
from drq.engine import settings as engine_settings
from drq.errors import UserError
from drq.launch import mps
from drq.presets import preset
from drq.replay import Replay
from drq.speed import SpeedArguments, command, speed
from drq.speed.command import measure, to_json
from drq.speed.plan import Plan, plan_for
from drq.speed.processes import measure_processes
from drq.speed.results import ProcessesSpeed, SpeedReport
from drq.speed.table import table
from drq.speed.updates import Effort, Work, make_learner, random_replay, spec_for, time_in_turns
from fake_mps import FakeMPS, environment_of, pretend_gpu

CPU = torch.device("cpu")
BATCH = 6


def tiny(name: str, task: str, **agent: Any) -> Work:
    """A preset with small images, batches and networks."""
    config = preset(name, task)
    small = dataclasses.replace(config.agent, batch_size=BATCH, hidden_dim=16, **agent)
    env = dataclasses.replace(config.env, image_size=36)
    return Work(name, dataclasses.replace(config, agent=small, env=env, replay=ReplayConfig(capacity=600)))


def plain_backend() -> FastBackend:
    engine = EngineConfig(precision="float32", compile="off")
    return FastBackend(EngineSettings.resolve(engine, CPU, SACConfig()))


# Contents of the replays that are timed.


def test_random_replay_is_what_adding_step_by_step_gives() -> None:
    config = tiny("planet", "dmc/cheetah-run").config
    made = random_replay(config, plain_backend())
    added = Replay(spec_for(config), made.capacity)
    for number in range(made.capacity):
        if number % 250 == 0:
            added.begin(np.zeros((3, 36, 36), dtype=np.uint8))
        done = number % 250 == 249
        added.add(np.zeros(6, dtype=np.float32), 0.0, 1.0, done, np.zeros((3, 36, 36), dtype=np.uint8))
    assert made.counters() == added.counters()
    assert made.sampleable == added.sampleable
    assert torch.equal(made.rings.places, added.rings.places)
    assert torch.equal(made.rings.rows[:, 1:3], added.rings.rows[:, 1:3])
    assert torch.equal(made.rings.window, added.rings.window)
    np.testing.assert_array_equal(made.streams[0].oldest_frame, added.streams[0].oldest_frame)
    assert len(made.rings.frames.unique()) == 256


# The measurements.


def test_contenders_take_turns_in_even_blocks() -> None:
    calls: list[tuple[str, int]] = []
    found = time_in_turns(
        {name: lambda count, name=name: calls.append((name, count)) for name in "AB"},  # type: ignore[misc]
        Effort(blocks=3, block_seconds=1e-9, warmup_updates=0),
        CPU,
    )
    assert calls == [("A", 2), ("B", 2), *3 * [("A", 2), ("B", 2)]]
    assert all(len(timing.blocks_ms) == 3 and timing.updates_per_block == 2 for timing in found.values())


@pytest.fixture(scope="module")
def plan() -> Plan:
    planet = tiny("planet", "dmc/cheetah-run")
    effort = Effort(blocks=2, block_seconds=0.01, warmup_updates=2)
    return Plan(
        effort=effort,
        reference=planet,
        plain={"plain, float32": {}, "plain, copied once": {"copy_per_view": False}},
        plain_capacity=50,
        float32_beside=True,
        acting={1: 3, 2: 3},
        environments=(("toy/reach", EnvConfig()), ("dmc/no-such", EnvConfig(render="fast"))),
        environment_block_seconds=0.02,
        processes_effort=effort,
        presets=(planet, tiny("atari100k", "atari/pong")),
        growth={"K": (tiny("planet", "dmc/cheetah-run"), Work("broken", Broken()))},  # type: ignore[arg-type]
        processes=((Work("broken", Broken()), (1,)), (planet, (1, 2))),  # type: ignore[arg-type]
        left_out={"the rest": "drq speed --full"},
    )


class Broken:
    """A configuration that nothing can be measured of."""


@pytest.fixture(scope="module")
def report(plan: Plan) -> SpeedReport:
    return measure(plan, EngineConfig(precision="bf16"), CPU)


def test_everything_planned_is_measured(report: SpeedReport) -> None:
    assert [each.name for each in report.presets] == ["planet", "atari100k"]
    assert [each.k for each in report.presets] == [2, 1]
    for each in (*report.presets, *report.growth["K"]):
        assert each.batch_size == BATCH
        assert each.replay_capacity == 600
        assert each.timing.ms == pytest.approx(float(np.median(each.timing.blocks_ms)))
        assert each.host_bytes is not None
        assert each.device_bytes is None
    # The same settings are measured once.
    assert report.growth["K"][0].timing is report.presets[0].timing
    (comparison,) = report.comparisons
    names = ["drq, bf16", "drq, float32", "plain, float32", "plain, copied once"]
    assert [each.name for each in comparison.contenders] == names
    first = comparison.contenders[0].timing
    for each in comparison.contenders:
        assert each.ratio == pytest.approx(each.timing.ms / first.ms)
        turns = [a / b for a, b in zip(each.timing.blocks_ms, first.blocks_ms, strict=True)]
        assert each.ratio_range == (min(turns), max(turns))
    assert [each.observations for each in report.acting] == [1, 2]
    (toy,) = report.environments
    assert toy.env_steps_per_second == toy.agent_steps_per_second > 0
    assert toy.frames_per_second is not None
    assert toy.frames_per_second > toy.agent_steps_per_second  # drawing is a part of a step
    assert [each.processes for each in report.processes] == [1, 2]
    for together in report.processes:
        assert together.work == "planet"
        assert not together.mps
        assert together.updates_per_second > 0
        assert together.host_bytes_each is not None


def test_what_cannot_be_measured_is_named(report: SpeedReport) -> None:
    assert set(report.left_out) == {"the rest", "dmc/no-such fast"}
    assert set(report.failed) == {"K broken", "1 x broken at once"}
    assert all("AttributeError" in why for why in report.failed.values())


def test_table_shows_every_measurement(report: SpeedReport) -> None:
    text = table(report)
    for word in ("planet", "atari100k", "drq, bf16", "plain, float32", "2 x planet", "toy/reach", "acting"):
        assert word in text
    assert "left out: dmc/no-such fast: " in text
    assert "FAILED: K broken: AttributeError" in text
    assert len(text.splitlines()) < 45
    (plain,) = re.findall(r"plain, float32 +\S+ +\S+ +(\S+) x", text)
    assert float(plain) == pytest.approx(report.comparisons[0].contenders[2].ratio, rel=0.02)


def test_a_part_that_was_asked_for_and_is_not_planned_is_named() -> None:
    empty = measure(plan_for(CPU, quick=True, full=False), EngineConfig(), CPU, only=("processes",))
    *machine, _, left_out = table(empty).splitlines()
    assert len(machine) == 2
    assert left_out.startswith("left out: presets, growth, several agents at once: ")
    assert left_out.endswith("drq speed --full.")


def test_json_holds_all_fields(report: SpeedReport) -> None:
    plain = json.loads(to_json(report))
    assert set(plain) == {each.name for each in dataclasses.fields(SpeedReport)}
    assert plain["comparisons"][0]["contenders"][2]["ratio"] == report.comparisons[0].contenders[2].ratio
    assert plain["presets"][0]["timing"]["blocks_ms"] == report.presets[0].timing.blocks_ms


def test_plans_name_what_they_leave_out() -> None:
    for device in (CPU, torch.device("cuda")):
        quick, usual, full = (
            plan_for(device, quick=q, full=f) for q, f in ((True, False), (False, False), (False, True))
        )
        assert quick.left_out
        assert usual.left_out
        assert not full.left_out
        assert not quick.presets
        assert {"planet", "ablation", "planet, K = M = 1", "atari100k (DQN)"} < {w.name for w in full.presets}
        assert "strong (Rainbow)" in {w.name for w in full.presets}
        assert set(full.growth) == {"batch", "K", "M", "replay"}
        assert full.processes[0][1] == (1, 2, 4, 8)


def test_an_update_of_the_strong_preset_has_priorities_to_choose_by() -> None:
    config = tiny("strong", "atari/pong", encoder_width=1, atoms=5).config
    engine = EngineConfig(precision="float32", compile="off")
    learner = make_learner(config, EngineSettings.resolve(engine, CPU, config.agent))
    before = learner.state()["sampler.priorities"].clone()
    assert bool((before > 0).all())
    learner.update()
    assert 1 <= int((learner.state()["sampler.priorities"] != before).sum()) <= BATCH


# The command.


def use(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    monkeypatch.setattr(command, "plan_for", lambda device, quick, full: plan)


def test_command_writes_json_and_a_failure_is_the_exit_code(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, plan)
    file = tmp_path / "speed.json"
    args = ["--only", "acting", "--json", str(file), "--device", "cpu", "--engine.precision", "float32"]
    speed(tyro.cli(SpeedArguments, args=args))
    written = json.loads(file.read_text())
    assert [each["observations"] for each in written["acting"]] == [1, 2]
    assert not written["comparisons"]
    assert "acting" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        speed(tyro.cli(SpeedArguments, args=["--only", "growth", "--json", "-", "--device", "cpu"]))
    assert stopped.value.code == 1
    assert json.loads(capsys.readouterr().out)["failed"]


def test_mistakes_are_answered_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--quick and --full"):
        speed(SpeedArguments(quick=True, full=True))
    with pytest.raises(UserError, match="cannot be written"):
        speed(SpeedArguments(json=str(tmp_path / "missing" / "speed.json")))


# Several processes.

ENGINE = EngineSettings.resolve(EngineConfig(), CPU, SACConfig())


def test_processes_are_started_once_and_one_that_dies_keeps_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    work, effort = tiny("planet", "dmc/cheetah-run"), Effort(blocks=2, block_seconds=0.02, warmup_updates=1)
    before = set(active_children())
    found = measure_processes(work, ENGINE, (1, 2, 2), effort)
    assert next(found).processes == 1
    started = set(active_children()) - before
    assert len(started) == 2  # those of the next count wait already
    assert next(found).processes == 2
    assert set(active_children()) - before == started
    said = capsys.readouterr().err
    assert re.search(r"2 processes are warm.*\n.*1 at once: \S+ updates/s.*\n.*2 at once: ", said)
    next(iter(started)).kill()
    with pytest.raises(ChildProcessError, match=r"died \(exit code -9\)"):
        next(found)
    assert set(active_children()) == before


def test_processes_learn_under_mps_where_they_are_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMPS(tmp_path)
    pretend_gpu(monkeypatch, fake, tmp_path)
    before = set(active_children())
    effort = Effort(blocks=1, block_seconds=0.01, warmup_updates=0)
    found = measure_processes(tiny("planet", "dmc/cheetah-run"), ENGINE, (1,), effort, under_mps=True)
    assert next(found).mps
    (process,) = set(active_children()) - before
    assert process.pid is not None
    assert environment_of(process.pid)[mps.PIPES] == str(fake.folder / "pipe")
    assert mps.PIPES not in os.environ  # for those processes alone
    assert not any(call.startswith("quit") for call in fake.calls)
    assert list(found) == []
    assert fake.calls[-1].startswith("quit")
    assert fake.gone()
    assert set(active_children()) == before


class Sets:
    """In the place of `measure_processes`: notes what sets it is asked for; no more than two processes fit."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Sequence[int], bool]] = []

    def __call__(
        self, work: Work, engine: EngineSettings, counts: Sequence[int], effort: Effort, *, under_mps: bool
    ) -> Iterator[ProcessesSpeed]:
        self.asked.append((work.name, counts, under_mps))
        if under_mps and work.name == "atari100k":
            raise mps.DaemonFailed("its server is gone.")
        if max(counts) > 2:
            raise torch.OutOfMemoryError("not that many")
        for count in counts:
            yield ProcessesSpeed(work.name, count, under_mps, 100.0 * count, None, None)


def test_on_a_gpu_each_set_is_measured_without_and_with_mps(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, None, tmp_path)
    sets = Sets()
    monkeypatch.setattr(command, "measure_processes", sets)
    monkeypatch.setattr(command, "_machine", lambda device: _CARD)
    atari = tiny("atari100k", "atari/pong")
    plan = dataclasses.replace(plan, processes=((plan.reference, (1, 2, 8)), (atari, (1,))))
    config, gpu = EngineConfig(precision="bf16"), torch.device("cuda")
    seen: list[int] = []
    found = measure(plan, config, gpu, ("processes",), lambda report: seen.append(len(report.processes)))
    whole, smaller = (1, 2, 8), (1, 2)
    assert sets.asked == [
        *(("planet", counts, under_mps) for under_mps in (False, True) for counts in (whole, smaller)),
        ("atari100k", (1,), False),
        ("atari100k", (1,), True),
    ]
    assert [(each.work, each.processes, each.mps) for each in found.processes] == [
        ("planet", 1, False), ("planet", 2, False), ("planet", 1, True), ("planet", 2, True), ("atari100k", 1, False),
    ]  # fmt: skip
    assert found.left_out == {
        "8 x planet at once": "it does not fit into the memory of this GPU.",
        "8 x planet at once, MPS": "it does not fit into the memory of this GPU.",
        "1 x atari100k at once, MPS": "its server is gone.",
    }
    assert not found.failed
    # By itself a DQN computes in TF32 on a GPU, which the engine's line, bf16, does not say.
    monkeypatch.setattr(engine_settings, "computes_in_bf16", lambda device: True)
    by_itself = measure(dataclasses.replace(plan, processes=((atari, (1,)),)), EngineConfig(), gpu, ("processes",))
    assert (by_itself.engine[:4], by_itself.processes[0].work) == ("bf16", "atari100k, tf32")
    assert sorted(set(seen)) == [0, 1, 2, 3, 4, 5]  # every one is saved when it is there
    text = table(found)
    assert "agents at once, not compiled" in text
    assert re.search(r"^  2 x planet +200 +100 ", text, re.MULTILINE)
    assert re.search(r"^  2 x planet, MPS +200 +100 ", text, re.MULTILINE)

    # A daemon that runs already cannot be done without.
    (tmp_path / "nobody").mkdir()
    (tmp_path / "nobody" / "control").touch()
    found = measure(plan, config, gpu, ("processes",))
    assert {each.mps for each in found.processes} == {True}
    assert "stop it to compare" in found.left_out["agents at once without MPS"]


_CARD = dict.fromkeys(("device", "cpu", "cores", "torch", "drq", "renderer"), "-")


def test_whole_runs_are_timed_with_their_memory_and_return(tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    script = Path(__file__).parents[1] / "benchmarks" / "runs.py"
    small = "--env.observation state --env.frame-stack 1 --agent.batch-size 4 --agent.hidden-dim 16 "
    small += "--agent.seed-steps 20 --eval.episodes 1 --eval.no-video --replay.capacity 50"
    command = f"{script} toy/reach --preset cpu --steps 40 --out {out} -- {small}"
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    (group,) = found["groups"]
    (run,) = group["runs"]
    assert run["finished"], run["output"]
    assert run["final_return"] == run["evaluations"][-1]["return_mean"]
    assert run["evaluations"][-1]["env_step"] == 40
    assert max(run["host_peak_bytes"].values()) > 1e7
    assert run["host_together_bytes"] > 1e7
    assert f"{run['seconds']:.1f} s" in done.stdout
    assert f"| 1 | {group['seconds']:.0f} | {run['final_return']:.1f} |" in [*speed_page()["of_runs"](found)]


def test_the_page_shows_what_was_measured() -> None:
    """docs/speed.md is as benchmarks/speed_page.py makes it from the files in results/speed."""
    script = speed_page()
    text = script["PAGE"].read_text()
    assert script["page"](text) == text
    assert "| drq, bf16 |" in text


def speed_page() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "speed_page.py"))
