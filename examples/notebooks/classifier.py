# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A classifier with certified radii
#
# Sets of six points in the plane, on a circle or in a cloud. The network keeps a Lipschitz constant
# of one whatever it learns, so every answer comes with a radius within which nobody can change it.

# %%
import matplotlib.pyplot as pyplot
import torch
from torch import nn

import regard
from regard.nn import Guaranteed, Orthogonal, Reflective
from regard.nonexpansive import GroupSort, Pool

torch.set_num_threads(1)
torch.manual_seed(0)
network = Guaranteed(
    [
        Orthogonal(2, 8),
        Reflective(8, heads=2),
        GroupSort(),
        Orthogonal(8, 8),
        GroupSort(),
        Pool(),
        Orthogonal(8, 2),
    ],
    tokens=6,
)
print(network.certificate(tokens=6))


# %%
def sets(count, generator):
    """Points and labels: one for a circle, zero for a cloud."""
    labels = torch.randint(0, 2, (count,), generator=generator)
    points = torch.randn(count, 6, 2, generator=generator)
    circle = points / points.norm(dim=-1, keepdim=True)
    return torch.where(labels[:, None, None] == 1, circle, 0.3 * points), labels


generator = torch.Generator().manual_seed(0)
optimizer = torch.optim.Adam(network.parameters(), 1e-2)
for _ in range(150):
    x, labels = sets(64, generator)
    loss = nn.functional.cross_entropy(4 * network(x).squeeze(-2), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}; the constant is still at most {network.certificate(tokens=6).value:.5f}")

# %% [markdown]
# Certified and attacked: the share of sets that are right, and stay right, under every move of a
# given length. The truth is between the two curves.

# %%
x, labels = sets(200, generator)
radius = regard.certified_radius(network, x)
right = radius.label == labels
moves = torch.linspace(0, 1, 41)
sure = [float((right & (radius.value > move)).float().mean()) for move in moves]
left = [float((right & (radius.attack > move)).float().mean()) for move in moves]
figure, axes = pyplot.subplots(figsize=(6, 4))
axes.plot(moves, sure, label="certified")
axes.plot(moves, left, "--", label="not broken by an attack")
axes.set(xlabel="length of the move", ylabel="right and safe", ylim=(0, 1))
axes.legend()
assert all(below <= above for below, above in zip(sure, left, strict=True))
print(f"right: {right.float().mean():.0%}; right and proved at 0.25: {sure[10]:.0%}")
