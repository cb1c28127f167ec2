"""Trains a published run of control again, and takes apart the updates at which the critic's loss jumps:

    python scripts/jumps.py results/walker-falls/dmc-walker-walk/k2-m2/seed-3 --until 50_000 --every 2_000

A jump is a loss of several times the median of the (at most 300) before it. Of each are shown the losses before and
after; what float32 makes of the same transitions and random numbers by the weights that the update found (the loss,
Q-values, targets and gradients), which tells whether rounding or a kernel has part in it; and the transitions that make
up most of the loss. With --every other updates are shown as well, to compare. Like repeat.py it then says whether the
rows of train.csv agree: to look changes no digit.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from drq.agents import make_agent
from drq.agents.sac import SAC
from drq.config import EngineConfig
from drq.engine import EngineSettings, FastBackend, Learner
from drq.errors import UserError
from drq.replay import Batch, Replay
from repeat import arguments, folder, repeat

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from precision import FLOAT32, found_by

REMEMBERED, AFTER, SHOWN = 300, 30, 4
"""Losses that make the median; losses and transitions that are shown of a jump."""


class Watch:
    """What happens around the updates of a learner."""

    def __init__(self, factor: float, least: float, most: int, every: int) -> None:
        self.factor, self.least, self.left, self.every = factor, least, most, every
        self.recent: deque[float] = deque(maxlen=REMEMBERED)
        self.after: list[float] | None = None
        self.weights: list[Tensor] = []
        """As the update found them."""
        self.eager: list[Learner] = []
        """The same agent in the run's own precision and in float32, without graphs."""

    def update(self, learner: Learner) -> None:
        if not isinstance(learner.agent, SAC):
            raise UserError("Only SAC has a critic's loss: name the folder of a control run.")
        random = learner.generator.get_state()
        now = list(learner.agent.modules.state_dict().values())
        self.weights = self.weights or [value.clone() for value in now]
        torch._foreach_copy_(self.weights, now)
        plainly(learner)
        loss = learner.metrics()["critic_loss"]
        if self.after is not None:
            self.after.append(loss)
            if len(self.after) == AFTER:
                print("  after it:", *(f"{value:.3g}" for value in self.after), flush=True)
                self.after = None
        elif self.left and len(self.recent) >= AFTER:
            median = statistics.median(self.recent)
            if loss > max(self.factor * median, self.least):
                self.left, self.after = self.left - 1, []
                print(f"update {learner.updates:,}: loss {loss:.4g}, the median before it {median:.3g}")
                print("  before it:", *(f"{value:.3g}" for value in list(self.recent)[-5:]))
                self.take_apart(learner, random)
        if self.every and learner.updates % self.every == 0:
            print(f"update {learner.updates:,}, as every {self.every:,}th: loss {loss:.4g}")
            self.take_apart(learner, random)
        self.recent.append(loss)

    def take_apart(self, learner: Learner, random: Tensor) -> None:
        """The transitions of the update, by the weights and random numbers that it had."""
        agent = learner.agent
        if not self.eager:
            ours = EngineConfig(precision=learner.engine.precision, compile="off", cuda_graphs="off")
            for config in (ours, FLOAT32):
                backend = FastBackend(EngineSettings.resolve(config, learner.backend.device, agent.config))
                same = make_agent(learner.replay.spec, agent.config, backend, seed=0)
                self.eager.append(Learner(same, learner.replay, backend, seed=0))
        generator = torch.Generator(learner.backend.device)
        generator.set_state(random)
        draws = agent.draw(generator)
        batch = learner.backend.batch(learner.replay, learner.replay.draw(agent.batch_size, generator))
        for eager in self.eager:
            eager.agent.modules.load_state_dict(dict(zip(agent.modules.state_dict(), self.weights, strict=True)))
        (y, q, gradients), (exact_y, exact_q, exact_gradients) = (found_by(e, batch, draws) for e in self.eager)
        learner.engine.apply_globally()
        q, exact_q = (values.unflatten(1, (-1, len(y))) for values in (q, exact_q))  # [critics, views, N]
        errors, exact = ((q - y).square().mean(1).sum(0), (exact_q - exact_y).square().mean(1).sum(0))
        print(f"  again without graphs {float(errors.mean()):.4g}, in float32 {float(exact.mean()):.4g}")
        print(f"  apart from float32's: Q {apart(q - exact_q)}; targets {apart(y - exact_y)}")
        pairs = {name: (gradient.flatten(), exact_gradients[name].flatten()) for name, gradient in gradients.items()}
        cosines = {name: float(cosine_similarity(*pair, dim=0)) for name, pair in pairs.items()}
        worst = min(cosines, key=cosines.__getitem__)
        print(f"  cosines of the two gradients by layer: {cosines[worst]:.4f} ({worst}) and more")
        share = errors / errors.sum()
        for number in share.argsort(descending=True)[:SHOWN].tolist():
            seen = " ".join(f"{value:.1f}" for value in q[:, :, number].flatten().tolist())
            print(f"  {float(share[number]):4.0%} by one transition: Q of each critic's views {seen}, ", end="")
            print(f"target {float(y[number]):.1f}, reward {float(batch.reward[number]):.2f};", end=" ")
            print(place(learner.replay, batch, number), flush=True)


def place(replay: Replay, batch: Batch, number: int) -> str:
    """Where in its episode a transition of the batch is, and how many have been stored since."""
    assert batch.slots is not None
    slot = int(batch.slots[number])
    ago = (replay.streams[0].transitions_added - 1 - slot) % replay.stream_capacity
    return f"agent step {int(replay.rings.places[slot, 1])} of its episode, {ago:,} ago"


def apart(differences: Tensor) -> str:
    mean, spread, most = (float(x) for x in (differences.mean(), differences.std(), differences.abs().max()))
    return f"{mean:+.3g} ± {spread:.3g}, at most {most:.3g}"


plainly = Learner.update


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--factor", type=float, default=8.0, help="a jump is so many times the median")
    parser.add_argument("--least", type=float, default=3.0, metavar="LOSS", help="and at least so much")
    parser.add_argument("--most", type=int, default=25, metavar="JUMPS", help="how many are shown")
    parser.add_argument("--every", type=int, default=0, metavar="UPDATES", help="show every so many, too, to compare")
    args = parser.parse_args()
    watch = Watch(args.factor, args.least, args.most, args.every)
    Learner.update = lambda learner: watch.update(learner)  # type: ignore[method-assign]
    return repeat(args.run, args.until, folder(args))


if __name__ == "__main__":
    sys.exit(main())
