"""What an agent may do that the package's own do not: priorities, schedules, resets between updates, acting by the
target network, fewer than one update a step. Shown by a small agent, eager and captured, interrupted and resumed."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

import drq
import td3_drq as td3
from drq import regularize
from drq.agents import AGENTS, AgentKind, Returns, UpdateResult
from drq.backend import Backend
from drq.cli import main
from drq.config import EngineConfig, SACConfig
from drq.engine import EngineSettings, FastBackend, Learner
from drq.envs.protocol import EnvSpec
from drq.replay import Batch, Choice, Replay
from drq.training.checkpoint import Checkpoints
from drq.training.state import RunState

SPEC = EnvSpec("toy/state", (4,), 1, "discrete", 3, 1, 50)
N, LONGEST, CAPACITY = 8, 4, 64


class Draws(NamedTuple):
    noise: Tensor


class Small:
    """A linear Q on states with annealed returns, scheduled noise on its targets and resets every third update."""

    batch_size = N

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.online = nn.Linear(4, 3).to(backend.device)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.modules = nn.ModuleDict({"online": self.online, "target": self.target})
        self.optimizers = {"online": backend.adam(list(self.online.parameters()), 1e-2)}
        self.noise = torch.zeros((), device=backend.device)
        """Follows a schedule: a number on the device, so that a captured update sees it change."""

    def exploration(self, count: int, agent_step: int, generator: Generator) -> Tensor:
        return torch.zeros(count)

    def evaluation(self, count: int, generator: Generator) -> Tensor:
        return torch.zeros(count)

    @torch.no_grad()
    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        return self.target(obs).argmax(1)

    def draw(self, generator: Generator) -> Draws:
        return Draws(torch.randn(N, generator=generator, device=generator.device))

    def phase(self, update: int) -> None:
        return None

    def returns(self, update: int) -> Returns:
        return Returns(max(LONGEST - update, 1), 0.9 + 0.01 * min(update, 9))

    def before_update(self, update: int, seed: int) -> None:
        self.noise.fill_(1.0 / (1 + update))
        if update and update % 3 == 0:
            fresh = torch.empty(3, 4).normal_(generator=Generator().manual_seed(seed))
            with torch.no_grad():
                self.online.weight.mul_(0.5).add_(0.5 * fresh.to(self.backend.device))
            for state in self.optimizers["online"].state.values():
                for value in state.values():
                    value.zero_()

    def update(self, batch: Batch, draws: Draws, phase: None) -> UpdateResult:
        assert isinstance(batch.obs, Tensor) or batch.obs.slots.shape == (N, 1)
        obs, next_obs = (part if isinstance(part, Tensor) else part.tensor() for part in (batch.obs, batch.next_obs))
        with torch.no_grad():
            y = regularize.target(batch, self.target(next_obs).amax(1) + self.noise * draws.noise)
        q = self.online(obs).gather(1, batch.action[:, None]).squeeze(1)
        loss, errors = regularize.loss((q - y) ** 2, batch)
        self.backend.descend(self.optimizers["online"], loss, list(self.online.parameters()))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target.parameters()), list(self.online.parameters()), 0.1)
        return UpdateResult({"loss": loss.detach(), "discount": batch.discount.max()}, errors)


class Prioritised:
    """In proportion to the newest error, by a running sum: slow and plain."""

    def __init__(self, backend: Backend) -> None:
        self.priorities = torch.zeros(CAPACITY, dtype=torch.float64, device=backend.device)
        self.chosen: list[Tensor] = []

    def choose(self, replay: Replay, random: Tensor) -> Choice:
        shares = self.priorities * replay.may_sample()
        sums = shares.cumsum(0)
        slots = torch.searchsorted(sums, random.double() / 2**62 * sums[-1], right=True).clamp(max=CAPACITY - 1)
        weights = 1.0 / shares[slots].clamp(min=1e-12).sqrt()
        return Choice(slots, (weights / weights.max()).float())

    def stored(self, replay: Replay, slot: int) -> None:
        self.priorities[slot] = torch.maximum(self.priorities.max(), torch.ones_like(self.priorities[0]))

    def learnt(self, slots: Tensor, errors: Tensor) -> None:
        self.priorities[slots] = errors.double() + 1e-3

    def state(self) -> dict[str, Tensor]:
        return {"priorities": self.priorities}


def make(device: str, *, graphs: bool, seed: int = 0, fill: bool = True) -> Learner:
    place = torch.device(device)
    asked = EngineConfig(precision="float32", compile="off", cuda_graphs="on" if graphs else "off")
    backend = FastBackend(EngineSettings.resolve(asked, place, SACConfig()))
    torch.manual_seed(seed)
    agent = Small(backend)
    replay = Replay(SPEC, CAPACITY, n_step=LONGEST, sampler=Prioritised(backend), backend=backend)
    learner = Learner(agent, replay, backend, seed)
    if fill:
        play(replay, 90)
    return learner


def play(replay: Replay, steps: int, seed: int = 1) -> None:
    rng = np.random.default_rng(seed)
    replay.begin(rng.normal(size=4).astype(np.float32))
    for step in range(steps):
        done = step % 13 == 12
        replay.add(int(rng.integers(3)), float(rng.normal()), 1.0, done, rng.normal(size=4).astype(np.float32))
        if done:
            replay.begin(rng.normal(size=4).astype(np.float32))


def everything(learner: Learner) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in learner.state().items()}


def test_priorities_weights_and_annealed_returns_against_a_loop(device: str) -> None:
    learner = make(device, graphs=False)
    seen: list[tuple[Batch, int]] = []
    own_update = learner.agent.update

    def update(batch: Batch, draws: Any, phase: Any) -> UpdateResult:
        seen.append((batch, learner.updates))
        return own_update(batch, draws, phase)

    learner.agent.update = update  # type: ignore[method-assign]
    sampler = learner.replay.sampler
    assert isinstance(sampler, Prioritised)
    for _ in range(6):
        before = sampler.priorities.clone()
        learner.update()
        batch, number = seen[-1]
        assert batch.slots is not None
        assert batch.weights is not None
        # Written back: each chosen transition's own error; nothing else.
        others = torch.ones(CAPACITY, dtype=torch.bool)
        others[batch.slots.cpu()] = False
        assert torch.equal(sampler.priorities.cpu()[others], before.cpu()[others])
        assert (sampler.priorities[batch.slots] != before[batch.slots]).all()
        # Never one whose return is not complete.
        assert bool(learner.replay.may_sample()[batch.slots].all())
        returns = learner.agent.returns(number)
        rows = learner.replay.rings.rows.cpu()
        for at, slot in enumerate(batch.slots.tolist()):
            reward, discount = 0.0, 1.0
            for ahead in range(returns.n_step):
                row = rows[(slot + ahead) % CAPACITY]
                reward += discount * float(row[0])
                discount *= returns.discount * float(row[1])
                if row[2]:
                    break
            assert float(batch.reward[at]) == pytest.approx(reward, abs=1e-5)
            assert float(batch.discount[at]) == pytest.approx(discount, rel=1e-6)
    assert seen[0][0].discount.min() < seen[-1][0].discount.min()


@pytest.mark.gpu
def test_a_captured_update_does_the_same() -> None:
    eager, captured = make("cuda", graphs=False), make("cuda", graphs=True)
    for _ in range(10):
        eager.update()
        captured.update()
        expected, found = everything(eager), everything(captured)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_resets_schedules_and_priorities_survive_a_resume_exactly(device: str, tmp_path: Path) -> None:
    graphs = device == "cuda"
    whole = make(device, graphs=graphs)
    for _ in range(5):
        whole.update()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(whole, RunState(agent_step=90))
    checkpoints.close()
    for _ in range(5):  # two resets lie ahead
        whole.update()
    again = make(device, graphs=graphs, seed=9, fill=False)
    again.seed = whole.seed
    assert Checkpoints(tmp_path).restore(again) is not None
    assert again.updates == 5
    for _ in range(5):
        again.update()
    expected, found = everything(whole), everything(again)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_reset_happens_when_it_is_due() -> None:
    learner = make("cpu", graphs=False)
    moved = []
    for _ in range(7):
        before = learner.agent.modules["online"].weight.detach().clone()
        learner.update()
        moved.append(float((learner.agent.modules["online"].weight.detach() - before).abs().max()))
    # A step of Adam moves a weight by its rate; a reset moves it further.
    assert [step > 0.05 for step in moved] == [False, False, False, True, False, False, True]


def test_the_target_network_may_act() -> None:
    learner = make("cpu", graphs=False)
    with torch.no_grad():
        learner.agent.modules["target"].bias.copy_(torch.tensor([0.0, 100.0, 0.0]))
    assert learner.actions(np.zeros((1, 4), np.float32), 0)() == [1]


def test_half_an_update_a_step_through_the_loop(tmp_path: Path) -> None:
    agent = SACConfig(batch_size=4, hidden_dim=8, feature_dim=4, seed_steps=20, updates_per_step=0.5)
    config = dataclasses.replace(
        drq.preset("cpu", "toy/reach", agent),
        steps=40,
        dir=str(tmp_path),
        log_every=20,
        env=drq.EnvConfig(image_size=24, frame_stack=1),
        eval=drq.EvalConfig(every=0, episodes=1, video=False),
    )
    drq.train(config, quiet=True)
    assert drq.load(tmp_path).agent_step == 40
    state = next((tmp_path / "checkpoint").glob("latest.json")).read_text()
    assert '"updates": 10,' in state


# An agent from outside: the TD3 of examples/.


def small(folder: Path, steps: int = 60) -> drq.TrainConfig:
    return dataclasses.replace(
        td3.SETTINGS,
        agent=td3.TD3Config(batch_size=8, seed_steps=30),
        dir=str(folder),
        steps=steps,
        checkpoint_every=40,
        device="cpu",
        eval=drq.EvalConfig(every=0, episodes=2, video=False),
    )


def test_an_agent_object_resumes_exactly(tmp_path: Path) -> None:
    td3.train(small(tmp_path / "whole"))
    td3.train(small(tmp_path / "parts", steps=45))
    td3.train(small(tmp_path / "parts"))
    one, other = ((tmp_path / name / "eval.csv").read_text().splitlines()[-1] for name in ("whole", "parts"))
    assert one.split(",")[:5] == other.split(",")[:5]


def test_an_agent_with_a_row_trains_and_evaluates_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(AGENTS, "td3", AgentKind(td3.TD3Config, "td3_drq:TD3", "continuous"))
    options = "--agent.batch-size 8 --agent.seed-steps 30 --env.image-size 24 --env.frame-stack 1 --steps 60"
    quick = "--eval.every 0 --eval.episodes 2 --eval.no-video --device cpu"
    main(["train", "toy/reach", "--agent", "td3", "--dir", str(tmp_path), *options.split(), *quick.split()])
    main(["eval", str(tmp_path), "--episodes", "2"])
    assert capsys.readouterr().out.startswith("return ")
    assert isinstance(drq.load(tmp_path).agent, td3.TD3)


def test_the_folder_of_an_agent_without_a_row_says_what_to_do(tmp_path: Path) -> None:
    td3.train(small(tmp_path))
    with pytest.raises(drq.UserError, match=r"There is no agent .td3.: choose from .* a row in drq\.agents\.AGENTS"):
        drq.load(tmp_path)


@pytest.mark.gpu
def test_an_agent_from_outside_gets_graphs_and_kernels() -> None:
    """Equal to plain PyTorch but for rounding, through captured updates and our convolutions."""
    spec = EnvSpec("toy/control", (3, 32, 32), 3, "continuous", 2, 1, 20)
    found = []
    for engine in (EngineConfig(precision="float32", compile="off", cuda_graphs="off", kernels="off"), EngineConfig()):
        config = td3.TD3Config(batch_size=16)
        backend = FastBackend(EngineSettings.resolve(engine, torch.device("cuda"), config))
        torch.manual_seed(0)
        agent = td3.TD3(spec, config, backend)
        replay = Replay(spec, 100, backend=backend)
        rng = np.random.default_rng(0)
        replay.begin(rng.integers(0, 256, spec.frame_shape, dtype=np.uint8))
        for _ in range(80):
            frame = rng.integers(0, 256, spec.frame_shape, dtype=np.uint8)
            replay.add(rng.uniform(-1, 1, 2).astype(np.float32), float(rng.normal()), 1.0, False, frame)
        learner = Learner(agent, replay, backend, 0)
        for _ in range(4):
            learner.update()
        found.append((learner, torch.cat([p.detach().flatten() for p in agent.modules.parameters()])))
    (_, plain), (fast, theirs) = found
    assert fast.backend.fused
    assert fast._graphs
    assert float((plain - theirs).norm() / plain.norm()) < 0.02
