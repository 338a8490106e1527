"""Every public noun and verb, with a value of the wrong kind in place of one argument: it works, or the error
is one of regard's own.
"""

import math

import pytest
import torch

import regard as r
from regard.errors import RegardError
from regard.potentials import Clipped

D = torch.float64
X = torch.tensor([[0.1, 0.2], [-0.3, 0.4], [0.5, -0.2]], dtype=D)
W = torch.eye(2, dtype=D)
LAYER = r.Attention(r.Dot(), r.Linear(W))
NEAR = r.Neighborhood(X, 0.01)
PLAIN = r.Attention(r.Dot())
BALL = r.Ball(0.1, tokens=3)
CERTIFICATE = r.certify(LAYER, BALL, r.Frobenius())
PROJECTED = {"w_q": W, "w_k": W, "b_q": W[0], "b_k": W[0]}
CLASSIFIER = r.maps.Compose((LAYER, r.nonexpansive.Pool()))

CALLS = {
    "Additive": {**PROJECTED, "v": W[0]},
    "Alibi": {"slope": 0.5},
    "Attention": {
        "potential": r.Dot(),
        "lookup": r.Identity(),
        "normalizer": r.Softmax(),
        "support": r.Full(),
    },
    "Ball": {"radius": 1.0, "center": X[0], "tokens": 3, "width": 2},
    "Bilinear": {"a": W},
    "Box": {"points": X, "radii": X[:, 0].abs()},
    "Causal": {},
    "Cosine": {**PROJECTED, "scale": 1.0, "eps": 1e-6},
    "Document": {"ids": torch.tensor([0, 0, 1])},
    "Dot": {**PROJECTED, "scale": 1.0},
    "Entmax": {"alpha": 1.5},
    "EntryMax": {},
    "Factored": {"w": W, "u": W, "b": W[0]},
    "Frobenius": {},
    "Full": {},
    "FunctionLookup": {"function": torch.tanh},
    "Gaussian": {**PROJECTED, "bandwidth": 1.0},
    "Hull": {"points": X, "token": 1, "embeddings": X},
    "Identity": {},
    "Laplace": {**PROJECTED, "bandwidth": 1.0},
    "Law": {},
    "Linear": {"w_v": W, "b_v": W[0]},
    "LinearKernel": {"feature_map": r.normalizers.Elu()},
    "Mean": {},
    "Measure": {"points": X, "log_weights": X[:, 0], "marks": torch.arange(3)},
    "Mode": {},
    "Neighborhood": {"points": X, "radius": 0.1, "norm": r.Frobenius()},
    "NormedDot": {**PROJECTED, "scale": 1.0, "query": None, "key": None},
    "OwnToken": {},
    "Padding": {"lengths": torch.tensor(2)},
    "PairBias": {"bias": torch.zeros(3, 3, dtype=D)},
    "Radii": {"points": X, "radii": X[:, 0].abs()},
    "RelativeBias": {"table": torch.zeros(5, dtype=D), "buckets": Clipped(2)},
    "Rotary": {
        "potential": r.Dot(),
        "base": 1e4,
        "frequencies": torch.ones(1, dtype=D),
        "interleaved": False,
    },
    "Sample": {"generator": None},
    "SecondMoment": {},
    "Shell": {"inner": 0.5, "outer": 1.0, "tokens": 3, "centered": True},
    "Sigmoid": {"bias": 0.0},
    "SinkSoftmax": {"sink": 0.0, "temperature": 1.0},
    "Sinkhorn": {"tolerance": 1e-6, "max_iterations": 20},
    "SoftCap": {"potential": r.Dot(), "cap": 2.0},
    "Softmax": {"temperature": 1.0},
    "Sparsemax": {},
    "StudentT": {**PROJECTED, "bandwidth": 1.0, "nu": 2.0},
    "Table": {"table": X},
    "TokenMax": {},
    "TokenSum": {},
    "Wasserstein": {"p": 1.0},
    "Where": {"mask": torch.ones(3, 3, dtype=torch.bool)},
    "Whole": {"tokens": 3},
    "Window": {"left": 1, "right": 0},
    "apply": {"attention": LAYER, "x": X, "context": X, "engine": None},
    "attend": {
        "q": X,
        "k": X,
        "v": X,
        "potential": r.Dot(),
        "normalizer": r.Softmax(),
        "support": r.Full(),
        "log_weights": X[:, 0],
        "engine": None,
        "dropout": 0.0,
    },
    "certified_cosine": {"model": CLASSIFIER, "x": X, "domain": NEAR, "steps": 1},
    "certified_radius": {
        "model": CLASSIFIER,
        "x": X,
        "token": 1,
        "norm": r.Frobenius(),
        "steps": 1,
        "resolution": 2.0,
    },
    "certify": {"map": LAYER, "domain": BALL, "norm": r.Frobenius()},
    "cite": {"certificate": CERTIFICATE},
    "compress": {"context": X, "attention": LAYER, "size": 2},
    "cost": {"subject": LAYER, "sizes": r.costs.Sizes(3, width=2)},
    "decide": {"model": CLASSIFIER, "x": X, "domain": NEAR, "label": 0, "steps": 1, "pieces": 1},
    "deviation": {"map": LAYER, "domain": NEAR, "norm": r.Frobenius()},
    "explain": {"attention": LAYER, "x": X, "context": X, "engine": None},
    "falsify": {
        "map": LAYER,
        "domain": BALL,
        "norm": r.Frobenius(),
        "steps": 1,
        "restarts": 1,
        "tokens": 3,
        "width": 2,
    },
    "falsify_deviation": {"map": LAYER, "domain": NEAR, "norm": r.Frobenius(), "steps": 1, "restarts": 1},
    "flow": {
        "map": LAYER,
        "x": X,
        "scheme": r.dynamics.Euler(0.5),
        "until": 1.0,
        "noise": 0.0,
        "seed": 0,
        "engine": None,
    },
    "image": {"map": LAYER, "domain": BALL},
    "iterate": {"map": LAYER, "x": X, "steps": 1, "engine": None},
    "linearize": {"map": LAYER, "x": X, "context": X, "batch": None},
    "mercer": {"attention": LAYER, "x": X},
    "one_token": {"points": X, "index": 1, "radius": 0.1},
    "substitutions": {
        "logits": lambda ids: ids.double(),
        "tokens": [1, 2],
        "choices": {0: [3]},
        "words": 1,
        "batch": 2,
    },
    "wasserstein": {"mu": X, "nu": X, "p": 1.0},
}
NOT_CALLED = {"Certificate", "Decision", "Kernel", "Potential", "Radius", "Witness", "audit", "declare"}
"""Results of verbs, abstract nouns, and what has tests of its own in tests/audits."""

