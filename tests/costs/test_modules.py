"""Modules and configs cost what torch counts when they run, part by part, without running."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import regard as r
from regard.costs import Architecture, Sizes, cost, register_flop_formulas
from regard.costs.families import architecture_of

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

BATCH, TOKENS, VOCABULARY = 2, 7, 40
COMMON = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
}
GPT2 = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "vocab_size": VOCABULARY,
    "n_positions": 20,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DISTIL = {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48, "vocab_size": VOCABULARY}
FAMILIES = {
    "GPT2LMHeadModel": GPT2,
    "GPT2Model": {**GPT2, "n_inner": 40},
    "LlamaForCausalLM": {
        **COMMON,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
    },
    "LlamaModel": {**COMMON, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "MistralForCausalLM": {**COMMON, "num_key_value_heads": 2},
    "Qwen2ForCausalLM": {**COMMON, "num_key_value_heads": 2},
    "Qwen3ForCausalLM": {**COMMON, "num_key_value_heads": 2, "head_dim": 8},
    "GemmaForCausalLM": {**COMMON, "num_key_value_heads": 1, "head_dim": 16},
    "BertModel": {**COMMON, "max_position_embeddings": 30},
    "BertForMaskedLM": {**COMMON, "max_position_embeddings": 30},
    "RobertaForMaskedLM": {**COMMON, "max_position_embeddings": 30},
    "DistilBertForMaskedLM": DISTIL,
    "DistilBertModel": DISTIL,
    "GPTNeoXForCausalLM": COMMON,
    **{
        f"{family}For{task}": {
            **fields,
            "num_labels": 2 if task == "QuestionAnswering" else 5,
            "pad_token_id": 1,
        }
        for task in ("SequenceClassification", "TokenClassification", "QuestionAnswering")
        for family, fields in {
            "GPT2": GPT2,
            "Llama": {**COMMON, "num_key_value_heads": 2},
            "Qwen2": {**COMMON, "num_key_value_heads": 2, "tie_word_embeddings": True},
            "GPTNeoX": COMMON,
            "Bert": {**COMMON, "max_position_embeddings": 30},
            "Roberta": {**COMMON, "max_position_embeddings": 30},
            "DistilBert": DISTIL,
        }.items()
    },
}


def model(name):
    kind = getattr(transformers, name)
    return kind(kind.config_class(**FAMILIES[name])).eval()


def counted(run):
    register_flop_formulas()
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def by_part(found):
    return {
        part.name: (part.matmul, part.visible, part.softmax, part.parameters)
        for part in found.parts
        if part.matmul or part.parameters
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    """The closed form, the run on shapes and the real run agree: flops of each part, parameters,
    and all of them with torch.
    """
    module, sizes = model(name), Sizes(TOKENS, BATCH)
    config = {**module.config.to_dict(), "architectures": [name]}
    declared, run = cost(config, sizes), cost(module, sizes)
    assert declared.forward == counted(lambda: module(torch.zeros(BATCH, TOKENS, dtype=torch.long)))
    assert declared.parameters == sum(p.numel() for p in module.parameters())
    assert by_part(declared) == by_part(run)
    assert declared.crossover == pytest.approx(architecture_of(config).crossover, rel=1e-12)


@pytest.mark.parametrize("name", ["BertModel", "LlamaModel"])
def test_eager_attention_has_the_same_parts(name):
    module = model(name)
    module.set_attn_implementation("eager")
    found, fused = (
        cost(module, Sizes(TOKENS, BATCH, causal=True)),
        cost(model(name), Sizes(TOKENS, BATCH, causal=True)),
    )
    assert by_part(found) == by_part(fused)
    assert found.moved > fused.moved  # matrices of pairs are written
    assert found.forward == counted(lambda: module(torch.zeros(BATCH, TOKENS, dtype=torch.long)))


def test_encoder_and_decoder():
    config = transformers.T5Config(
        d_model=32, d_kv=8, num_heads=4, d_ff=48, num_layers=2, vocab_size=VOCABULARY
    )
    module = transformers.T5ForConditionalGeneration(config).eval()
    source, target = torch.zeros(BATCH, 5, dtype=torch.long), torch.zeros(BATCH, TOKENS, dtype=torch.long)
    real = counted(lambda: module(input_ids=source, decoder_input_ids=target))
    found = cost(module, Sizes(TOKENS, BATCH, context=5))
    assert found.forward == real
    assert found.attention == 2 * 4 * 32 * BATCH * (5 * 5 + TOKENS * TOKENS + TOKENS * 5)
    assert (
        cost(module, Sizes(TOKENS, BATCH), inputs={"input_ids": source, "decoder_input_ids": target}).forward
        == real
    )


MODULES = {
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), ((BATCH, TOKENS, 32),)),
    "tokens first": (lambda: nn.TransformerEncoderLayer(32, 4, 64), ((TOKENS, BATCH, 32),)),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(32, 4, 64, batch_first=True),
        ((BATCH, TOKENS, 32), (BATCH, 5, 32)),
    ),
    "attention": (
        lambda: nn.MultiheadAttention(32, 4, batch_first=True),
        ((BATCH, TOKENS, 32), (BATCH, 5, 32), (BATCH, 5, 32)),
    ),
    "linear": (lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 5)), ((BATCH, TOKENS, 32),)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch(name):
    make, shapes = MODULES[name]
    module = make()
    context = 5 if len(shapes) > 1 else None
    found = cost(module, Sizes(TOKENS, BATCH, context))
    assert found.forward == counted(lambda: module(*(torch.randn(shape) for shape in shapes)))
    assert found.parameters == sum(p.numel() for p in module.parameters())
    assert (
        cost(
            module, Sizes(TOKENS, BATCH, context), inputs=tuple(torch.empty(shape) for shape in shapes)
        ).forward
        == found.forward
    )


def test_parts_of_an_encoder_layer():
    width, hidden = 32, 64
    found = cost(nn.TransformerEncoderLayer(width, 4, hidden, batch_first=True), Sizes(TOKENS, BATCH))
    tokens = BATCH * TOKENS
    flops = {
        "projections": 6 * tokens * width**2,
        "scores": 2 * tokens * TOKENS * width,
        "mixing": 2 * tokens * TOKENS * width,
        "output": 2 * tokens * width**2,
        "feed-forward": 4 * tokens * width * hidden,
    }
    assert {part.name: part.matmul for part in found.parts if part.matmul} == flops
    assert found.softmax == 5 * 4 * tokens * TOKENS
    assert found.part("normalization").parameters == 4 * width
    assert found.crossover == 2 * width + hidden


def test_training_agrees_with_torch():
    """Every input of a product has a gradient here, as behind an embedding;
    the fused kernel computes the scores once more.
    """
    module = model("GPT2LMHeadModel")
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    found = cost(module, Sizes(TOKENS, BATCH))
    assert counted(lambda: module(ids).logits.sum().backward()) == found.training + found.recomputed


def test_modules_are_left_as_they_were():
    """Frozen, in training or not: the count is one, dropout is not part of it, and nothing changes."""
    module = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).requires_grad_(False)
    module.linear1.eval()
    flags = [inner.training for inner in module.modules()]
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found = cost(module, Sizes(TOKENS, BATCH))
    assert [inner.training for inner in module.modules()] == flags
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert found == cost(module.eval(), Sizes(TOKENS, BATCH))


def test_activations_are_what_autograd_saves():
    module, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), torch.empty(2, 5, 8)
    assert cost(module, Sizes(5, 2)).activations == 4 * 10 * (
        8 + 16
    )  # the output of the activation is the input of the product
    assert cost(module.double(), Sizes(5, 2), inputs=(x.double(),)).activations == 8 * 10 * (8 + 16)


def test_regard_modules():
    from regard import nn as own

    design = own.Design(width=64, heads=4, positions=own.RotaryPositions())
    module = own.LanguageModel(design, vocabulary=VOCABULARY, layers=2).eval()
    found = cost(module, Sizes(TOKENS, BATCH))
    assert found.forward == counted(lambda: module(torch.zeros(BATCH, TOKENS, dtype=torch.long)))
    assert found.parameters == sum(p.numel() for p in module.parameters())
    assert found.attention == 2 * 4 * 64 * BATCH * TOKENS**2
    assert found.part("head").matmul == 2 * BATCH * TOKENS * 64 * VOCABULARY
    assert found.visible < found.forward
    assert all(found.part(name).parameters for name in ("embedding", "projections", "output", "feed-forward"))


def test_regard_modules_with_a_context():
    from regard import nn as own

    x, context = torch.randn(BATCH, TOKENS, 64), torch.randn(BATCH, 5, 64)
    for module, sizes in (
        (own.DecoderLayer(own.Design(width=64, heads=4)), Sizes(TOKENS, BATCH, 5)),
        (own.MultiHeadAttention(64, 4), Sizes(TOKENS, BATCH, 5)),
    ):
        assert cost(module, sizes).forward == counted(lambda module=module: module(x, context=context))


def both_ways(module):
    """What the module takes, and what it takes with the lengths exchanged:
    the same where encoder and decoder have as many layers.
    """
    source, target = (torch.randn(BATCH, length, 64) for length in (9, TOKENS))
    return counted(lambda: module(source, target)), counted(lambda: module(target, source))


def test_the_target_looks_at_the_source():
    """tokens are those of the target, context those of the source, though modules take the source first."""
    from regard import nn as own

    for module in (
        own.Transformer(own.Design(width=64, heads=4), 1, 3),
        nn.Transformer(64, 4, 1, 3, 48, batch_first=True),
    ):
        right, wrong = both_ways(module)
        assert cost(module, Sizes(TOKENS, BATCH, context=9)).forward == right != wrong


def test_sequence_to_sequence():
    from regard import nn as own

    module = own.SequenceToSequence(own.Design(width=64, heads=4), source=11, target=VOCABULARY, layers=2)
    source, target = (torch.zeros(BATCH, length, dtype=torch.long) for length in (9, TOKENS))
    found = cost(module, Sizes(TOKENS, BATCH, context=9))
    assert found.forward == counted(lambda: module(source, target)) != counted(lambda: module(target, source))
    assert found.part("head").matmul == 2 * BATCH * TOKENS * 64 * VOCABULARY


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("head_width", [4, 8, 16])
def test_narrow_heads(head_width, kv_heads):
    """The kernel is given columns of zeros up to a width of 16; they are no part of the formula,
    nor of T*.
    """
    from regard import nn as own

    width = 4 * head_width
    design = own.Design(width=width, heads=4, kv_heads=kv_heads, hidden=40, positions=own.RotaryPositions())
    module = own.LanguageModel(design, vocabulary=VOCABULARY, layers=2).eval()
    found, formula = (
        cost(module, Sizes(TOKENS, BATCH)),
        cost(Architecture(width, 2, 4, 40, groups=kv_heads), Sizes(TOKENS, BATCH)),
    )
    for name in ("projections", "scores", "mixing", "output", "feed-forward"):
        assert (found.part(name).matmul, found.part(name).visible) == (
            formula.part(name).matmul,
            formula.part(name).visible,
        )
    assert found.crossover == formula.crossover
    padding = 2 * 2 * 4 * BATCH * TOKENS**2 * 2 * (16 - head_width)
    assert counted(lambda: module(torch.zeros(BATCH, TOKENS, dtype=torch.long))) == found.forward + padding


class Kernel(nn.Module):
    """The fused kernel on what `change` makes of queries and values."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        made = self.change(x.unflatten(-1, (2, -1)).transpose(-2, -3))
        return nn.functional.scaled_dot_product_attention(made, made, made)


