"""Layers keep their promise: when made, while they learn, after they were cast, pruned and loaded."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import regard as r
from regard.maps import Affine
from regard.nn import (
    Averaging,
    DistanceScores,
    Fixed,
    Guaranteed,
    Memory,
    NormBounded,
    Offset,
    Orthogonal,
    OrthogonalMixing,
    Promise,
    Promised,
    Reflective,
    from_torch,
    load,
    save,
    to_torch,
)
from regard.nn.promises import SLACK
from regard.nn.reflective import reflective_constant
from regard.nonexpansive import GroupSort, IntoBall, Pool
from tests.nn.promised import LAYERS, TOKENS, WIDTH, classifier, doubled

D = torch.float64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def drawn(*shape, seed=0, dtype=D):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def every_layer(test):
    return pytest.mark.parametrize("name", LAYERS)(test)


def shaken(layer, size=1.0):
    """The layer with other numbers."""
    with torch.no_grad():
        for k, parameter in enumerate(layer.parameters()):
            parameter.add_(size * drawn(*parameter.shape, seed=k).to(parameter.dtype))
    return layer


# What a layer is


@every_layer
def test_a_layer_is_what_it_declares(name):
    layer, x = shaken(LAYERS[name]().double()), 2 * drawn(2, 5, TOKENS, WIDTH)
    declared = r.declare.one(layer)
    torch.testing.assert_close(declared(x), layer(x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(declared(x[1, 3]), layer(x)[1, 3], rtol=1e-10, atol=1e-12)


@every_layer
def test_weights_are_declared_as_the_forward_pass_has_them(name):
    """In float32: the declared map has the same numbers, and only the arithmetic is finer."""
    layer, x = LAYERS[name](), drawn(TOKENS, WIDTH)
    declared = layer.declare()
    torch.testing.assert_close(declared(x), layer(x.float()).double(), rtol=2e-5, atol=2e-6)


@every_layer
@pytest.mark.parametrize("size", [0.0, 1.0, 5.0])
def test_the_certificate_keeps_the_promise(name, size):
    layer = shaken(LAYERS[name](), size)
    assert layer.keep(TOKENS).value <= layer.promise.value * (1 + SLACK)


@pytest.mark.parametrize("name", ["memory", "reflective", "dot", "gaussian", "cosine", "distance"])
def test_no_attack_breaks_it(name):
    layer = shaken(LAYERS[name]())
    domain = r.Ball(3.0, tokens=TOKENS)
    attack = r.falsify(layer, domain, r.Frobenius(), steps=5, restarts=1, width=WIDTH)
    assert 0.05 < attack.value <= layer.certificate(TOKENS).value * (1 + 1e-9)


@pytest.mark.parametrize(
    "name", ["orthogonal", "tall", "mixing", "offset", "sort", "memory", "memory of sequences", "reflective"]
)
def test_a_promise_is_not_kept_by_giving_it_away(name):
    """The constant is used up: no layer is divided by more than its theorem asks for."""
    assert shaken(LAYERS[name]()).certificate(TOKENS).value >= 0.9999


@every_layer
def test_gradients(name):
    layer = shaken(LAYERS[name]().double(), 0.3)
    x = drawn(TOKENS, WIDTH, seed=1).requires_grad_()
    names = [key for key, _ in layer.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=name == "stack")


@every_layer
def test_the_cost_of_a_layer(name):
    found = r.cost(LAYERS[name](), r.costs.Sizes(TOKENS, width=WIDTH))
    assert found.forward >= 0
    assert found.parameters == sum(parameter.numel() for parameter in LAYERS[name]().parameters())


# Linear maps


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (1, 4), (4, 1), (5, 5), (3, 8), (8, 3)])
def test_columns_or_rows_are_orthonormal(inputs, outputs):
    weight = shaken(Orthogonal(inputs, outputs).double(), 2.0).weight
    gram = weight.mT @ weight if outputs >= inputs else weight @ weight.mT
    torch.testing.assert_close(gram, torch.eye(min(inputs, outputs), dtype=D), rtol=0, atol=1e-11)


def test_a_bounded_map_is_anything_below_its_bound():
    layer = NormBounded(3, 2, 1.5).double()
    small = torch.tensor([[0.5, 0.0, 0.2], [0.1, 0.4, 0.0]], dtype=D)
    with torch.no_grad():
        layer.raw.copy_(small)
        torch.testing.assert_close(layer.weight, small, rtol=1e-11, atol=0)
        layer.raw.copy_(100 * small)
    assert float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) == pytest.approx(1.5)


# Attention


def test_reflective_attention_without_scores_is_a_reflection():
    """At g = 0 all lengths of tokens inside the ball stay."""
    layer = Reflective(WIDTH, 2, r.Ball(100.0)).double()
    with torch.no_grad():
        layer.strength.fill_(-60.0)
        layer.before.bias.zero_()
        layer.after.bias.zero_()
    x = drawn(TOKENS, WIDTH)
    torch.testing.assert_close(layer(x).norm(), x.norm(), rtol=1e-10, atol=0)
    torch.testing.assert_close(layer.numbers()[2], torch.ones(2, dtype=D), rtol=1e-12, atol=0)


@pytest.mark.parametrize("g", [1e-4, 0.01, 0.05, 0.3, 1.0, 3.9])
@pytest.mark.parametrize("step", [2.0, 1.5])
def test_what_scores_cost(g, step):
    """L(g) is what is proved of x - cPx with scores t z·z'; at most 1 + 4g for small g."""
    found = float(reflective_constant(torch.tensor([g], dtype=D), step))
    reflected = r.nonexpansive.Reflected(r.Attention(r.Dot(scale=g / 4)), step)
    proved = r.certify(reflected, r.Ball(2.0, torch.zeros(WIDTH, dtype=D)), r.Frobenius())
    assert found == pytest.approx(proved.value, rel=1e-10)
    assert found <= math.exp(g) + step * g * (1 + math.exp(g / 8)) + 1e-12
    assert g > 0.1 or found <= 1 + 4 * g


