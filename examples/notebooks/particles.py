# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A million particles
#
# Tokens that attend to each other are particles that attract each other. All pairs of a million would
# take days; a Fourier series takes seconds, and its error is proved before it runs.

# %%
import math

import matplotlib.pyplot as pyplot
import torch

import regard
from regard.dynamics import Euler, Sphere
from regard.engines import Fourier

torch.set_num_threads(1)
torch.manual_seed(0)
attention = regard.Attention(regard.Dot(scale=4.0))  # the inverse temperature is the scale
million = torch.nn.functional.normalize(torch.randn(1_000_000, 2, dtype=torch.float64), dim=-1)
print(regard.explain(attention, million, engine=Fourier(1e-6)))

# %% [markdown]
# One evaluation for all of them:

# %%
moved = regard.apply(attention, million, engine=Fourier(1e-6))
print(moved.shape)

# %% [markdown]
# A flow on the circle. The more particles there are, the smaller are the waves in which they begin,
# and the longer it takes until clusters are seen; so here are twenty thousand, for fifty steps.

# %%
start = million[:20_000]
trajectory = regard.flow(attention, start, Euler(0.4), 20.0, space=Sphere(), engine=Fourier(1e-6))
times = (0.0, 6.0, 10.0, 20.0)
figure, axes = pyplot.subplots(1, 4, figsize=(14, 3), sharey=True)
for axis, time in zip(axes, times, strict=True):
    points = trajectory.at(time)
    angles = torch.atan2(points[:, 1], points[:, 0])
    axis.hist(angles.numpy(), bins=90, range=(-math.pi, math.pi))
    axis.set(title=f"t = {time:g}", xlabel="angle", yscale="log")
figure.tight_layout()

# %% [markdown]
# Three clusters form, because a wave of three periods grows fastest at β = 4; later two of them meet.
# `regard simulate --beta 4 --dimension 2 --particles 1000000` does it with a million and writes a page
# that plays.
