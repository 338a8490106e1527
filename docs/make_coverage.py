"""Write docs/coverage.md: whether the attention of architectures is declared or observed.

python docs/make_coverage.py             the types that most models are of
python docs/make_coverage.py TYPE ...    these alone
python docs/make_coverage.py --all       every type of the installed transformers (about ten minutes)
python docs/make_coverage.py --missing   those that the page does not have: goes on where --all was stopped
"""

from __future__ import annotations

import multiprocessing
import re
import resource
import signal
import sys
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from regard._files import write_text

PAGE, WITHOUT = Path(__file__).with_name("coverage.md"), "## Without attention"

PATIENCE = 120
"""CPU seconds that one architecture may take."""
ROOM = 8
"""GiB that it may take: some configs have sizes that nothing here makes small."""
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
audited on the fullest input that was found for them, of text, pictures, films and sound:
`python docs/make_coverage.py --all` writes this page. *declared*: each attention layer is a declaration,
checked against the module, with weights and certificates; *observed*: each is measured as it was seen to
compute, and the reason says which piece was not understood; *part*: some of it is neither, as where no input
that runs reaches a module, or attention is no softmax of scores. What this command could not build or run is
at the end.

{counts}

| type | level | why no better |
|---|---|---|
"""


def main(kinds: list[str]) -> None:
    """Audit each; its row is on the page at once, and the others stay."""
    import transformers

    from tests.audits import architectures

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for kind in ("bert", "vit"):  # loads what all types need before processes are made, so that each need not
        architectures.coverage_of(kind)
    known = _read(PAGE.read_text())
    every = architectures.kinds() if {*kinds} & {"--all", "--missing"} else kinds or NAMED.split()
    asked = [kind for kind in every if kinds != ["--missing"] or kind not in known]
    for number, kind in enumerate(asked, 1):
        known[kind] = _one(kind)
        print(f"{number} of {len(asked)}: {kind}", *known[kind], flush=True)
        write_text(PAGE, _page(known, transformers.__version__))


def _read(page: str) -> dict[str, tuple[str, str]]:
    """The rows that a page has."""
    rows = re.findall(r"^\| (\S+) \| (declared|observed|part) \| (.*) \|$", page, re.MULTILINE)
    rest = re.findall(r"^- (\S+): (.*)$", page, re.MULTILINE)
    without = page.partition(WITHOUT)[2].partition("##")[0].strip()
    return (
        {kind: (level, why.strip()) for kind, level, why in rows}
        | {kind: ("none", "") for kind in without.split(", ") if kind}
        | {kind: ("not run", why) for kind, why in rest}
    )


def _one(kind: str) -> tuple[str, str]:
    """In a process of its own, which may run out of time and memory and take nothing with it."""
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_judge, args=(kind, there))
    child.start()
    there.close()
    try:
        level, why = here.recv()
    except EOFError:
        level, why = "not run", f"its process ended with status {child.exitcode}"
    child.join()
    return level, why


def _judge(kind: str, answer: Connection) -> None:
    from tests.audits.architectures import CannotRun, coverage_of

    resource.setrlimit(resource.RLIMIT_AS, (ROOM << 30, ROOM << 30))
    signal.signal(signal.SIGPROF, _slow)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    try:
        answer.send(coverage_of(kind))
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        answer.send(
            ("not run", first if isinstance(error, CannotRun) else f"{type(error).__name__}: {first}")
        )


def _slow(*_: Any) -> None:
    raise TimeoutError(f"more than {PATIENCE} CPU seconds")


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
    parts += [f"{WITHOUT}\n\n{without}", "## Not built or not run here\n\n" + "\n".join(rest)]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    """One cell of a table, from a text or from such a cell."""
    plain = text.replace("\\|", "|").replace("&lt;", "<").replace("\n", " ")[:160]
    return plain.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main(sys.argv[1:])
