"""A worked case: the irregularity of a decoder is not in its attention.

python examples/massive_activation.py

Builds a small Llama with random weights, and gives one MLP what trained decoders grow by themselves: a down
projection that writes a huge number into one coordinate of the first token. An audit of attention alone would
pass this model. The audit of the block and its parts names the layer, the branch, and the token that has
become a massive activation one layer later.
"""

from __future__ import annotations

import torch

import regard
from regard.audits.capture import capture
from regard.audits.checks import checks

LAYER = 2
IDS = torch.randint(3, 100, (1, 12), generator=torch.Generator().manual_seed(1))


def planted() -> torch.nn.Module:
    """A Llama of six layers whose third MLP is the culprit."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)  # initial weights are so small that every layer is nearly the identity
        down = model.layers[LAYER].mlp.down_proj
        hidden = capture(model, {"input_ids": IDS}, [f"layers.{LAYER}.mlp.down_proj"])[
            f"layers.{LAYER}.mlp.down_proj"
        ].arguments[0][0]
        down.weight[7] += 500 * torch.linalg.pinv(hidden)[:, 0]  # the first token fires, the others do not
    return model


def main() -> None:
    asked = [check for check in checks() if check.name in ("constants", "geometry", "depth")]
    report = regard.audit(planted(), [{"input_ids": IDS}], checks=asked, name="a decoder")
    print("layer  attention branch  MLP branch      block  largest/median token")
    for row in report.layers:
        names = ("attention_branch_constant", "mlp_branch_constant", "block_constant", "token_ratio")
        attention, mlp, block, ratio = (row.values[name] for name in names)
        print(f"{row.layer:5d} {attention:17.3g} {mlp:11.3g} {block:10.3g} {ratio:21.3g}")
    for finding in report.findings():
        print(f"{finding.level}: {finding.what} {finding.why} {finding.advice}")


if __name__ == "__main__":
    main()
