"""What is proved of a module is proved of its declaration, so both are run, with gradients and without; and
the eps of a norm layer is the one that PyTorch computes with.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import regard as r
from regard.audits.adapters.norms import any_normalize
from regard.errors import ArgumentError
from regard.maps import Affine
from regard.nn.interchange import design_of
from regard.nonexpansive import Pool
from regard.proofs.agreement import batched, copy_in, crosswise, one_by_one, relative_gap

D = torch.float64
HALVES = (torch.bfloat16, torch.float16)
KINDS = (*HALVES, torch.float32, D)
BALL, NORM = r.Ball(1.0, tokens=4, width=6), r.Frobenius()


def bound(module, domain=BALL):
    return r.certify(module, domain, NORM).value


def layer(**options):
    torch.manual_seed(1)
    made = nn.TransformerEncoderLayer(6, 2, 8, **{"batch_first": True, "dtype": D, **options}).eval()
    nn.init.normal_(made.linear1.weight)
    return made


# The eps of a norm layer


def used(norm, kind):
    """The eps that PyTorch computes with, from a token as short as its root: x/y = √(mean x² + eps)."""
    size = 1e-8 if kind == D else 2.0**-13
    x = torch.full((1, 6), size, dtype=kind)
    with torch.no_grad():
        y = norm(x)
    return float(((x.double() / y.double()).square() - x.double().square()).mean())


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_without_eps_a_norm_layer_has_that_of_its_arithmetic(kind, weighted):
    if kind == D and not weighted:
        pytest.skip("a module without weights has the default dtype")
    norm = nn.RMSNorm(6, elementwise_affine=weighted).to(kind)
    eps = r.declare(norm).eps
    assert used(norm, kind) == pytest.approx(eps, rel=0.02)
    assert any_normalize(norm).eps == eps
    torch_layer = nn.TransformerEncoderLayer(6, 2, 8).to(kind)
    torch_layer.norm1 = norm
    assert design_of(torch_layer).norm.eps == eps


@pytest.mark.parametrize("kind", HALVES)
def test_an_inner_norm_without_eps_is_read_with_that_of_its_arithmetic(kind):
    from regard.audits.adapters.inner_norms import read_norm

    assert read_norm("norm", nn.RMSNorm(6)).eps == torch.finfo(torch.float32).eps
    assert read_norm("norm", nn.RMSNorm(6, eps=1e-3)).eps == 1e-3


@pytest.mark.parametrize("kind", HALVES)
def test_short_tokens_of_a_norm_layer_in_half_precision_move_no_farther_than_proved(kind):
    norm = nn.RMSNorm(6).to(kind)
    generator = torch.Generator().manual_seed(0)
    x = (1e-3 * torch.randn(4, 6, generator=generator)).to(kind)
    proved = r.deviation(norm, r.one_token(x.double(), 0, 2e-3), NORM).value
    moves = []
    for _ in range(50):
        away = torch.randn(6, generator=generator, dtype=D)
        y = x.clone()
        y[0] = (x[0].double() + 1.9e-3 * away / away.norm()).to(kind)
        if float((y[0].double() - x[0].double()).norm()) <= 2e-3:
            with torch.no_grad():
                moves.append(float((norm(y).double() - norm(x).double()).norm()))
    assert len(moves) > 10
    assert 1.0 < max(moves) <= proved


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_layer_with_eps_keeps_its_bound_in_every_dtype(kind):
    assert bound(nn.RMSNorm(6, eps=2.0**-10).to(kind)) == bound(nn.RMSNorm(6, eps=2.0**-10).double())


@pytest.mark.parametrize("radius", [1.0, 1000.0])
def test_a_norm_layer_whose_eps_is_that_of_its_input_is_refused_in_another_dtype(radius):
    """Without weights it has no dtype; a linear layer in float64 after it says which one it runs in."""
    domain = r.Ball(radius, tokens=4, width=6)
    norm, last = nn.RMSNorm(6, elementwise_affine=False), nn.Linear(6, 6)
    module = nn.Sequential(norm, last)
    single = bound(module, domain)
    with pytest.raises(ArgumentError, match=r"RMSNorm without eps.*nn.RMSNorm\(..., eps=2.2e-16\)"):
        bound(module.double(), domain)
    norm.eps = torch.finfo(torch.float32).eps
    assert bound(module, domain) == pytest.approx(single, rel=1e-9)
    assert bound(module.bfloat16(), domain) < math.inf


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_a_copy_in_a_wider_dtype_keeps_the_eps_of_a_norm_layer(kind):
    norm = nn.RMSNorm(6).to(kind)
    assert copy_in(D, norm).eps == r.declare(norm).eps
    assert norm.eps is None


# Layers that PyTorch runs fused


def test_a_fused_layer_with_another_activation_is_refused():
    for module in (layer(activation=nn.GELU("tanh")), layer(activation=nn.GELU("tanh")).bfloat16()):
        found = r.certify(module, BALL, NORM)
        assert math.isinf(found.value)
        assert "in place of Gelu(tanh=True)" in found.refused[0]
        assert "set_fastpath_enabled(False)" in found.refused[0]


def test_an_activation_that_is_set_later_is_refused_where_the_layer_runs_fused():
    module = layer()
    module.activation = functional.gelu
    assert math.isinf(bound(module))
    module.activation_relu_or_gelu = 2  # as if it had been built with it
    assert bound(module) == bound(layer(activation="gelu")) < math.inf


@pytest.mark.parametrize(
    "options",
    [{"batch_first": False}, {"bias": False}, {"nhead": 3}, {"train": True}, {"slow": True}],
    ids=str,
)
def test_a_layer_that_never_runs_fused_keeps_its_bound(options):
    options = dict(options)
    train, slow, heads = options.pop("train", False), options.pop("slow", False), options.pop("nhead", 2)
    torch.manual_seed(1)
    options = {"batch_first": True, "dropout": 0.0, **options}
    module = nn.TransformerEncoderLayer(6, heads, 8, activation=nn.GELU("tanh"), dtype=D, **options)
    module.train(train)
    torch.backends.mha.set_fastpath_enabled(not slow)
    try:
        assert bound(module) < math.inf
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


# Modules that users declare


class Off(nn.Linear):
    """A linear layer that is declared with an error."""

    by = 1.0013

    def forward(self, x):
        return self.by * super().forward(x)


@r.declare.rule(Off)
def _plain(module):
    return Affine(module.weight.detach().double().mT.contiguous(), module.bias.detach().double())


class Right(Off):
    """The same without the error."""

    by = 1.0


class Fused(Off):
    """One that is another map without gradients."""

    def forward(self, x):
        value = nn.Linear.forward(self, x)
        return value if torch.is_grad_enabled() else 1.0013 * value


class Random(Off):
    """One that is random in training."""

    def forward(self, x):
        value = nn.Linear.forward(self, x)
        return value + torch.randn_like(value) if self.training else value


class Alone(Off):
    """One that takes single sequences."""

    def forward(self, x):
        if x.ndim != 2:
            raise ValueError("one sequence, please")
        return nn.Linear.forward(self, x)


class Narrow(Off):
    """Half of what was declared."""

    def forward(self, x):
        return nn.Linear.forward(self, x)[..., :3]


class Named(Off):
    """One that takes more than tokens."""

    def forward(self, x, name):
        return nn.Linear.forward(self, x)


def made(cls, kind=torch.float32):
    torch.manual_seed(2)
    return cls(6, 6).to(kind).eval()


X = torch.linspace(-1, 1, 24).reshape(4, 6)


def typo(x):
    return r.one_token(x, 0, 1e-3)


ASKED = {
    "certify": lambda module, x: r.certify(module, BALL, NORM).value,
    "certify on a shell": lambda module, x: r.certify(module, r.Shell(0.5, tokens=4), NORM).value,
    "certify anywhere": lambda module, x: r.certify(module, r.Whole(), NORM).value,
    "certify laws": lambda module, x: (
        r.certify(module, r.domains.NearbyLaws(x, 0.1, r.Ball(4.0)), r.Wasserstein(1)).value
    ),
    "deviation": lambda module, x: r.deviation(module, typo(x), NORM).value,
    "image": lambda module, x: r.image(module, BALL).radius,
    "decide": lambda module, x: -float(r.decide(module, x, typo(x), readout=Pool()).margin.value),
    "certified_radius": lambda module, x: float(r.certified_radius(module, x, readout=Pool()).value),
    "certified_cosine": lambda module, x: (
        r.certified_cosine(module, x, typo(x), readout=Pool()).distance.value
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ASKED)
def test_a_declaration_that_is_off_by_an_eighth_of_a_percent_is_an_error(name, kind):
    x = X.to(kind)
    for wrong in (Off, Fused):
        with pytest.raises(
            ArgumentError, match=r"(map|model): differs by 0.0013 \(relative\) from what it is"
        ):
            ASKED[name](made(wrong, kind), x)
    assert 0 < ASKED[name](made(Right, kind), x) < math.inf


def test_what_differs_without_gradients_alone_is_named():
    with pytest.raises(ArgumentError, match=r"without gradients in float64; call torch.backends.mha"):
        bound(made(Fused))


def test_the_tolerance_is_a_hypothesis():
    found = r.certify(made(Right), BALL, NORM)
    said = "Right equals its declaration within 1e-05 (relative), run in float32 with and without gradients"
    assert f"  checked: {said} at two sequences of the domain" in str(found).splitlines()
    decided = r.decide(made(Right, D), X.double(), typo(X.double()), readout=Pool())
    assert "Right equals its declaration within 6e-08 (relative), run in float64" in str(decided)
    assert str(decided).count("at x and x/2") == 1  # the readout is a declaration
    half = r.certify(made(Right, torch.bfloat16), BALL, NORM)
    assert "within 1e-05 (relative), run in float32" in str(half)
    assert "declaration" not in str(r.certify(r.declare(made(Right)), BALL, NORM))


def test_all_bounds_of_a_module_rest_on_the_run():
    found = r.certify(layer(), BALL, NORM)
    assert all("equals its declaration" in str(one.hypotheses[-1]) for one in (found, *found.others))


def test_the_bound_of_an_edit_rests_on_the_run():
    torch.manual_seed(3)
    module = nn.MultiheadAttention(6, 2, dtype=D)
    found = r.deviation(module, r.domains.deleted(X.double(), 1), r.TokenMax())
    assert found.value < math.inf
    assert "MultiheadAttention equals its declaration" in str(found)


def test_a_bound_is_that_of_the_declaration():
    module = layer()
    assert bound(module) == r.certify(r.declare(module), BALL, NORM).value


def test_randomness_in_training_is_found_and_eval_is_its_remedy():
    module = made(Random).train()
    state = torch.get_rng_state()
    with pytest.raises(ArgumentError, match=r"call module.eval\(\) if training changes it"):
        bound(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert bound(module.eval()) == bound(made(Right))


def test_a_module_that_takes_single_sequences_is_run_on_them():
    assert bound(made(Alone)) == bound(made(Right))
    assert r.decide(made(Alone), X, typo(X), readout=Pool()).holds


def test_another_shape_is_an_error():
    with pytest.raises(ArgumentError, match=r"map: gives another shape than its declaration, \[4, 6\]"):
        bound(made(Narrow))


def test_a_module_that_does_not_run_on_tokens_is_assumed_to_be_its_declaration():
    found = r.certify(made(Named), BALL, NORM)
    assert found.value == bound(made(Right))
    assert str(found.hypotheses[-1]).startswith("assumed: Named computes its declaration: it was not run on")
    assert "TypeError" in str(found.hypotheses[-1])
    with pytest.raises(TypeError):
        r.decide(made(Named), X, typo(X), readout=Pool())


class Chaotic(nn.Module):
    """Rounding in float32 is all of its value's last digits."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return (self.linear(x) + 2e3) - 2e3


