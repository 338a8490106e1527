"""regard audit: how regular is the attention of a trained model?"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from regard.audits.checkpoint import Checkpoint
    from regard.audits.checks import Check
    from regard.audits.run import Audit
    from regard.audits.streaming import StreamedAudit
    from regard.audits.weights import WeightAudit

    _Audit = Audit | StreamedAudit | WeightAudit

STOPPED = 130
UNREAD = (
    "the tokenizer does not know words: the included samples of the kind {} are taken instead of sentences"
)
"""The exit status of a process that was interrupted."""

HELP = """How regular is the attention of a trained model?

MODEL is a local directory (config.json with safetensors, or a pickle of tensors) or a hub id; without one,
all-MiniLM-L6-v2 is audited. Everything that is not an option is a model. One model is audited on texts. Two
or more are checkpoints of one training run, in their order: a series, by their weights alone. Code in a
checkpoint is never run.

A report is written to --out: report.html to read, report.json with every number, card.md for a model card
(a series: series.html and series.json). The summary goes to stdout, progress and errors to stderr.

\b
Examples
  regard audit                                            the demonstration model on the included sentences
  regard audit ./my-model --text corpus.txt               one text per line
  regard audit ./my-model --text "A text." --text "More." texts given here
  regard audit ./my-model --checks weights,rows           some questions only (regard checks lists them)
  regard audit ./my-model --quick                         a first look at one text, in seconds
  regard audit ./my-model --text long.txt --thorough      proofs on long texts: 512 tokens, some 2,048
  regard audit ./llama-7b --weights-only                  norms of heads; reads one layer at a time
  regard audit ./llama-7b --low-memory                    texts too, with one block in memory at a time
  regard audit ./big-model --out big --resume             continue after Ctrl-C, a crash or a reboot
  regard audit ./step-1000 ./step-2000 ./step-3000        how each head moves over training

\b
Exit status
  0 done   1 nothing could be measured   2 wrong arguments or files
  130 stopped by Ctrl-C, with a partial report
