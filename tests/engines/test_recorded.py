"""Every declaration where programs are recorded and not run: without numbers, traced, exported, compiled."""

import warnings

import pytest
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

import regard as r
from tests.nouns import NORMALIZERS, POTENTIALS, SUPPORTS


def single(value):
    return pytree.tree_map(
        lambda t: t.float() if isinstance(t, torch.Tensor) and t.dtype.is_floating_point else t, value
    )


DECLARED = {
    **{f"potential {name}": {"potential": single(p)} for name, p in POTENTIALS.items()},
    **{f"normalizer {name}": {"normalizer": single(n)} for name, n in NORMALIZERS.items()},
    **{f"support {name}": {"support": s} for name, s in SUPPORTS.items()},
    "normalizer sinkhorn": {"normalizer": r.Sinkhorn(0.0, 4)},  # recorded programs take every step
}
every = pytest.mark.parametrize("name", DECLARED)
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's tracers warn about their own internals


def points(count=6, width=4):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 2, count, width, generator=generator) for _ in range(3))


def attend(name):
    return lambda q, k, v: r.attend(q, k, v, **DECLARED[name])


@every
def test_meta_tensors_have_the_shape(name):
    declared = pytree.tree_map(lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t, DECLARED[name])
    found = r.attend(*(t.to("meta") for t in points()), **declared)
    assert found.is_meta
    assert found.shape == attend(name)(*points()).shape


@every
def test_fake_tensors_have_the_shape(name):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = attend(name)(*map(mode.from_tensor, points()))
    assert found.shape == attend(name)(*points()).shape


@every
def test_traced_programs_are_the_declaration(name):
    traced = torch.jit.trace(attend(name), points(), check_trace=False)
    other = tuple(2 * t for t in points())
    torch.testing.assert_close(traced(*other), attend(name)(*other), atol=1e-5, rtol=1e-4)


@every
def test_batched_gradients(name):
    """torch.autograd maps cotangents by a vmap of its own."""
    q, k, v = (t.double().requires_grad_() for t in points())
    declared = pytree.tree_map(
        lambda t: t.double() if isinstance(t, torch.Tensor) and t.dtype.is_floating_point else t,
        DECLARED[name],
    )
    out = r.attend(q, k, v, **declared)
    cotangents = torch.randn(3, *out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    options = {"retain_graph": True, "allow_unused": True}
    batched = torch.autograd.grad(out, (q, k, v), cotangents, is_grads_batched=True, **options)
    for index, cotangent in enumerate(cotangents):
        alone = torch.autograd.grad(out, (q, k, v), cotangent, **options)
        for found, expected in zip(batched, alone, strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                torch.testing.assert_close(found[index], expected)


JACOBIANS = [
    *(f"potential {name}" for name in ("dot", "laplace", "pair bias of keys", "xpos")),
    *(f"normalizer {name}" for name in ("sparsemax", "sigmoid", "sinkhorn")),
    "support causal",
]


@pytest.mark.parametrize("name", JACOBIANS)
def test_jacobians_by_batches_of_gradients(name):
    """autograd.functional.jacobian(vectorize=True) is the one that goes output by output."""
    q, k, v = (t[:, :, :3, :4] for t in points())
    whole, one_by_one = (
        torch.autograd.functional.jacobian(lambda x: attend(name)(x, k, v), q, vectorize=vectorize)
        for vectorize in (True, False)
    )
    torch.testing.assert_close(whole, one_by_one, atol=1e-5, rtol=1e-4)
    assert float(whole.abs().max()) > 1e-3


COMPILED = {
    "laplace": {"potential": r.Laplace()},
    "gaussian, learned": {"potential": r.Gaussian(bandwidth=torch.tensor([1.0, 2.0]))},
    "entmax, learned": {"normalizer": r.Entmax(torch.tensor([1.3, 1.7]))},
    "dropout of nothing": {"dropout": 0.0, "potential": r.Dot() + r.PairBias(torch.eye(6))},
    "kernel of a gaussian": {
        "potential": r.Gaussian(bandwidth=1.0),
        "normalizer": r.LinearKernel(r.normalizers.Elu()),
    },
}


@pytest.mark.parametrize("name", COMPILED)
def test_whole_graphs_compile_with_their_gradients(name):
    torch._dynamo.reset()

    def call(q, k, v):
        return r.attend(q, k, v, **COMPILED[name])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    mine, theirs = (tuple(t.requires_grad_() for t in points()) for _ in range(2))
    found, expected = compiled(*mine), call(*theirs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), mine),
        torch.autograd.grad(expected.square().sum(), theirs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


class Declared(torch.nn.Module):
    def __init__(self, **declared):
        super().__init__()
        self.declared = declared

    def forward(self, q, k, v):
        return r.attend(q, k, v, **self.declared)


@pytest.mark.parametrize(
    "declared",
    [{"potential": r.Rotary(r.Dot()), "support": r.Causal()}, {"potential": r.Laplace()}],
    ids=["fused", "not fused"],
)
def test_exported_programs_take_every_length(declared):
    tokens = torch.export.Dim("tokens", min=2, max=64)
    shapes = ({2: tokens},) * 3
    exported = torch.export.export(Declared(**declared), points(), dynamic_shapes=shapes).module()
    longer = points(11)
    torch.testing.assert_close(exported(*longer), r.attend(*longer, **declared), atol=1e-5, rtol=1e-4)


def test_onnx():
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    declared = {"potential": r.Dot() + r.Alibi.heads(2), "support": r.Causal()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(Declared(**declared), points(), dynamo=True, verbose=False)
    model = program.model_proto
    onnx.checker.check_model(model)
    inputs = {each.name: t.numpy() for each, t in zip(model.graph.input, points(), strict=True)}
    found = torch.from_numpy(ReferenceEvaluator(model).run(None, inputs)[0])
    torch.testing.assert_close(found, r.attend(*points(), **declared), atol=1e-5, rtol=1e-4)