@r.declare.rule(Chaotic)
def _chaotic(module):
    return r.declare(module.linear)


def test_rounding_is_told_from_another_map_by_a_copy_in_a_wider_dtype():
    torch.manual_seed(3)
    module = Chaotic()
    with torch.no_grad():
        exact = r.declare(module)(X.double())
        assert 1e-5 < relative_gap(module(X).double(), exact) < 4 * torch.finfo(torch.float32).eps ** 0.5
    found = r.certify(module, BALL, NORM)
    assert found.value == r.certify(module.linear, BALL, NORM).value
    assert "run in float64" in str(found)
    with pytest.raises(ArgumentError, match=r"differs by .* in bfloat16, by rounding; convert it to a wider"):
        bound(copy.deepcopy(module).bfloat16())


def test_ways_to_take_a_batch():
    attention, both = nn.MultiheadAttention(6, 2, dtype=D), torch.randn(2, 4, 6, dtype=D)
    alone = one_by_one(attention, both)
    assert torch.allclose(crosswise(attention, both), alone)
    assert not torch.allclose(batched(attention, both), alone)
    attention.batch_first = True
    assert torch.allclose(batched(attention, both), alone)


def test_nothing_equals_nothing_and_numbers_that_are_none_do_not_agree():
    zero, one = torch.zeros(2), torch.ones(2)
    assert relative_gap(zero, zero) == 0.0
    assert relative_gap(one, zero) == pytest.approx(2**0.5)
    assert relative_gap(torch.full((2,), math.nan), one) == math.inf


