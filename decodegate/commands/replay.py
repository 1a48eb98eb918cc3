"""`decodegate replay`: one cell again, with its rows."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decodegate.help import LOOK, examples
from harness.outcomes import ExitCode

if TYPE_CHECKING:
    from harness.cells import Cell, Subject
    from harness.choice import Choice
    from harness.records import Record
    from harness.verdict import JudgedRow

__all__ = ["register"]

SUITES = "suites.decoding"
EPILOG = examples(
    "decodegate replay 'engine::llama/gqa::repeat_is_deterministic[float32,dense]'",
    "decodegate replay 'engine::llama/gqa::x[float32,dense]' --schedule 'step 5'",
)


def register(app: typer.Typer) -> None:
    app.command("replay", epilog=EPILOG, rich_help_panel=LOOK)(replay)


def replay(
    cell: Annotated[
        str, typer.Argument(metavar="CELL", help="A cell's id, as in reports: target::family/case::check[dtype,layout].")
    ],
    schedule: Annotated[
        list[str] | None,
        typer.Option(help="Replay this schedule instead of the check's (repeatable); the check's name is free then."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    target: Annotated[str | None, typer.Option(help="module:Class, where the cell's target is not a known name.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The checkpoint directory, where the case is not a tiny one.")
    ] = None,
    build: Annotated[
        str | None, typer.Option(metavar="NAME=DIR", help="A directory with another version of the target's code.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds that the cell may take.")] = 300.0,
    bad: Annotated[bool, typer.Option("--bad", help="Show only the rows that fail, and those that tie.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with record and rows.")] = False,
) -> None:
    """Replay one cell and show each row of logits: position, error, noise floor, bound, margin, verdict.

    The error is the largest difference from the oracle, the noise that of the reference run naively in the cell's dtype, and
    the ratio is the worse of RMSE and largest error, each as a multiple of a third of its bound: beyond 3 it is bad. MATCH is
    good; TIE is another token, which the oracle has within twice the bound of its own; DRIFT is the right token with an error
    beyond the bound; WRONG is another token too, or a number that is not finite.

    A schedule is a list of operations: "feed 12" prefills 12 tokens in one call ("feed 12 all" with the logits of each), "step
    4" decodes 4 one by one, "greedy 8" lets the engine choose, "rewind 3" drops 3; "feed b 5" does it to another sequence. The
    tokens are drawn from the seed.

    Exits as `decodegate gate` would for this cell alone.
    """
    from harness.cells import SelectionError
    from harness.execution import Execution
    from harness.isolation import Isolation, default_memory_bytes, default_threads
    from harness.outcomes import exit_code
    from harness.records import encode
    from harness.schedule import ScheduleError
    from harness.targets import TargetError
    from harness.worker import Build, BuildError

    try:
        found = _cell(cell, target, checkpoint, schedule)
        worker_build = Build.parse(build) if build else Build()
    except (SelectionError, TargetError, ScheduleError, BuildError) as error:
        typer.echo(f"decodegate replay: {error}", err=True)
        raise typer.Exit(int(ExitCode.USAGE)) from None
    isolation = Isolation(worker_build, timeout_s=timeout, threads=default_threads(1), memory_bytes=default_memory_bytes(1))
    execution = Execution(isolation, seed, power=schedule is None)
    try:
        record, rows = execution.record_with_rows(found)
    finally:
        execution.close()
    if as_json:
        print(json.dumps({"record": json.loads(encode(record)), "rows": [asdict(row) for row in rows]}, indent=2, default=str))
    else:
        _show(record, [row for row in rows if row.word != "MATCH"] if bad else rows)
    raise typer.Exit(int(exit_code([record.outcome])))


def _cell(text: str, target_spec: str | None, checkpoint: Path | None, schedules: list[str] | None) -> Cell:
    """The cell of an id; raises SelectionError, TargetError or ScheduleError, which say what there is."""
    from harness.cells import Cell, SelectionError, checks_in, parse_cell_id, unknown
    from harness.check import Check
    from harness.replay import Plan
    from harness.schedule import Schedule
    from harness.targets import resolve

    target, case, check_name, dtype, layout = parse_cell_id(text)
    subject = _subject(case, dtype, layout, checkpoint)
    spec = target_spec or target
    if schedules:
        parsed = [Schedule.parse(schedule) for schedule in schedules]
        for given in parsed:
            Plan(given, seed=0, vocab=2)  # raises where no target could run it, whatever its tokens
        check = Check(check_name, "the schedule that was given", lambda _: parsed, ())
    else:
        checks = checks_in(SUITES)
        if check_name not in checks:
            raise SelectionError(unknown("check", check_name, checks))
        check = checks[check_name]
    return Cell(spec, resolve(spec).name, subject, check, dtype, layout)


def _subject(case: str, dtype: str, layout: str, checkpoint: Path | None) -> Subject:
    """The tiny case, or the checkpoint under the name that the id gives it: a run with several may have numbered it."""
    from harness.cells import Selection, SelectionError, checkpoint_subjects, subjects

    if checkpoint is None:
        (subject,) = subjects(Selection(cases=[case], dtypes=[dtype], layouts=[layout]))
        return subject
    (subject,) = checkpoint_subjects([checkpoint])
    family, name = case.split("/")
    if family != subject.case.family:
        raise SelectionError(f"{checkpoint} is of the {subject.case.family} family, the cell is of {family}")
    named = replace(subject.case, name=name)
    Selection(dtypes=[dtype], layouts=[layout]).validate([named])
    return replace(subject, case=named)


def _show(record: Record, rows: list[JudgedRow]) -> None:
    from rich.table import Table

    from reports.ratios import facts
    from reports.terminal import make_console
    from reports.text import duration, figure, plural

    console = make_console()
    for index, schedule in enumerate(record.schedule):
        console.print(f"schedule {index}: {schedule}", soft_wrap=True)
    if rows:
        routed = any(row.choice for row in rows)
        table = Table(box=None, pad_edge=False)
        for name in (
            "schedule",
            "operation",
            "position",
            "error",
            "noise",
            "bound",
            "ratio",
            "margin",
            *["router"] * routed,
            "expected",
            "got",
            "verdict",
        ):
            table.add_column(name, justify="left" if name == "verdict" else "right")
        for row in rows:
            numbers = (row.max_abs, row.noise_max, row.allowed, row.error_ratio, row.margin)
            router = [_router(row.choice)] if routed else []
            cells = (row.schedule, row.operation, row.position, *map(figure, numbers), *router, row.expected, row.got, row.word)
            table.add_row(*map(str, cells), style="red" if row.bad else None)
        console.print(table)
    for fault, power in record.power.items():
        console.print(f"power   {figure(power)} times the bound under {fault}")
    said = [*map(str, facts(record)), plural(record.rows, "row"), duration(record.duration_s)]
    console.print(f"{record.outcome}  {' · '.join(said)}", style="bold", soft_wrap=True)
    for text in filter(None, (record.message, record.detail)):
        console.print(text, soft_wrap=True)


def _router(choice: Choice | None) -> str:
    """The router margin of a row's token: `0.0041 thin` where rounding reaches it."""
    from reports.text import figure

    if choice is None:
        return figure(None)
    return f"{figure(choice.margin)}{' thin' * (choice.margin <= choice.rounding)}"
