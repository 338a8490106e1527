"""What runs on other devices than a CPU, as far as a CPU can tell: the same path, asked for by a value;
shapes on the device meta; and a pretended cuda device on which torch's kernel is never reached.
"""

import math

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import regard as r
from regard.compute.engines import sdpa
from regard.compute.selection import select
from regard.compute.tensors import pose_tensors
from tests.devices import OnDevice
from tests.engines import test_against_reference as against
from tests.engines.test_recorded import DECLARED
from tests.nouns import POTENTIALS, SUPPORTS, D

PUBLIC = r.engines.Sdpa(public=True)
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
WITHOUT_MASK = ("full", "causal", "padding", "padding batched", "causal and padding")


class Seen(TorchDispatchMode):
    """Which operations ran, and the largest tensor that one of them made."""

    def __init__(self):
        super().__init__()
        self.operations, self.largest = [], 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        self.operations.append(operation)
        made = [
            t.untyped_storage().nbytes() // t.itemsize
            for t in pytree.tree_leaves(result)
            if torch.is_tensor(t)
        ]
        self.largest = max([self.largest, *made])
        return result


class Doors(TorchFunctionMode):
    """Calls of F.scaled_dot_product_attention; `pretend` gives their shapes without a kernel."""

    def __init__(self, pretend=False):
        super().__init__()
        self.calls, self.pretend = [], pretend

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function is F.scaled_dot_product_attention:
            self.calls.append((arguments, options))
            if self.pretend:
                return torch.empty_like(arguments[0])
        return function(*arguments, **options)


def accepts(potential, support):
    """Whether a declaration needs no mask: a dot product with biases on keys."""
    x = torch.randn(2, 2, 6, 4, dtype=D)
    try:
        r.attend(x, x, x, potential=potential, support=support, engine=PUBLIC)
    except r.errors.RefusalError:
        return False
    return True


FIT = [(p, s) for p in POTENTIALS for s in WITHOUT_MASK if accepts(POTENTIALS[p], SUPPORTS[s])]


def test_what_fits():
    """Every potential that is a dot product and a bias on keys, under every support that masks no pairs."""
    kinds = {potential for potential, _ in FIT}
    assert {
        "dot",
        "dot heads",
        "bilinear",
        "gaussian",
        "gaussian heads",
        "cosine",
        "normed",
        "rotary",
    } <= kinds
    assert {(p, s) for p in ("dot", "gaussian", "rotary") for s in WITHOUT_MASK} <= set(FIT)
    assert not kinds & {"laplace", "additive", "softcap", "relative"}


@pytest.mark.parametrize(("potential", "support"), FIT)
def test_outputs_and_gradients(potential, support, monkeypatch):
    """Of queries, keys, values, counts and every parameter, beside the reference."""
    monkeypatch.setattr(against, "ENGINES", [PUBLIC])
    for weighted in (False, True):
        against.compare(POTENTIALS[potential], r.Softmax(0.7), SUPPORTS[support], weighted)


def problem(potential, support, kind=D, engine=None):
    q, k, v = (torch.randn(2, 6, 4, dtype=kind, requires_grad=True) for _ in range(3))
    counts = torch.randn(6, dtype=kind).requires_grad_()
    return pose_tensors(q, k, v, POTENTIALS[potential], r.Softmax(0.7), SUPPORTS[support], counts), (
        q,
        k,
        v,
        counts,
    )


