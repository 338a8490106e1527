"""Values compare by value, tensors included; hashes agree with equality; transforms never compare numbers."""

import math

import pytest
import torch
import torch.utils._pytree as pytree

import regard as r
from tests.nouns import LOOKUPS, MOMENTS, NORMALIZERS, POTENTIALS, SUPPORTS, D

NOUNS = {**POTENTIALS, **NORMALIZERS, **SUPPORTS, **LOOKUPS, **MOMENTS}


def copied(noun):
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, noun)


@pytest.mark.parametrize("name", NOUNS)
def test_a_copy_is_equal_and_has_the_same_hash(name):
    noun = NOUNS[name]
    assert copied(noun) == noun
    assert hash(copied(noun)) == hash(noun)
    for place, leaf in enumerate(leaves := pytree.tree_leaves(noun)):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            changed = [*leaves]
            changed[place] = ~leaf if leaf.dtype == torch.bool else leaf + 1
            assert pytree.tree_unflatten(changed, pytree.tree_structure(noun)) != noun


def test_different_values_differ():
    names = list(NOUNS)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert NOUNS[one] != NOUNS[other], (one, other)
    assert r.Dot() != r.Gaussian(bandwidth=1.0)
    assert r.Dot() != "Dot()"
    assert r.Softmax() == r.Softmax(1.0)
    assert r.Softmax() != r.Softmax(torch.tensor(1.0))
    assert r.Attention(r.Dot(), support=r.Causal()) == r.Attention(
        r.Dot(), r.Identity(), r.Softmax(), r.Causal()
    )
    assert r.Ball(1.0, torch.zeros(3)) == r.Ball(1.0, torch.zeros(3))
    assert r.Measure(torch.ones(3, 2)) == r.Measure(torch.ones(3, 2))
    assert r.Dot() + r.Alibi(0.5) == r.Dot() + r.Alibi(0.5)
    assert r.Dot() + r.Alibi(0.5) != r.Alibi(0.5) + r.Dot()  # other rounding


def test_numbers_dtype_shape_and_device_count():
    w = torch.randn(3, 2, dtype=D)
    assert r.Dot(w, w) == r.Dot(w.clone(), torch.nn.Parameter(w.clone()))
    assert r.Dot(w, w) != r.Dot(w, w.float())
    assert r.Dot(w, w) != r.Dot(w, None)
    assert r.Dot(w, w) != r.Dot(w.unsqueeze(0), w)
    meta = torch.empty(3, 2, dtype=D, device="meta")
    assert r.Dot(meta, meta) == r.Dot(meta, meta)
    assert r.Dot(meta, meta) != r.Dot(
        meta, torch.empty_like(meta)
    )  # numbers that nobody can read are equal to none
    assert r.Dot(w, w) != r.Dot(meta, meta)


def test_nan_equals_nothing_but_the_same_tensor():
    nothing = torch.full((2, 2), math.nan)
    one, same, other = (
        pytree.tree_map(lambda _, numbers=numbers: numbers, r.Bilinear(torch.ones(2, 2)))
        for numbers in (nothing, nothing, nothing.clone())
    )
    assert one == same
    assert one != other


def test_values_are_keys_and_members():
    w = torch.randn(3, 2)
    known = {r.Dot(): "plain", r.Dot(w, w): "projected"}
    assert known[r.Dot()] == "plain"
    assert known[r.Dot(w.clone(), w.clone())] == "projected"
    assert r.Causal() in (r.Full(), r.Causal())
    assert len({r.Causal(), r.Causal(), r.Full()}) == 2
    before = hash(key := r.Dot(w, w))
    w += 1
    assert hash(key) == before  # numbers may be written to: a hash reads shapes


def test_transforms_compare_no_numbers():
    x, w = torch.randn(4, 5, 3, dtype=D), torch.randn(4, 3, 2, dtype=D)

    def run(point, weight):
        one, other = r.Attention(r.Dot(weight, weight)), r.Attention(r.Dot(weight.clone(), weight))
        assert one == r.Attention(r.Dot(weight, weight))
        assert one != other  # inside vmap no number can be read
        assert hash(one) == hash(other)
        return one(point)

    mapped = torch.func.vmap(run)(x, w)
    assert torch.allclose(
        mapped, torch.stack([r.Attention(r.Dot(b, b))(a) for a, b in zip(x, w, strict=True)])
    )
    structure = pytree.tree_structure(r.Attention(r.Dot(w[0], w[0])))
    assert structure == pytree.tree_structure(r.Attention(r.Dot(w[1], w[1])))
    assert structure != pytree.tree_structure(r.Attention(r.Dot(w[1], w[1]), support=r.Causal()))


ORDERS = {
    r.Dot: ("w_q", "w_k", "scale", "b_q", "b_k"),
    r.Cosine: ("w_q", "w_k", "scale", "eps", "b_q", "b_k"),
    r.Gaussian: ("w_q", "w_k", "bandwidth", "b_q", "b_k"),
    r.Laplace: ("w_q", "w_k", "bandwidth", "b_q", "b_k"),
    r.StudentT: ("w_q", "w_k", "bandwidth", "nu", "b_q", "b_k"),
    r.Additive: ("w_q", "w_k", "v", "b_q", "b_k"),
}


@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
def test_projections_come_first_and_biases_last(kind):
    assert tuple(kind.__match_args__) == ORDERS[kind]


@pytest.mark.parametrize("number", [2.0, 3, torch.tensor(2.0)])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(r.Dot, "scale"), (r.Cosine, "scale"), (r.Gaussian, "bandwidth"), (r.Laplace, "bandwidth")],
)
def test_a_number_is_no_projection(kind, name, number):
    with pytest.raises(
        r.errors.ArgumentError, match=f"w_q: is the number .* come first: name the number, e.g. {name}=..."
    ):
        kind(number)
    with pytest.raises(r.errors.ArgumentError, match="w_k: is the number"):
        kind(None, number)


def test_scale_multiplies_and_temperature_divides():
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=D)
    scaled = r.attend(x, x, x, potential=r.Cosine(scale=4.0))
    assert torch.allclose(
        scaled, r.attend(x, x, x, potential=r.Cosine(), normalizer=r.Softmax(temperature=0.25)), atol=1e-14
    )
    assert torch.allclose(r.Dot(scale=3.0).scores(x, x), 3 * x @ x.mT)
