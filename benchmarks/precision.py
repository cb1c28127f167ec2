"""What fewer digits change in a trained agent: targets, Q-values and gradients by the default engine against float32.

    python benchmarks/precision.py runs/reacher              on a GPU if there is one; the run keeps its replay
    python benchmarks/precision.py runs/reacher --batches 50

Bias and spread are the mean and the standard deviation, over transitions, of what the default gives less what float32
gives for the same batches and random numbers. A cosine is that between a layer's two gradients of the critic's loss.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import torch
import tyro
from torch import Tensor
from tyro.conf import Positional

from drq.agents.sac import SAC
from drq.config import EngineConfig, TrainConfig
from drq.engine import EngineSettings, Learner
from drq.envs.protocol import EnvSpec
from drq.errors import UserError
from drq.replay import Batch
from drq.training.checkpoint import Checkpoints
from drq.training.checkpoint_reader import newest
from drq.training.components import make_learner
from drq.training.folder import RunFolder
from drq.training.schedule import Schedule

FLOAT32 = EngineConfig(precision="float32", compile="off", cuda_graphs="off", kernels="off")


def learner_of(config: TrainConfig, spec: EnvSpec, engine: EngineConfig, device: torch.device) -> Learner:
    settings = EngineSettings.resolve(engine, device, config.agent, updates=0)
    return make_learner(config, spec, settings, Schedule(config).capacity)


def found_by(learner: Learner, batch: Batch, draws: object) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Targets, [N], Q-values, [critics, views * N], and the gradients of the critic's loss, by parameter."""
    learner.engine.apply_globally()
    agent = learner.agent
    assert isinstance(agent, SAC)
    *q, _ = agent.predictions(batch, draws)  # type: ignore[arg-type]
    y = agent.targets(batch, draws)  # type: ignore[arg-type]
    loss, *_ = agent.critic_loss(batch, draws)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(loss, agent.trained_by_critic)
    names = [name for name, parameter in agent.critic.named_parameters() if parameter.requires_grad]
    return y, torch.stack(q).detach(), dict(zip(names, gradients, strict=True))


def main(run: Positional[Path], batches: int = 20, device: str | None = None) -> None:
    """Compares precisions on a run folder.

    Args:
        run: a folder of a SAC run with its checkpoint.
        batches: how many batches of the run's own size.
        device: cpu or cuda. Unset: cuda if there is one.
    """
    folder = RunFolder(run)
    config, spec = folder.config, folder.spec
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    engine = dataclasses.replace(config.engine, compile="off", cuda_graphs="off")
    ours = learner_of(config, spec, engine, place)
    if not isinstance(ours.agent, SAC):
        raise UserError("Only SAC has targets and critics to compare here: name the folder of a control run.")
    checkpoints = Checkpoints(folder.checkpoint)
    if not checkpoints.exist:
        raise UserError(f"{run} has no checkpoint: let the run reach its first.")
    if newest(checkpoints.folder).dropped:
        raise UserError(f"{run} dropped its replay when it had finished: name a run of `drq train`, which keeps it.")
    checkpoints.restore(ours)
    exact = learner_of(config, spec, FLOAT32, place)
    exact.agent.modules.load_state_dict(ours.agent.modules.state_dict())
    differences: dict[str, list[Tensor]] = defaultdict(list)
    values: dict[str, list[Tensor]] = defaultdict(list)
    gradients: dict[str, list[tuple[float, float]]] = defaultdict(list)
    generator = torch.Generator(place).manual_seed(0)
    for _ in range(batches):
        batch = ours.replay.batch(ours.replay.draw(config.agent.batch_size, generator))
        draws = ours.agent.draw(generator)
        y, q, by_layer = found_by(ours, batch, draws)
        exact_y, exact_q, exact_by_layer = found_by(exact, batch, draws)
        for name, one, other in (("target", y, exact_y), ("Q", q[0], exact_q[0])):
            differences[name].append(one.double() - other.double())
            values[name].append(other.double())
        for name, gradient in by_layer.items():
            one, other = gradient.double().flatten(), exact_by_layer[name].double().flatten()
            cosine = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
            gradients[name].append((cosine, float(one.norm() / other.norm())))
    print(f"{config.task} after {ours.updates:,} updates, {batches} batches of {config.agent.batch_size}, ", end="")
    print(f"{ours.engine.precision} against float32 on {place}")
    print(f"{'':28}{'mean':>10}{'bias':>10}{'spread':>10}")
    for name, parts in differences.items():
        difference, value = torch.cat(parts), torch.cat(values[name])
        print(f"{name:28}{value.mean():10.3f}{difference.mean():10.4f}{difference.std():10.4f}")
    print(f"{'gradient of':28}{'cosine':>10}{'length':>10}")
    for name, parts in gradients.items():
        cosine, length = (sum(numbers) / len(numbers) for numbers in zip(*parts, strict=True))
        print(f"{name:28}{cosine:10.5f}{length:10.4f}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except UserError as error:
        raise SystemExit(f"precision: {error}") from None
