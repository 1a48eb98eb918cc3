"""`decodegate gate`: pytest with a selection, reports and exit codes around it."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decodegate.help import JUDGE, examples
from decodegate.output import writable_directory
from harness.outcomes import ExitCode

if TYPE_CHECKING:
    import pytest

    from harness.records import Record
    from harness.smoke import Smoke

__all__ = ["plugin_is_installed", "register"]

SUITE = "decoding"  # the package of suites whose checks make the matrix
RECORDS = "gate.jsonl"
PREVIOUS = "previous.jsonl"  # the records that a rerun goes by; the run itself writes a new gate.jsonl
FINISHED = (0, 1, 5)  # pytest's exit codes of a run that got to its end: all passed, some failed, none selected
MOST_JOBS = 8  # by default: each process holds torch and MLX, which take 1 GB


class Isolate(str, Enum):
    WORKER = "worker"
    CELL = "cell"


EPILOG = examples(
    "decodegate gate",
    "decodegate gate --case llama/gqa --dtype float32",
    "decodegate gate --target engine --target mlx_lm --checkpoint ./my-model",
    "decodegate gate --rerun-failed",
)


def register(app: typer.Typer) -> None:
    app.command("gate", epilog=EPILOG, rich_help_panel=JUDGE)(gate)


def gate(
    family: Annotated[list[str] | None, typer.Option(help="Run only this family (repeatable).")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Run only this case, as in llama/gqa (repeatable).")] = None,
    check: Annotated[list[str] | None, typer.Option(help="Run only this check (repeatable).")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Run only float32, bfloat16 or float16 (repeatable).")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="Run only dense or model_owned (repeatable).")] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Engine to judge, a known name or module:Class (repeatable). Default: engine.")
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="A checkpoint directory as a further case, selected as the others are; alone: --case FAMILY/DIRNAME "
            "(repeatable).",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Processes, each with a worker beside it. Default: cores, at most 8."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", callback=writable_directory, help="Where records and reports go.")] = Path(
        "gate-out"
    ),
    seed: Annotated[int, typer.Option(help="Seed of weights, tokens and the shuffled order.")] = 0,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Run cells in an order drawn from the seed.")] = False,
    isolate: Annotated[Isolate, typer.Option(help="One process for many cells, or one for each cell.")] = Isolate.WORKER,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds that a cell may take.")] = 60.0,
    build: Annotated[
        str | None, typer.Option(metavar="NAME=DIR", help="A directory with another version of the target's code.")
    ] = None,
    rerun_failed: Annotated[bool, typer.Option("--rerun-failed", help="Run only what did not pass in DIR/gate.jsonl.")] = False,
    smoke: Annotated[
        bool | None,
        typer.Option(
            "--smoke/--no-smoke",
            help="Run real checkpoints too, of --family and in --dtype where given. Default: where nothing is selected.",
        ),
    ] = None,
) -> None:
    """Run every check on every case, judge each against the recompute, and write gate.jsonl, gate.md, gate.html and gate.xml.

    Without a selection that is all tiny cases in each dtype and layout, and a smoke of the real checkpoints; with one, the
    cells that fit all of it. `decodegate list` has the names. The layout is who holds a sequence's state: the engine (dense) or
    the model (model_owned).

    Exits with 0 where all is well, 1 where something is wrong, 2 on a usage error, 3 where a cell was vacuous (it ran, but what
    it tests did not) or nothing was run, 75 where only the surroundings failed (no weights, no lock), 130 where it was
    interrupted before anything was wrong. A run that ends without a record leaves those of the last run as they were.
    """
    import pytest

    from reports import job_summary

    _know_checks(check or ())
    _know_checkpoints(checkpoint or ())
    job_summary.claim()
    began = time.monotonic()
    selections = {"family": family, "case": case, "check": check, "dtype": dtype, "layout": layout, "target": target}
    arguments = [f"--gate-{name}={value}" for name, values in selections.items() for value in values or ()]
    arguments += [f"--gate-checkpoint={path}" for path in checkpoint or ()]
    arguments += [
        f"--gate-seed={seed}",
        f"--gate-isolate={isolate.value}",
        f"--gate-timeout={timeout}",
        f"--gate-record={out / RECORDS}",
    ]
    arguments += ["--gate-shuffle"] * shuffle + [f"--gate-build={build}"] * (build is not None)
    jobs = jobs or min(MOST_JOBS, os.cpu_count() or 1)
    arguments += [f"--numprocesses={jobs}"] if jobs > 1 else []
    previous = _previous(out) if rerun_failed else None
    arguments += [f"--gate-rerun-failed={previous}"] if previous else []
    with_smoke = _smoke_wanted(smoke, any(selections.values()) or bool(checkpoint), previous)

    reporter = _Reporter(_smokes(family or (), dtype or (), seed) if with_smoke else [])
    with _alone_in(out), _last_set_aside(out / RECORDS):
        status = int(pytest.ExitCode.INTERRUPTED)
        with reporter.showing(), reporter.interruptible():
            status = int(pytest.main([*_base_arguments(), *arguments], plugins=[reporter]))
            if with_smoke and status in FINISHED and (out / RECORDS).exists():
                reporter.smoke(out / RECORDS)
        if status == pytest.ExitCode.USAGE_ERROR:
            raise typer.Exit(int(ExitCode.USAGE))
        raise typer.Exit(int(_finish(out, status, reporter, time.monotonic() - began)))


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Two runs that write the same records would leave neither's; the kernel frees the lock of a run that is killed."""
    import filelock

    try:
        with filelock.FileLock(out / ".lock", timeout=0):
            yield
    except filelock.Timeout:
        typer.echo(f"decodegate gate: another run is writing to {out}; wait for it, or choose another --out", err=True)
        raise typer.Exit(int(ExitCode.USAGE)) from None


