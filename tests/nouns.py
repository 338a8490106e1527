"""One list for each family of nouns; tests/test_house.py makes sure that no public noun is missing."""

import torch

import regard as r

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


# Points have width 4; heads, where there are any, number 2.
POTENTIALS = {
    "dot": r.Dot(),
    "dot projected": r.Dot(_t(4, 3), _t(4, 3, seed=1), b_q=_t(3, seed=2), b_k=_t(3, seed=3)),
    "dot heads": r.Dot(_t(2, 4, 3), _t(2, 4, 3, seed=1), scale=torch.tensor([0.5, 2.0], dtype=D)),
    "bilinear": r.Bilinear(_t(4, 4)),
    "cosine": r.Cosine(scale=3.0),
    "cosine projected": r.Cosine(_t(4, 3), _t(4, 3, seed=1), torch.tensor(2.0, dtype=D), 1e-3),
    "normed": r.NormedDot(query=r.normed.Normed(), key=r.normed.Normed(1e-2, _t(4))),
    "normed query": r.NormedDot(
        _t(4, 3), _t(4, 2, seed=1), 2.0, query=r.normed.Normed(0.1, None, _t(3, 2, seed=2))
    ),
    "normed heads": r.NormedDot(
        _t(4, 6),
        _t(2, 4, 3, seed=1),
        b_q=_t(6, seed=2),
        b_k=_t(3, seed=3),
        query=r.normed.Normed(1e-2, _t(6, seed=4), _t(2, 6, 3, seed=5), _t(3, seed=6)),
        key=r.normed.Normed(1e-2, _t(2, 3, seed=7)),
    ),
    "gaussian": r.Gaussian(bandwidth=1.5),
    "gaussian tied": r.Gaussian(_t(4, 3), _t(4, 3), bandwidth=torch.tensor(2.0, dtype=D)),
    "gaussian untied": r.Gaussian(_t(4, 3), _t(4, 3, seed=1), 2.0, b_q=_t(3, seed=2), b_k=_t(3, seed=3)),
    "gaussian heads": r.Gaussian(bandwidth=torch.tensor([1.0, 3.0], dtype=D)),
    "laplace": r.Laplace(bandwidth=2.0),
    "student": r.StudentT(bandwidth=torch.tensor(1.5, dtype=D), nu=2.0),
    "additive": r.Additive(_t(4, 5), _t(4, 5, seed=1), _t(5, seed=2)),
    "additive bare": r.Additive(None, None, _t(4)),
    "alibi": r.Alibi(0.3),
    "alibi heads": r.Alibi.heads(2),
    "pair bias heads": r.PairBias(_t(2, 16, 16)),
    "pair bias of keys": r.Dot() + r.PairBias(_t(1, 16)),
    "relative": r.RelativeBias(_t(2, 7), r.potentials.Clipped(3)),
    "relative logarithmic": r.RelativeBias(_t(8), r.potentials.Logarithmic(8, 5)),
    "relative causal buckets": r.RelativeBias(_t(8), r.potentials.Logarithmic(8, 5, bidirectional=False)),
    "rotary": r.Rotary(r.Dot()),
    "rotary interleaved": r.Rotary(r.Dot(_t(4, 6), _t(4, 6, seed=1)), base=100.0, interleaved=True),
    "rotary partial": r.Rotary(r.Cosine(scale=2.0), frequencies=torch.tensor([0.7], dtype=D)),
    "rotary normed": r.Rotary(
        r.NormedDot(_t(4, 4), _t(4, 4, seed=1), query=r.normed.Normed(), key=r.normed.Normed())
    ),
    "rotary gaussian": r.Rotary(r.Gaussian(_t(4, 4), _t(4, 4, seed=1), 2.0)),
    "softcap": r.SoftCap(r.Dot(), 1.5),
    "xpos": r.potentials.XPos(r.Dot(), reach=3.0),
    "xpos projected": r.potentials.XPos(r.Dot(_t(4, 6), _t(4, 6, seed=1)), reach=5.0, interleaved=False),
    "sum": r.Dot() + r.Alibi(0.2) + r.Gaussian(bandwidth=2.0),
    "scaled": 0.5 * r.Laplace() - r.Dot(),
    "function": r.Potential.of(lambda x, y: -(x - y).abs().sum(-1)),
}