def test_scores_start_small():
    assert float(reflective_constant(torch.zeros(1, dtype=D))) == 1.0
    radius, sharpness, _ = (
        number.detach() for number in Reflective(WIDTH, 2, r.Ball(3.0)).double().numbers()
    )
    torch.testing.assert_close(
        sharpness * radius.square(), torch.full((2,), 0.05, dtype=D), rtol=1e-6, atol=0
    )


def test_a_memory_takes_the_longest_step():
    """c = 8/(tΔ²): one step more and the certificate is above one."""
    layer = shaken(Memory(WIDTH, 5).double())
    step = layer.declare()
    longer = step.replace(step=1.01 * step.step)
    assert r.certify(step, r.Whole(), r.Frobenius()).value <= 1 + 1e-9
    assert r.certify(longer, r.Whole(), r.Frobenius()).value > 1.001


def test_distances_need_the_number_of_tokens():
    with pytest.raises(r.errors.ArgumentError, match="tokens: is None; say the largest number"):
        Averaging(WIDTH, 2, DistanceScores())
    layer = Averaging(WIDTH, 2, DistanceScores(), tokens=4)
    assert layer.certificate(2).value < layer.certificate(4).value <= 1
    with pytest.raises(r.errors.ArgumentError, match="x: has 5 tokens"):
        layer(drawn(5, WIDTH, dtype=torch.float32))


# Special inputs


@every_layer
def test_constant_tokens_and_tokens_far_away(name):
    layer = LAYERS[name]()
    for x in (torch.zeros(TOKENS, WIDTH), torch.ones(TOKENS, WIDTH), torch.full((TOKENS, WIDTH), 1e4)):
        x = x.requires_grad_()
        value = layer(x)
        (slope,) = torch.autograd.grad(value.sum(), x)
        assert bool(torch.isfinite(value).all())
        assert bool(torch.isfinite(slope).all())


@pytest.mark.parametrize(
    "name", ["orthogonal", "memory", "reflective", "dot", "gaussian", "cosine", "distance"]
)
def test_one_token(name):
    layer, x = LAYERS[name]().double(), drawn(1, WIDTH)
    torch.testing.assert_close(layer.declare()(x), layer(x), rtol=1e-10, atol=1e-12)
    assert layer.certificate(1).value <= 1 + SLACK


# Learning


