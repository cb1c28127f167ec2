"""An independent transcription of Rainbow + DrQ, slow and in float64: one image at a time, one view at a time, Adam and
the average by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from drq.agents.rainbow import Rainbow
from drq.envs.protocol import EnvSpec
from drq.replay import Batch

SIZE, ACTIONS, N = 20, 4, 3
SPEC = EnvSpec("atari/tiny", (1, SIZE, SIZE), 2, "discrete", ACTIONS, 4, None)


def slowly_projected(reward: float, discount: float, probabilities: list[float], atoms: list[float]) -> list[float]:
    """One atom after the other, to the two nearest."""
    out = [0.0] * len(atoms)
    gap = atoms[1] - atoms[0]
    for atom, probability in zip(atoms, probabilities, strict=True):
        moved = min(max(reward + discount * atom, atoms[0]), atoms[-1])
        at = (moved - atoms[0]) / gap
        below = min(math.floor(at), len(atoms) - 2)
        out[below] += probability * (1 - (at - below))
        out[below + 1] += probability * (at - below)
    return out


def oracle_augment(image: Tensor, nu: Tensor) -> Tensor:
    dy, dx, r = (float(number) for number in nu)
    padded = F.pad(image[None].double() / 255, (4, 4, 4, 4), mode="replicate")[0]
    top, left = 4 + int(dy), 4 + int(dx)
    return padded[:, top : top + SIZE, left : left + SIZE] * (1 + 0.05 * r)


class Oracle:
    """Weights and optimiser state as plain lists."""

    def __init__(self, agent: Rainbow) -> None:
        self.c = agent.config
        self.online = {name: p.detach().double().clone() for name, p in agent.online.state_dict().items()}
        self.target = {name: p.detach().double().clone() for name, p in agent.target.state_dict().items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.online.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.online.items()}
        self.updates = 0
        gap = 2 * self.c.value_limit / max(self.c.atoms - 1, 1)
        self.atoms = [-self.c.value_limit + gap * atom for atom in range(self.c.atoms)]

    def logits(self, w: dict[str, Tensor], image: Tensor) -> Tensor:
        """[actions, atoms]."""
        weights = iter(value for name, value in w.items() if name.startswith("encoder"))

        def convolve(x: Tensor) -> Tensor:
            return F.conv2d(x, next(weights), next(weights), padding=1)

        x = image[None]
        for _ in range(3):
            x = convolve(x)
            # 20 and 10 are padded below and to the right alone, 5 on all sides.
            x = F.pad(x, (1, 1, 1, 1) if x.shape[2] % 2 else (0, 1, 0, 1), value=-math.inf)
            x = F.max_pool2d(x, 3, 2)
            for _ in range(2):
                x = x + convolve(convolve(x.clamp(min=0)).clamp(min=0))
        features = x.clamp(min=0)[0].permute(1, 2, 0).flatten()
        if self.c.rescale_features:
            features = (features - features.min()) / (features.max() - features.min() + 1e-5)
        hidden = (w["head.hidden.weight"] @ features + w["head.hidden.bias"]).clamp(min=0)
        advantage = (w["head.advantage.weight"] @ hidden + w["head.advantage.bias"]).view(ACTIONS, self.c.atoms)
        if not self.c.dueling:
            return advantage
        value = w["head.value.weight"] @ hidden + w["head.value.bias"]
        return value + advantage - advantage.sum(0) / ACTIONS

    def values(self, logits: Tensor) -> list[float]:
        if self.c.atoms == 1:
            return [float(row[0]) for row in logits]
        return [sum(float(p) * atom for p, atom in zip(row.softmax(0), self.atoms, strict=True)) for row in logits]

    def target_of(self, batch: Batch, i: int, nu_next: Tensor) -> Tensor:
        assert isinstance(batch.next_obs, Tensor)
        c = self.c
        total = torch.zeros(c.atoms, dtype=torch.float64)
        for k in range(c.k):
            view = oracle_augment(batch.next_obs[i], nu_next[k * N + i])
            rated = self.logits(self.target, view)
            values = self.values(self.logits(self.online, view) if c.double else rated)
            best = rated[values.index(max(values))]
            reward, discount = float(batch.reward[i]), float(batch.discount[i])
            if c.atoms == 1:
                total += reward + discount * best
            else:
                total += torch.tensor(slowly_projected(reward, discount, best.softmax(0).tolist(), self.atoms))
        return total / c.k

    def update(self, batch: Batch, nu: Tensor, nu_next: Tensor) -> tuple[float, float, list[float]]:
        """The loss, the mean target value, and each transition's error."""
        c = self.c
        assert isinstance(batch.obs, Tensor)
        ys = [self.target_of(batch, i, nu_next).detach() for i in range(N)]
        atoms = torch.tensor(self.atoms if c.atoms > 1 else [1.0], dtype=torch.float64)
        w = {name: p.requires_grad_(True) for name, p in self.online.items()}
        loss, errors = torch.zeros((), dtype=torch.float64), [0.0] * N
        for i in range(N):
            for m in range(c.m):
                row = self.logits(w, oracle_augment(batch.obs[i], nu[m * N + i]))[int(batch.action[i])]
                if c.atoms == 1:
                    distance = (row - ys[i]).abs().sum()
                    error = 0.5 * distance**2 if float(distance.detach()) < 1 else distance - 0.5
                else:
                    error = -(ys[i] * (row - row.logsumexp(0))).sum()
                errors[i] += float(error.detach()) / c.m
                loss = loss + error * (1.0 if batch.weights is None else float(batch.weights[i])) / (N * c.m)
        gradients = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        self.updates += 1
        for name, g in gradients.items():
            self.first[name] = c.adam_beta1 * self.first[name] + (1 - c.adam_beta1) * g
            self.second[name] = c.adam_beta2 * self.second[name] + (1 - c.adam_beta2) * g**2
            mean = self.first[name] / (1 - c.adam_beta1**self.updates)
            spread = (self.second[name] / (1 - c.adam_beta2**self.updates)).sqrt()
            old = w[name].detach()
            decay = c.weight_decay if old.ndim > 1 else 0.0
            self.online[name] = old - c.learning_rate * (mean / (spread + c.adam_eps) + decay * old)
            self.target[name] = (1 - c.tau) * self.target[name] + c.tau * self.online[name]
        return float(loss.detach()), float(sum(y @ atoms for y in ys)) / N, errors
