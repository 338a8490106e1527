"""Laws: order counts where positions say so and nowhere else, and what is masked has no influence at all."""

import pytest
import torch

import regard as r
from regard.nn import (
    AlibiPositions,
    Decoder,
    Design,
    Embedding,
    Encoder,
    LanguageModel,
    MultiHeadAttention,
    NoPositions,
    SequenceToSequence,
    Sinusoidal,
    UnitVariance,
    shaped,
)
from tests.nn.modules import INSIDE, added, alive

D = torch.float64
WIDTH, HEADS, N, WORDS = 8, 2, 7, 11
PLAIN = Design(WIDTH, HEADS, initialization=UnitVariance())
UNORDERED = {
    "dot": PLAIN,
    "gaussian": PLAIN.replace(mechanism=r.Attention(r.Gaussian(bandwidth=2.0))),
    "entmax": PLAIN.replace(mechanism=r.Attention(r.Dot(), normalizer=r.Entmax(1.5))),
    "groups, post norm, gated": PLAIN.replace(kv_heads=1, norm_first=False, gated=True),
    "shaped": shaped(PLAIN),
}
ADDED = added(N)


@torch.no_grad()
@pytest.mark.parametrize("name", UNORDERED)
def test_without_positions_an_encoder_is_equivariant(name):
    encoder, x, order = (
        alive(Encoder(UNORDERED[name], 2)),
        torch.randn(2, N, WIDTH, dtype=D),
        torch.randperm(N),
    )
    found, wanted = encoder(x[:, order]), encoder(x)[:, order]
    assert float((found - wanted).abs().max()) < 1e-12 * max(1.0, float(wanted.abs().max()))
    assert float((encoder(x) - wanted).abs().max()) > 1e-2  # the permutation did something