@pytest.mark.parametrize("support", ["full", "causal", "causal and padding"])
@pytest.mark.parametrize("potential", ["dot", "gaussian", "rotary"])
def test_second_derivatives_and_energies(potential, support):
    """Gradients of gradients, and of free energies, which the kernel does not give: block by block."""
    if support == "causal and padding":
        posed, moving = problem(potential, "causal")
        posed = posed.replace(log_counts=posed.log_counts.masked_fill(torch.arange(6) < 2, -math.inf))
    else:
        posed, moving = problem(potential, support)
    plans = [select(posed, engine) for engine in (PUBLIC, r.engines.ReferenceEngine())]
    found, expected = ([plan.run(), _finite(plan.free_energy())] for plan in plans)
    weights = [torch.randn_like(t) for t in expected]
    for mine, theirs, weight in zip(found, expected, weights, strict=True):
        torch.testing.assert_close(mine, theirs)
        first = [gradients((t * weight).sum(), moving) for t in (mine, theirs)]
        torch.testing.assert_close(*first)
        second = [gradients(sum(g.square().sum() for g in each), moving) for each in first]
        torch.testing.assert_close(*second)


def gradients(value, moving):
    """With zeros where nothing depends on a tensor."""
    if not value.requires_grad:
        return [torch.zeros_like(t) for t in moving]
    found = torch.autograd.grad(value, moving, create_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(moving, found, strict=True)]


def _finite(energy):
    return torch.where(energy > -math.inf, energy, 0.0)


def test_batches_of_gradients():
    q, k, v = (torch.randn(2, 6, 4, dtype=D, requires_grad=True) for _ in range(3))
    out = r.attend(q, k, v, potential=r.Gaussian(bandwidth=1.0), engine=PUBLIC)
    cotangents = torch.randn(3, *out.shape, dtype=D)
    batched = torch.autograd.grad(out, (q, k, v), cotangents, is_grads_batched=True, retain_graph=True)
    for place, cotangent in enumerate(cotangents):
        for mine, one in zip(
            batched, torch.autograd.grad(out, (q, k, v), cotangent, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(mine[place], one)


def test_forward_mode_goes_to_blocks():
    """torch has no forward derivative of its kernels: the door is shut, and other engines run unasked."""
    x = torch.randn(6, 4, dtype=D)
    with pytest.raises(r.errors.RefusalError, match="forward mode"):
        torch.func.jvp(lambda t: r.attend(t, t, t, engine=PUBLIC), (x,), (x,))
    with pytest.raises(r.errors.RefusalError, match="mask or a bias on pairs"):
        r.attend(x, x, x, support=r.Window(2, 0), engine=PUBLIC)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("potential", ["dot", "relative", "alibi heads", "rotary", "pair bias heads"])
def test_one_query_needs_no_mask(potential, support):
    """A step of decoding: whatever one query sees is a bias on keys."""
    if "batched" in support or support == "causal and padding":
        pytest.skip("other tests have batches of supports")
    x = torch.randn(2, 6, 4, dtype=D)
    query = r.Measure(x[:, 4:5], marks=torch.tensor([4]))
    context = r.Measure(x, marks=torch.arange(6))
    attention = r.Attention(POTENTIALS[potential], support=SUPPORTS[support])
    found, expected = (
        r.apply(attention, query, context, engine=e).points for e in (PUBLIC, r.engines.ReferenceEngine())
    )
    torch.testing.assert_close(found, expected)


N = 257  # tokens, so many that a matrix of scores cannot be taken for anything else
BIASED = {
    "dot": {},
    "causal": {"support": r.Causal()},
    "gaussian": {"potential": r.Gaussian(bandwidth=3.0), "log_weights": torch.randn(N)},
    "padding": {"support": r.Padding(torch.tensor(200)) & r.Causal(), "potential": r.Rotary(r.Dot())},
}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BIASED)
def test_no_mask_and_no_matrix(name, kind):
    """Forward and backward: no mask goes through the door, the fused kernel runs, nothing is m × n."""
    q, k, v = (torch.randn(1, 2, N, 24, dtype=kind, requires_grad=True) for _ in range(3))
    with Seen() as seen, Doors() as doors:
        out = r.attend(q, k, v, engine=PUBLIC, **BIASED[name])
        out.sum().backward()
    ((arguments, options),) = doors.calls
    assert options.get("attn_mask") is None
    assert options["is_causal"] == isinstance(
        BIASED[name].get("support", r.Full()), (r.Causal, r.supports.And)
    )
    assert {t.shape[-1] % 8 for t in arguments} == {0}
    assert FUSED in seen.operations
    assert seen.largest < N * N
    exact = r.attend(
        *(t.double() for t in (q, k, v)), engine=r.engines.ReferenceEngine(), **_double(BIASED[name])
    )
    assert (out - exact).abs().max() <= (2e-5 if kind == torch.float32 else 2e-2)


def _double(declared):
    return pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, declared)