def stretch(layer, pair):
    """How much two sequences are moved apart: what a promise bounds."""
    first, second = layer(pair)
    return (first - second).norm() / (pair[0] - pair[1]).norm()


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda weights: torch.optim.SGD(weights, 1.0, momentum=0.9),
        lambda weights: torch.optim.Adam(weights, 0.05),
        lambda weights: torch.optim.RMSprop(weights, 0.02),
    ],
    ids=["SGD", "Adam", "RMSprop"],
)
def test_a_thousand_steps_that_try_to_break_it(optimizer):
    """The optimizer maximizes what the promise forbids to exceed one."""
    stack = [Reflective(WIDTH, 2), Memory(WIDTH, 4), NormBounded(WIDTH, 2)]
    layer = Guaranteed(stack, Promise(r.Frobenius(), 1.0))
    start = [parameter.detach().clone() for parameter in layer.parameters()]
    pair = drawn(2, TOKENS, WIDTH, dtype=torch.float32)
    steps = optimizer(layer.parameters())
    before = stretch(layer, pair).detach()
    for _ in range(1000):
        steps.zero_grad()
        (-stretch(layer, pair)).backward()
        steps.step()
    assert layer.keep().value <= 1 + SLACK
    assert before < stretch(layer, pair).detach() <= 1
    assert any(bool((one != two).any()) for one, two in zip(start, layer.parameters(), strict=True))


# Files, casts and pruning


@every_layer
def test_a_layer_that_was_saved_comes_back(name, tmp_path):
    pytest.importorskip("safetensors")
    layer = shaken(LAYERS[name]())
    found = load(save(layer, tmp_path))
    x = drawn(TOKENS, WIDTH, dtype=torch.float32)
    assert torch.equal(found(x), layer(x))
    assert found.promise == layer.promise
    assert found.certificate(TOKENS).value == layer.certificate(TOKENS).value


def test_a_stack_with_its_own_promise_comes_back(tmp_path):
    pytest.importorskip("safetensors")
    assert load(save(doubled(), tmp_path)).promise == Promise(r.Frobenius(), 2.0)


@every_layer
def test_a_cast_to_bfloat16_keeps_the_promise(name, tmp_path):
    pytest.importorskip("safetensors")
    layer = shaken(LAYERS[name]()).to(torch.bfloat16)
    assert layer.keep(TOKENS).value <= layer.promise.value * (1 + SLACK)
    x = drawn(TOKENS, WIDTH).to(torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    again = load(save(layer, tmp_path))
    assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("name", ["orthogonal", "memory", "memory of sequences", "bounded", "mixing"])
def test_pruning_keeps_the_promise(name, tmp_path):
    pytest.importorskip("safetensors")
    layer = shaken(LAYERS[name]())
    tensor = "memory" if name.startswith("memory") else "raw"
    prune.l1_unstructured(layer, tensor, 0.5)
    assert math.isinf(layer.certificate(TOKENS).value)  # hooks may change anything
    prune.remove(layer, tensor)
    assert int((getattr(layer, tensor) == 0).sum()) >= getattr(layer, tensor).numel() // 2
    assert layer.keep(TOKENS).value <= layer.promise.value * (1 + SLACK)
    assert load(save(layer, tmp_path)).certificate(TOKENS).value <= layer.promise.value * (1 + SLACK)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused(number, tmp_path):
    pytest.importorskip("safetensors")
    layer = classifier()
    save(layer, tmp_path / "good")
    with torch.no_grad():
        layer.stack[3].memory[0, 0] = number
    with pytest.raises(r.errors.ArgumentError, match=r"stack\.3\.memory: holds NaN or infinity"):
        layer.keep()
    with pytest.raises(r.errors.ArgumentError, match="holds NaN or infinity"):
        load(save(layer, tmp_path / "bad"))
    assert load(tmp_path / "good").keep().value <= 1 + SLACK


def test_weights_that_leave_the_range_are_refused(tmp_path):
    """(U; V) so large that VᵀV is no number."""
    pytest.importorskip("safetensors")
    layer = Orthogonal(2, 4)
    with torch.no_grad():
        layer.raw.fill_(1e30)
    save(layer, tmp_path)
    with pytest.raises(r.errors.ArgumentError):
        load(tmp_path)


def test_autocast_does_not_reach_inside():
    layer, x = classifier(), drawn(TOKENS, WIDTH, dtype=torch.float32)
    plain = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), plain)