@pytest.mark.parametrize(
    ("change", "width"),
    [
        (lambda x: nn.functional.pad(x, (0, 12)), 4),
        (lambda x: nn.functional.pad(nn.functional.pad(x, (0, 4)), (0, 8)), 4),
        (lambda x: nn.functional.pad(x, (0, 12)).double().contiguous(), 4),
        (lambda x: nn.functional.pad(x, (0, 12), value=1.0), 16),
        (lambda x: nn.functional.pad(x, (12, 0)), 16),
        (lambda x: nn.functional.pad(x, (0, 12)).add_(1), 16),
        (lambda x: nn.functional.pad(x, (0, 12))[..., :8], 8),
        (lambda x: nn.functional.pad(x, (0, TOKENS - 4)).mT, TOKENS),
    ],
)
def test_only_zeros_on_the_right_are_padding(change, width):
    found = cost(Kernel(change), Sizes(TOKENS, BATCH, width=8))
    assert found.part("scores").matmul == found.part("mixing").matmul == 2 * 2 * BATCH * TOKENS**2 * width


def test_models_without_memory():
    """Eight billion parameters, from the config alone and from modules that hold none."""
    widths = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    config = {
        **widths,
        "model_type": "llama",
        "num_hidden_layers": 32,
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
    }
    found = cost(config, 8192)
    assert found.parameters == 8_030_261_248
    assert found.weights == 2 * found.parameters
    assert found.crossover == 26624
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**widths, num_hidden_layers=1, tie_word_embeddings=False)
        )
    one = cost({**config, "num_hidden_layers": 1}, 8192)
    assert by_part(cost(module, 8192)) == by_part(one)


