"""regard decide: the shipped classifier, models of transformers, the page and the command."""

import json
import math
import random
from dataclasses import asdict, replace
from string import ascii_lowercase

import pytest
import torch
from typer.testing import CliRunner

import regard as r
from regard.cli.application import application
from regard.decisions import Typos, answers, loaded_on, run_pairs, shipped, shipped_on, try_typos
from regard.decisions.budget import Spent, blocks, budget
from regard.decisions.depth_chart import depth_chart
from regard.decisions.page import html
from regard.decisions.reviews import is_kept_back, sentences
from regard.decisions.typos import misspellings, typos
from regard.decisions.word_answers import Answers, WordAnswer, percent, shown_attack, shown_proved
from regard.errors import ArgumentError

SENTENCE = "the soup was dull ."


@pytest.fixture(scope="module")
def found():
    return answers(shipped_on(SENTENCE), resolution=1.5)


def test_the_shipped_classifier_knows_what_it_was_not_taught():
    model = shipped.load()
    right = [
        int(model([shipped.words_of(text)])[0].argmax()) == label
        for text, label in sentences(200, 5, test=True)
    ]
    assert sum(right) / len(right) > 0.94
    assert shipped.WEIGHTS.stat().st_size < 300_000


def test_kept_back_pairs_are_in_no_training_sentence():
    kept = [word for word in ("dull", "good", "weak", "fresh") for _ in range(1) if is_kept_back("was", word)]
    train = {text for text, _ in sentences(3000, 1, test=False)}
    for word in kept:
        assert not any(text.endswith(f"was {word}") and "nothing" not in text for text in train)


def test_typos_are_one_letter_away():
    found = typos("cat")
    assert "cat" not in found
    assert {"at", "act", "cats", "bat", "caat"} <= set(found)
    assert len(found) == len(set(found)) == 3 + (26 * 4 - 3) + 25 * 3 + 2
    assert typos("!") == typos("a1") == []
    assert typos("cat", "я")[-1] == "яcat"


def test_typos_are_in_the_case_of_the_word():
    small = typos("cat")
    assert typos("CAT") == sorted(one.upper() for one in small)
    assert typos("Cat") == sorted(one.capitalize() for one in small)
    assert "iPhonee" in typos("iPhone")
    assert not {"iphone", "cat"} & {one.lower() for one in [*typos("iPhone"), *typos("Cat")]}
    assert set("".join(misspellings("мир at", [(0, 3), (4, 6)])[0])) <= set("мирat")


def test_proved_is_below_the_attack_and_typos_are_run(found):
    assert found.label == "negative"
    assert found.margin > 0
    for one in found.words:
        assert 0 < one.proved < one.attack
        assert one.proved < one.distance
    model = shipped.load()
    assert [one.word for one in found.typos] == ["the", "soup", "was", "dull"]
    for place, one in enumerate(found.typos):
        words = shipped.words_of(SENTENCE)
        labels = {}
        for typo in typos(one.word):
            words[place] = typo
            labels[typo] = shipped_label(model, words)
        assert one.count == len(labels)
        assert one.changed == sum(label != "negative" for label in labels.values())
        assert all(labels[typo] == label != "negative" for typo, label in one.examples)
    count, changed = sum(one.count for one in found.typos), sum(one.changed for one in found.typos)
    assert f"{changed} of {count} one-letter typos change" in found.sentences()[0]


def shipped_label(model, words):
    return ("negative", "positive")[int(model([words])[0].argmax())]


def test_random_moves_within_a_proved_radius_change_nothing(found):
    asked, generator = shipped_on(SENTENCE), torch.Generator().manual_seed(0)
    for one in found.words:
        moves = torch.randn(64, asked.x.shape[-1], generator=generator, dtype=torch.float64)
        moved = asked.x.repeat(64, 1, 1)
        moved[:, one.place] += moves / moves.norm(dim=-1, keepdim=True) * one.proved * one.length
        logits = asked.readout(asked.model(moved.float()).double()).squeeze(1)
        assert (logits.argmax(-1) == 0).all()


