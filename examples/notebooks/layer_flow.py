# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A trained layer as a flow
#
# Take one layer of a trained model and apply it to its own output, again and again. Where do the
# tokens go?

# %%

import matplotlib.pyplot as pyplot
import torch

from regard.audits.inputs import inputs_of
from regard.audits.load import load
from regard.flows import iterated, layers_of

torch.set_num_threads(1)
model, tokenizer, name = load(None)
text = (
    "Of Man's first disobedience, and the fruit of that forbidden tree, whose mortal taste "
    "brought death into the world, and all our woe, with loss of Eden."
)
(item,) = inputs_of(model, [text], tokenizer)
found = [iterated(layer, steps=24) for layer in layers_of(model, item)]
print(name, "on", len(tokenizer(text)["input_ids"]), "tokens")

# %% [markdown]
# The mean cosine of two tokens: one means that all of them have met.

# %%
figure, axes = pyplot.subplots(figsize=(7, 4))
for number, one in enumerate(found):
    axes.plot(one.values["mean cosine"], label=f"layer {number}")
axes.set(xlabel="times the layer was applied", ylabel="mean cosine of tokens", ylim=(0, 1.02))
axes.legend()

# %%
met = [number for number, one in enumerate(found) if one.values["mean cosine"][-1] > 0.99]
print("layers that bring all tokens together:", met)

# %% [markdown]
# That is an observation about one text, not a theorem.
