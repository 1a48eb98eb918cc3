"""`decodegate evidence`: what a change did, as a table: today's checks on the builds before and after it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decodegate.help import JUDGE, examples
from decodegate.output import writable_directory
from harness.outcomes import ExitCode, Infra, Outcome, Rejected

if TYPE_CHECKING:
    from harness.builds import Made
    from harness.cells import Cell
    from reports.evidence import Table

__all__ = ["register"]

Names = list[str] | None
EPILOG = examples(
    "decodegate evidence --base HEAD~1 --family nemotron_nas",
    "decodegate evidence --base v0.3 --head v0.4 --check repeat_is_deterministic",
    "decodegate evidence --base origin/main --bench smollm2",
)


def register(app: typer.Typer) -> None:
    app.command("evidence", epilog=EPILOG, rich_help_panel=JUDGE)(command)


def command(
    base: Annotated[str, typer.Option(metavar="REV", help="Git revision before the change.")],
    head: Annotated[str | None, typer.Option(metavar="REV", help="Git revision after it. Default: the working tree.")] = None,
    families: Annotated[Names, typer.Option("--family", metavar="NAME", help="Only this family (repeatable).")] = None,
    cases: Annotated[Names, typer.Option("--case", metavar="ID", help="Only this case (repeatable).")] = None,
    checks: Annotated[Names, typer.Option("--check", metavar="NAME", help="Only this check (repeatable).")] = None,
    dtypes: Annotated[Names, typer.Option("--dtype", metavar="NAME", help="Only this dtype (repeatable).")] = None,
    layouts: Annotated[Names, typer.Option("--layout", metavar="NAME", help="Only this layout (repeatable).")] = None,
    checkpoints: Annotated[
        list[Path] | None, typer.Option("--checkpoint", help="Checkpoint as a further case (repeatable).")
    ] = None,
    target: Annotated[str, typer.Option(help="The target whose package the builds hold: a name or module:Class.")] = "engine",
    repo: Annotated[
        Path | None,
        typer.Option(metavar="DIR", exists=True, file_okay=False, help="Repository of the package. Default: where it lies."),
    ] = None,
    bench: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Measure speed on both builds too: smollm2, a path.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=200, help="Rounds of --bench; 6 or more give a 95 % interval.")] = 6,
    busy_ok: Annotated[bool, typer.Option("--busy-ok", help="Measure although other processes use the machine.")] = False,
    lock_timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the device lock.")] = 900.0,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a cell may take.")] = 60.0,
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", callback=writable_directory, help="Directory for evidence.jsonl, .md, .html and .json."),
    ] = Path("evidence-out"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of Markdown.")] = False,
) -> None:
    """Run today's checks on two builds of the engine and print the before/after table as Markdown, ready to paste.

    A build that aborts, hangs or raises costs its own field of the table and nothing else. The exit code is that of the build
    after the change: 0 when all of its cells pass, 1 when one is wrong; 4 when there is no before and after to compare, 75 when
    all is well but the speed that --bench asks for could not be measured.
    """
    from harness.builds import BuildError, Builds, NoCommit, Source
    from harness.cells import Matrix, Selection, SelectionError, checks_in, subjects, unknown
    from harness.checkpoints import resolve as find_checkpoint
    from harness.lock import hold
    from harness.outcomes import exit_code
    from harness.targets import TargetError, resolve
    from reports.evidence import write

    try:
        adapter = resolve(target)
        known = checks_in("suites.decoding")
        selection = Selection(families or (), cases or (), checks or (), dtypes or (), layouts or ())
        selected = subjects(selection, checkpoints or ())
        for name in selection.checks:
            if name not in known:
                raise SelectionError(unknown("check", name, known))
        matrix = Matrix(target, adapter, selected, selection)
        cells = sorted((cell for check in known.values() for cell in matrix.cells(check)), key=lambda cell: cell.order)
    except (SelectionError, TargetError) as error:
        print(f"decodegate evidence: {error}", file=sys.stderr)
        raise typer.Exit(ExitCode.USAGE) from None
    if not cells:
        print(
            "decodegate evidence: no cell is selected; `decodegate list cases` and `list checks` show what there is",
            file=sys.stderr,
        )
        raise typer.Exit(ExitCode.USAGE)
    if bench is not None:
        find_checkpoint(bench)  # before an hour of cells rather than after
    try:
        with Builds(Source.find(getattr(adapter, "package", adapter.name), repo)) as builds:
            before, after = builds.revision(base), builds.revision(head) if head else builds.working_tree()
            with hold("decodegate evidence", timeout=lock_timeout) as waited:
                table = _run(before, after, cells, out, seed=seed, timeout_s=timeout, target=target, waited=waited)
                outcomes = [row.after.outcome for row in table.rows]
                if bench is not None:
                    outcomes.append(_measure(table, before, after, bench, rounds, busy_ok))
    except BuildError as error:
        print(f"decodegate evidence: {error}", file=sys.stderr)
        raise typer.Exit(ExitCode.USAGE if isinstance(error, NoCommit) else ExitCode.BASELINE_RED) from None
    written = write(table, out)
    print(written["json" if as_json else "md"].read_text("utf-8"), end="")
    raise typer.Exit(exit_code(outcomes))


def _run(
    before: Made, after: Made, cells: list[Cell], out: Path, *, seed: int, timeout_s: float, target: str, waited: float
) -> Table:
    from harness.evidence import Evidence
    from harness.provenance import header
    from harness.records import Writer
    from reports.evidence import Table, print_progress
    from reports.terminal import make_console

    said = make_console(sys.stderr)
    with Evidence(before, after, seed=seed, timeout_s=timeout_s) as evidence:
        head = header(" ".join(["decodegate", *sys.argv[1:]]), seed, len(cells), {target: evidence.environment(target)})
        head.commit, head.dirty, head.builds = after.commit, after.dirty, evidence.described()
        head.lock_wait_s = round(waited, 3)
        records = []
        writer = Writer(out / "evidence.jsonl", head)
        try:
            for pair in print_progress(said, evidence.records(cells), len(cells)):
                for record in pair:
                    writer.write(record)
                    records.append(record)
        finally:
            writer.close()
    return Table(head, records)


def _measure(table: Table, before: Made, after: Made, checkpoint: str, rounds: int, busy_ok: bool) -> Outcome:
    """Speed on both builds into the table, ratios after / before; where there is none, the reason as a note. Returns what came
    of it: the cells have been run, and their table is not lost for it.
    """
    from harness.bench.process import Peer
    from harness.bench.run import measure_checkpoint
    from harness.evidence import AFTER, BEFORE

    peers = [Peer("engine", "float32", sys.executable, made, role) for role, made in ((AFTER, after), (BEFORE, before))]
    try:
        table.speed = measure_checkpoint(
            peers,
            checkpoint,
            rounds=rounds,
            allow_busy=busy_ok,
            say=lambda text: print(f"bench: {text}", file=sys.stderr),
        )
        return Outcome.PASS
    except (Infra, Rejected) as error:
        table.header.notes.append(f"speed was not measured: {error}")
        print(f"decodegate evidence: {table.header.notes[-1]}", file=sys.stderr)
        return Outcome.INFRA if isinstance(error, Infra) else Outcome.ERROR
