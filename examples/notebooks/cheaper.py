# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Which attention is good enough?
#
# A window, the largest scores, merged keys, fewer bits: which of them would do for *this* layer on
# *this* text? Errors are those of queries that nothing was fitted to.

# %%
from pathlib import Path

import matplotlib.pyplot as pyplot
import torch

from regard.audits import sites
from regard.audits.load import load
from regard.compression import LowRank, Merged, Quantized, Recent, TopK, cheaper
from regard.maps import Heads

torch.set_num_threads(1)
model, tokenizer, _ = load(None)
root = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "examples" / "data").is_dir())
text = (root / "examples" / "data" / "paradise_lost.txt").read_text(encoding="utf-8")[:4000]
batch = dict(tokenizer(text, return_tensors="pt", truncation=True, max_length=128))
site = sites(model, batch)[3]
layer = Heads(site.attention, site.w_o)

# %%
candidates = (
    Recent(32),
    TopK(32),
    Merged(16),
    Merged(32),
    LowRank(16),
    Quantized(8),
    Quantized(4),
    Quantized(2),
)
table = cheaper(layer, site.points, candidates=candidates)
print(table)

# %%
figure, axes = pyplot.subplots(figsize=(7, 4))
for choice in table.choices:
    axes.loglog(choice.memory, choice.error, "o")
    axes.annotate(
        str(choice.candidate),
        (choice.memory, choice.error),
        fontsize=8,
        xytext=(4, 4),
        textcoords="offset points",
    )
axes.set(xlabel="memory, of all keys and values", ylabel="relative error of fresh outputs")

# %%
best = table.best(0.1)
print("within ten percent, the least memory:", best.candidate if best else "none")
