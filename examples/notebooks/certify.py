# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Certify your own layer
#
# Any encoder layer of torch. How far can its output move when one token moves? A proof from above, an
# attack from below, for growing moves.

# %%
import matplotlib.pyplot as pyplot
import torch
from torch import nn

import regard
from regard import plot

torch.set_num_threads(1)
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double().eval()
x = torch.randn(6, 16, dtype=torch.float64)

# %%
radii = [0.01, 0.03, 0.1, 0.3, 1.0]
proved, found = [], []
for radius in radii:
    typo = regard.one_token(x, 2, radius)
    proved.append(regard.deviation(layer, typo, regard.Frobenius()).value)
    found.append(regard.falsify_deviation(layer, typo, regard.Frobenius(), restarts=2, steps=15).value)
    print(f"token 2 moves by {radius:4}: found {found[-1]:.4f}, proved {proved[-1]:.4f}")
assert all(below <= above for below, above in zip(found, proved, strict=True))

# %%
figure, axes = pyplot.subplots(figsize=(6, 4))
axes.loglog(radii, proved, "o-", label="proved")
axes.loglog(radii, found, "o--", label="found by an attack")
axes.set(xlabel="how far the token may move", ylabel="how far the output moves")
axes.legend()

# %% [markdown]
# What each theorem says about the attention alone, on a ball: the smallest bound is the certificate, the
# others are its ladder.

# %%
attention = regard.Attention(
    regard.Dot(torch.randn(16, 8, dtype=torch.float64) / 4, torch.randn(16, 8, dtype=torch.float64) / 4)
)
certificate = regard.certify(attention, regard.Ball(1.0, tokens=6), regard.Frobenius())
print(certificate)
plot.ladder(certificate)
