"""The Transformer as modules to train: each owns parameters, runs a declaration, and can declare itself for
every verb.

    model = LanguageModel(Design(width=128, heads=4, positions=RotaryPositions()), vocabulary=256, layers=4)
    logits = model(ids)
    regard.linearize(model.decoder.layers[0].declare(), x).norm()
"""

from regard.nn import attention_interchange as _attention  # noqa: F401 (known to from_torch and to_torch)
from regard.nn import linear_interchange as _linear  # noqa: F401 (linear layers become known to from_torch)
from regard.nn import rules as _rules  # noqa: F401 (modules become known to regard.declare)
from regard.nn.attention import MultiHeadAttention
from regard.nn.averaging import Averaging
from regard.nn.cache import Cache, ContextCache, LayerCache
from regard.nn.declaration import Projections, projected
from regard.nn.declared import Declared, Declaring
from regard.nn.deep import Deep, ForgettingWarning
from regard.nn.design import Design, shaped
from regard.nn.embedding import Embedding
from regard.nn.feed_forward import FeedForward
from regard.nn.fixed_points import Anderson, Picard, Solution
from regard.nn.generation import Sampling
from regard.nn.guaranteed import Fixed, Guaranteed
from regard.nn.initialization import Initialization, ScaledNormal, UnitVariance, Xavier, initialize
from regard.nn.interchange import from_torch, to_torch
from regard.nn.invertible import Invertible, OutsideImageError
from regard.nn.key_value_attention import KeyValueAttention
from regard.nn.layers import Branch, DecoderLayer, EncoderLayer
from regard.nn.log_determinant import BlockTriangular, Dense, LogDeterminant, Roulette, Series, Truncated
from regard.nn.mechanism import Mechanism
from regard.nn.memory import Memory
from regard.nn.models import LanguageModel, SequenceToSequence
from regard.nn.monitors import Monitor, RegularityWarning, monitor
from regard.nn.offset import Offset
from regard.nn.orthogonal import NormBounded, Orthogonal, OrthogonalMixing
from regard.nn.positions import (
    AlibiPositions,
    LearnedPositions,
    NoPositions,
    Positions,
    RelativePositions,
    RotaryPositions,
    Sinusoidal,
    XPosPositions,
)
from regard.nn.promises import Promise, Promised
from regard.nn.reflective import Reflective
from regard.nn.saving import load, save
from regard.nn.scores import CosineScores, DistanceScores, DotScores, GaussianScores, Scores
from regard.nn.shaping import Shaping
from regard.nn.stacks import Decoder, Encoder, Transformer

__all__ = [
    "AlibiPositions",
    "Anderson",
    "Averaging",
    "BlockTriangular",
    "Branch",
    "Cache",
    "ContextCache",
    "CosineScores",
    "Declared",
    "Declaring",
    "Decoder",
    "DecoderLayer",
    "Deep",
    "Dense",
    "Design",
    "DistanceScores",
    "DotScores",
    "Embedding",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "Fixed",
    "ForgettingWarning",
    "GaussianScores",
    "Guaranteed",
    "Initialization",
    "Invertible",
    "KeyValueAttention",
    "LanguageModel",
    "LayerCache",
    "LearnedPositions",
    "LogDeterminant",
    "Mechanism",
    "Memory",
    "Monitor",
    "MultiHeadAttention",
    "NoPositions",
    "NormBounded",
    "Offset",
    "Orthogonal",
    "OrthogonalMixing",
    "OutsideImageError",
    "Picard",
    "Positions",
    "Projections",
    "Promise",
    "Promised",
    "Reflective",
    "RegularityWarning",
    "RelativePositions",
    "RotaryPositions",
    "Roulette",
    "Sampling",
    "ScaledNormal",
    "Scores",
    "SequenceToSequence",
    "Series",
    "Shaping",
    "Sinusoidal",
    "Solution",
    "Transformer",
    "Truncated",
    "UnitVariance",
    "XPosPositions",
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