@pytest.mark.parametrize("tolerance", [1e-8, 1e-3])
def test_a_fixed_point_is_run_within_its_own_tolerance(tolerance):
    f = Affine(0.5 * torch.eye(6, dtype=D))
    module = r.nn.Deep(f, tolerance)
    assert bound(module) == bound(r.nn.Deep(f, 1e-8)) < 2.1
    assert bound(nn.Sequential(module, nn.Linear(6, 6, dtype=D))) < math.inf


def test_a_module_of_a_width_that_nothing_states_is_assumed_to_be_its_declaration():
    found = r.nn.Offset(tokens=3, width=2).certificate()
    assert found.value < 1 + 1e-6
    assert found.hypotheses[-1].checked is False
    layer = nn.LayerNorm(6, elementwise_affine=False)
    assert r.certify(layer, r.Shell(0.5), NORM).hypotheses[-1].checked is False
    assert r.certify(layer, r.Ball(1.0, width=6), NORM).hypotheses[-1].checked is True


def test_a_language_model_that_takes_words_is_assumed_to_be_its_declaration():
    model = r.nn.LanguageModel(r.nn.Design(6, 2), 11, 1).double().eval()
    found = r.certify(model, BALL, NORM)
    assert found.value < math.inf
    assert found.hypotheses[-1].checked is False
