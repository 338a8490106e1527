"""regard audit: how regular the attention of a trained model is."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.directories import default_directory, refuse_other, source_of
from regard.cli.options import (
    Checks,
    Device,
    Json,
    Open,
    OutByModel,
    Pairs,
    Resume,
    Seed,
    Text,
    TextFile,
    announce,
    open_page,
    print_json,
)
from regard.cli.processes import refuse_processes, start_workers
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.audits.checkpoint import Checkpoint
    from regard.audits.checks import Check
    from regard.audits.fleet import Team
    from regard.audits.gate import Gate
    from regard.audits.report import Report
    from regard.audits.run import Audit
    from regard.audits.streaming import StreamedAudit
    from regard.audits.weights import WeightAudit

    AnyAudit = Audit | StreamedAudit | WeightAudit

STOPPED = 130
"""The exit status of a process that was interrupted."""
SOON = 10.0
"""An audit that takes longer, in seconds, prints an estimate first."""
ORIGINALS = 10
"""Where pairs are given and no texts, at most so many of their originals are audited."""
UNITS = ".units"
"""Where results are kept below --out."""
UNREAD = "the tokenizer does not know words: the included {} are audited instead of sentences"
DRAWN = (
    "the tokenizer knows none of the included texts: random tokens of its vocabulary are audited, "
    "and raise no alarm; give texts of its kind with --text"
)

HELP = """How regular the attention of a trained model is, head by head.

MODEL is a local directory (config.json with safetensors, or a pickle of tensors) or a hub id; without one,
all-MiniLM-L6-v2 is audited. Code in a checkpoint is never run. Checkpoints of one training run are compared
by regard track.

A report is written to --out, which is the directory audit-<model> unless you name one: report.html to read,
report.json with every number, card.md for a model card. A directory with the report of another model is
refused. The summary goes to stdout, progress and errors to stderr.

\b
Examples
  regard audit                                     the demonstration model
  regard audit ./my-model --text-file corpus.txt   one text per line
  regard audit ./my-model --text "A" --text "B"    texts given here
  regard audit ./my-model --pairs typos.tsv        your own changes
  regard audit ./my-model --checks weights,rows    some checks only
  regard audit --list-checks                       the checks by name
  regard audit ./my-model --quick --open           one text, in seconds
  regard audit ./my-model --json                   JSON for a program
  regard audit ./my-model --thorough               proofs on long texts, too
  regard audit ./llama-7b --weights-only           norms, layer by layer
  regard audit ./llama-7b --low-memory             texts, block by block
  regard audit ./big-model --resume                continue after Ctrl-C
  regard audit ./big-model --processes 4           four processes, one report
  torchrun --nproc-per-node 4 -m regard audit ./big-model
                                                   over several machines, too
  regard audit ./my-model --fail-if "words.worst_cosine<0.5"
                                                   status 1 where that is so
  regard audit ./my-model --pairs typos.tsv --fail-if "pairs.worst_pair_cosine<0.7"
                                                   the same for your own changes
  regard audit ./my-model --baseline old/report.json
                                                   status 1 where it got worse

\b
Exit status
  0 done   1 nothing could be measured, or --fail-if or --baseline fails (one line on stderr for each reason)
  2 wrong arguments or files   130 stopped by Ctrl-C, with a partial report