NONEXPANSIVE = {
    "into ball": r.nonexpansive.IntoBall(0.8),
    "into ball, smooth": r.nonexpansive.IntoBall(0.8, smooth=True),
    "center": r.nonexpansive.Center(),
    "pairs": r.nonexpansive.GroupSort(2),
    "sorted": r.nonexpansive.GroupSort(4),
    "memory": r.nonexpansive.MemoryStep(_t(4, 6), _t(6, seed=1), 0.7, 1.3),
    "memory, a long step up": r.nonexpansive.MemoryStep(_t(4, 6), None, 2.0, -3.0),
    "reflected": r.nonexpansive.Reflected(r.Attention(r.Dot(scale=0.1))),
    "reflected, projected": r.nonexpansive.Reflected(r.Attention(r.Dot(_t(4, 3), _t(4, 3))), 0.7),
    "split": r.nonexpansive.Split((r.Attention(r.Dot(scale=0.3)), r.nonexpansive.Center())),
    "mixed": r.nonexpansive.MixTokens(_t(2, 3)),
    "flatten": r.nonexpansive.Flatten(),
    "unflatten": r.nonexpansive.Unflatten(2),
    "pool": r.nonexpansive.Pool(),
}

NORMALIZERS = {
    "softmax": r.Softmax(),
    "softmax cold": r.Softmax(0.3),
    "softmax learned": r.Softmax(torch.tensor(2.0, dtype=D)),
    "entmax 1": r.Entmax(1.0),
    "entmax 1.25": r.Entmax(1.25),
    "entmax 1.5": r.Entmax(1.5),
    "entmax 2": r.Entmax(2.0),
    "entmax 3": r.Entmax(3.0),
    "entmax learned": r.Entmax(torch.tensor(1.7, dtype=D)),
    "sparsemax": r.Sparsemax(),
    "sigmoid": r.Sigmoid(),
    "sigmoid biased": r.Sigmoid(torch.tensor(0.5, dtype=D)),
    "exponential": r.normalizers.Exponential(),
    "exponential biased": r.normalizers.Exponential(torch.tensor(-0.5, dtype=D)),
    "sink": r.SinkSoftmax(0.5),
    "sink cold": r.SinkSoftmax(torch.tensor(-0.3, dtype=D), 0.7),
    "sinkhorn": r.Sinkhorn(1e-9, 2000),
    "linear elu": r.LinearKernel(r.normalizers.Elu()),
    "linear random": r.LinearKernel(r.normalizers.PositiveRandom.draw(4, 16, 0, D)),
}

# Six tokens.
SUPPORTS = {
    "full": r.Full(),
    "causal": r.Causal(),
    "window": r.Window(2, 1),
    "window open": r.Window(None, 1),
    "document": r.Document(torch.tensor([0, 0, 1, 1, 1, 0])),
    "document batched": r.Document(torch.tensor([[[0, 0, 1, 1, 1, 2]], [[0, 1, 1, 2, 2, 2]]])),
    "padding": r.Padding(torch.tensor(4)),
    "padding batched": r.Padding(torch.tensor([[6], [0]])),
    "where": r.Where(torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) > 0.4),
    "causal and padding": r.Causal() & r.Padding(torch.tensor([[5], [2]])),
    "window or document": r.Window(1, 0) | r.Document(torch.tensor([0, 0, 0, 1, 1, 1])),
    "nothing": r.Window(0, 0) & r.Padding(torch.tensor(2)),
}

LOOKUPS = {
    "identity": r.Identity(),
    "linear": r.Linear(_t(4, 3), _t(3, seed=1)),
    "factored": r.Factored(_t(4, 3), _t(3, 2, seed=1), _t(2, seed=2)),
    "normed": r.lookups.NormedLinear(_t(4, 3), r.normed.Normed(1e-2, None, _t(3, 2, seed=1)), _t(3, seed=2)),
    "pointwise": r.FunctionLookup(lambda z: torch.cat([z.sin(), z.square()], -1)),
    "table": r.Table(_t(6, 2)),
}

MOMENTS = {
    "mean": r.Mean(),
    "law": r.Law(),
    "second": r.SecondMoment(),
    "mode": r.Mode(),
    "sample": r.Sample(torch.Generator().manual_seed(0)),
}
