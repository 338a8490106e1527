# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # An audit in a notebook
#
# A small real model, two sentences, and one question: which of its heads would amplify a change? The
# model comes with the extra `demo`; nothing is downloaded.

# %%
import torch

import regard
from regard import plot
from regard.audits.load import load

torch.set_num_threads(1)
model, tokenizer, name = load(None)
texts = ["The cat sat on the mat and watched the rain.", "The bank raised its rates after the river flooded."]
report = regard.audit(model, texts, tokenizer=tokenizer, name=name, checks=["weights", "rows", "influence"])
print(report)

# %% [markdown]
# The first thing to read is what was *not* covered. Here nothing was left out.

# %%
print(len(report.heads), "heads,", len(report.missing), "modules that were not understood")
assert not report.missing

# %% [markdown]
# A map of the heads: how spread out are their rows? Pale cells look at one token only.

# %%
plot.head_map(report, "entropy")

# %% [markdown]
# Which words does the output depend on? Measured by derivatives, in the first sentence.

# %%
plot.words(report)

# %% [markdown]
# Everything is also a table, one row for each head.

# %%
print("\n".join(report.summary()[:6]))