"""


def audit(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A directory or a hub id.", show_default=False)
    ] = None,
    text: Text = None,
    text_file: TextFile = None,
    pairs: Pairs = None,
    checks: Checks = None,
    list_checks: Annotated[
        bool,
        typer.Option("--list-checks", help="Print the checks and what each needs.", is_eager=True),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: one text, and only what takes seconds.")
    ] = False,
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help="Prove on long texts too; takes hours."),
    ] = False,
    every_word: Annotated[
        bool,
        typer.Option("--every-word", help="Change every word of the texts, instead of a sample of a text."),
    ] = False,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Read the weights of one layer at a time; no texts.")
    ] = False,
    low_memory: Annotated[
        bool | None,
        typer.Option(
            "--low-memory/--no-low-memory",
            help="Hold one block of the model at a time; checks that need all of them at once are omitted.",
            show_default="where the model would fill the memory",
        ),
    ] = None,
    twin: Annotated[
        bool | None,
        typer.Option(
            "--twin/--no-twin",
            help="Measure the same architecture with random weights too, for comparison.",
            show_default="where the model is small",
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", help="Number of processes on this machine.")
    ] = 1,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Exit status 1 where the worst number of CHECK.COLUMN fulfils this, or where there is no "
            'number: "words.worst_cosine<0.5"; may be repeated.',
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="REPORT",
            help="Exit status 1 where a number is worse than in this report of the same texts and checks.",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="How much worse than in the baseline a number may be.", show_default="0.05"
        ),
    ] = None,
    device: Device = "cpu",
    seed: Seed = None,
    resume: Resume = False,
    out: OutByModel = None,
    open_: Open = False,
    json_: Json = False,
) -> None:
    """Check every argument before the work begins, then do it."""
    from regard.audits.fleet import joined
    from regard.audits.inputs import read_pairs, read_texts
    from regard.audits.load import device_of
    from regard.audits.run import with_pairs

    if list_checks:
        return _list_checks()
    with joined() as team:
        _refuse_several(model, context.args)
        refuse_processes(processes, team)
        texts = read_texts(text or [], text_file or [])
        changes = [] if pairs is None else read_pairs(pairs)
        texts = texts or list(dict.fromkeys(original for original, _ in changes))[:ORIGINALS]
        of_texts = {"--text": bool(text), "--text-file": bool(text_file), "--pairs": bool(changes)}
        of_time = {"--twin": bool(twin), "--thorough": thorough, "--every-word": every_word}
        _refuse_with("--weights-only, which reads no texts", weights_only, {**of_texts, **of_time})
        _refuse_with("--quick, which is a first look", quick, {**of_time, "--weights-only": weights_only})
        asked = find_checks(checks, weights_only)
        asked = _quickly(asked, checks is not None) if quick else asked
        asked = with_pairs(asked, bool(changes))
        if weights_only and low_memory is not None:
            found = "is given, and --weights-only reads one layer at a time anyway"
            raise ArgumentError("--low-memory", found, "leave it out")
        judge = _judge(fail_if or [], baseline, tolerance, asked)
        way = Way(
            default_directory("audit", _listed(model)) if out is None else out,
            device_of(device),
            changes,
            seed or 0,
            resume,
            weights_only,
            low_memory,
            False if quick else twin,
            thorough,
            quick,
            json_,
            open_,
            judge,
            every_word,
        )
        code = _do(model, texts, asked, way, processes, team)
    if code:
        raise typer.Exit(code)


def _refuse_several(model: str | None, others: list[str]) -> None:
    """Refuse more than one model: several are checkpoints for another command."""
    if model is not None and others:
        found = f"is {1 + len(others)} models, and an audit is of one"
        remedy = f"compare checkpoints with: regard track {shlex.join([model, *others])}"
        raise ArgumentError("MODEL", found, remedy)


def _listed(model: str | None) -> list[str]:
    return [] if model is None else [model]


def _list_checks() -> None:
    from regard.audits import terminal
    from regard.audits.checks import checks as known

    terminal.show_checks(known(), terminal.output())


def _do(model: str | None, texts: list[str], asked: list[Check], way: Way, processes: int, team: Team) -> int:
    """The work itself, and its exit status."""
    from regard._files import check_writable

    if team.rank == 0:
        refuse_other(way.out / "report.json", _listed(model))
        check_writable(way.out)
    if processes > team.world:
        try:
            return start_workers(processes, way.out / UNITS, way.resume)
        finally:
            _remove_empty(way.out)
    return _single(model, texts, asked, way, team)


def _refuse_with(what: str, there: bool, given: dict[str, bool]) -> None:
    """Refuse options that cannot be given together with another."""
    for option, asked in given.items():
        if there and asked:
            raise ArgumentError(option, f"is given with {what}", "leave one of them out")


@dataclass(frozen=True)
class Way:
    """How an audit is done, and where its report goes. low_memory, twin: None where that is to be found
    out.
    """

    out: Path
    device: str = "cpu"
    pairs: Sequence[tuple[str, str]] = ()
    seed: int = 0
    resume: bool = False
    weights_only: bool = False
    low_memory: bool | None = None
    twin: bool | None = False
    thorough: bool = False
    quick: bool = False
    json_: bool = False
    open_: bool = False
    judge: Callable[[Report], Gate] | None = None
    every_word: bool = False


def _judge(
    texts: list[str], baseline: Path | None, tolerance: float | None, asked: list[Check]
) -> Callable[[Report], Gate]:
    """What decides whether a report passes; its arguments are checked here, before a model is loaded."""
    from regard.audits.compare import read
    from regard.audits.gate import check_tolerance, conditions, gate
    from regard.audits.report import TOLERANCE

    if tolerance is not None and baseline is None:
        raise ArgumentError("--tolerance", "is given without --baseline", "leave it out")
    share = TOLERANCE if tolerance is None else tolerance
    check_tolerance(share, "--tolerance")
    found = conditions(texts, asked, "--fail-if")
    before = None if baseline is None else read(baseline, "--baseline")
    return lambda report: gate(report, found, before, share)


def find_checks(names: str | None, alone: bool) -> list[Check]:
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


def _quickly(asked: list[Check], named: bool) -> list[Check]:
    """The checks of a first look; named: each of them was asked for."""
    slow = [check.name for check in asked if check.quickly() is None]
    if named and slow:
        what = f"is given with {', '.join(slow)}, of which there is no quick form"
        raise ArgumentError("--quick", what, "leave one of them out")
    return [look for check in asked for look in [check.quickly()] if look is not None]


def _single(model: str | None, texts: list[str], asked: list[Check], way: Way, team: Team) -> int:
    """Audit one model, from where an earlier run stopped if that is asked; the exit status."""
    from regard.audits import terminal
    from regard.audits.owning import succession

    started = time.monotonic()
    run, subject = _run(model, texts, asked, way)
    team.agree(subject)
    run.store = team.open_store(way.out / UNITS, subject, way.resume)
    if run.store.predecessor:
        terminal.say(terminal.messages(), succession(run.store.predecessor, way.resume))
    stopped = _measure(run, way, team)
    code = team.await_report(STOPPED if stopped else None)
    seconds = time.monotonic() - started
    return _report(run, model, way, stopped, team, seconds) if code is None else code


def _report(run: AnyAudit, model: str | None, way: Way, stopped: str, team: Team, seconds: float) -> int:
    """Write and show the report; the exit status."""
    from regard.audits import page, terminal

    report = run.report(stopped)
    source = source_of(_listed(model))
    report = replace(report, model={**report.model, "source": source})
    paths = page.save(report, way.out)
    if way.json_:
        print_json(report.to_dict())
        announce(paths, json_=True)
    else:
        terminal.show(report, paths, terminal.output(), seconds)
    if way.open_:
        open_page(way.out / "report.html")
    passed = bool(stopped) or way.judge is None or _passes(way.judge(report))
    code = STOPPED if stopped else 0 if report.measured and passed else 1
    team.reported(code)
    if not stopped:
        run.store.remove()
    return code


def _passes(found: Gate) -> bool:
    """Whether a report passes; prints on stderr, one line each, why it does not and what is undecided."""
    from regard.audits import terminal

    for remark in found.remarks:
        terminal.say(terminal.messages(), remark)
    for failure in found.failures:
        terminal.say(terminal.messages(), f"failed: {failure}")
    return not found.failures


def _run(
    model: str | None, texts: list[str], asked: list[Check], way: Way
) -> tuple[AnyAudit, dict[str, str]]:
    """An audit that is ready to measure, and what it is of."""
    from regard.audits.checkpoint import find
    from regard.audits.weights import WeightAudit

    with status("loading the model"):
        checkpoint = find(model)
        if way.weights_only:
            run = WeightAudit(checkpoint, checks=asked, device=way.device, seed=way.seed)
            return run, _subject(checkpoint, texts, asked, way)
        way = replace(way, low_memory=_low_memory(checkpoint, way))
        if way.low_memory and way.twin:
            found = "is given for a model that is read block by block, and would hold all of its twin"
            raise ArgumentError("--twin", found, "leave it out, or give --no-low-memory")
        return on_texts(checkpoint, texts, asked, way), _subject(checkpoint, texts, asked, way)


def _low_memory(checkpoint: Checkpoint, way: Way) -> bool:
    """Whether to hold one block at a time: what was asked for, what the machine has room for, or what makes
    matrices of quantized weights; that is said.
    """
    from regard.audits import terminal
    from regard.audits.streaming import exceeds_memory, is_quantized

    if way.low_memory is not None:
        return way.low_memory
    small = is_quantized(checkpoint)
    large = small or exceeds_memory(checkpoint)
    if large:
        terminal.say(terminal.messages(), terminal.QUANTIZED if small else terminal.BLOCKWISE)
    return large


def on_texts(checkpoint: Checkpoint, texts: list[str], asked: list[Check], way: Way) -> Audit | StreamedAudit:
    from regard.audits import terminal
    from regard.audits.inputs import notes_on
    from regard.audits.load import load_head, tokenizer_of
    from regard.audits.run import Audit
    from regard.audits.samples import DOMAINS, RANDOM, known_samples
    from regard.audits.streaming import StreamedAudit
    from regard.audits.twin import SMALL

    run: Audit | StreamedAudit
    tokenizer = tokenizer_of(checkpoint)
    domain, known = ("", texts) if texts else known_samples(tokenizer)
    if way.quick and len(known) > 1:
        terminal.say(terminal.messages(), f"--quick audits text 1 of {len(known)}")
        known = known[:1]
    if way.low_memory:
        run = StreamedAudit(
            checkpoint,
            known,
            tokenizer=tokenizer,
            checks=asked,
            device=way.device,
            thorough=way.thorough,
            pairs=way.pairs,
            seed=way.seed,
        )
    else:
        model = load_head(checkpoint).to(way.device)
        small = sum(parameter.numel() for parameter in model.parameters()) <= SMALL
        run = Audit(
            model,
            known,
            tokenizer=tokenizer,
            checks=asked,
            name=checkpoint.name,
            twin=small if way.twin is None else way.twin,
            thorough=way.thorough,
            headed=True,
            every_word=way.every_word,
            pairs=way.pairs,
            seed=way.seed,
        )
    if domain not in ("", DOMAINS[0]):
        terminal.say(terminal.messages(), DRAWN if domain == RANDOM else UNREAD.format(domain))
    for note in notes_on(run.inputs, tokenizer):
        terminal.say(terminal.messages(), note)
    for item in run.inputs:
        if item.cut:
            terminal.say(
                terminal.messages(),
                f"text {item.index + 1} is longer than the model takes: cut to {len(item.tokens)} tokens",
            )
    return run


def _subject(checkpoint: Checkpoint, texts: list[str], asked: list[Check], way: Way) -> dict[str, str]:
    """What results are of: they may be continued only where all of this is the same."""
    from importlib.metadata import version

    import torch

    from regard import __version__
    from regard.audits.store import fingerprint

    return {
        "MODEL": fingerprint(checkpoint.name, checkpoint.identity()),
        "--text": fingerprint(texts),
        "--pairs": fingerprint(way.pairs),
        "--seed": str(way.seed),
        "--checks": ",".join(check.name for check in asked),
        "--quick": str([check.of_site is check.quick_site for check in asked]),
        "--device": way.device,
        "--weights-only": str(way.weights_only),
        "--low-memory": str(way.low_memory),
        "--twin": str(way.twin),
        "--thorough": str(way.thorough),
        "--every-word": str(way.every_word),
        "versions": f"regard {__version__}, torch {torch.__version__}, transformers "
        f"{version('transformers')}",
    }


def _predict(run: Audit) -> None:
    """Print about how long an audit by all checks takes, where that is more than a few seconds."""
    from regard._durations import spoken_time
    from regard.audits import terminal
    from regard.audits.checks import checks as known
    from regard.audits.run import with_pairs

    usual = {check.name for check in with_pairs(known(), False) if not check.named}
    if {check.name for check in run.checks if not check.is_quick} >= usual:
        seconds = run.predicted_seconds()
        if seconds > SOON:
            said = f"this takes {spoken_time(seconds)} on this machine (estimate); --quick is a first look"
            terminal.say(terminal.messages(), said)


def _measure(run: AnyAudit, way: Way, team: Team) -> str:
    """Measure all there is; says why where that was interrupted.

    A model that turns out to be broken leaves no files.
    """
    from regard.audits import terminal
    from regard.audits.run import Audit

    sizes = [len(run.places), *(len(run.places) + 1 for _ in run.inputs)]
    sizes += [1 for _ in range(getattr(run, "twin", False) + bool(getattr(run, "pairs", ())))]
    if isinstance(run, Audit) and team.rank == 0 and not len(run.store):
        _predict(run)
    try:
        with terminal.Bars(terminal.messages(), team.parts(sizes)) as bars:
            team.measure(run, bars)
    except KeyboardInterrupt:
        return (
            f"stopped after {len(run.store)} of {sum(sizes)} steps; the same "
            "command with --resume continues it"
        )
    except ArgumentError:
        if way.weights_only and team.rank == 0:
            run.store.remove()
            _remove_empty(way.out)
        raise
    return ""


def _remove_empty(directory: Path) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


@contextmanager
def status(what: str) -> Iterator[None]:
    """Show on a terminal what is being done while it lasts."""
    from regard.audits import terminal

    console = terminal.messages()
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
