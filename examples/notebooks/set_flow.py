# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A flow of sets
#
# An invertible network for sets: x + f(x) with attention in f, where f is *proved* to contract. Here
# it learns to undo what made rings of points out of noise, a little: one block, sixty steps of
# maximum likelihood.

# %%
import math

import matplotlib.pyplot as pyplot
import torch
from torch import nn

import regard
from regard.maps import Compose
from regard.nn import Declaring, Dense, Invertible
from regard.nonexpansive import IntoBall

torch.set_num_threads(1)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
POINTS = 8


def rings(count):
    """Sets of points on a circle of random radius, and a little noise."""
    angle = 2 * math.pi * torch.rand(count, POINTS)
    length = 1.2 + 0.2 * torch.randn(count, 1)
    points = torch.stack((angle.cos(), angle.sin()), -1) * length[..., None]
    return points + 0.1 * torch.randn(count, POINTS, 2)


# %% [markdown]
# A block whose weights are parameters. `Invertible` refuses it where it cannot prove that it
# contracts, now and after every step.


# %%
class Block(Declaring):
    """f: attention behind a projection on a ball; values are scaled so that the proof goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(0.1 * torch.randn(2, 2))
        self.strength = nn.Parameter(torch.tensor(0.1))

    def value(self) -> Compose:
        w = 0.6 * self.w / torch.linalg.matrix_norm(self.w, 2).clamp(min=1.0)
        attention = regard.Attention(regard.Dot(scale=0.05 * self.strength.tanh()), regard.Linear(w))
        return Compose((IntoBall(2.0), attention))


flow = Invertible(Block(), log_determinant=Dense())
print(flow.certificate())

# %% [markdown]
# Maximum likelihood: the density of y under a standard normal law, times the change of volume.

# %%
optimizer = torch.optim.Adam(flow.parameters(), 3e-2)
losses = []
for _ in range(60):
    y, log_det = flow(rings(8))
    loss = (y.square().sum((-2, -1)) / 2 - log_det).mean() / (2 * POINTS)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"nats for each coordinate, up to a constant: {losses[0]:.3f} before, {sum(losses[-9:]) / 9:.3f} after")
print(f"the constant of f is {flow.certificate().value:.3f}, proved from the weights as they are")

# %% [markdown]
# Forward and back: the inverse is a fixed point, with an error that is proved.

# %%
x = rings(1)[0]
with torch.no_grad():
    y, log_det = flow(x)
    back = flow.inverse(y)
print(f"log-determinant {float(log_det):.4f}; back again to {float((back - x).abs().max()):.1e}")
assert torch.allclose(back, x, atol=1e-4)

# %%
figure, axes = pyplot.subplots(1, 2, figsize=(8, 4))
for axis, points, title in zip(axes, (x, y), ("a set", "after the flow"), strict=True):
    axis.scatter(*points.detach().T)
    axis.set(title=title, xlim=(-2.5, 2.5), ylim=(-2.5, 2.5), aspect="equal")

# %% [markdown]
# One block moves little: a map that contracts cannot do more. `python examples/set_flow.py` trains
# four such blocks on digits as clouds of points, by maximum likelihood.
