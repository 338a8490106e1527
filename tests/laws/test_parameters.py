"""Nouns say what their tensors are: heads are found by declarations,
and silence is refused with the line to add.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import regard as r
from regard import maps
from regard._enclosed import length
from regard._object import Object
from regard._upper import exact
from regard.normalizers.linear import FeatureKernel, FeatureMap, _PlainGaussian
from regard.parameters import (
    KEY,
    Tokens,
    children,
    in_basis,
    leads,
    number,
    one_head,
    parameter,
    part,
    projection,
    shared,
    walk,
    width,
)
from regard.potentials.base import FunctionPotential, linear_terms, simple_parts
from regard.proofs.scores import Form, Slopes, bilinear, slopes
from regard.proofs.subject import single_heads
from regard.proofs.theorems.composition import fold
from regard.testing import check_potential
from tests import nouns

D = torch.float64


class Salience(r.Potential):
    """a(x, y) = x·y + u·y, one vector u (d,), or one for each head (h, d).

    Abstract: u is declared below, or is not.
    """

    positional: ClassVar[bool] = False
    u: Tensor

    def features(self, x, y, x_marks, y_marks):
        return x, (y, y @ self.u.unsqueeze(-1))

    def pair(self, queries, keys):
        return queries @ keys[0].mT + keys[1].mT


@dataclass(frozen=True, eq=False, repr=False)
class Silent(Salience):
    """It does not say what u is."""

    u: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Salient(Salience):
    """It does."""

    u: Tensor = parameter(rank=1, widths=(Tokens.KEYS,))


@slopes.rule(Salience)
def _salience(potential, ball):
    """v = x_i + u is the same for all j, z = x_j."""
    alpha, zero = ball.reach + length(potential.u), exact(0.0)
    return Slopes(alpha, zero, ball.radius, ball.reach, 2 * ball.radius * alpha, zero)


def vectors(heads, seed=0, size=0.05):
    return size * torch.randn(heads, 4, generator=torch.Generator().manual_seed(seed), dtype=D)


def jacobian_norm(attention, x):
    found = torch.func.jacrev(lambda z: attention(z))(x)
    return float(torch.linalg.matrix_norm(found.reshape(-1, x.numel()), 2))


DOMAIN = r.Ball(0.2, torch.zeros(4, dtype=D), 3)


def test_a_vector_for_each_head_is_counted_as_heads():
    """64 heads that all see the same are eight times as long as one: no bound of one head holds for them."""
    attention = r.Attention(Salient(vectors(64)))
    found = r.certify(attention, DOMAIN, r.Frobenius())
    one = r.certify(r.Attention(Salient(vectors(64)[0])), DOMAIN, r.Frobenius())
    generator = torch.Generator().manual_seed(1)
    points = [
        0.2 * torch.nn.functional.normalize(torch.randn(3, 4, generator=generator, dtype=D), dim=-1)
        for _ in range(20)
    ]
    reached = max(jacobian_norm(attention, x) for x in points)
    attack = r.falsify(attention, DOMAIN, r.Frobenius(), steps=5, restarts=1).value
    assert 7.9 < max(reached, attack) <= found.value <= 1.3 * reached
    assert found.value == pytest.approx(8 * one.value, rel=0.1)


def test_what_says_nothing_is_refused_with_the_line_to_add():
    attention = r.Attention(Silent(vectors(64)))
    line = "write `u: Tensor = parameter(rank=2)` where none of [64, 4] are, rank=1 where the first is"
    for found in (
        r.certify(attention, DOMAIN, r.Frobenius()),
        r.deviation(attention, r.Neighborhood(torch.zeros(3, 4, dtype=D), 0.1), r.Frobenius()),
    ):
        assert math.isinf(found.value)
        assert any(
            "Silent.u: does not say which of its dimensions are heads" in why and line in why
            for why in found.refused
        )


AROUND = {
    "heads": lambda a: maps.Heads(a, torch.eye(4, dtype=D).expand(2, 4, 4).clone()),
    "residual": lambda a: maps.Residual(AROUND["heads"](a)),
    "composed": lambda a: maps.Compose((maps.Normalize(), AROUND["heads"](a))),
    "twice": lambda a: maps.Compose((AROUND["heads"](a), AROUND["heads"](a))),
    "added": lambda a: maps.Added((AROUND["heads"](a), maps.Affine(torch.eye(4, dtype=D)))),
    "to a context": lambda a: maps.ToContext(a, torch.ones(2, 4, dtype=D)),
    "from queries": lambda a: maps.FromQueries(a, torch.ones(2, 4, dtype=D)),
    "joint": lambda a: maps.Joint(a, 1),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("norm", [r.Frobenius(), r.TokenMax(), r.Wasserstein(1.0)], ids=repr)
def test_silence_is_refused_wherever_attention_stands(name, norm):
    """And what is said is certified: no attack exceeds the bound."""
    silent, told = (AROUND[name](r.Attention(kind(vectors(2, size=0.5)))) for kind in (Silent, Salient))
    near = r.Neighborhood(0.1 * torch.eye(3, 4, dtype=D), 0.05)
    for domain in (DOMAIN, near):
        assert math.isinf(r.certify(silent, domain, norm).value)
    domain = near if isinstance(norm, r.TokenMax) else DOMAIN
    bound = r.certify(told, domain, norm).value
    if not isinstance(norm, r.Wasserstein) and math.isfinite(bound):
        assert r.falsify(told, domain, norm, steps=2, restarts=1).value <= bound
    assert math.isinf(r.deviation(silent, near, norm).value)


def test_what_says_nothing_runs():
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=D)
    told, silent = (r.Attention(kind(vectors(3)), support=r.Causal())(x) for kind in (Salient, Silent))
    assert torch.equal(told, silent)
    assert r.apply(r.Attention(Silent(vectors(3))), x).shape == (3, 5, 4)
    check_potential(Silent(vectors(1)[0]))


def kinds(*bases):
    """All final classes below these that a declaration may hold; engines have potentials of their own."""
    found = [kind for base in bases for kind in base.__subclasses__()]
    own = [
        kind
        for kind in found
        if kind.__module__.startswith("regard.") and "__dataclass_params__" in vars(kind)
    ]
    return [kind for kind in own if not kind.__module__.startswith("regard.compute.")] + (
        kinds(*found) if found else []
    )


NOUNS = {
    *kinds(
        r.Potential,
        r.normalizers.Normalizer,
        r.lookups.Lookup,
        r.supports.Support,
        r.moments.Moment,
        FeatureMap,
        maps.Map,
    ),
    r.Attention,
}
PLAIN = {"bool", "int", "float", "None", "Buckets", "Activation"}


@pytest.mark.parametrize(
    "kind", sorted(NOUNS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__
)
def test_every_field_that_may_hold_tensors_says_what_it_is(kind):
    """All fields but plain numbers; the parameters of a function are what nobody can know."""
    for field in dataclasses.fields(kind):
        if not set(field.type.split(" | ")) <= PLAIN:
            assert (KEY in field.metadata) != (kind is FunctionPotential and field.name == "parameters"), (
                field.name
            )


def test_potentials_say_whether_they_look_at_marks():
    assert {kind for kind in kinds(r.Potential) if kind.positional is None} == set()


ALL = {**nouns.POTENTIALS, **nouns.NORMALIZERS, **nouns.SUPPORTS, **nouns.LOOKUPS, **nouns.MOMENTS}


@pytest.mark.parametrize("name", ALL)
def test_every_noun_can_be_taken_apart(name):
    """One head of one is the noun itself, and the ranks are those that the checks of construction ask for."""
    noun = ALL[name]
    counts = {torch.Size(lead).numel() for *_, lead in leads(noun)} | {1}
    assert one_head(noun, 0, 1) == noun or max(counts) > 1
    assert all(part == one_head(part, 0, max(counts)) for part in [one_head(noun, 0, max(counts))])
    assert repr(type(noun)(**{f.name: getattr(noun, f.name) for f in dataclasses.fields(noun)})) == repr(noun)


def test_heads_are_found_by_declaration_and_not_by_name():
    """A field called w_q may be a vector, and one called scale a matrix."""

    @dataclass(frozen=True, eq=False, repr=False)
    class Odd(r.Potential):
        w_q: Tensor = parameter(rank=1)
        scale: Tensor = parameter(rank=2)
        many: tuple[Tensor, ...] = parameter(rank=0, default=())

        def features(self, x, y, x_marks, y_marks):
            return x * self.w_q.unsqueeze(-2), y @ self.scale

        def pair(self, queries, keys):
            return queries @ keys.mT

    heads = single_heads(r.Attention(Odd(torch.ones(3, 4), torch.eye(4), (torch.ones(3), torch.tensor(2.0)))))
    assert [tuple(head.potential.w_q.shape) for head in heads] == [(4,)] * 3
    assert all(head.potential.scale.shape == (4, 4) for head in heads)
    assert [part.shape for part in heads[0].potential.many] == [(), ()]
    check_potential(Odd(torch.rand(3, 4, dtype=D), torch.rand(4, 4, dtype=D)))


def test_a_declaration_that_lies_breaks_a_law():
    @dataclass(frozen=True, eq=False, repr=False)
    class Lies(Salience):
        u: Tensor = parameter(rank=2)

    with pytest.raises(AssertionError, match="as many heads as the fields say"):
        check_potential(Lies(vectors(3)))

    @dataclass(frozen=True, eq=False, repr=False)
    class Narrow(Salience):
        u: Tensor = parameter(rank=1, widths=(Tokens.KEYS,))

        def features(self, x, y, x_marks, y_marks):
            return x, (y, y[..., :2] @ self.u.unsqueeze(-1))

    with pytest.raises(AssertionError, match="as wide as they say"):
        check_potential(Narrow(vectors(1)[0, :2]))

    @dataclass(frozen=True, eq=False, repr=False)
    class Aware(Salience):
        u: Tensor = parameter(rank=1)

        def features(self, x, y, x_marks, y_marks):
            return x, (y, (y @ self.u.unsqueeze(-1)) + y_marks.unsqueeze(-1))

    with pytest.raises(AssertionError, match="does not look at marks"):
        check_potential(Aware(vectors(1)[0]))

    @dataclass(frozen=True, eq=False, repr=False)
    class Peeking(r.Potential):
        w_q: Tensor = projection(Tokens.QUERIES)
        w_k: Tensor = projection(Tokens.KEYS)

        def features(self, x, y, x_marks, y_marks):
            return (x @ self.w_q, x), (y @ self.w_k, y)

        def pair(self, queries, keys):
            return queries[0] @ keys[0].mT + queries[1] @ keys[1].mT

    with pytest.raises(AssertionError, match="through projections alone"):
        check_potential(Peeking(torch.rand(4, 2, dtype=D), torch.rand(4, 2, dtype=D)))


def test_slopes_that_are_too_small_break_a_law():
    @dataclass(frozen=True, eq=False, repr=False)
    class Steeper(Salience):
        u: Tensor = parameter(rank=1)

    @slopes.rule(Steeper)
    def _flat(potential, ball):
        zero = exact(0.0)  # u is forgotten
        return Slopes(ball.reach, zero, ball.radius, ball.reach, 2 * ball.radius * ball.reach, zero)

    with pytest.raises(AssertionError, match="alpha is at least the slope in a key"):
        check_potential(Steeper(vectors(1, size=3.0)[0]))

    @dataclass(frozen=True, eq=False, repr=False)
    class Formed(Salience):
        u: Tensor = parameter(rank=1)

    @bilinear.rule(Formed)
    def _wrong(potential, width):
        zero = torch.zeros(width, dtype=D)
        return Form(torch.eye(width, dtype=D), zero, potential.u.double())  # u acts on keys, not on queries

    with pytest.raises(AssertionError, match="bilinear form is exact"):
        check_potential(Formed(vectors(1)[0]))


def test_a_bilinear_form_is_enough():
    """Slopes follow from the form, and a constant in the scores is counted where rows are no laws."""

    @dataclass(frozen=True, eq=False, repr=False)
    class Shifted(r.Potential):
        c: float
        positional: ClassVar[bool] = False

        def features(self, x, y, x_marks, y_marks):
            return x, y

        def pair(self, queries, keys):
            return queries @ keys.mT + self.c

    @bilinear.rule(Shifted)
    def _form(potential, width):
        zero = torch.zeros(width, dtype=D)
        return Form(torch.eye(width, dtype=D), zero, zero)

    for norm in (r.Frobenius(), r.TokenMax(), r.Wasserstein(1.0)):
        one, other = (
            r.certify(r.Attention(p), DOMAIN, norm).value
            for p in (Shifted(5.0), r.Bilinear(torch.eye(4, dtype=D)))
        )
        assert one == pytest.approx(other, rel=1e-9)
    attention = r.Attention(Shifted(5.0), normalizer=r.Sigmoid(-5.0))
    found = r.certify(attention, DOMAIN, r.TokenMax()).value
    assert r.falsify(attention, DOMAIN, r.TokenMax(), steps=5, restarts=1).value <= found < math.inf
    assert found == pytest.approx(
        r.certify(r.Attention(r.Dot(scale=1.0), normalizer=r.Sigmoid(0.0)), DOMAIN, r.TokenMax()).value,
        rel=1e-9,
    )


def test_what_may_hide_tensors_must_say_that_it_has_no_heads():
    class Function(r.Potential):
        function: Callable

        def features(self, x, y, x_marks, y_marks):
            return self.function(x), y

        def pair(self, queries, keys):
            return queries @ keys.mT

    @dataclass(frozen=True, eq=False, repr=False)
    class Hidden(Function):
        function: Callable

    @dataclass(frozen=True, eq=False, repr=False)
    class Open(Function):
        function: Callable = shared()

    assert len(single_heads(r.Attention(Open(torch.sin)))) == 1
    found = r.certify(r.Attention(Hidden(torch.sin)), DOMAIN, r.Frobenius())
    assert "write `function: builtin_function_or_method = shared()`" in found.refused[0]


def test_functions_with_heads_take_them_as_parameters():
    u = vectors(3)[:, None, None, :]
    hidden = r.Potential.of(lambda x, y: (x * y).sum(-1) + (u * y).sum(-1))
    with pytest.raises(r.errors.ArgumentError, match="give tensors with heads as parameters"):
        r.Attention(hidden)(torch.zeros(5, 4, dtype=D))
    told = r.Attention(r.Potential.of(lambda x, y, u: (x * y).sum(-1) + (u * y).sum(-1), u))
    assert told(torch.zeros(5, 4, dtype=D)).shape == (3, 5, 4)
    found = r.certify(told, r.Neighborhood(torch.zeros(5, 4, dtype=D), 0.1), r.TokenMax())
    assert math.isinf(found.value)
    assert "FunctionPotential.parameters: does not say" in found.refused[0]


# Parts


class Twice(r.Potential):
    """2 a. Abstract: its part is declared below, or is not."""

    positional: ClassVar[bool] = False
    potential: r.Potential

    def features(self, x, y, x_marks, y_marks):
        return self.potential.features(x, y, x_marks, y_marks)

    def pair(self, queries, keys):
        return 2 * self.potential.pair(queries, keys)


@dataclass(frozen=True, eq=False, repr=False)
class Doubled(Twice):
    """It does not say that it sees tokens through its part alone."""

    potential: r.Potential


@dataclass(frozen=True, eq=False, repr=False)
class Told(Twice):
    """It does."""

    potential: r.Potential = part()


@slopes.rule(Twice)
def _doubled(potential, ball):
    return slopes.one(potential.potential, ball).times(2.0)


def test_positions_inside_an_unknown_potential_are_not_forgotten():
    hidden = r.Attention(Doubled(r.Dot() + r.Alibi(3.0)))
    for norm, why in (
        (r.Frobenius(), "Doubled over a position bias"),
        (r.Wasserstein(1.0), "not functions of the law"),
    ):
        found = r.certify(hidden, DOMAIN, norm)
        assert math.isinf(found.value)
        assert any(why in sentence for sentence in found.refused)
    assert math.isfinite(r.certify(r.Attention(Doubled(r.Dot())), DOMAIN, r.Frobenius()).value)


def test_what_does_not_say_whether_it_looks_at_marks_has_no_law():
    @dataclass(frozen=True, eq=False, repr=False)
    class Unsaid(Salience):
        u: Tensor = parameter(rank=1)
        positional: ClassVar[None] = None

    found = r.certify(r.Attention(Unsaid(vectors(1)[0])), DOMAIN, r.Wasserstein(1.0))
    assert any("write `positional: ClassVar[bool] = False` in Unsaid" in why for why in found.refused)
    assert math.isfinite(r.certify(r.Attention(Salient(vectors(1)[0])), DOMAIN, r.Wasserstein(1.0)).value)
    assert math.isfinite(r.certify(r.Attention(Unsaid(vectors(1)[0])), DOMAIN, r.TokenMax()).value)


def test_a_norm_layer_is_folded_into_parts_that_say_so():
    layer = maps.Normalize(weight=torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=D))
    w = torch.randn(4, 3, generator=torch.Generator().manual_seed(3), dtype=D)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(4), dtype=D)
    folded = fold(layer, r.Attention(Told(r.Dot(w, w)), r.Linear(w)))
    plain = maps.Normalize()(x)
    assert torch.allclose(folded(plain), r.Attention(2 * r.Dot(w, w), r.Linear(w))(layer(x)), atol=1e-12)
    found = r.certify(
        maps.Compose((layer, r.Attention(Doubled(r.Dot(w, w)), r.Linear(w)))),
        r.Ball(1.0, tokens=3),
        r.TokenMax(),
    )
    assert any(
        "write `potential: Potential = part()`" in why
        for why in (*found.refused, *(w for o in found.others for w in o.refused))
    )


def test_the_visitor():
    w = torch.randn(2, 4, 3, dtype=D)
    inner = r.Dot(w, w)
    potential = 0.5 * (r.Rotary(inner) + 2.0 * r.Alibi(torch.ones(2))) - r.SoftCap(
        r.Gaussian(bandwidth=1.0), 3.0
    )
    assert [type(p) for p in simple_parts(potential)] == [r.Dot, r.Alibi, r.Gaussian]
    assert [(type(term), factor) for term, factor in linear_terms(potential)] == [
        (r.Rotary, 0.5),
        (r.Alibi, 1.0),
        (r.SoftCap, -1.0),
    ]
    assert [type(p) for p in walk(r.Rotary(inner))] == [r.Rotary, r.Dot]
    assert children(inner) == []
    assert width(r.Attention(potential)) == 4
    assert width(r.Attention(r.Bilinear(torch.ones(2, 5))), Tokens.QUERIES) == 2
    assert width(r.Attention(r.Bilinear(torch.ones(2, 5))), Tokens.KEYS) == 5
    assert (
        width(maps.FromQueries(r.Attention(r.Bilinear(torch.ones(2, 5))), torch.ones(3, 2)), Tokens.QUERIES)
        == 5
    )
    assert width(r.Attention(r.Dot())) is None
    turned = in_basis(inner, torch.eye(4, dtype=D)[:, :2])
    assert torch.equal(turned.w_q, w[:, :2])


def test_what_is_proved_of_a_noun_is_not_inherited():
    """A dot product with something added is no dot product, though it would find the rules of one."""
    with pytest.raises(
        TypeError, match=r"More derives from Dot, which is final: .*; derive it from Potential"
    ):

        class More(r.Dot):
            def pair(self, queries, keys):
                return 100 * super().pair(queries, keys)


def test_a_rank_is_a_count():
    with pytest.raises(r.errors.ArgumentError, match="rank: is -1"):
        parameter(rank=-1)
    with pytest.raises(r.errors.ArgumentError, match="widths: names 1 dimensions of 2"):
        parameter(rank=2, widths=(Tokens.KEYS,))


def test_declarations_are_ordinary_fields():
    assert dataclasses.fields(r.Dot)[0].default is None
    assert Salient(vectors(1)[0]) == Salient(u=vectors(1)[0])
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        Salient()
    assert number(default=2.0).default == 2.0
    assert repr(r.Softmax()) == "Softmax()"
    assert (
        repr(FeatureKernel(r.Dot(), r.normalizers.Elu()))
        == "FeatureKernel(potential=Dot(), feature_map=Elu())"
    )
    assert isinstance(_PlainGaussian(1.0), Object)