@contextlib.contextmanager
def _last_set_aside(records: Path) -> Iterator[None]:
    """The last run's records under another name, so that what stands under theirs is this run's; where this run has none, they
    come back.
    """
    before = records.replace(records.with_suffix(".before.jsonl")) if records.exists() else None
    try:
        yield
    finally:
        if not _any_in(records):
            records.unlink(missing_ok=True)
            if before is not None:
                before.replace(records)
        elif before is not None:
            before.unlink()


def _any_in(records: Path) -> bool:
    """Whether there is a record, and not only the header, which is written before the first cell."""
    if not records.exists():
        return False
    with records.open("rb") as lines:
        return sum(1 for _ in itertools.islice(lines, 2)) == 2


def _know_checks(names: Iterable[str]) -> None:
    """A check that there is not is a usage error; where several processes collect, none of them could say it."""
    from harness.cells import checks_in, unknown

    known = checks_in(f"suites.{SUITE}") if names else {}
    for name in names:
        if name not in known:
            typer.echo(f"decodegate gate: {unknown('check', name, known)}", err=True)
            raise typer.Exit(int(ExitCode.USAGE))


def _know_checkpoints(paths: Iterable[Path]) -> None:
    """A directory that is not there is a usage error; one that is damaged raises Rejected, which pytest would call usage."""
    from harness.cells import SelectionError, checkpoint_subjects

    try:
        checkpoint_subjects(paths)
    except SelectionError as error:
        typer.echo(f"decodegate gate: {error}", err=True)
        raise typer.Exit(int(ExitCode.USAGE)) from None


def _base_arguments() -> list[str]:
    """The suite, and pytest without what would get between it and the reports."""
    found = importlib.util.find_spec("suites")
    assert found is not None and found.submodule_search_locations is not None  # suites ship with the package
    suite = Path(found.submodule_search_locations[0]) / SUITE
    off = ("terminal", "cacheprovider", "randomly", "benchmark", "hypothesispytest")
    load = [] if plugin_is_installed() else ["-p", "harness.plugin"]
    # cells assert nothing, and to rewrite the asserts of all modules costs each process seconds
    options = ["--capture=no", "--assert=plain", "-o", "addopts=", "--gate-only-cells"]
    return [*load, str(suite), *options, *(f"-pno:{name}" for name in off)]


def plugin_is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(point.value == "harness.plugin" for point in entry_points(group="pytest11"))


def _previous(out: Path) -> Path:
    """A copy of the last records: the run replaces the file itself."""
    if not (out / RECORDS).exists():
        typer.echo(
            f"decodegate gate: there is no {out / RECORDS} to rerun from; run `decodegate gate --out {out}` first", err=True
        )
        raise typer.Exit(int(ExitCode.USAGE))
    shutil.copyfile(out / RECORDS, out / PREVIOUS)
    return out / PREVIOUS


def _smoke_wanted(asked: bool | None, selective: bool, previous: Path | None) -> bool:
    from harness.outcomes import Outcome
    from harness.records import RecordError, load
    from harness.smoke import CHECKS

    if asked is not None:
        return asked
    if previous is None:
        return not selective
    try:
        return any(record.check in CHECKS and record.outcome is not Outcome.PASS for record in load(previous)[1])
    except RecordError as error:
        typer.echo(f"decodegate gate: {error}", err=True)
        raise typer.Exit(int(ExitCode.USAGE)) from None