def test_the_outline_of_eight_widths():
    """T* = 8D is the gated layer with F = 4D, or the plain one against feed-forward alone under a causal
    kernel; plain is 6D.
    """
    plain, gated = (Architecture(512, 1, 8, 2048, gated=gated) for gated in (False, True))
    assert (plain.crossover, gated.crossover) == (6 * 512, 8 * 512)
    assert cost(plain, 100).crossover == 6 * 512
    assert cost(gated, 100).causal_crossover == 16 * 512 - 1
    at = cost(plain, 4 * 512)
    assert at.attention == at.part("feed-forward").matmul
    at = cost(plain, 8 * 512 - 1)
    assert at.visible - at.linear == at.part("feed-forward").matmul


def test_windows():
    a = Architecture(16, 1, 2, 8, window=3)
    found = cost(a, 10)
    seen = int((torch.ones(10, 10).tril() - torch.ones(10, 10).tril(-3)).sum())
    assert found.part("scores").visible == 2 * 16 * seen
    assert cost(a, Sizes(10, causal=False)).visible == found.forward


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 3},
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0},
    ],
)
def test_windows_of_configs(kind, fields):
    """Against what transformers makes of the same fields."""
    config = {**COMMON, "model_type": kind, "num_key_value_heads": 2, **fields}
    made = transformers.AutoConfig.for_model(**config)
    kinds = ["sliding_attention"] * 2 if kind == "mistral" else made.layer_types
    windows = [made.sliding_window if one == "sliding_attention" else None for one in kinds]
    tokens, causal = 10, torch.ones(10, 10).tril()
    seen = sum(int((causal - causal.tril(-(window or tokens))).sum()) for window in windows)
    found = cost(config, tokens).part("scores")
    assert found.visible == found.matmul * seen // (2 * tokens**2)


