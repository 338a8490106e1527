"""Modules are declared where they are exactly a known class: what may compute something else is refused, and
what computes the same keeps its bound.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations, parametrize

import regard as r
from regard.errors import ArgumentError
from regard.maps import Added, Affine
from regard.nn import Design, FeedForward

D = torch.float64
BALL, NORM = r.Ball(1.0, tokens=4, width=6), r.Frobenius()


def layer(**options):
    torch.manual_seed(1)
    return nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dtype=D, **options).eval()


def linear():
    torch.manual_seed(2)
    return nn.Linear(6, 6, dtype=D)


def bound(module):
    return r.certify(module, BALL, NORM).value


def changed(change, make=layer):
    """A module with one part replaced."""
    module = make()
    change(module)
    return module


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.full((6,), 3.0, dtype=D))

    def forward(self, x):
        return self.by * x


class DeclaredScale(LayerScale):
    """One that its user declares."""


@r.declare.rule(DeclaredScale)
def _scale(module):
    return Affine(torch.diag(module.by.detach()))


class Louder(nn.TransformerEncoderLayer):
    def _sa_block(self, *given, **options):
        return 5 * super()._sa_block(*given, **options)


class Wider(nn.TransformerEncoderLayer):
    def _ff_block(self, x):
        return 5 * super()._ff_block(x)


class Called(nn.TransformerEncoderLayer):
    def __call__(self, *given, **options):
        return 5 * super().__call__(*given, **options)


class CalledLinear(nn.Linear):
    def __call__(self, x):
        return 3 * super().__call__(x)


class OwnLinear(nn.Linear):
    """One that its user declares."""

    def forward(self, x):
        return 3 * super().forward(x)


@r.declare.rule(OwnLinear)
def _own(module):
    return Affine(3 * module.weight.detach().mT.contiguous(), 3 * module.bias.detach())


class Backwards(nn.Sequential):
    def forward(self, x):
        return -super().forward(x)


class Shifted(nn.LayerNorm):
    def __call__(self, x):
        return 7 * super().__call__(x)


class Half(nn.Dropout):
    def forward(self, x):
        return 9 * x


class OtherFeedForward(FeedForward):
    def __call__(self, x):
        return 5 * super().__call__(x)


class Noise(nn.Module):
    def forward(self, weight):
        return weight + torch.randn_like(weight)


def _as(kind):
    return lambda module: setattr(module, "__class__", kind)


def _set(**parts):
    return lambda module: [setattr(module, name, part) for name, part in parts.items()]


REFUSED = {
    "a layer with another attention block": lambda: changed(_as(Louder)),
    "a layer with another feed-forward block": lambda: changed(_as(Wider)),
    "a layer with another call": lambda: changed(_as(Called)),
    "a block of the layer alone": lambda: changed(_set(_sa_block=lambda *given, **options: 5 * given[0])),
    "a call of the layer alone": lambda: changed(_set(_call_impl=lambda *given, **options: 5 * given[0])),
    "a scale for a dropout": lambda: changed(_set(dropout1=LayerScale())),
    "a scale for the last dropout": lambda: changed(_set(dropout2=LayerScale())),
    "a scale in the feed-forward": lambda: changed(_set(dropout=LayerScale())),
    "a dropout of its own": lambda: changed(_set(dropout1=Half())),
    "a norm of its own": lambda: changed(_set(norm2=Shifted(6, dtype=D))),
    "a linear layer of its own": lambda: CalledLinear(6, 6, dtype=D),
    "a sequence of its own": lambda: Backwards(linear()),
    "a part that is another": lambda: nn.Sequential(linear(), CalledLinear(6, 6, dtype=D)),
    "random weights": lambda: changed(
        lambda one: (parametrize.register_parametrization(one, "weight", Noise()), one.eval()), linear
    ),
    "a module of regard.nn": lambda: OtherFeedForward(6, 8).double().eval(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_compute_something_else_has_no_bound(name):
    found = r.certify(REFUSED[name](), BALL, NORM)
    assert math.isinf(found.value)
    assert "declare.rule(" in found.refused[0] or "remove the parametrization" in found.refused[0]


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
@pytest.mark.parametrize("make", [layer, linear, lambda: FeedForward(6, 8).double().eval()])
def test_a_hook_on_all_modules_is_refused_while_it_is_there(register, make):
    module = make()
    before = bound(module)
    handle = register(lambda module, *given: None)
    try:
        found = r.certify(module, BALL, NORM)
    finally:
        handle.remove()
    assert math.isinf(found.value)
    assert "a global forward hook" in found.refused[0]
    assert bound(module) == before < math.inf


WEIGHTS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("kind", [D, torch.float32])
def test_a_parametrization_keeps_the_bound_of_its_weights(name, kind):
    module = WEIGHTS[name](linear().to(kind)).eval()
    plain = linear().to(kind)
    with torch.no_grad():
        plain.weight.copy_(module.weight)
    assert bound(module) == bound(plain) < math.inf


def test_weight_norm_in_bfloat16_keeps_the_bound_of_its_weights():
    module = parametrizations.weight_norm(linear().bfloat16())
    plain = linear().bfloat16()
    with torch.no_grad():
        plain.weight.copy_(module.weight)
    assert bound(module) == bound(plain) < math.inf
    assert parametrize.is_parametrized(module, "weight")
    assert bound(module) == bound(plain)  # a copy was made, and the module is as it was


def test_weight_norm_inside_a_layer_keeps_the_bound():
    one, other = layer(), layer()
    parametrizations.weight_norm(other.linear1)
    with torch.no_grad():
        one.linear1.weight.copy_(other.linear1.weight)
    assert bound(other) == bound(one) < math.inf


def test_weight_norm_inside_a_module_of_regard_keeps_the_bound():
    torch.manual_seed(3)
    one = r.nn.EncoderLayer(Design(6, 2)).double().eval()
    other = copy.deepcopy(one)
    parametrizations.weight_norm(other.attention.projection)
    with torch.no_grad():
        one.attention.projection.weight.copy_(other.attention.projection.weight)
    assert bound(other) == bound(one) < math.inf


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropouts_do_nothing_outside_of_training_and_are_an_error_in_training(kind):
    module = changed(_set(dropout1=kind(0.5).eval()))
    assert bound(module) == bound(layer())
    module.dropout1.train()
    with pytest.raises(ArgumentError, match=r"module: is in training mode: .*; call module.eval\(\) first"):
        bound(module)
    module.dropout1.p = 0.0
    assert bound(module) == bound(layer())


def attention(**options):
    torch.manual_seed(4)
    return nn.MultiheadAttention(6, 2, dtype=D, **options)


TRAINING = {
    "dropout": lambda p: nn.Dropout(p),
    "sequence": lambda p: nn.Sequential(nn.Linear(6, 6, dtype=D), nn.Dropout(p)),
    "attention": lambda p: attention(dropout=p),
    "layer": lambda p: layer(dropout=p),
    "stack": lambda p: nn.TransformerEncoder(layer(dropout=p), 2, enable_nested_tensor=False),
    "regard": lambda p: r.nn.EncoderLayer(Design(6, 2, dropout=p)).double(),
    "rows of regard": lambda p: r.nn.EncoderLayer(Design(6, 2, attention_dropout=p)).double(),
}
TYPO = r.one_token(torch.linspace(-1, 1, 24, dtype=D).reshape(4, 6), 1, 0.1)


@pytest.mark.parametrize("name", TRAINING)
def test_training_that_changes_values_is_an_error_and_dropout_zero_is_none(name):
    random, certain = TRAINING[name](0.1).train(), TRAINING[name](0.0).train()
    for ask in (
        lambda: r.certify(random, BALL, NORM),
        lambda: r.deviation(random, TYPO, NORM),
        lambda: r.declare(random),
    ):
        with pytest.raises(ArgumentError, match=r"training mode: .* call module.eval\(\) first"):
            ask()
    assert bound(certain) == bound(certain.eval()) < math.inf


def test_a_deviation_in_training_without_dropout_is_that_outside_of_it():
    module = attention(dropout=0.0).train()
    found = r.deviation(module, TYPO, NORM).value
    assert found == r.deviation(module.eval(), TYPO, NORM).value < math.inf


def test_weights_that_training_changes_are_an_error():
    module = parametrizations.spectral_norm(linear()).train()
    with pytest.raises(ArgumentError, match=r"parametrized weight gives other numbers; call module.eval"):
        bound(module)
    assert bound(module.eval()) < 1 + 1e-2


def test_dropout_of_weights_is_an_error_in_training_even_where_it_drops_none():
    """Of 36 weights it drops one in 28 reads, so that two reads, and four runs, seldom differ."""
    torch.manual_seed(0)
    module = linear()
    parametrize.register_parametrization(module, "weight", nn.Dropout(1e-3))
    assert torch.equal(module.weight, module.weight)
    with pytest.raises(
        ArgumentError, match=r"dropout of its parametrized weight is random; call module.eval"
    ):
        bound(module)
    assert bound(module.eval()) == bound(linear())
    module.train().parametrizations.weight[0].p = 0.0
    assert bound(module) == bound(linear())


@pytest.mark.parametrize("kind", DROPOUTS)
def test_a_dropout_of_any_kind_in_a_layer_of_regard_is_an_error_in_training(kind):
    module = r.nn.EncoderLayer(Design(6, 2)).double()
    before = bound(module.eval())
    module.dropout = kind(1e-3).train()
    with pytest.raises(ArgumentError, match=r"training mode: its dropout is random; call module.eval"):
        bound(module)
    assert bound(module.eval()) == before


def seen(module, count=200):
    """The largest ratio of differences among random pairs of the ball."""
    generator = torch.Generator().manual_seed(5)
    ratios = []
    for _ in range(count):
        x, away = torch.randn(2, 4, 6, generator=generator, dtype=D)
        x, y = (one / one.norm(dim=-1, keepdim=True).clamp_min(1.0) for one in (x, x + 1e-3 * away))
        with torch.no_grad():
            ratios.append(float((module(x) - module(y)).norm() / (x - y).norm()))
    return max(ratios)


def test_what_a_user_declares_keeps_working():
    module = OwnLinear(6, 6, dtype=D)
    assert (
        seen(module)
        <= bound(module)
        == pytest.approx(float(3 * torch.linalg.norm(module.weight.detach(), 2)))
    )
    inside = nn.Sequential(module, nn.ReLU())
    assert seen(inside) <= bound(inside) < math.inf


@pytest.mark.parametrize("place", ["dropout1", "dropout", "dropout2"])
def test_a_declared_module_in_the_place_of_a_dropout_counts(place):
    """Without gradients PyTorch's fused layer leaves it out, so that the layer must not run fused."""
    plain = nn.TransformerEncoderLayer(6, 2, 6, dtype=D).eval()
    module = copy.deepcopy(plain)
    setattr(module, place, DeclaredScale())
    x = torch.randn(4, 6, dtype=D)
    assert torch.allclose(r.declare(module)(x), module(x))
    assert not torch.allclose(r.declare(plain)(x), module(x))
    assert bound(module) > bound(plain)
    fused = nn.TransformerEncoderLayer(6, 2, 6, batch_first=True, dtype=D).eval()
    setattr(fused, place, DeclaredScale())
    with pytest.raises(ArgumentError, match="set_fastpath_enabled"):
        bound(fused)