def test_half_precision_keeps_the_digits_of_counts():
    """Counts of bfloat16 points are not rounded to bfloat16: three columns hold what one of float32 would."""
    q, k, v = (torch.randn(1, 1, 64, 16).bfloat16() for _ in range(3))
    counts = 100 + 0.3 * torch.randn(64)
    exact = r.attend(q.double(), k.double(), v.double(), log_weights=counts.double())
    found = r.attend(q, k, v, log_weights=counts, engine=PUBLIC).double()
    rounded = r.attend(q.double(), k.double(), v.double(), log_weights=counts.bfloat16().double())
    assert (found - exact).abs().max() <= 0.02 < (rounded - exact).abs().max()


@pytest.mark.parametrize("name", DECLARED)
def test_shapes_alone(name):
    """On the device meta every declaration runs, and no tensor has as many entries as all scores."""
    count = 768  # just more pairs than a block holds
    declared = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), _longer(DECLARED[name], count))
    tokens = (torch.empty(2, 2, count, 4, device="meta", dtype=torch.float32) for _ in range(3))
    with Seen() as seen:
        out = r.attend(*tokens, **declared)
    assert out.is_meta
    assert out.shape == (2, 2, count, 4)
    assert seen.largest < count * count
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    normalizer = declared.get("normalizer", r.Softmax())
    if isinstance(normalizer, r.Softmax) and "potential" not in declared:
        assert fused in seen.operations


def _longer(declared, count):
    """Tables and masks of six tokens as such of many, where a declaration has them."""
    ids = torch.arange(count) // 8
    longer = {
        "document": r.Document(ids),
        "document batched": r.Document(ids.expand(2, 1, count)),
        "window or document": r.Window(1, 0) | r.Document(ids),
    }
    support = next((s for n, s in longer.items() if declared.get("support") is SUPPORTS[n]), None)
    return declared if support is None else {**declared, "support": support}


PRETENDED = {
    "dot": lambda: {},
    "causal": lambda: {"support": r.Causal()},
    "counts": lambda: {"log_weights": torch.empty(N, device="cuda")},
    "gaussian": lambda: {
        "potential": r.Gaussian(bandwidth=3.0),
        "log_weights": torch.empty(N, device="cuda"),
    },
}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PRETENDED)
def test_a_pretended_device(name, kind):
    """Tensors without numbers that say they are on cuda: all runs that comes before and after the kernel."""
    with FakeTensorMode(), Doors(pretend=True) as doors, Seen() as seen:
        declared = PRETENDED[name]()
        out = r.attend(*(torch.empty(1, 2, N, 24, device="cuda", dtype=kind) for _ in range(3)), **declared)
    ((arguments, options),) = doors.calls
    assert (out.device.type, out.shape, out.dtype) == ("cuda", (1, 2, N, 24), kind)
    assert set(options) == {"is_causal", "scale"}
    assert options["is_causal"] == (name == "causal")
    assert {t.shape[-1] for t in arguments} == {24 if name in ("dot", "causal") else 32}
    assert {t.dtype for t in arguments} == {torch.float32 if name == "gaussian" else kind}
    assert seen.largest < N * N