def test_importing_regard_is_enough():
    """In a process of its own: torch counts nothing before, and what its kernel takes after."""
    code = (
        "import torch; from torch.utils.flop_counter import FlopCounterMode; q = torch.randn(1, 2, 5, 16)\n"
        "def count():\n"
        "    with FlopCounterMode(display=False) as counter: "
        "torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "    return counter.get_total_flops()\n"
        "before = count(); import regard; print(before, count())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert found == ["0", str(4 * 2 * 5 * 5 * 16)]


def test_formulas_are_registered_once():
    register_flop_formulas()
    before = dict(flop_registry)
    register_flop_formulas()
    assert before == dict(flop_registry)
    q = torch.randn(2, 3, 5, 16, requires_grad=True)
    k = torch.randn(2, 3, 9, 16, requires_grad=True)
    forward = 2 * 2 * 2 * 3 * 5 * 9 * 16
    assert counted(lambda: nn.functional.scaled_dot_product_attention(q, k, k)) == forward
    assert (
        counted(lambda: nn.functional.scaled_dot_product_attention(q, k, k).sum().backward())
        == forward + 5 * forward // 2
    )


def test_fused_layers_of_torch_are_counted():
    """Without gradients torch.nn takes a way of its own, which is as long;
    sequences of several lengths take what each takes.
    """
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    attention = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(BATCH, TOKENS, 32)
    with torch.no_grad():
        assert counted(lambda: layer(x)) == cost(layer, Sizes(TOKENS, BATCH)).forward
        assert counted(lambda: attention(x, x, x)) == cost(attention, Sizes(TOKENS, BATCH)).forward
    operation = torch.ops.aten._native_multi_head_attention
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        nested = torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(5, 32)])
    assert flop_registry[operation](nested, nested, nested, 32) == sum(
        cost(attention, tokens).forward for tokens in (3, 5)
    )