class Twice(nn.TransformerEncoderLayer):
    """A layer that is a sum."""

    def forward(self, x, **options):
        return self.linear1(x) + self.linear2(x)


@r.declare.rule(Twice)
def _twice(module):
    return Added((r.declare(module.linear1), r.declare(module.linear2)))


class OneMap(nn.TransformerEncoderLayer):
    """A layer that is one map, which is no composition."""

    def forward(self, x, **options):
        return self.linear1(x)


@r.declare.rule(OneMap)
def _one_map(module):
    return r.declare(module.linear1)


@pytest.mark.parametrize("kind", [Twice, OneMap])
def test_layers_that_are_declared_as_something_else_than_a_composition_are_not_taken_apart(kind):
    torch.manual_seed(6)
    layers = [kind(6, 2, 6, batch_first=True, dtype=D).eval() for _ in range(3)]
    for one in layers:
        nn.init.normal_(one.linear1.weight)
        with torch.no_grad():
            one.linear2.weight.copy_(-one.linear1.weight + 1e-3 * torch.randn(6, 6, dtype=D))
    module = nn.TransformerEncoder(layers[0], 1, enable_nested_tensor=False).eval()
    module.layers = nn.ModuleList(layers)
    x = torch.randn(4, 6, dtype=D)
    with torch.no_grad():
        assert torch.allclose(r.declare(module)(x), module(x))
    assert seen(lambda x: module(x.unsqueeze(0))[0]) <= bound(module)


def test_a_stack_of_regard_with_a_sum_among_its_layers():
    class Sum(r.nn.Promised):
        promise, tokens = r.nn.Promise(NORM, 9.0), None

        def __init__(self):
            super().__init__()
            self.one, self.other = linear(), linear()

        def run(self, x, **options):
            return self.one(x) + self.other(x)

        def forward(self, x, **options):
            return self.run(x)

        def declare(self):
            return Added((r.declare(self.one), r.declare(self.other)))

    module = r.nn.Encoder(Design(6, 2), 1).double().eval()
    module.layers = nn.ModuleList([Sum()])
    x = torch.randn(4, 6, dtype=D)
    assert torch.allclose(module.declare()(x), module(x))