"""


def audit(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="Directories or hub ids.", show_default=False)
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT|FILE",
            help="A text, or a file with one text per line; may be repeated.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The directory for the report.")] = Path("audit-report"),
    checks: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Names of checks, separated by commas.", show_default="all"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: one text, and what takes seconds.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help="Prove on long texts too, and misspell all of them; takes hours."),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue where an interrupted audit stopped.")
    ] = False,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Read the weights of one layer at a time; no texts.")
    ] = False,
    low_memory: Annotated[
        bool | None,
        typer.Option(
            "--low-memory/--no-low-memory",
            help="Hold one block of the model at a time; checks that need all of them at once are not made.",
            show_default="where the model would fill the memory",
        ),
    ] = None,
    twin: Annotated[
        bool | None,
        typer.Option(
            "--twin/--no-twin",
            help="Measure the same architecture with random weights too, to compare with.",
            show_default="where the model is small",
        ),
    ] = None,
) -> None:
    """Check every argument before the work begins, then do it."""
    from regard._files import check_writable
    from regard.audits.load import device_of

    several = len(models or []) > 1
    alone = several or weights_only
    texts, asked = _texts(text or [], alone), _find_checks(checks, alone)
    if quick:
        texts, asked = texts[:1], _quickly(asked, alone)
    if twin and (alone or quick):
        what = "--quick, which is a first look" if quick else "--weights-only or a series, without inputs"
        raise ArgumentError("--twin", f"is given with {what}", "leave one of them out")
    if thorough and (alone or quick):
        what = "--quick, which is a first look" if quick else "--weights-only or a series, without inputs"
        raise ArgumentError("--thorough", f"is given with {what}", "leave one of them out")
    if several and resume:
        raise ArgumentError("--resume", "is given for a series, which takes seconds", "leave it out")
    if alone and low_memory is not None:
        raise ArgumentError(
            "--low-memory",
            "is given, and --weights-only and a series read one layer at a time anyway",
            "leave it out",
        )
    if importlib.util.find_spec("jinja2") is None:
        raise MissingExtraError("jinja2", "report")
    way = _Way(out, device_of(device), resume, weights_only, low_memory, False if quick else twin, thorough)
    check_writable(out)
    if several:
        _series(models or [], asked, way)
    else:
        _single(models[0] if models else None, texts, asked, way)


@dataclass(frozen=True)
class _Way:
    """How an audit is done, and where its report goes. low_memory, twin: None where that is to be found
    out.
    """

    out: Path
    device: str
    resume: bool
    weights_only: bool
    low_memory: bool | None
    twin: bool | None = False
    thorough: bool = False


def _texts(values: list[str], alone: bool) -> list[str]:
    """The texts that were given; none means those that come with the package, as the tokenizer knows them."""
    from regard.audits.inputs import texts_of

    if alone and values:
        raise ArgumentError(
            "--text",
            "is given, and --weights-only and a series read no texts",
            "leave it out, or audit one model with texts",
        )
    return texts_of(values)


def _find_checks(names: str | None, alone: bool) -> list[Check]:
    """The checks with these names, in the order of the report."""
    from regard.audits.checks import checks as known

    able = [check for check in known() if check.of_weights is not None or not alone]
    usual = [check.name for check in able if not check.named]
    wanted = usual if names is None else [name.strip() for name in names.split(",")]
    wrong = [name for name in wanted if name not in [check.name for check in able]]
    if wrong:
        what = "no check of weights alone" if alone else "no check"
        raise ArgumentError(
            "--checks",
            f"there is {what} named {wrong[0]!r}",
            f"choose from {', '.join(check.name for check in able)}",
        )
    return [check for check in able if check.name in wanted]


def _quickly(asked: list[Check], alone: bool) -> list[Check]:
    """The checks of a first look."""
    found = [look for check in asked for look in [check.quickly()] if look is not None]
    if alone or not found:
        what = "with --weights-only or a series" if alone else "with checks that have no quick form"
        raise ArgumentError("--quick", f"is given {what}", "leave one of them out")
    return found


def _single(model: str | None, texts: list[str], asked: list[Check], way: _Way) -> None:
    """Audit one model, from where an earlier run stopped if that is asked."""
    from regard.audits import page, terminal
    from regard.audits.store import Store

    run, subject = _run(model, texts, asked, way)
    run.store = Store(way.out / ".units", subject, resume=way.resume)
    stopped = _measure(run, way)
    report = run.report(stopped)
    terminal.show(report, page.save(report, way.out), terminal.output())
    if stopped:
        raise typer.Exit(STOPPED)
    run.store.remove()
    if not report.covered:
        raise typer.Exit(1)


def _run(model: str | None, texts: list[str], asked: list[Check], way: _Way) -> tuple[_Audit, dict[str, str]]:
    """An audit that is ready to measure, and what it is of."""
    from regard.audits.checkpoint import find
    from regard.audits.weights import WeightAudit

    with _status("loading the model"):
        checkpoint = find(model)
        if way.weights_only:
            return WeightAudit(checkpoint, checks=asked, device=way.device), _subject(
                checkpoint, texts, asked, way
            )
        way = replace(way, low_memory=_low_memory(checkpoint, way))
        if way.low_memory and way.twin:
            found = "is given for a model that is read block by block, and would hold all of its twin"
            raise ArgumentError("--twin", found, "leave it out, or give --no-low-memory")
        return _on_texts(checkpoint, texts, asked, way), _subject(checkpoint, texts, asked, way)


def _low_memory(checkpoint: Checkpoint, way: _Way) -> bool:
    """Whether to hold one block at a time: what was asked for, or what the machine has room for,
    which is said.
    """
    from regard.audits import terminal
    from regard.audits.streaming import exceeds_memory

    if way.low_memory is not None:
        return way.low_memory
    large = exceeds_memory(checkpoint)
    if large:
        terminal.say(terminal.messages(), terminal.BLOCKWISE)
    return large


def _on_texts(
    checkpoint: Checkpoint, texts: list[str], asked: list[Check], way: _Way
) -> Audit | StreamedAudit:
    from regard.audits import terminal
    from regard.audits.load import load_head, load_weights, tokenizer_of
    from regard.audits.run import Audit
    from regard.audits.samples import DOMAINS, known_samples
    from regard.audits.streaming import StreamedAudit
    from regard.audits.twin import SMALL

    run: Audit | StreamedAudit
    tokenizer = tokenizer_of(checkpoint)
    domain, known = ("", texts) if texts else known_samples(tokenizer)
    if way.low_memory:
        run = StreamedAudit(
            checkpoint,
            known,
            tokenizer=tokenizer,
            checks=asked,
            device=way.device,
            thorough=way.thorough,
        )
    else:
        answered = any(check.named for check in asked)  # an answer needs the head that the model has
        model = load_head(checkpoint).to(way.device) if answered else load_weights(checkpoint, way.device)
        small = sum(parameter.numel() for parameter in model.parameters()) <= SMALL
        run = Audit(
            model,
            known,
            tokenizer=tokenizer,
            checks=asked,
            name=checkpoint.name,
            twin=small if way.twin is None else way.twin,
            thorough=way.thorough,
        )
    if domain not in ("", DOMAINS[0]):
        terminal.say(terminal.messages(), UNREAD.format(domain))
    for item in run.inputs:
        if item.cut:
            terminal.say(
                terminal.messages(),
                f"text {item.index + 1} is longer than the model takes: cut to {len(item.tokens)} tokens",
            )
    return run


def _subject(checkpoint: Checkpoint, texts: list[str], asked: list[Check], way: _Way) -> dict[str, str]:
    """What results are of: they may be continued only where all of this is the same."""
    from importlib.metadata import version

    import torch

    from regard import __version__
    from regard.audits.store import fingerprint

    return {
        "MODEL": fingerprint(checkpoint.name, checkpoint.identity()),
        "--text": fingerprint(texts),
        "--checks": ",".join(check.name for check in asked),
        "--quick": str([check.of_site is check.quick_site for check in asked]),
        "--device": way.device,
        "--weights-only": str(way.weights_only),
        "--low-memory": str(way.low_memory),
        "--twin": str(way.twin),
        "--thorough": str(way.thorough),
        "versions": f"regard {__version__}, torch {torch.__version__}, transformers "
        f"{version('transformers')}",
    }


def _measure(run: _Audit, way: _Way) -> str:
    """Measure all there is; says why where that was interrupted.

    A model that turns out to be broken leaves no files.
    """
    from regard.audits import terminal

    sizes = [len(run.places), *(len(run.places) + 1 for _ in run.inputs)]
    sizes += [1 for _ in range(getattr(run, "twin", False))]
    try:
        with terminal.Bars(terminal.messages(), sizes) as bars:
            run.measure(bars)
    except KeyboardInterrupt:
        return (
            f"stopped after {len(run.store)} of {sum(sizes)} steps; the same "
            "command with --resume continues it"
        )
    except ArgumentError:
        if way.weights_only:
            run.store.remove()
            _remove_empty(way.out)
        raise
    return ""


def _remove_empty(directory: Path) -> None:
    if not any(directory.iterdir()):
        directory.rmdir()


def _series(models: Sequence[str], asked: list[Check], way: _Way) -> None:
    """Audit the weights of each checkpoint, and lay the reports side by side."""
    from regard.audits import terminal
    from regard.audits.checkpoint import find
    from regard.audits.series import save, series
    from regard.audits.weights import WeightAudit

    with _status("looking at the checkpoints"):
        runs = [WeightAudit(find(model), checks=asked, device=way.device) for model in models]
    sizes = [len(run.places) for run in runs]
    with terminal.Bars(terminal.messages(), sizes) as bars:
        for number, run in enumerate(runs):
            run.measure(
                lambda what, done, total, before=sum(sizes[:number]): bars(what, before + done, sum(sizes))  # type: ignore[misc]
            )
    found = series([run.report() for run in runs], _distinct([run.name for run in runs], models))
    terminal.show_series(found, save(found, way.out), terminal.output())


def _distinct(short: Sequence[str], long: Sequence[str]) -> Sequence[str]:
    """Short names, where these tell the models apart."""
    return short if len(set(short)) == len(set(long)) else long


@contextmanager
def _status(what: str) -> Iterator[None]:
    """A word of what takes a while, on a terminal."""
    from regard.audits import terminal

    console = terminal.messages()
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