def test_a_recorded_mask_is_written_down(monkeypatch):
    """A program that is only recorded has no block masks: it goes through the door with one of its own."""
    monkeypatch.setattr(sdpa, "_is_other", lambda problem: True)
    with FakeTensorMode(), Doors() as doors:
        x = torch.empty(1, 2, 33, 16, dtype=torch.bfloat16)
        r.attend(x, x, x, support=r.Window(3, 0))
        r.attend(x, x, x, support=r.Causal())
    masks = [options.get("attn_mask") for _, options in doors.calls]
    assert masks[0].shape[-2:] == (33, 33)
    assert masks[0].dtype == torch.bfloat16
    assert masks[1] is None


DIFFERENTIATED = [
    "potential dot",
    "potential gaussian",
    "potential laplace",
    "support window",
    "normalizer sparsemax",
]


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_shapes_of_gradients(name):
    count = 768  # just more pairs than a block holds
    declared = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), DECLARED[name])
    q, k, v = (torch.empty(2, 2, count, 4, device="meta", requires_grad=True) for _ in range(3))
    with Seen() as seen:
        r.attend(q, k, v, **declared).sum().backward()
    assert all(t.grad.shape == t.shape for t in (q, k, v))
    assert seen.largest < count * count


def test_modules_and_costs_on_meta():
    """A model that nobody has memory for: built, run, differentiated and counted by shapes."""
    design = r.nn.Design(width=64, heads=4, hidden=128)
    with torch.device("meta"):
        layer = r.nn.EncoderLayer(design)
        x = torch.empty(2, 1024, 64, requires_grad=True)
    with Seen() as seen:
        layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert seen.largest < 1024 * 1024
    assert r.cost(layer, 1024).forward > 0


FLEXIBLE = ["dot", "alibi heads", "softcap", "relative logarithmic", "pair bias heads"]


FLEXED = [
    *(("relative", support) for support in SUPPORTS if support != "window open"),
    *((potential, "causal and padding") for potential in FLEXIBLE),
]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("potential", "support"), FLEXED)
def test_flex_takes_masks_and_biases_on_pairs(potential, support):
    """Block masks, score modifications and log-sum-exps, as torch defines them, beside the reference."""
    q, k, v = (torch.randn(2, 2, 6, 4) for _ in range(3))
    counts = torch.randn(2, 2, 6)
    counts[0, 0, 2] = -math.inf
    noun = pytree.tree_map_only(torch.Tensor, lambda t: t.float(), POTENTIALS[potential])
    posed = pose_tensors(q, k, v, noun, r.Softmax(0.7), SUPPORTS[support], counts)
    plans = [
        select(posed, engine) for engine in (r.engines.Flex(compiled=False), r.engines.ReferenceEngine())
    ]
    (out, energy), (expected, its_energy) = (plan.run_with_free_energy() for plan in plans)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(energy, its_energy, atol=1e-5, rtol=1e-5)


def test_flex_compiles_masks_and_biases():
    """One program with a block mask of several blocks, a table of relative biases, and counts."""
    count = 300
    q, k, v = (torch.randn(1, 2, count, 16) for _ in range(3))
    declared = {
        "potential": r.Dot() + r.RelativeBias(torch.randn(2, 7), r.potentials.Clipped(3)),
        "support": (r.Document(torch.arange(count) // 150) & r.Causal()) | r.Window(3, 0),
        "log_weights": torch.randn(count),
    }
    found = r.attend(q, k, v, engine=r.engines.Flex(), **declared)
    torch.testing.assert_close(found, r.attend(q, k, v, engine=r.engines.ReferenceEngine(), **declared))


def test_the_device_of_the_tests():
    """`make test DEVICE=...`: what is made without a device is made there; random numbers are a CPU's."""
    expected = torch.randn(3, generator=torch.Generator().manual_seed(0))
    with OnDevice(torch.device("meta")):
        made = [torch.zeros(2), torch.tensor([1.0]), torch.arange(3), torch.randn(2, requires_grad=True)]
        kept = torch.zeros(2, device="cpu")
    with OnDevice(torch.device("cpu")):
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(0))
    assert all(t.is_meta for t in made)
    assert made[-1].requires_grad
    assert not kept.is_meta
    assert torch.equal(drawn, expected)
