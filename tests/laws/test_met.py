"""What people met who tried the library as their own: each test failed once."""

import math

import pytest
import torch

import regard as r


def slopes_of_the_released_code(heads):
    """Equation by equation as models with linear biases were trained (press2022, their code)."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**index for index in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    more = slopes_of_the_released_code(2 * lower)[0::2][: heads - lower]
    return slopes_of_the_released_code(lower) + more


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 25, 112])
def test_slopes_are_those_that_models_were_trained_with(heads):
    torch.testing.assert_close(r.Alibi.heads(heads).slope, torch.tensor(slopes_of_the_released_code(heads)))


def test_slopes_of_transformers():
    modeling = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    for heads in (6, 12):
        bias = modeling.build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)  # (heads, 1, 3): slope · t
        torch.testing.assert_close(r.Alibi.heads(heads).slope, bias[:, 0, 1])


def test_free_energy_subtracts_the_log_of_the_count_in_the_dtype_of_the_energy():
    """A uniform row has free energy log(1/n Σ exp 0) = 0, to the last digit of float64."""
    x = torch.zeros(7, 2, dtype=torch.float64)
    assert r.Attention(r.Dot()).free_energy(x).abs().max() <= 1e-15


@pytest.mark.parametrize("count", [3, 7, 49])
def test_free_energy_of_learned_temperatures(count):
    x = torch.randn(count, 3, dtype=torch.float64)
    temperature = torch.tensor([0.5, 2.0], dtype=torch.float64)
    heads = r.Attention(r.Dot(), normalizer=r.Softmax(temperature)).free_energy(x.expand(2, -1, -1))
    for head, each in zip(heads, temperature, strict=True):
        alone = r.Attention(r.Dot(), normalizer=r.Softmax(float(each))).free_energy(x)
        torch.testing.assert_close(head, alone, atol=1e-14, rtol=0)


def test_an_entmax_for_each_head_is_learned():
    """One alpha a head is that alpha, and its gradient is that of finite differences (correia2019)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
        for _ in range(3)
    )
    alpha = torch.tensor([1.2, 1.5, 2.3], dtype=torch.float64, requires_grad=True)
    counts = torch.randn(5, dtype=torch.float64, generator=generator)

    def heads(q, k, v, alpha):
        return r.attend(q, k, v, normalizer=r.Entmax(alpha), log_weights=counts)

    for head, each in enumerate(alpha.tolist()):
        some = (t[:, head : head + 1] for t in (q, k, v))
        alone = r.attend(*some, normalizer=r.Entmax(each), log_weights=counts)
        torch.testing.assert_close(heads(q, k, v, alpha)[:, head : head + 1], alone)
    assert torch.autograd.gradcheck(heads, (q, k, v, alpha), check_forward_ad=True)
    few = tuple(t[:1, :, :3].detach().requires_grad_() for t in (q, k, v))
    plain = lambda *given: r.attend(*given[:3], normalizer=r.Entmax(given[3]))  # noqa: E731
    assert torch.autograd.gradgradcheck(plain, (*few, alpha))


def test_an_entmax_that_is_no_law_is_refused():
    with pytest.raises(r.errors.ArgumentError, match="alpha: has entries that are not above 1"):
        r.Entmax(torch.tensor([1.5, 1.0]))


DOCUMENTS = {
    "sorted": torch.arange(40) // 10,
    "unsorted": torch.tensor([2, 0, 1, 0] * 10),
    "of a batch": torch.stack([torch.arange(40) // 10, torch.arange(40) // 7]).unsqueeze(1),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_leave_out_what_nobody_sees(name):
    """The span of a document holds all that its tokens see, and where documents are sorted nothing else."""
    document = r.Document(DOCUMENTS[name])
    marks = torch.arange(40)
    allowed = document.allows(marks, marks).reshape(-1, 40, 40).any(0)
    for low, high in ((0, 5), (8, 21), (39, 39)):
        first, last = document.span(low, high)
        seen = allowed[low : high + 1].any(0).nonzero()
        assert first <= int(seen[0])
        assert last >= int(seen[-1])
        if name == "sorted":
            assert (first, last) == (int(seen[0]), int(seen[-1]))


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_documents_are_the_definition(name, causal):
    q, k, v = (torch.randn(2, 2, 40, 16, dtype=torch.float64) for _ in range(3))
    support = r.Document(DOCUMENTS[name]) & (r.Causal() if causal else r.Full())
    exact = r.attend(q, k, v, support=support, engine=r.engines.ReferenceEngine())
    for engine in (r.engines.Sdpa(), r.engines.Tiled(pairs=160)):
        torch.testing.assert_close(r.attend(q, k, v, support=support, engine=engine), exact)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"is_causal": True}, r"^is_causal: is torch's name; write support=regard.Causal\(\)"),
        ({"attn_mask": torch.ones(3, 3).bool()}, r"^attn_mask: .*support=regard.Where\(mask\)"),
        ({"dropout_p": 0.1}, "^dropout_p: .*not a probability law"),
        ({"scale": 0.5}, r"^scale: .*Dot\(scale="),
        ({"enable_gqa": True}, "^enable_gqa: .*grouped"),
        ({"maks": 1}, "^maks: is not an argument of attend; it takes potential"),
    ],
)
def test_options_of_torch_say_how_they_are_written(given, message):
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(r.errors.ArgumentError, match=message):
        r.attend(q, q, q, **given)


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("support", [r.Full(), r.Causal()])
def test_the_kernel_at_once_is_the_plan(width, support):
    """Where nothing is left to decide the plan makes the same call, bit for bit."""
    q, k, v = (torch.randn(2, 3, 9, width) for _ in range(3))
    for normalizer in (r.Softmax(), r.Softmax(0.5)):
        planned = r.attend(q, k, v, support=support, normalizer=normalizer, engine=r.engines.Sdpa())
        assert torch.equal(r.attend(q, k, v, support=support, normalizer=normalizer), planned)
