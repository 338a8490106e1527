"""The fused path: the flash kernel really runs, and other transformations pass through it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import regard as r
from tests.nouns import D

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

REDUCIBLE = {
    "dot": {},
    "bilinear": {
        "potential": r.Bilinear(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) / 16)
    },
    "gaussian": {"potential": r.Gaussian(bandwidth=3.0)},
    "cosine": {"potential": r.Cosine(scale=5.0)},
    "weights": {"log_weights": torch.randn(9, generator=torch.Generator().manual_seed(1))},
    "causal alibi": {"potential": r.Dot() + r.Alibi(0.1), "support": r.Causal()},
    "rotary": {"potential": r.Rotary(r.Dot())},
    "sum": {"potential": r.Dot() + r.Gaussian(bandwidth=4.0), "support": r.Causal()},
    "padding": {"support": r.Padding(torch.tensor(5)) & r.Causal()},
    "temperature": {"normalizer": r.Softmax(2.0)},
}


class Calls(TorchDispatchMode):
    """Records which operators run, and the largest tensor any of them makes."""

    def __init__(self):
        super().__init__()
        self.operators, self.largest = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators.append(function)
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("name", REDUCIBLE)
def test_flash_is_taken(name):
    q, k, v = (torch.randn(2, 3, 9, 16, requires_grad=True) for _ in range(3))
    with Calls() as calls:
        out = r.attend(q, k, v, **REDUCIBLE[name])
        torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)
    assert FLASH in calls.operators
    assert FLASH_BACKWARD in calls.operators


@pytest.mark.parametrize("shape", [(700, 64), (2, 700, 8), (1, 2, 700, 16), (1, 1, 2, 700, 3)])
def test_no_matrix_of_pairs(shape):
    """Whatever the rank and the widths of keys and values, no tensor of 700 x 700 is ever made."""
    q, k = (torch.randn(shape, requires_grad=True) for _ in range(2))
    v = torch.randn(*shape[:-1], 5, requires_grad=True)
    for declared in (
        {},
        {"potential": r.Gaussian(bandwidth=9.0)},
        {"support": r.Window(50, 0)},
        {"log_weights": torch.randn(700, requires_grad=True)},
    ):
        with Calls() as calls:
            torch.autograd.grad(r.attend(q, k, v, **declared).sum(), (q, k, v))
        assert FLASH in calls.operators
        assert calls.largest < 700 * 700


@pytest.mark.parametrize("name", REDUCIBLE)
def test_compile(name):
    q, k, v = (torch.randn(2, 3, 9, 16) for _ in range(3))

    def call(q, k, v):
        return r.attend(q, k, v, engine=r.engines.Sdpa(), **REDUCIBLE[name])

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    mine, theirs = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
    found, expected = compiled(*mine), call(*theirs)
    assert torch.allclose(found, expected, atol=1e-6)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), mine),
        torch.autograd.grad(expected.square().sum(), theirs),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("name", REDUCIBLE)
def test_vmap(name):
    q, k, v = (torch.randn(4, 3, 9, 16, dtype=D) for _ in range(3))
    declared = {
        key: value.to(D) if isinstance(value, torch.Tensor) else value
        for key, value in REDUCIBLE[name].items()
    }
    if name == "bilinear":
        declared = {"potential": r.Bilinear(declared["potential"].a.double())}

    def call(q, k, v):
        return r.attend(q, k, v, engine=r.engines.Sdpa(), **declared)

    assert torch.allclose(
        torch.func.vmap(call)(q, k, v), torch.stack([call(*t) for t in zip(q, k, v, strict=True)]), atol=1e-12
    )
    shared = torch.func.vmap(call, in_dims=(0, None, None))(q, k[0], v[0])
    assert torch.allclose(shared, torch.stack([call(t, k[0], v[0]) for t in q]), atol=1e-12)


def test_vmap_with_blocks_of_masks():
    q, k, v = (torch.randn(3, 9, 4, dtype=D) for _ in range(3))

    def call(q, k, v):
        return r.attend(
            q, k, v, support=r.Window(2, 1), potential=r.Dot() + r.Alibi(0.2), engine=r.engines.Sdpa()
        )

    assert torch.allclose(
        torch.func.vmap(call)(q, k, v), torch.stack([call(*t) for t in zip(q, k, v, strict=True)]), atol=1e-12
    )


@pytest.mark.parametrize("name", REDUCIBLE)
def test_autocast(name):
    q, k, v = (torch.randn(2, 3, 9, 16, requires_grad=True) for _ in range(3))
    expected = r.attend(q, k, v, **REDUCIBLE[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = r.attend(q, k, v, engine=r.engines.Sdpa(), **REDUCIBLE[name])
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected, atol=0.05)
    assert torch.isfinite(torch.autograd.grad(found.sum(), q)[0]).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex():
    """Where torch supports it: named, without gradients, in float32."""
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    weights = torch.randn(64)
    for declared in (
        {"potential": r.Gaussian(bandwidth=3.0), "log_weights": weights},
        {"potential": r.SoftCap(r.Dot(), 2.0)},
    ):
        found = r.attend(q, k, v, engine=r.engines.Flex(compiled=False), **declared)
        assert torch.allclose(
            found, r.attend(q, k, v, engine=r.engines.ReferenceEngine(), **declared), atol=1e-5
        )
    with pytest.raises(r.errors.RefusalError, match="no derivatives on a CPU"):
        r.attend(q.requires_grad_(), k, v, engine=r.engines.Flex())
    with pytest.raises(r.errors.RefusalError, match="softmax, not by Entmax"):
        r.attend(q.detach(), k, v, normalizer=r.Entmax(), engine=r.engines.Flex())


def test_explain():
    x = torch.randn(12, 4)
    fused = r.explain(r.Attention(r.Gaussian(bandwidth=1.0)), x)
    assert fused.engine.name == "sdpa"
    assert fused.prediction.flops > 0
    explained = r.explain(r.Attention(r.Laplace()), x)
    assert explained.engine.name == "tiled"
    assert explained.refusals["sdpa"] == "Laplace scores are not a dot product plus a key bias."
    assert "sdpa refuses: Laplace" in str(explained)
    assert all(why.endswith(".") for why in explained.refusals.values())
    with pytest.raises(r.errors.RefusalError, match="sdpa refuses"):
        r.explain(r.Attention(r.Laplace()), x, engine=r.engines.Sdpa())
    table = r.RelativeBias(torch.zeros(7, requires_grad=True), r.potentials.Clipped(3))
    assert "no derivative to a bias" in r.explain(r.Attention(r.Dot() + table), x).refusals["sdpa"]
    with torch.no_grad():
        assert r.explain(r.Attention(r.Dot() + table), x).engine.name == "sdpa"
