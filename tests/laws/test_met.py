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