def test_copies_are_equal_and_apart():
    layer = classifier()
    other = copy.deepcopy(layer)
    x = drawn(TOKENS, WIDTH, dtype=torch.float32)
    assert torch.equal(other(x), layer(x))
    shaken(other)
    assert not torch.equal(other(x), layer(x))


# Stacks


def test_constants_multiply_and_a_promise_that_cannot_be_met_is_refused():
    twice = Fixed(Affine(2 * torch.eye(WIDTH, dtype=D)), Promise(r.Frobenius(), 2.0))
    stack = [Orthogonal(WIDTH, WIDTH), twice, GroupSort(), twice]
    assert Guaranteed(stack, Promise(r.Frobenius(), 4.0)).certificate().value == pytest.approx(4, rel=1e-4)
    with pytest.raises(r.errors.ArgumentError, match="promise: is 1 in Frobenius") as found:
        Guaranteed(stack, Promise(r.Frobenius(), 1.0))
    lines = str(found.value).splitlines()
    assert sum("Fixed" in line for line in lines) == 3
    assert any("Orthogonal" in line for line in lines)
    assert "promise 3.99" in lines[-1] or "promise 4" in lines[-1]


def test_a_fixed_map_meets_numbers_of_other_kinds():
    """Neither its own numbers nor those of the tokens are rounded on the way."""
    third = torch.full((WIDTH, WIDTH), 1 / 3, dtype=D) / 4
    for made, x in ((third, torch.float32), (third.float(), D), (third, torch.bfloat16)):
        layer, tokens = Fixed(Affine(made)), drawn(TOKENS, WIDTH).to(x)
        value = layer(tokens)
        assert value.dtype == x
        exact = tokens.double() @ made.double()
        torch.testing.assert_close(value, exact.to(x), rtol=0, atol=0 if x != D else 1e-15)


def test_a_single_layer_that_cannot_keep_its_promise():
    with pytest.raises(r.errors.ArgumentError, match="promise: is 1 in Frobenius"):
        Fixed(Affine(2 * torch.eye(WIDTH, dtype=D)))


def test_other_norms():
    """Maps of tokens keep lengths token by token; a sum of tokens over √n has the constant √n there."""
    stack = [Orthogonal(WIDTH, WIDTH), GroupSort(), Memory(WIDTH, 4)]
    assert Guaranteed(stack, Promise(r.TokenMax(), 1.0)).certificate().value <= 1 + SLACK
    with pytest.raises(r.errors.ArgumentError, match="promise: is 1 in TokenMax"):
        Guaranteed([*stack, Pool()], Promise(r.TokenMax(), 1.0), tokens=4)
    assert Guaranteed([*stack, Pool()], Promise(r.TokenMax(), 2.0), tokens=4).keep(4).value <= 2 + 1e-5


def test_a_stack_certifies_decisions():
    layer, x = classifier(), drawn(6, TOKENS, WIDTH, seed=2)
    found = r.certified_radius(layer, x)
    margin = layer.declare()(x).squeeze(-2).topk(2).values
    wanted = (margin[:, 0] - margin[:, 1]) / math.sqrt(2) / layer.certificate(TOKENS).value
    torch.testing.assert_close(found.value, wanted, rtol=1e-5, atol=1e-7)
    assert bool((found.value <= found.attack).all())


# Bad input


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Promise(r.Frobenius(), 0.0), "value: is 0"),
        (lambda: Promise(r.Frobenius(), math.inf), "value: is inf"),
        (lambda: Promise(r.Frobenius(), True), "value: is True"),
        (lambda: Promise("frobenius", 1.0), "norm: is 'frobenius'"),
        (lambda: Orthogonal(0, 3), "inputs: is 0"),
        (lambda: Orthogonal(3, 3, bias="no"), "bias: is 'no'"),
        (lambda: NormBounded(3, 3, -1.0), "bound: is -1"),
        (lambda: NormBounded(3, 3, math.nan), "bound: is nan"),
        (lambda: OrthogonalMixing(0), "tokens: is 0"),
        (lambda: Offset(2, 0), "width: is 0"),
        (lambda: Memory(4, 1), "slots: is 1"),
        (lambda: Memory(4, 3, 0), "tokens: is 0"),
        (lambda: Reflective(4, 3), "heads: is 3"),
        (lambda: Reflective(4, 2, r.Ball(1.0, torch.ones(4))), "domain: is Ball"),
        (lambda: Reflective(4, 2, r.Ball(0.0)), "domain: is Ball"),
        (lambda: Reflective(4, 2, step=2.5), "step: is 2.5"),
        (lambda: Averaging(4, 2, r.Dot()), "scores: is Dot"),
        (lambda: Fixed(GroupSort), "map: is a ABCMeta"),
        (lambda: Guaranteed([]), "stack: is an empty list"),
        (lambda: Guaranteed([nn.Linear(2, 2)]), "stack: has a Linear"),
        (lambda: Guaranteed([GroupSort()], 1.0), "promise: is 1.0"),
        (lambda: Guaranteed([IntoBall(1.0)], tokens=0), "tokens: is 0"),
    ],
)
def test_wrong_arguments(make, match):
    with pytest.raises(r.errors.ArgumentError, match=match):
        make()


