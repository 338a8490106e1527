"""Modules of torch: the declared map computes what the module does."""

import math

import pytest
import torch
from torch import nn

from regard.domains import Whole
from regard.maps import Compose, Pointwise
from regard.norms import TokenMax
from regard.proofs import certify, declare
from regard.proofs.modules import Unchanged
from regard.proofs.theorem import Refusal

D = torch.float64


def _modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    separate = nn.MultiheadAttention(6, 2)
    weights = separate.in_proj_weight.detach().chunk(3)
    separate.q_proj_weight, separate.k_proj_weight, separate.v_proj_weight = (
        nn.Parameter(part.clone()) for part in weights
    )
    separate.in_proj_weight, separate._qkv_same_embed_dim = None, False
    packed = nn.MultiheadAttention(6, 3)
    for attention in (separate, packed):
        nn.init.normal_(attention.in_proj_bias)
        nn.init.normal_(attention.out_proj.bias)
    layer = nn.LayerNorm(6)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return {
        "linear": nn.Linear(6, 4),
        "linear without bias": nn.Linear(6, 4, bias=False),
        "layer norm": layer,
        "layer norm bare": nn.LayerNorm(6, elementwise_affine=False),
        "rms norm": nn.RMSNorm(6),
        "rms norm eps": nn.RMSNorm(6, eps=1e-3),
        "relu": nn.ReLU(),
        "gelu": nn.GELU(),
        "gelu tanh": nn.GELU(approximate="tanh"),
        "silu": nn.SiLU(),
        "tanh": nn.Tanh(),
        "identity": nn.Identity(),
        "dropout": nn.Dropout(0.5),
        "sequential": nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.GELU(), nn.Linear(8, 3)),
        "sequential of nothing": nn.Sequential(nn.Identity(), nn.Dropout()),
        "attention packed": packed,
        "attention separate": separate,
        "attention without bias": nn.MultiheadAttention(6, 2, bias=False),
        "encoder layer": nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        "encoder layer norm first": nn.TransformerEncoderLayer(6, 2, 8, activation="gelu", norm_first=True),
        "encoder layer module activation": nn.TransformerEncoderLayer(
            6, 2, 8, activation=nn.SiLU(), bias=False
        ),
        "encoder": nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
            2,
            nn.LayerNorm(6),
            enable_nested_tensor=False,
        ),
    }


MODULES = _modules()


@pytest.mark.parametrize("name", MODULES)
def test_declared_map_is_the_module(name):
    module = MODULES[name].double().eval()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=D)
    with torch.no_grad():
        expected = (
            module(x, x, x, need_weights=False)[0] if isinstance(module, nn.MultiheadAttention) else module(x)
        )
    torch.testing.assert_close(declare.one(module)(x), expected, rtol=1e-12, atol=1e-12)


def test_declared_maps_are_copies_in_double():
    module = nn.Linear(3, 3)
    map = declare.one(module)
    with torch.no_grad():
        module.weight.zero_()
    assert map.w.dtype == D
    assert not map.w.requires_grad
    assert bool((map.w != 0).all())
    double = nn.Linear(3, 3).double()
    map = declare.one(double)
    with torch.no_grad():
        double.weight.zero_()
    assert bool((map.w != 0).all())


class _Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _hooked() -> nn.Linear:
    module = nn.Linear(3, 3)
    module.register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), "add keys that are not tokens"),
        (nn.MultiheadAttention(4, 2, add_zero_attn=True), "add keys that are not tokens"),
        (nn.MultiheadAttention(4, 2, kdim=3), "kdim and vdim"),
        (nn.LayerNorm((3, 4)), "over 2 axes"),
        (nn.Conv1d(3, 3, 1), r"declare.rule\(Conv1d\)"),
        (nn.Sequential(nn.Conv1d(3, 3, 1)), r"declare.rule\(Conv1d\)"),
        (nn.TransformerEncoderLayer(4, 2, 8, activation=torch.sin).eval(), "is not known; use relu"),
        (_Doubled(3, 3), r"declare.rule\(_Doubled\)"),
        (_hooked(), "has hooks"),
        ("text", r"declare.rule\(str\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refusals(module, sentence):
    with pytest.raises(Refusal, match=sentence):
        declare.one(module)
    infinite = certify(module, Whole(), TokenMax())
    assert math.isinf(infinite.value)
    assert infinite.refused


def test_nothing_has_constant_one():
    assert certify(nn.Identity(), Whole(), TokenMax()).value == 1.0
    assert isinstance(declare.one(nn.Dropout().eval()), Pointwise)
    assert float(Unchanged()(torch.tensor(3.0))) == 3.0
    assert isinstance(declare.one(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), Compose)
