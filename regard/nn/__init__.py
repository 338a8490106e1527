"""The Transformer as modules to train: each owns parameters, runs a declaration, and can declare itself for
every verb.

model = LanguageModel(Design(width=128, heads=4, positions=RotaryPositions()), vocabulary=256, layers=4)
logits = model(ids)
regard.linearize(model.decoder.layers[0].declare(), x).norm()
"""

from regard.nn import rules as _rules  # noqa: F401 (modules become known to regard.declare)
from regard.nn.attention import MultiHeadAttention
from regard.nn.cache import Cache, ContextCache, LayerCache
from regard.nn.declaration import Projections, projected
from regard.nn.design import Design, shaped
from regard.nn.embedding import Embedding
from regard.nn.feed_forward import FeedForward
from regard.nn.generation import Sampling
from regard.nn.initialization import Initialization, ScaledNormal, UnitVariance, Xavier, initialize
from regard.nn.interchange import from_torch, to_torch
from regard.nn.layers import Branch, DecoderLayer, EncoderLayer
from regard.nn.mechanism import Mechanism
from regard.nn.models import LanguageModel, SequenceToSequence
from regard.nn.monitors import Monitor, RegularityWarning, monitor
from regard.nn.positions import (
    AlibiPositions,
    LearnedPositions,
    NoPositions,
    Positions,
    RelativePositions,
    RotaryPositions,
    Sinusoidal,
)
from regard.nn.saving import load, save
from regard.nn.shaping import Shaping
from regard.nn.stacks import Decoder, Encoder, Transformer

__all__ = [
    "AlibiPositions",
    "Branch",
    "Cache",
    "ContextCache",
    "Decoder",
    "DecoderLayer",
    "Design",
    "Embedding",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "Initialization",
    "LanguageModel",
    "LayerCache",
    "LearnedPositions",
    "Mechanism",
    "Monitor",
    "MultiHeadAttention",
    "NoPositions",
    "Positions",
    "Projections",
    "RegularityWarning",
    "RelativePositions",
    "RotaryPositions",
    "Sampling",
    "ScaledNormal",
    "SequenceToSequence",
    "Shaping",
    "Sinusoidal",
    "Transformer",
    "UnitVariance",
    "Xavier",
    "from_torch",
    "initialize",
    "load",
    "monitor",
    "projected",
    "save",
    "shaped",
    "to_torch",
]