@every_layer
def test_wrong_inputs(name):
    layer = LAYERS[name]()
    with pytest.raises(r.errors.ArgumentError, match="x: is"):
        layer(torch.ones(WIDTH))
    with pytest.raises(r.errors.ArgumentError, match="x: is"):
        layer(torch.ones(TOKENS, WIDTH, dtype=torch.int64))
    if list(layer.parameters()):
        with pytest.raises(r.errors.ArgumentError, match="x: has dtype"):
            layer(drawn(TOKENS, WIDTH))
        if name != "mixing":
            with pytest.raises(r.errors.ArgumentError, match="x: has shape"):
                layer(drawn(TOKENS, WIDTH + 1, dtype=torch.float32))


def test_a_layer_is_final():
    with pytest.raises(TypeError, match="Orthogonal, which is final"):
        type("Mine", (Orthogonal,), {})


def test_a_layer_of_ones_own():
    """What is derived from Promised says what it does, and is proved like the others."""

    class Half(Promised):
        def __init__(self, factor):
            super().__init__()
            self.promise, self.factor = Promise(r.Frobenius(), 0.5), factor
            self.keep()

        def run(self, x):
            return self.factor * x

        def declare(self):
            return Affine(self.factor * torch.eye(WIDTH, dtype=D))

    assert Guaranteed([Half(0.5), GroupSort()], Promise(r.Frobenius(), 0.5)).keep().value <= 0.5 * (1 + SLACK)
    with pytest.raises(r.errors.ArgumentError, match=r"promise: is 0\.5"):
        Half(0.6)


def test_hooks_are_refused():
    layer = Orthogonal(WIDTH, WIDTH)
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(r.errors.ArgumentError, match="has hooks"):
        layer.keep()
    with pytest.raises(r.errors.RefusalError, match="certified_radius refuses: Orthogonal has hooks"):
        r.certified_radius(layer, drawn(1, WIDTH))


def test_replaced_methods_are_refused():
    """Anywhere inside: what is proved is what the class computes."""
    layer = Guaranteed([Orthogonal(WIDTH, WIDTH), Reflective(WIDTH, 2)])
    layer.stack[1].before.run = lambda x: 5 * x
    with pytest.raises(r.errors.ArgumentError, match="computes something other"):
        layer.keep()


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_of_torch_and_back(bias):
    """The same map, promised to stay within its own norm; and the matrix of a layer for torch."""
    linear, x = nn.Linear(WIDTH, 3, bias), drawn(TOKENS, WIDTH, dtype=torch.float32)
    layer = from_torch(linear)
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-6, atol=1e-6)
    norm = float(torch.linalg.matrix_norm(linear.weight.detach().double(), 2))
    assert norm * (1 - 1e-6) <= layer.keep().value <= layer.promise.value == pytest.approx(norm, rel=1e-4)
    shaken(layer, 9.0)
    assert layer.keep().value <= layer.promise.value * (1 + SLACK)
    for made in (layer, Orthogonal(WIDTH, 7, bias=bias)):
        torch.testing.assert_close(to_torch(made)(x), made(x), rtol=1e-6, atol=1e-6)
    made.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(r.errors.ArgumentError, match="has hooks"):
        to_torch(made)
    nn.init.zeros_(linear.weight)
    with pytest.raises(r.errors.ArgumentError, match="has the weight zero"):
        from_torch(linear)