def test_the_depth_curve_has_a_bar_for_each_block(found):
    assert [one.block for one in found.spent] == [0, 1, 2]
    assert all(one.linear > 0 and 0 < one.share < 1 for one in found.spent)
    asked = shipped_on(SENTENCE)
    assert len(blocks(r.declare.one(asked.model))) == 3
    far = budget(asked.model, asked.x, r.one_token(asked.x, 1, 100.0))
    assert far == []  # nothing is left of the derivative, and nothing is said of it


def test_the_chart_of_the_depth_curve_stands_on_its_numbers(found):
    """Heights are in proportion, the ticks are round, and nothing is drawn of nothing."""
    chart = depth_chart(found.spent)
    zero = chart.ticks[0].y
    assert (chart.ticks[0].text, zero) == ("0", 216.0)
    per_tick = (zero - chart.ticks[1].y) / float(chart.ticks[1].text)
    for one, point in zip(found.spent, chart.points, strict=True):
        assert zero - point.linear == pytest.approx(per_tick * one.linear)
        assert zero - point.whole == pytest.approx(per_tick * (one.linear + one.rest))
        assert f"block {one.block + 1}:" in point.said
    assert chart.ticks[-1].y == pytest.approx(30.0)
    assert chart.ticks[-1].y <= min(point.whole for point in chart.points)
    assert [point.x for point in chart.points] == sorted({point.x for point in chart.points})
    assert len(chart.between.split()) == 2 * len(chart.points)
    assert depth_chart([]) is None
    assert depth_chart([Spent(0, math.inf, 1.0)]) is None
    assert len(depth_chart([Spent(0, 0.3, 0.1)]).points) == 1


def test_the_page_says_it_and_runs_no_text(found):
    page = html(found, "regard decide --text '<script>'")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    places = [page.index(sentence) for sentence in found.sentences()]
    assert places == sorted(places)
    assert (
        places[0] < page.index("Run. Below each word") < page.index("Small moves of one vector") < places[1]
    )
    assert "<title>Could a typo change this answer?</title>" in page
    for one in found.words:
        assert f"<bdi>{one.word}</bdi>" in page
        assert f"<bdi>{one.nearest}</bdi>" in page
    assert "Where the room is used up" in page
    assert page.count("<polyline") == 2


def test_proofs_are_rounded_down_and_attacks_up():
    for value in (0.0123456, 1e-5, 0.5, 0.99999, 3.2e-7, 1.0, 8.09858):
        low, high = (float(percent(value, up).split()[0]) for up in (False, True))
        assert 0.99 * 100 * value <= low <= 100 * value <= high <= 1.01 * 100 * value
    assert percent(0.0) == "0 %"
    assert percent(73.2) == "7,320 %"
    assert percent(0.5, up=True) == percent(0.5) == "50 %"


def test_where_nothing_is_proved_nothing_is_called_so():
    told = "the embedding may lose nine tenths of its length; use a smaller radius"
    words = [WordAnswer(1, "warm", 2.0, -1.0, 0.9961101, told), WordAnswer(2, "film", 2.0, 0.5, 0.98)]
    found = Answers("embedding", "a model", "warm film", "", 0.0, None, words, radius=0.5)
    (said,) = found.sentences()
    assert "Nothing is proved about the cosine to the original when the vector of “warm” moves" in said
    assert told in said
    assert "Proved" not in said
    assert [shown_proved(found, one) for one in words] == ["open", "0.500000"]
    assert shown_attack(found, words[0]) == "0.996111"
    page = html(found)
    assert "why nothing is proved" in page
    assert "one-letter typos change" not in page