WRONG = {
    "None": None,
    "a string": "x",
    "True": True,
    "a huge int": 10**400,
    "NaN": math.nan,
    "a list": [1.0],
    "an object": object(),
    "a class": r.Dot,
    "a sparse tensor": X.to_sparse(),
    "a nested tensor": torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged),
    "a float8 tensor": X.to(torch.float8_e4m3fn),
    "a complex tensor": X.to(torch.complex128),
    "a meta tensor": X.to("meta"),
    "a scalar tensor": torch.tensor(math.nan, dtype=D),
    "an empty tensor": X[:0],
    "integers": torch.arange(3),
    "a tensor of many dimensions": X[None, None, None, None],
    "another noun": r.TokenMax(),
}


def run(name, **changes):
    arguments = {**CALLS[name], **changes}
    return getattr(r, name)(**arguments)


def test_all_public_names_are_called():
    assert {*CALLS} | NOT_CALLED == {*r.__all__}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_kind_is_named(name):
    run(name)
    internal = []
    for argument in CALLS[name]:
        for kind, value in WRONG.items():
            if kind == "a huge int" and argument in ("steps", "restarts"):
                continue  # that many are a wish, and take as long
            try:
                run(name, **{argument: value})
            except RegardError:
                pass
            except Exception as error:
                internal.append(f"{argument}={kind}: {type(error).__name__}: {str(error)[:150]}")
    assert not internal, "\n".join(internal)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: r.Gaussian(sigma=2), "sigma: is no argument of Gaussian; write bandwidth=..."),
        (lambda: r.Dot(sacle=2.0), "sacle: is no argument of Dot; write scale=..."),
        (lambda: r.Window("x", 0), "left: is 'x'; give a number or None"),
        (lambda: r.Window(128), "right: is missing; write Window(..., right=...), a number or None"),
        (lambda: r.Ball(1.0, tokens=True), "tokens: is True; give a whole number or None"),
        (lambda: r.Linear(None), "w_v: is None; give a torch.Tensor"),
        (lambda: r.one_token(X, 1, radius=None), "radius: is None; give a number"),
        (
            lambda: r.attend(X, X, X, r.Gaussian(bandwidth=1.0)),
            "potential: is given by position to attend; write potential=...",
        ),
        (lambda: r.attend(X, X, X.to_sparse()), "v: has the layout torch.sparse_coo; make it dense"),
        (lambda: r.attend(*[X.to(torch.float8_e4m3fn)] * 3), "q: has dtype torch.float8_e4m3fn; convert"),
        (lambda: r.attend(WRONG["a nested tensor"], X, X), "q: is a nested tensor; pad it"),
        (
            lambda: r.linearize(PLAIN, X.half()).norm(),
            "x: has dtype torch.float16, which has no singular values",
        ),
        (
            lambda: r.linearize(PLAIN, 1e38 * torch.eye(3)).norm(),
            "x: gives a derivative with NaN or infinity; give points",
        ),
        (lambda: r.Entmax(10**18), "alpha: is 1e+18; give at most 8"),
        (lambda: r.Entmax(torch.tensor([2.0, 50.0])), "alpha: has entries above 8; give at most 8"),
        (lambda: r.Softmax(10**400), "temperature: is a whole number of 1329 bits; give a number"),
        (lambda: r.nn.Encoder(None, 1), "design: is None; give a value of Design"),
        (lambda: r.nn.Transformer("x", 1, 1), "design: is 'x'; give a value of Design"),
        (lambda: r.nn.Encoder(r.nn.Design(4, 2), depth=3), "depth: is no argument of Encoder; its arguments"),
        (lambda: r.nn.monitor(None), "model: is None; give a Module"),
        (lambda: r.nn.MultiHeadAttention(2, 1)(WRONG["a nested tensor"]), "x: is a nested tensor; pad it"),
        (lambda: r.nn.MultiHeadAttention(2, 1)(X.to_sparse()), "x: has the layout torch.sparse_coo; make"),
        (
            lambda: r.nn.MultiHeadAttention(4, 2, potential=r.Gaussian(bandwidth=1.0)),
            "potential: is no argument of MultiHeadAttention; write mechanism=...",
        ),
    ],
)
def test_the_argument_and_the_remedy(call, message):
    with pytest.raises(r.errors.ArgumentError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_arguments_without_annotations_are_of_any_kind():
    """Python names what is missing; `self` is no argument of a wrong kind."""
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'width' and 'heads'"):
        r.nn.MultiHeadAttention()


def test_the_largest_alpha_resolves_half_a_percent():
    """The weights of two keys from the equation of their threshold."""
    alpha, p = 8.0, torch.tensor([0.99, 0.01], dtype=D)
    scores = p ** (alpha - 1) / (alpha - 1)
    torch.testing.assert_close(
        r.Entmax(alpha).weights(scores[None], r.normalizers.Reference())[0], p, rtol=0, atol=5e-3
    )


def test_a_nan_query_gives_what_pytorch_gives():
    """Zeros of its fused kernel on the CPU; the definition gives NaN, and no other row changes."""
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=D) for _ in range(3))
    q[0, 0, 1, 0] = math.nan
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(r.attend(q, k, v), theirs, equal_nan=True)
    defined = r.attend(q, k, v, engine=r.engines.ReferenceEngine())
    assert defined[0, 0, 1].isnan().all()
    assert int(defined.isnan().sum()) == 8
