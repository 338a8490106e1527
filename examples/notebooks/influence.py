# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # An influence map
#
# Weights say where a query looks. They do not say what happens when a token changes. The influence of
# token j on output i is the norm of ∂ output_i / ∂ token_j: the value that is passed on, the key that
# changes the row, the query that looks elsewhere.

# %%
import matplotlib.pyplot as pyplot
import torch

import regard
from regard import plot
from regard.audits import sites
from regard.audits.load import load

torch.set_num_threads(1)
model, tokenizer, _ = load(None)
batch = dict(tokenizer("The bank raised its rates after the river flooded.", return_tensors="pt"))
words = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
site = sites(model, batch)[3]  # the attention of layer 3, as a declaration that was proved to be the module

# %%
tokens = site.points.unsqueeze(0)  # (1, n, d): heads are broadcast
weights = site.attention.weights(tokens).mean(-3)
influence = regard.linearize(site.attention, tokens).influence().square().sum(-3).sqrt()

# %% [markdown]
# Left: where rows look, on average over twelve heads. Right: what moves them.

# %%
figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 6))
plot.influence(weights, tokens=words, axes=left).set_title("mean weight")
plot.influence(influence, tokens=words, axes=right).set_title("influence")
figure.tight_layout()

# %% [markdown]
# The first token takes most of the weight, and has the largest influence: a sink. The diagonal,
# nearly empty on the left, is not on the right.

# %%
share = float(weights[:, 0].mean() / weights.sum(-1).mean())
largest = words[int(influence.sum(0).argmax())]
print(f"{words[0]} takes {share:.0%} of the weight; the largest influence is that of {largest}")