@torch.no_grad()
@pytest.mark.parametrize("positions", INSIDE, ids=repr)
def test_positions_in_scores_break_it(positions):
    encoder, x, order = (
        alive(Encoder(PLAIN.replace(positions=positions), 2)),
        torch.randn(1, N, WIDTH, dtype=D),
        torch.arange(N).flip(0),
    )
    order[0], order[1] = order[1].clone(), order[0].clone()
    assert float((encoder(x[:, order]) - encoder(x)[:, order]).abs().max()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("positions", [NoPositions(), *ADDED], ids=repr)
def test_positions_in_embeddings_break_it(positions):
    design = PLAIN.replace(positions=positions)
    embedding, encoder = alive(Embedding(WORDS, design)), alive(Encoder(design, 2))
    ids, order = torch.randperm(WORDS)[None, :N], torch.randperm(N)
    gap = float((encoder(embedding(ids[:, order])) - encoder(embedding(ids))[:, order]).abs().max())
    assert gap > 1e-3 if positions in ADDED else gap < 1e-12 * 100


@torch.no_grad()
def test_sinusoidal_positions_are_the_formula():
    points = Embedding(WORDS, PLAIN.replace(positions=Sinusoidal(100.0))).double()
    ids = torch.zeros(1, 5, dtype=torch.long)
    added = (points(ids, 3) - points.weight[0] * WIDTH**0.5)[0]
    for place in range(5):
        for pair in range(WIDTH // 2):
            angle = torch.tensor((3 + place) * 100.0 ** (-2 * pair / WIDTH), dtype=D)
            torch.testing.assert_close(
                added[place, 2 * pair : 2 * pair + 2],
                torch.stack([angle.sin(), angle.cos()]),
                rtol=1e-12,
                atol=1e-12,
            )


@torch.no_grad()
@pytest.mark.parametrize("positions", INSIDE, ids=repr)
def test_positions_in_scores_see_differences_alone(positions):
    """A sequence that begins later has the same scores."""
    module = alive(PLAIN.replace(positions=positions).self_attention())
    potential, x = module.mechanism.value().potential, torch.randn(HEADS, N, WIDTH // HEADS, dtype=D)
    marks = torch.arange(N)
    torch.testing.assert_close(
        potential.scores(x, x, marks, marks),
        potential.scores(x, x, marks + 5, marks + 5),
        rtol=1e-10,
        atol=1e-10,
    )


def jacobian(run, x):
    """Blocks (n, d, n, d) of one sequence."""
    return torch.autograd.functional.jacobian(run, x)


@pytest.mark.parametrize("positions", [NoPositions(), *INSIDE], ids=repr)
@pytest.mark.parametrize("kind", ["plain", "shaped"])
def test_the_future_has_no_influence(positions, kind):
    design = PLAIN.replace(positions=positions)
    decoder = alive(Decoder(design if kind == "plain" else shaped(design), 2, cross=False))
    found = jacobian(lambda x: decoder(x), torch.randn(5, WIDTH, dtype=D))
    for i in range(5):
        for j in range(5):
            block = found[i, :, j]
            assert bool((block == 0).all()) if j > i else float(block.abs().max()) > 1e-4


HIDING = {
    "padding": r.Padding(torch.tensor(3)),
    "where": r.Where((torch.arange(5) < 3)[None]),
    "causal and padding": r.Causal() & r.Padding(torch.tensor(3)),
}


DESIGNS = {
    "dot": PLAIN,
    "gaussian": UNORDERED["gaussian"],
    "entmax": UNORDERED["entmax"],
    "shaped": shaped(PLAIN),
}


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("kind", DESIGNS)
def test_padding_has_no_influence(name, kind):
    encoder = alive(Encoder(DESIGNS[kind], 1 if kind == "entmax" else 2))
    found = jacobian(lambda x: encoder(x, support=HIDING[name]), torch.randn(5, WIDTH, dtype=D))
    assert bool((found[:3, :, 3:] == 0).all())
    assert float(found[2, :, :3].abs().amax((0, 2)).min()) > 1e-5


@torch.no_grad()
def test_padding_of_one_row_is_that_row_alone():
    """A sequence in a padded batch has the outputs it has alone, whatever the padding holds."""
    encoder, lengths = alive(Encoder(PLAIN.replace(positions=AlibiPositions()), 2)), [7, 4, 1]
    x = torch.randn(3, N, WIDTH, dtype=D)
    found = encoder(x, support=r.Padding(torch.tensor(lengths)[:, None]))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(found[row, :length], encoder(x[row, :length]), rtol=1e-12, atol=1e-12)
    for row, length in enumerate(lengths):
        x[row, length:] = 1e6 * torch.randn(N - length, WIDTH, dtype=D)
    again = encoder(x, support=r.Padding(torch.tensor(lengths)[:, None]))
    for row, length in enumerate(lengths):
        assert torch.equal(found[row, :length], again[row, :length])


def test_hidden_tokens_of_a_context_have_no_influence():
    decoder, x = alive(Decoder(PLAIN, 2)), torch.randn(3, WIDTH, dtype=D)
    hidden = r.Where((torch.arange(4) != 1)[None])
    found = jacobian(lambda y: decoder(x, y, context_support=hidden), torch.randn(4, WIDTH, dtype=D))
    assert bool((found[:, :, 1] == 0).all())
    assert float(found[:, :, [0, 2, 3]].abs().amax((0, 1, 3)).min()) > 1e-5


def test_a_source_that_is_padded_translates_as_it_does_alone():
    model = alive(SequenceToSequence(PLAIN.replace(positions=Sinusoidal()), WORDS, WORDS, 2))
    source, target = torch.randint(WORDS, (1, 6)), torch.randint(WORDS, (1, 4))
    padded = torch.cat([source, torch.randint(WORDS, (1, 3))], 1)
    found = model(padded, target, source_support=r.Padding(torch.tensor([[6]])))
    torch.testing.assert_close(found, model(source, target), rtol=1e-11, atol=1e-11)


def test_gradients_do_not_reach_what_is_hidden():
    model, ids = alive(LanguageModel(PLAIN, WORDS, 2)), torch.arange(N)[None]
    loss = model(ids, support=r.Padding(torch.tensor([[4]])))[0, :4].square().sum()
    points = torch.autograd.grad(loss, model.embedding.weight, retain_graph=True)[0]
    assert float(points.abs().max()) > 0
    embedded = model.embedding(ids).detach().requires_grad_()
    found = torch.autograd.grad(
        model.decoder(embedded, support=r.Padding(torch.tensor([[4]])))[0, :4].sum(), embedded
    )[0]
    assert bool((found[0, 4:] == 0).all())
    assert bool((found[0, :4].abs().amax(-1) > 0).all())


def test_attention_that_sees_nothing_is_its_bias():
    module = alive(MultiHeadAttention(WIDTH, HEADS))
    found = module(torch.randn(3, WIDTH, dtype=D), support=r.Padding(torch.tensor(0)))
    assert torch.equal(found, module.output.bias.expand(3, -1))
