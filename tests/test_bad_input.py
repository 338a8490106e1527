"""Every error names the argument, what was found, and the remedy."""

import pytest
import torch

import regard as r

t = torch.randn
nan = torch.tensor([[0.0, float("nan")]])

CASES = {
    "points rank": (lambda: r.Measure(t(3)), "points: has shape [3]; give (..., n, d)"),
    "points dtype": (
        lambda: r.Measure(torch.arange(6).reshape(3, 2)),
        "points: has dtype torch.int64; convert it",
    ),
    "points nan": (lambda: r.Measure(nan), "points: has 1 non-finite entries out of 2"),
    "points list": (lambda: r.Measure([[0.0]]), "points: is a list; give a torch.Tensor"),
    "weights length": (
        lambda: r.Measure(t(3, 2), t(4)),
        "log_weights: is float32[4]; give a tensor (..., 3)",
    ),
    "weights nan": (lambda: r.Measure(t(2, 2), nan[0]), "log_weights: has NaN or +inf"),
    "weights zero": (
        lambda: r.Measure(t(2, 2), torch.full((2,), -torch.inf)),
        "its mass is zero; give at least one atom a positive weight",
    ),
    "marks length": (lambda: r.Measure(t(3, 2), marks=torch.arange(2)), "marks: is int64[2]"),
    "batches": (lambda: r.Measure(t(3, 4, 2), t(2, 4)), "points and log_weights: have batch shapes"),
    "mix dimension": (lambda: r.Measure(t(3, 2)).mix(r.Measure(t(3, 4)), 0.5), "other: lives in dimension 4"),
    "mix weight": (
        lambda: r.Measure(t(3, 2)).mix(r.Measure(t(3, 2)), 1.5),
        "weight: is 1.5; give a number between 0 and 1",
    ),
    "bandwidth zero": (lambda: r.Gaussian(bandwidth=0.0), "bandwidth: is 0.0; give a positive finite number"),
    "bandwidth whose square is zero": (
        lambda: r.Gaussian(bandwidth=1e-170),
        "bandwidth: is 1e-170, and float64 does not hold its square; scale the points",
    ),
    "bandwidth whose square is infinite": (lambda: r.StudentT(bandwidth=1e170), "bandwidth: is 1e+170"),
    "bandwidth negative": (lambda: r.Laplace(bandwidth=-1.0), "bandwidth: is -1.0"),
    "bandwidth tensor": (
        lambda: r.Gaussian(bandwidth=torch.tensor([1.0, -1.0])),
        "bandwidth: has entries that are not positive",
    ),
    "nu": (lambda: r.StudentT(nu=0.0), "nu: is 0.0"),
    "cap": (lambda: r.SoftCap(r.Dot(), float("inf")), "cap: is inf"),
    "temperature": (lambda: r.Softmax(0.0), "temperature: is 0.0"),
    "alpha": (lambda: r.Entmax(0.5), "alpha: is 0.5; give a number ≥ 1"),
    "tolerance": (lambda: r.Sinkhorn(-1.0), "tolerance: is -1.0"),
    "scale": (lambda: r.Dot(scale=float("nan")), "scale: is nan"),
    "w_q nan": (lambda: r.Dot(nan), "w_q: has 1 non-finite entries"),
    "w_q rank": (lambda: r.Dot(t(3)), "w_q: has shape [3]; give a tensor of shape (..., d, c)"),
    "widths": (lambda: r.Dot(t(4, 3), t(4, 2)), "w_k: projects to 2 and w_q to 3"),
    "v width": (lambda: r.Additive(t(4, 3), t(4, 3), t(5)), "v: has width 5"),
    "rotary odd": (lambda: r.Rotary(r.Dot()).scores(t(3, 3), t(3, 3)), "odd width 3"),
    "rotary sum": (lambda: r.Rotary(r.Dot() + r.Alibi(0.1)).scores(t(3, 4), t(3, 4)), "wrap each term"),
    "table": (
        lambda: r.RelativeBias(t(6), r.potentials.Clipped(3)),
        "table: has 6 entries; Clipped(reach=3) needs 7",
    ),
    "one token's radius": (lambda: r.one_token(t(3, 2), 1, -0.1), "radius: is -0.1; give a number"),
    "window": (lambda: r.Window(-1, 0), "left: is -1"),
    "ids": (lambda: r.Document(t(3)), "ids: is float32[3]; give an integer tensor"),
    "lengths": (lambda: r.Padding(torch.tensor([-1])), "lengths: has negative entries"),
    "mask": (lambda: r.Where(torch.ones(3, 3)), "mask: is float32[3, 3]; give a boolean tensor"),
    "mask size": (
        lambda: r.attend(t(5, 2), t(5, 2), t(5, 2), support=r.Where(torch.ones(4, 5, dtype=torch.bool))),
        "mask: covers the marks 0..3",
    ),
    "ids size": (
        lambda: r.attend(t(5, 2), t(5, 2), t(5, 2), support=r.Document(torch.zeros(4, dtype=torch.long))),
        "ids: covers the marks 0..3",
    ),
    "class": (lambda: r.Attention(r.Dot), "potential: is a Dot class; give a Potential value"),
    "wrong noun": (lambda: r.Attention(r.Softmax()), "potential: is a Softmax"),
    "attend noun": (
        lambda: r.attend(t(3, 2), t(3, 2), t(3, 2), potential="gaussian"),
        "potential: is 'gaussian'; give a Potential value",
    ),
    "q int": (
        lambda: r.attend(torch.ones(3, 2, dtype=torch.long), t(3, 2), t(3, 2)),
        "q: has dtype torch.int64",
    ),
    "q rank": (lambda: r.attend(t(3), t(3, 2), t(3, 2)), "q: has shape [3]"),
    "q k width": (lambda: r.attend(t(3, 2), t(3, 4), t(3, 2)), "q and k: have widths 2 and 4"),
    "v rows": (lambda: r.attend(t(3, 2), t(3, 2), t(4, 2)), "v: has 4 rows for 3 keys"),
    "dtypes": (lambda: r.attend(t(3, 2), t(3, 2).double(), t(3, 2)), "q, k and v: have dtypes"),
    "slopes": (
        lambda: r.attend(t(4, 5, 2), t(4, 5, 2), t(4, 5, 2), potential=r.Dot() + r.Alibi(t(3))),
        "does not fit tokens with batch dimensions [4]; give one parameter, or one for each head",
    ),
    "bandwidths": (
        lambda: r.attend(t(4, 5, 2), t(4, 5, 2), t(4, 5, 2), potential=r.Gaussian(bandwidth=t(3).abs() + 1)),
        "does not fit tokens with batch dimensions [4]",
    ),
    "heads": (lambda: r.attend(t(6, 3, 2), t(4, 3, 2), t(4, 3, 2)), "keys: have 4 heads and the queries 6"),
    "batch": (lambda: r.attend(t(2, 1, 3, 2), t(3, 1, 3, 2), t(3, 1, 3, 2)), "have batch shapes"),
    "log_weights": (
        lambda: r.attend(t(3, 2), t(3, 2), t(3, 2), log_weights=t(4)),
        "log_weights: has shape [4]; give one entry for each key: (..., 3)",
    ),
    "device": (
        lambda: r.attend(t(3, 2), t(3, 2, device="meta"), t(3, 2)),
        "queries: is on cpu and keys on meta",
    ),
    "w_v": (
        lambda: r.Attention(r.Dot(), r.Linear(t(3, 2)))(t(5, 4)),
        "w_v: takes width 3 and the keys have 4",
    ),
    "w_q apply": (
        lambda: r.Attention(r.Dot(t(3, 2), t(3, 2)))(t(5, 4)),
        "w_q: takes width 3 and the points have 4",
    ),
    "lookup table": (lambda: r.Attention(r.Dot(), r.Table(t(3, 2)))(t(5, 4)), "table: has 3 rows for 5 keys"),
    "pointwise": (
        lambda: r.Attention(r.Dot(), r.FunctionLookup(lambda z: z.sum()))(t(5, 4)),
        "function: maps keys [5, 4] to",
    ),
    "function": (
        lambda: r.attend(t(5, 4), t(5, 4), t(5, 4), potential=r.Potential.of(lambda x, y: x)),
        "function: returned float32",
    ),
    "context": (
        lambda: r.Attention(r.Dot())(t(5, 4), "text"),
        "context: is a str; give a Tensor (..., n, d) or a Measure",
    ),
    "sigmoid kernel": (
        lambda: r.Attention(r.Dot(), normalizer=r.Sigmoid()).kernel(t(3, 2)),
        "Sigmoid rows are not probability laws",
    ),
    "sigmoid law": (
        lambda: r.Attention(r.Dot(), normalizer=r.Sigmoid(), moment=r.SecondMoment())(t(3, 2)),
        "moment: needs laws",
    ),
    "gap law": (
        lambda: r.Attention(r.Dot()).law_gap(t(3, 3), t(4, 2)),
        "law: has shape [3, 3]; give rows on the keys: (..., 4, 4)",
    ),
    "gap normalizer": (
        lambda: r.Attention(r.Dot(), normalizer=r.Entmax()).law_gap(t(4, 4), t(4, 2)),
        "the KL gap is a statement about softmax rows",
    ),
    "linear potential": (
        lambda: r.attend(
            t(3, 2), t(3, 2), t(3, 2), potential=r.Laplace(), normalizer=r.LinearKernel(r.normalizers.Elu())
        ),
        "cannot become a feature kernel: Laplace",
    ),
    "float marks": (
        lambda: r.Attention(r.Dot(), support=r.Document(torch.zeros(3, dtype=torch.long)))(
            r.Measure(t(3, 2), marks=t(3))
        ),
        "marks: have dtype torch.float32",
    ),
    "pairs": (lambda: r.engines.Tiled(pairs=0), "pairs: is 0"),
}


@pytest.mark.parametrize("name", CASES)
def test_error(name):
    call, message = CASES[name]
    with pytest.raises(r.errors.ArgumentError) as caught:
        call()
    assert message in str(caught.value), str(caught.value)
    assert ";" in str(caught.value)
    assert isinstance(caught.value, ValueError)
