"""Write docs/coverage.md: whether the attention of architectures is declared or observed.

python docs/make_coverage.py            the types that are named here
python docs/make_coverage.py --all      every type that the installed transformers builds offline (an hour)
python docs/make_coverage.py TYPE ...   these alone, printed and not written
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

PATIENCE = 120
"""Seconds that one architecture may take."""
NAMED = """
bert roberta electra camembert ernie esm distilbert modernbert albert deberta deberta-v2 mpnet eurobert
nomic_bert longformer big_bird xlnet mobilebert roformer layoutlm gpt2 gpt_neox gpt_neo gptj gpt_bigcode
codegen opt bloom mpt falcon biogpt xglm llama mistral mixtral ministral arcee qwen2 qwen2_moe qwen3
qwen3_moe gemma gemma2 gemma3_text phi phi3 phimoe deepseek_v2 deepseek_v3 gpt_oss llama4_text smollm3
olmo olmo2 olmo3 olmoe granite granitemoe glm glm4 ernie4_5 cohere cohere2 starcoder2 stablelm nemotron
persimmon helium jamba seed_oss exaone4 t5 mt5 umt5 bart mbart marian pegasus m2m_100 blenderbot whisper
wav2vec2 hubert xlm-roberta vit deit clip siglip dinov2 dinov3_vit beit swin mamba falcon_mamba rwkv fnet
"""
"""The types that most models are of."""
HEAD = """# Which architectures the audit covers

Tiny configurations of model types of transformers {version}, built offline with random weights and
audited on one input: `python docs/make_coverage.py` writes this page, with `--all` for every type there
is. *declared*: each attention layer is a declaration, proved to be the module, with weights and
certificates; *observed*: each is measured as it was seen to compute, and the reason says which piece was
not understood; *part*: some of it is neither. What this command could not build or run is at the end.

{counts}

| type | level | why no better |
|---|---|---|
"""


def main(kinds: list[str]) -> None:
    """Audit each, and write the table unless some were named."""
    import transformers

    from tests.audits import architectures

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = {}
    written = kinds in ([], ["--all"])
    for kind in (architectures.kinds() if kinds else NAMED.split()) if written else kinds:
        found[kind] = _one(kind)
        print(kind, *found[kind], flush=True)
    if written:
        Path(__file__).with_name("coverage.md").write_text(_page(found, transformers.__version__))


def _one(kind: str) -> tuple[str, str]:
    from tests.audits.architectures import coverage_of

    signal.signal(signal.SIGALRM, _slow)
    signal.alarm(PATIENCE)
    try:
        return coverage_of(kind)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "not run", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        signal.alarm(0)


def _slow(*_: Any) -> None:
    raise TimeoutError(f"more than {PATIENCE} seconds")


def _page(found: dict[str, tuple[str, str]], version: str) -> str:
    counts = Counter(level for level, _ in found.values())
    ran = {kind: row for kind, row in found.items() if row[0] not in ("not run", "none")}
    lines = [f"| {kind} | {level} | {_cell(why)} |" for kind, (level, why) in sorted(ran.items())]
    without = ", ".join(kind for kind, row in sorted(found.items()) if row[0] == "none")
    rest = [f"- {kind}: {_cell(why)}" for kind, (level, why) in sorted(found.items()) if level == "not run"]
    total = f"{len(ran)} types with attention: " + ", ".join(
        f"{counts[level]} {level}" for level in ("declared", "observed", "part")
    )
    parts = [HEAD.format(version=version, counts=f"**{total}.**") + "\n".join(lines)]
    parts += [f"## Without attention\n\n{without}", "## Not built or not run here\n\n" + "\n".join(rest)]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")[:160]


if __name__ == "__main__":
    main(sys.argv[1:])