def _smokes(families: Collection[str], dtypes: Collection[str], seed: int) -> list[Smoke]:
    """Of a real checkpoint, and of the trained ones of each family; by default of all, in float32."""
    from harness.cells import checkpoint_subjects
    from harness.checkpoints import SMOLLM2, shipped
    from harness.smoke import Smoke

    sources = {SMOLLM2: "llama"} | {str(one.checkpoint): one.case.family for one in checkpoint_subjects(shipped())}
    chosen = [source for source, family in sources.items() if not families or family in families]
    return [Smoke(source, dtype=dtype, seed=seed) for source in chosen for dtype in dict.fromkeys(dtypes or ("float32",))]


def _finish(out: Path, status: int, reporter: _Reporter, elapsed_s: float) -> ExitCode:
    """Reports of what was recorded, and the exit code: of the records, and of a run that did not get to its end."""
    from harness.outcomes import exit_code
    from reports import job_summary, read, terminal, write

    for text in reporter.troubles:
        typer.echo(text, err=True)
    if not _any_in(out / RECORDS):
        if reporter.interrupted:
            typer.echo(f"decodegate gate: interrupted before the first cell; {out} is as it was", err=True)
            return ExitCode.INTERRUPTED
        if status == 5:  # pytest collected nothing
            typer.echo(
                "decodegate gate: no cell is selected, so there is no evidence; `decodegate list` says what there is", err=True
            )
            return ExitCode.VACUOUS
        typer.echo("decodegate gate: the run ended before its first cell", err=True)
        return ExitCode.WRONG
    summary = read(out / RECORDS)
    written = write(summary, out)
    terminal.summary(summary, files=[out / RECORDS, *written.values()], elapsed_s=elapsed_s)
    job_summary.append(written["md"].read_text("utf-8"))
    (run,) = summary.runs
    code = exit_code(record.outcome for record in run.records)
    if reporter.interrupted and code is not ExitCode.WRONG and not reporter.troubles:
        return ExitCode.INTERRUPTED
    cut_short = len(run.records) < run.header.selected
    return ExitCode.WRONG if cut_short or reporter.troubles or status not in FINISHED else code


class _Reporter:
    """A pytest plugin that shows the run: progress instead of pytest's own terminal."""

    def __init__(self, smokes: list[Smoke]) -> None:
        self.troubles: list[str] = []
        self.interrupted = False
        self._smokes = smokes
        self._progress: Any = None

    def showing(self) -> Any:
        from contextlib import ExitStack

        self._stack = ExitStack()
        return self._stack

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C ends what is inside, and what was recorded gets its reports."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.interrupted = (
            excinfo.type is KeyboardInterrupt
        )  # pytest ends a collection that failed with a class derived from it

    def pytest_configure(self, config: pytest.Config) -> None:
        from harness.plugin import gate_of
        from harness.smoke import CHECKS

        gate = gate_of(config)
        gate.further = len(CHECKS) * len(self._smokes)
        gate.command = shlex.join(["decodegate", *sys.argv[1:]])

    def pytest_gate_start(self, selected: int) -> None:
        from harness.smoke import CHECKS
        from reports.progress import Progress

        self._progress = self._stack.enter_context(Progress(selected + len(CHECKS) * len(self._smokes)))

    def pytest_gate_record(self, record: Record) -> None:
        self._progress.finish(record)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        from harness.cells import cell_id_of

        cell = cell_id_of(nodeid)
        if cell and self._progress:
            self._progress.begin(cell)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.troubles.append(f"{report.nodeid} cannot be collected:\n{report.longreprtext}")

    def pytest_internalerror(self, excrepr: Any) -> bool:
        self.troubles.append(f"pytest failed inside:\n{excrepr}")
        return True

    def smoke(self, records: Path) -> None:
        """The smoke's records, appended to those of the cells."""
        if not self._smokes:
            typer.echo("decodegate gate: there is no checkpoint of the selected families to smoke", err=True)
        from harness.records import Writer
        from harness.smoke import run

        writer = Writer(records, None)

        def keep(record: Record) -> None:
            writer.write(record)
            self._progress.finish(record)

        try:
            for smoke in self._smokes:
                label = f"smoke of {Path(smoke.source).name} in {smoke.dtype}"
                self._progress.begin(label)
                run(smoke, keep, say=self._progress.say)
                self._progress.end(label)
        finally:
            writer.close()