def test_modules_that_read_values():
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(
        r.errors.ArgumentError, match=r"^inputs: Reads could not be run on shapes alone \(.*give inputs="
    ):
        cost(Reads(4, 4), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "config: has no model_type; give the config.json"),
        (
            {"model_type": "unheard"},
            "config: is of the model type 'unheard', which has no closed form here; build the model",
        ),
        ({"hidden_size": None}, "config: has no hidden_size or n_embd or dim or d_model; add it"),
        ({"num_hidden_layers": -1}, "config: has -1 for num_hidden_layers; give a positive whole number"),
        ({"torch_dtype": "nonsense"}, "config: has the dtype 'nonsense'"),
        ({"torch_dtype": "int64"}, "config: has the dtype 'int64'"),
        ({"num_key_value_heads": 3}, "groups: are 3 for 4 heads; give a divisor of the heads"),
        ({"model_type": ["llama"]}, "config: has ['llama'] for model_type; give a name"),
        ({"architectures": 5}, "config: has 5 for architectures; give a list with the name of one class"),
        ({"architectures": {}}, "config: has {} for architectures; give a list"),
        (
            {"architectures": ["LlamaModel", "LlamaForCausalLM"]},
            "config: has ['LlamaModel', 'LlamaForCausalLM'] for architectures; give",
        ),
        ({"architectures": [None]}, "config: has [None] for architectures; give"),
        (
            {"architectures": ["LlamaForDreaming"]},
            "config: is of a LlamaForDreaming, which has no closed form as a llama; build the model",
        ),
        (
            {"architectures": ["MistralModel"]},
            "config: is of a MistralModel, which has no closed form as a llama; build the model",
        ),
        (
            {"add_cross_attention": True},
            "config: has add_cross_attention, and what is looked at has no size here; build the model",
        ),
        (
            {"use_bidirectional_attention": True},
            "config: has use_bidirectional_attention, which has no closed form here; build",
        ),
        *(
            ({name: value}, f"config: has {value!r} for {name}; give true or false")
            for name in ("attention_bias", "mlp_bias", "tie_word_embeddings", "add_cross_attention")
            for value in ("false", 1)
        ),
        *(
            ({"head_dim": value}, f"config: has {value!r} for head_dim; give a positive")
            for value in (True, 8.0, "8", 0, -8)
        ),
        *(
            (
                {"model_type": "mistral", "architectures": [], "sliding_window": value},
                f"config: has {value!r} for sliding_window; give a",
            )
            for value in (True, 3.5, "4", 0, -5)
        ),
        (
            {"model_type": "qwen2", "architectures": [], "use_sliding_window": "no"},
            "config: has 'no' for use_sliding_window; give true",
        ),
        (
            {"model_type": "qwen2", "architectures": [], "use_sliding_window": True, "max_window_layers": -1},
            "config: has -1 for max_window_layers; give",
        ),
        (
            {
                "model_type": "qwen2",
                "architectures": [],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "config: has ['full_attention'] for layer_types; give one of",
        ),
        (
            {"architectures": ["LlamaForTokenClassification"], "num_labels": 3, "id2label": {0: "a"}},
            "config: has {0: 'a'} for id2label and 3 for num_labels; give one name for each class",
        ),
    ],
)
def test_wrong_configs(change, message):
    config = {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"], **change}
    with pytest.raises(r.errors.ArgumentError) as found:
        cost({key: value for key, value in config.items() if value is not None}, 5)
    assert str(found.value).startswith(message)


@pytest.mark.parametrize(
    "kind", ["GPT2DoubleHeadsModel", "BertLMHeadModel", "BertForPreTraining", "DistilBertForMultipleChoice"]
)
def test_heads_without_a_closed_form(kind):
    made = getattr(transformers, kind).config_class
    with pytest.raises(
        r.errors.ArgumentError,
        match=rf"^config: is of a {kind}, which has no closed form as a \w+; build the model",
    ):
        cost({**made().to_dict(), "architectures": [kind]}, 5)


def test_one_class_may_be_named_without_a_list():
    config = {**COMMON, "model_type": "llama"}
    named = [
        cost({**config, "architectures": name}, 5)
        for name in ("LlamaForCausalLM", ["LlamaForCausalLM"], "LlamaModel", None)
    ]
    assert named[0] == named[1] != named[2] == named[3]


@pytest.mark.parametrize(
    ("fields", "labels"), [({}, 2), ({"num_labels": 7}, 7), ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3)]
)
def test_labels(fields, labels):
    config = {**COMMON, "model_type": "llama"}
    classifier = cost({**config, "architectures": ["LlamaForSequenceClassification"], **fields}, TOKENS)
    assert classifier.part("head").parameters == 32 * labels
    assert classifier.forward - cost(config, TOKENS).forward == 2 * TOKENS * 32 * labels


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 32.0}, "width: is 32.0; give a positive whole number"),
        ({"layers": True}, "layers: is True; give a positive whole number"),
        ({"gated": "false"}, "gated: is 'false'; give True or False"),
        ({"windowed": 1}, "windowed: is 1 for 2 layers and the window None; give a window"),
        ({"window": 4, "windowed": 3}, "windowed: is 3 for 2 layers and the window 4; give a window"),
    ],
)
def test_wrong_architectures(fields, message):
    with pytest.raises(r.errors.ArgumentError) as found:
        Architecture(**{"width": 32, "layers": 2, "heads": 4, "hidden": 48, **fields})
    assert str(found.value).startswith(message)


def test_configs_and_paths(tmp_path):
    """A config of transformers is a config, and so is the file that it is kept in."""
    import json

    config = transformers.LlamaConfig(
        num_hidden_layers=2, vocab_size=100, hidden_size=32, intermediate_size=64
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    whole = str(cost(config.to_dict(), 16))
    for subject in (config, tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert str(cost(subject, 16)) == whole


@pytest.mark.parametrize("subject", [3, [], object(), "nowhere"])
def test_what_has_no_cost_is_said(subject):
    with pytest.raises(r.errors.ArgumentError, match="subject: "):
        cost(subject, 16)