def test_the_first_sentence_promises_no_more_than_was_run():
    def said(kind, *typos):
        return Answers(kind, "a model", "a film", "good", 1.0, list(typos), []).sentences()

    film = Typos("film", 2, 233, 0, [])
    assert said("classes", film) == ["None of 233 one-letter typos changes the answer “good”."]
    one = replace(film, changed=1, examples=[("fblm", "bad")])
    assert said("classes", one) == ["Yes: 1 of 233 one-letter typos changes the answer “good”."]
    assert said("next token", replace(one, changed=2)) == [
        "Yes: 2 of 233 one-letter typos change the next token “good”."
    ]
    near = replace(film, examples=[("fim", 0.93)])
    (told,) = said("embedding", near)
    assert told == (
        "None of 233 one-letter typos takes the cosine to the original below 0.9; "
        "the lowest is 0.930, with “fim” for “film”."
    )
    assert said("classes") == ["No typo was run: no word of the text consists of letters alone."]


def test_a_small_move_is_never_called_a_word():
    """A proof about 0.1 % of a vector is second, and says how far away the next word is."""
    words = [WordAnswer(1, "warm", 2.0, 0.99999, 0.999991, nearest="hot", distance=0.98)]
    typos = [Typos("warm", 0, 4, 4, [("warn", 0.3)])]
    found = Answers("embedding", "a model", "warm", "", 0.0, typos, words)
    run, proved = found.sentences()
    assert run.startswith("Yes: 4 of 4 one-letter typos take the cosine to the original below 0.9")
    assert "if the vector of one token moves by at most 0.1 % of its length" in proved
    assert "This does not cover typos: the nearest other word, “hot” for “warm”, is a move of 98 %" in proved
    page = html(found)
    assert "Could one word" not in page
    assert "<title>Could a typo change this embedding?</title>" in page
    assert page.index(run) < page.index("Proved:")


