"""`decodegate mutants`: plant faults in the engine, one at a time, and see whether the check that must catch each one does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from decodegate.help import JUDGE, examples
from decodegate.output import writable_directory
from harness.outcomes import ExitCode

__all__ = ["register"]
EPILOG = examples(
    "decodegate mutants",
    "decodegate mutants --in-diff origin/main --jobs 2",
    "decodegate mutants --id rewind_leaves_the_slots --all-checks",
)


def register(app: typer.Typer) -> None:
    app.command("mutants", epilog=EPILOG, rich_help_panel=JUDGE)(command)


def command(
    ids: Annotated[list[str] | None, typer.Option("--id", metavar="ID", help="Only this mutant (repeatable).")] = None,
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", metavar="F..", help="Only this kind of fault (repeatable).")
    ] = None,
    in_diff: Annotated[str | None, typer.Option(metavar="REV", help="Only mutants of files that differ from REV.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Mutants at a time. Default: the number of cores.")] = None,
    all_checks: Annotated[
        bool, typer.Option("--all-checks", help="Run every check on every mutant, not only the named one.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    target: Annotated[str, typer.Option(help="The target whose package is changed: a name or module:Class.")] = "engine",
    repo: Annotated[
        Path | None,
        typer.Option(metavar="DIR", exists=True, file_okay=False, help="Repository of the package. Default: where it lies."),
    ] = None,
    catalogue: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of .toml files with mutants of your own.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", callback=writable_directory, help="Results and reports; finished mutants are kept.")
    ] = Path("mutants-out"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Plant the catalogue's faults and report which check catches each, and with how much headroom.

    The checks must pass on the unchanged engine first; otherwise the exit code is 4. A mutant is caught when its named check
    fails on it. Results are kept in DIR/mutants.jsonl, so that a run that was cut short goes on where it ended.
    """
    import filelock

    from harness.builds import BuildError, Builds, Source
    from harness.mutants import catalogue as catalogues
    from harness.records import RecordError
    from harness.targets import TargetError, resolve

    try:
        mutants = catalogues.load(catalogue or catalogues.CATALOGUE)
        adapter = resolve(target)
        source = Source.find(getattr(adapter, "package", adapter.name), repo)
        files = source.changed_since(in_diff) if in_diff is not None else None
        chosen = catalogues.select(mutants, ids or (), kinds or (), files)
    except (catalogues.CatalogueError, BuildError, TargetError) as error:
        print(f"decodegate mutants: {error}", file=sys.stderr)
        raise typer.Exit(ExitCode.USAGE) from None
    if not chosen:
        print(f"no mutant lies in a file that differs from {in_diff}" if in_diff else "no mutant is selected", file=sys.stderr)
        raise typer.Exit(ExitCode.OK if in_diff else ExitCode.VACUOUS)
    try:
        with filelock.FileLock(out / ".lock", timeout=0), Builds(source) as builds:
            code = _run(builds, mutants, chosen, out, as_json, jobs=jobs, seed=seed, target=target, all_checks=all_checks)
    except RecordError as error:
        print(f"decodegate mutants: {error}; remove the file, or give another --out", file=sys.stderr)
        raise typer.Exit(ExitCode.USAGE) from None
    except filelock.Timeout:
        print(f"decodegate mutants: another run writes to {out}; wait for it, or give another --out", file=sys.stderr)
        raise typer.Exit(ExitCode.USAGE) from None
    raise typer.Exit(code)


def _run(
    builds, mutants, chosen, out: Path, as_json: bool, *, jobs: int | None, seed: int, target: str, all_checks: bool
) -> ExitCode:
    import os

    from harness.mutants.results import Store, exit_code
    from harness.mutants.run import BaselineRed, MutantRun, Settings
    from harness.provenance import header
    from reports.mutants import as_json as to_json
    from reports.mutants import print_table, render
    from reports.progress import follow
    from reports.terminal import make_console

    said = make_console(sys.stderr)
    settings = Settings(target=target, seed=seed, jobs=jobs or os.cpu_count() or 1, all_checks=all_checks)
    with MutantRun(builds, settings) as run:
        head = header(" ".join(["decodegate", *sys.argv[1:]]), seed, len(chosen), {target: run.environment})
        store = Store(out / "mutants.jsonl", head, {mutant.id: mutant.digest for mutant in mutants}, run.judged_by)
        results = [store.kept[mutant.id] for mutant in chosen if mutant.id in store.kept]
        pending = [mutant for mutant in chosen if mutant.id not in store.kept]
        if results:
            said.print(f"{len(results)} of {len(chosen)} mutants are kept from the last run in {out}")
        try:
            for result in follow(said, "mutants", run.results(pending), len(pending)):
                store.add(result)
                results.append(result)
                if not result.good:
                    said.print(f"{result.id}: {result.verdict}: {result.message}")
        except BaselineRed as error:
            print(f"decodegate mutants: {error}:", file=sys.stderr)
            for record in error.records:
                print(f"  {record.cell}: {record.outcome}: {record.message}", file=sys.stderr)
            print("Repair the engine, or the check, first: `decodegate gate` has the details.", file=sys.stderr)
            return ExitCode.BASELINE_RED
        finally:
            store.close()
    (out / "mutants.md").write_text(render(head, results), "utf-8")
    (out / "mutants.json").write_text(to_json(head, results), "utf-8")
    if as_json:
        print(to_json(head, results), end="")
    else:
        print_table(make_console(), results)
    return exit_code(results)
