"""Recipes: what they refuse, and the learning rate at each update."""

import math

import pytest
import torch
from torch import nn

from regard.errors import ArgumentError
from regard.training import Recipe, building
from regard.training.building import build, weight_count
from regard.training.optimizer import optimizer_of, restore, tensors_of


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"steps": 0}, "--steps"),
        ({"batch": -1}, "--batch"),
        ({"every": 0}, "--every"),
        ({"heads": 3}, "--heads"),
        ({"width": 12, "heads": 4}, "--heads"),
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"learning_rate": math.nan}, "--learning-rate"),
        ({"learning_rate": math.inf}, "--learning-rate"),
        ({"learning_rate": 1e38}, "--learning-rate"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**31}, "--seed"),
    ],
)
def test_bad_options_are_named(options, argument):
    with pytest.raises(ArgumentError, match=f"^{argument}: is "):
        Recipe(**options)


def test_the_rate_rises_and_falls_along_a_cosine():
    recipe = Recipe(steps=1000, learning_rate=2.0)
    assert recipe.rate(0) == pytest.approx(0.02)
    assert recipe.rate(99) == pytest.approx(2.0)
    assert recipe.rate(550) == pytest.approx(1.1)  # half way down from 2 to 0.2
    assert recipe.rate(1000) == pytest.approx(0.2)
    falling = [recipe.rate(step) for step in range(100, 1000)]
    assert falling == sorted(falling, reverse=True)
    assert Recipe(steps=1).rate(0) == Recipe().learning_rate


def test_checkpoints_are_due_at_multiples_and_at_the_end():
    assert [step for step in range(12) if Recipe(steps=11, every=4).due(step)] == [0, 4, 8, 11]


def test_other_options_are_refused():
    recipe = Recipe(width=64)
    recipe.agrees({"width": 64, "seed": None})
    with pytest.raises(ArgumentError, match=r"^--width: is 32, and the training in this directory has 64"):
        recipe.agrees({"width": 32})


def test_an_optimizer_comes_back_bit_for_bit():
    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.rand(5, 3)).square().sum().backward()
        optimizer.step()

    recipe = Recipe()
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = optimizer_of(model, recipe)
    for _ in range(3):
        step(model, optimizer)
    kept = {name: tensor.clone() for name, tensor in tensors_of(model, optimizer).items()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    step(model, optimizer)

    torch.manual_seed(99)
    other = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    other.load_state_dict(weights)
    again = optimizer_of(other, recipe)
    restore(other, again, kept)
    step(other, again)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    "sizes", [{"width": 16, "layers": 1, "heads": 2}, {"width": 24, "layers": 3, "heads": 3}]
)
def test_weights_are_counted_before_they_are_made(sizes):
    recipe = Recipe(**sizes)
    assert sum(weight.numel() for weight in build(recipe, 7).parameters()) == weight_count(recipe, 7)


def test_an_allocation_that_fails_names_the_width(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")

    monkeypatch.setattr(building, "_model", fail)
    with pytest.raises(ArgumentError, match=r"^--width: is 128, and training takes at least 0\.0 GiB"):
        build(Recipe(), 7)


def test_matrices_decay_and_biases_do_not():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    groups = optimizer_of(model, Recipe()).param_groups
    assert [(group["weight_decay"], sorted(p.ndim for p in group["params"])) for group in groups] == [
        (0.1, [2]),
        (0.0, [1, 1, 1]),
    ]