def test_the_command(tmp_path):
    ran = CliRunner().invoke(
        application(),
        ["decide", "--text", "we loved it", "--resolution", "2", "--out", str(tmp_path / "out")],
    )
    assert ran.exit_code == 0, ran.output
    said = ran.output.replace("\n", " ")
    places = [said.index(part) for part in ("Could a typo", "one-letter typos", "Proved:", "nearest other")]
    assert places == sorted(places)
    assert "loved" in ran.output
    written = json.loads((tmp_path / "out" / "decide.json").read_text())
    assert written["kind"] == "classes"
    assert len(written["words"]) == 3
    assert (tmp_path / "out" / "decide.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--radius", "0"], "--radius"),
        (["--resolution", "1"], "--resolution"),
        (["some-model"], "--text"),
        (["--text", "…"], "no word"),
        (
            ["--text", "./corpus.txt"],
            "the name of a file; give the texts in it with --text-file ./c",
        ),
        (
            ["--text", "a film", "--text", "a meal"],
            "--text: is 2 texts, and typos are run of one; give one text",
        ),
        (["--level", "1.5"], "--level"),
        (["--text", "word " * 40], "40 words"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    ran = CliRunner().invoke(application(), ["decide", *arguments, "--json"])
    assert isinstance(ran.exception, ArgumentError)
    assert words in str(ran.exception)


WORDS = ("a", "warm", "film", "cold")


def tiny(tmp_path, kind, letters=False, **options):
    """A tiny model of transformers in a directory, with a tokenizer of a few words, or of letters."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", *(ascii_lowercase if letters else WORDS)]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if letters:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Whitespace(), pre_tokenizers.Split("", "isolated")]
        )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    ).save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(
        getattr(
            transformers,
            kind[
                : kind.index("For")
                if "For" in kind
                else kind.index("LM")
                if "LM" in kind
                else kind.index("Model")
            ]
            + "Config",
        )(vocab_size=len(words), **options)
    )
    model.save_pretrained(tmp_path)
    return str(tmp_path)


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SMALL = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("BertForSequenceClassification", SIZES, "classes"),
        ("RobertaForSequenceClassification", {**SIZES, "pad_token_id": 3}, "classes"),
        (
            "DistilBertForSequenceClassification",
            {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
            "classes",
        ),
        ("GPT2LMHeadModel", SMALL, "next token"),
        ("BertModel", SIZES, "embedding"),
    ],
)
def test_models_of_transformers(tmp_path, kind, options, says):
    asked = loaded_on(tiny(tmp_path, kind, **options), "a warm film")
    assert asked.kind == says
    place = asked.moving[1]
    if says == "embedding":
        found = r.certified_cosine(asked.model, asked.x, r.one_token(asked.x, place, 0.01))
        assert 0.9 < found.cosine <= found.attack.value
    else:
        found = r.decide(asked.model, asked.x, r.one_token(asked.x, place, 1e-4))
        assert found.holds is True
        assert found.least_margin <= found.attack.value + 1e-6  # which is in float32


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("BertForSequenceClassification", SIZES),
        ("GPT2LMHeadModel", {**SMALL, "initializer_range": 0.5}),
        ("BertModel", {**SIZES, "initializer_range": 0.5}),
    ],
)
def test_typos_are_run_in_the_measure_of_the_model(tmp_path, kind, options):
    """The same as running each text alone, with transformers and nothing else."""
    import transformers

    directory, text, level = tiny(tmp_path, kind, letters=True, **options), "on it", 0.8
    found = try_typos(loaded_on(directory, text), level=level)
    model = getattr(transformers, kind).from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def answer(words):
        with torch.no_grad():
            out = model(torch.tensor([tokenizer(words)["input_ids"]]))
        if kind == "BertModel":
            return out.last_hidden_state[0].mean(0)
        return (out.logits[0, -1] if kind == "GPT2LMHeadModel" else out.logits[0]).argmax()

    def changes(words):
        if kind == "BertModel":
            return bool(torch.cosine_similarity(answer(words), answer(text), dim=0) < level)
        return bool(answer(words) != answer(text))

    for one, start, end in zip(found.typos, (0, 3), (2, 5), strict=True):
        others = [text[:start] + typo + text[end:] for typo in typos(one.word)]
        assert one.changed == sum(map(changes, others))
        assert all(changes(text[:start] + typo + text[end:]) for typo, _ in one.examples[: one.changed])
    total = sum(one.changed for one in found.typos)
    assert f"{total} of {2 * 129} one-letter typos" in found.sentences()[0] or total == 0
    if kind == "BertModel":
        typo, lowest = min((one.examples[0] for one in found.typos), key=lambda pair: pair[1])
        assert f"the lowest is {lowest:.3f}, with “{typo}”" in found.sentences()[0]
    if kind != "BertForSequenceClassification":
        assert 0 < total < 2 * 129


def test_the_nearest_other_word_is_that_of_the_embeddings(tmp_path):
    asked = loaded_on(tiny(tmp_path, "BertModel", **SIZES), "a warm film")
    place = asked.moving[1]
    embed = asked.model.model.embeddings.requires_grad_(False)
    own = embed(torch.tensor([[4, 5, 6]]))[0, 1]
    far = {word: embed(torch.tensor([[4, 4 + k, 6]]))[0, 1] - own for k, word in enumerate(WORDS)}
    far = {word: float(move.norm() / own.norm()) for word, move in far.items() if word != "warm"}
    word, distance = asked.nearest(place)
    assert word == min(far, key=far.get)
    assert distance == pytest.approx(far[word], rel=1e-5)


def test_the_most_probable_next_tokens_stay(tmp_path):
    """A set of classes: each of them leads all others."""
    asked = loaded_on(tiny(tmp_path, "GPT2LMHeadModel", **SMALL), "a warm film")
    from regard.proofs.classifier import classifier

    logits = classifier(asked.model, asked.x).run(asked.x)
    top = logits.topk(3, -1).indices[0].tolist() if logits.ndim > 1 else logits.topk(3).indices.tolist()
    found = r.decide(asked.model, asked.x, r.one_token(asked.x, asked.moving[-1], 1e-5), label=top)
    assert found.holds is True
    far = r.decide(asked.model, asked.x, r.one_token(asked.x, asked.moving[-1], 3.0), label=top)
    assert far.holds is not True


def test_typos_are_run_by_a_model_of_which_nothing_is_proved(tmp_path):
    sizes = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 16}
    asked = loaded_on(tiny(tmp_path, "LlamaForCausalLM", letters=True, **sizes), "on it")
    found = answers(asked)
    ran, proved = found.sentences()
    assert "of 258 one-letter typos change" in ran
    assert proved.startswith("Nothing is proved: the model is a LlamaForCausalLM, whose layers are not read")
    assert proved in html(found)


def test_a_model_that_computes_no_numbers_is_refused(tmp_path):
    """A cosine of NaN is below no level: it must not count as a typo that changes nothing."""
    asked = loaded_on(tiny(tmp_path, "BertModel", **SIZES), "a warm film")
    torch.nn.init.constant_(asked.model.model.encoder.layer[1].output.dense.bias, torch.nan)
    with pytest.raises(ArgumentError, match="computes NaN"):
        try_typos(asked)


def test_a_text_that_is_cut_is_said_to_be(tmp_path):
    directory = tiny(tmp_path, "BertModel", **SIZES, max_position_embeddings=4)
    asked = loaded_on(directory, "a warm")
    assert asked.cuts("a warm film cold a warm")
    assert not asked.cuts("a warm")


def test_a_family_that_is_not_read_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="has an encoder and a decoder"):
        loaded_on(
            tiny(tmp_path, "T5Model", d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2), "a warm film"
        )


def test_a_model_that_computes_something_else_is_refused(tmp_path):
    from regard.audits.checkpoint import find
    from regard.audits.load import load_head
    from regard.decisions.networks import network_of

    model = load_head(find(tiny(tmp_path, "BertForSequenceClassification", **SIZES)))
    model.bert.encoder.layer[1].register_forward_hook(lambda module, given, out: 1.5 * out)
    with pytest.raises(ArgumentError, match="differ"):
        network_of(model, {"input_ids": torch.tensor([[1, 4, 5, 2]])})


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch, found):
    """What was written down is not asked again, for the same question alone."""
    from regard.audits.store import Store
    from regard.decisions import word_answers

    asked = shipped_on(SENTENCE)
    first = Store(tmp_path / "units", {"MODEL": asked.identity()})
    for one in found.words[:2]:
        first.put(f"word-{one.place}", asdict(one))
    for one in found.typos[:3]:
        first.put(f"typos-{one.start}", asdict(one))
    calls, runs, bars = [], [], []
    again = replace(asked, run=lambda texts: runs.extend(texts) or shipped_on(SENTENCE).run(texts))
    monkeypatch.setattr(
        word_answers,
        "_word",
        lambda a, place, *more: calls.append(place) or replace(found.words[-1], place=place),
    )
    store = Store(tmp_path / "units", {"MODEL": again.identity()}, resume=True)
    again = answers(again, lambda *shown: bars.append(shown), resolution=1.5, store=store)
    assert calls == asked.moving[2:]
    assert again.words[:2] == found.words[:2]
    assert again.typos == found.typos
    assert len(runs) == found.typos[3].count + 1
    assert bars[0] == ("typos of “dull”", 0, found.typos[3].count)
    assert ("typos of “dull”", found.typos[3].count, found.typos[3].count) in bars
    assert shipped_on("the soup was good .").identity() != asked.identity()


def test_what_has_no_number_is_kept_as_it_is(monkeypatch, found):
    """A result passes through JSON, which has no infinity and no NaN."""
    from regard.decisions import word_answers

    open_ = replace(found.words[0], attack=math.inf, distance=math.nan)
    monkeypatch.setattr(word_answers, "_word", lambda a, place, *more: replace(open_, place=place))
    again = answers(shipped_on("good"), resolution=1.5)
    assert again.words[0].attack == math.inf
    assert math.isnan(again.words[0].distance)


def test_a_command_that_is_stopped_says_what_it_kept(tmp_path, monkeypatch, found):
    from regard.decisions import word_answers

    def stop(asked, place, *more):
        if place == asked.moving[1]:
            raise KeyboardInterrupt
        return replace(found.words[0], place=place)

    command = ["decide", "--text", SENTENCE, "--out", str(tmp_path / "out")]
    monkeypatch.setattr(word_answers, "_word", stop)
    ran = CliRunner().invoke(application(), command)
    assert ran.exit_code == 130
    assert "stopped; 5 results kept: the same command with --resume continues" in " ".join(ran.output.split())
    assert "Yes: " in ran.output  # what was run is shown before the proofs begin
    ran = CliRunner().invoke(application(), [*command, "--resume", "--level", "0.5"])
    assert "(changed: --level)" in str(ran.exception)
    places = []
    monkeypatch.setattr(
        word_answers,
        "_word",
        lambda a, place, *more: places.append(place) or replace(found.words[0], place=place),
    )
    ran = CliRunner().invoke(application(), [*command, "--resume"])
    assert (ran.exit_code, places) == (0, [2, 3, 4])
    assert not (tmp_path / "out" / ".units").exists()


def test_pairs_are_run_in_the_measure_of_the_model(tmp_path, monkeypatch):
    """The same as running both texts alone; in the table, in JSON and on the page."""
    monkeypatch.chdir(tmp_path)
    texts = [("the soup was good", "the soup was dull"), ("we loved it", "we <b> loved it")]
    (tmp_path / "pairs.tsv").write_text("".join(f"{one}\t{other}\n" for one, other in texts))
    ran = CliRunner().invoke(application(), ["decide", "--pairs", "pairs.tsv"])
    assert ran.exit_code == 0, ran.output
    assert "1 of 2 pairs changes the answer." in ran.output
    assert "positive → negative" in ran.output
    data = json.loads((tmp_path / "decide" / "decide.json").read_text())
    assert [one["differs"] for one in data["pairs"]] == [True, False]
    assert (data["pairs"][0]["before"], data["pairs"][0]["after"]) == ("positive", "negative")
    assert (data["typos"], data["words"], data["text"]) == (None, [], "")
    page = (tmp_path / "decide" / "decide.html").read_text()
    assert "<h1><bdi>2 pairs of texts</bdi></h1>" in page
    assert "we &lt;b&gt; loved it" in page
    asked = ("--pairs", "pairs.tsv", "--text", "we loved it", "--resolution", "4", "--json")
    data = json.loads(CliRunner().invoke(application(), ["decide", *asked]).stdout)
    assert len(data["pairs"]) == 2
    assert len(data["typos"]) == len(data["words"]) == 3
    assert data == json.loads((tmp_path / "decide" / "decide.json").read_text())


def test_pairs_of_an_embedding_are_cosines(tmp_path):
    import transformers

    directory = tiny(tmp_path, "BertModel", letters=True, **{**SIZES, "initializer_range": 0.5})
    (one,) = run_pairs(loaded_on(directory, "on it"), [("on it", "no its")], level=0.8)
    model = transformers.BertModel.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def mean(text):
        with torch.no_grad():
            return model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].mean(0)

    assert one.cosine == pytest.approx(
        float(torch.cosine_similarity(mean("on it"), mean("no its"), dim=0)), abs=1e-5
    )
    assert one.differs == (one.cosine < 0.8)
    assert one.shown == f"cosine {one.cosine:.3f}"


def test_a_page_of_another_model_is_not_overwritten(tmp_path):
    """The first has the name of the second in another place."""
    command = ["--text", "a warm", "--resolution", "100", "--out", str(tmp_path / "out")]
    first, second = (tiny(tmp_path / name / "model", "BertModel", **SIZES) for name in ("a", "b"))
    assert CliRunner().invoke(application(), ["decide", first, *command]).exit_code == 0
    before = (tmp_path / "out" / "decide.json").read_bytes()
    ran = CliRunner().invoke(application(), ["decide", second, *command])
    assert "holds the report of another model (model); give another directory" in str(ran.exception)
    assert (tmp_path / "out" / "decide.json").read_bytes() == before
    assert CliRunner().invoke(application(), ["decide", first, *command]).exit_code == 0


def test_random_is_not_used_by_the_grammar():
    random.seed(0)
    first = list(sentences(5, 3, test=False))
    random.seed(1)
    assert first == list(sentences(5, 3, test=False))
