"""The pytest plugin: every `Check` in a suite module becomes cells, one pytest item each, run in worker processes.

    pytest suites -k gqa                                   the cells of a case, beside ordinary tests
    pytest my_suite.py --gate-target my_engine:Adapter     another project's engine and suite

    Module test_chunked.py
      TargetNode engine
        CaseNode llama/gqa
          CellItem chunked_prefill_matches_full_forward[float32,dense]

Records travel to the controller inside reports, so that a run by pytest-xdist writes the same file as one without.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness import cells, records
from harness.cells import Cell, Matrix, Selection, cell_id_of
from harness.check import Check
from harness.isolation import Isolation, default_memory_bytes, default_threads
from harness.outcomes import Outcome, Rejected
from harness.provenance import header
from harness.target import Target
from harness.targets import TargetError, resolve
from harness.worker import Build, BuildError, Describe

if TYPE_CHECKING:
    from harness.execution import Execution

__all__ = ["CellItem", "Gate", "gate_of"]

_GATE = pytest.StashKey["Gate"]()


class Hooks:
    """Hooks for whoever shows a run while it goes on; they are called in the controller."""

    def pytest_gate_start(self, selected: int) -> None:
        """The cells are known, none has begun."""

    def pytest_gate_record(self, record: records.Record) -> None:
        """A cell has ended, and its record is on disk where there is a record file."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("decodegate", "decodegate: cells of target, case, check, dtype and layout")
    add = group.addoption
    add("--gate-target", action="append", metavar="NAME", help="target to judge, a known name or module:Class (repeatable)")
    add(
        "--gate-checkpoint",
        action="append",
        type=Path,
        metavar="DIR",
        help="checkpoint directory as a further case (repeatable)",
    )
    for name in ("family", "case", "check", "dtype", "layout"):
        add(f"--gate-{name}", action="append", default=[], metavar="NAME", help=f"run only this {name} (repeatable)")
    add("--gate-seed", type=int, default=0, help="seed of weights, tokens and the shuffled order (default 0)")
    add("--gate-shuffle", action="store_true", help="run cells in an order drawn from the seed")
    add("--gate-isolate", choices=("worker", "cell"), default="worker", help="a process for many cells, or one for each")
    add("--gate-timeout", type=float, default=60.0, metavar="S", help="seconds that a cell may take (default 60)")
    add(
        "--gate-memory",
        type=float,
        metavar="GIB",
        help="memory limit of a worker process (default: its share of half the machine)",
    )
    add("--gate-build", metavar="NAME=DIR", help="directory with the target's code, put first on the worker's path")
    add("--gate-record", type=Path, metavar="FILE", help="write one JSON line per cell to FILE while the run goes on")
    add("--gate-rerun-failed", type=Path, metavar="FILE", help="run only cells that did not pass in FILE, or that it lacks")
    add("--gate-only-cells", action="store_true", help="leave out ordinary tests")
    parser.addini("gate_targets", "targets to judge where --gate-target is not given", type="args", default=["engine"])


def pytest_configure(config: pytest.Config) -> None:
    gate = config.stash[_GATE] = Gate(config)
    config.pluginmanager.register(gate, "decodegate-gate")
    if any(getattr(config.option, f"gate_{name}") for name in ("target", "checkpoint", "family", "case", "dtype", "layout")):
        gate.matrices  # noqa: B018  a name that leads nowhere is said before anything is collected


def pytest_unconfigure(config: pytest.Config) -> None:
    gate = config.stash.get(_GATE, None)
    if gate is not None:
        gate.close()


def gate_of(config: pytest.Config) -> Gate:
    return config.stash[_GATE]


class Gate:
    """The state of a session: selection, targets, the run of cells and, in the controller, the record file."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        self.config = config
        self.seed: int = option.gate_seed
        self.selection = Selection(
            option.gate_family, option.gate_case, option.gate_check, option.gate_dtype, option.gate_layout
        )
        self.build = _build(option.gate_build)
        self._matrices: list[Matrix] | None = None
        self._isolation: Isolation | None = None
        self._execution: Execution | None = None
        self._writer: records.Writer | None = None
        self._started = False
        self._recorded: set[str] = set()
        self.collected: set[str] = set()  # names of the checks that were found
        self.command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
        self.further = 0  # records that the caller appends when the cells are done, for the header's `selected`

    @property
    def targets(self) -> dict[str, Target]:
        return {matrix.target_spec: matrix.target for matrix in self.matrices}

    @property
    def matrices(self) -> list[Matrix]:
        """One for each selected target; a name that leads nowhere is a usage error."""
        if self._matrices is None:
            option = self.config.option
            try:
                subjects = cells.subjects(self.selection, option.gate_checkpoint or [])
                specs = dict.fromkeys(option.gate_target or self.config.getini("gate_targets"))
                self._matrices = [Matrix(spec, resolve(spec), subjects, self.selection) for spec in specs]
            except (cells.SelectionError, TargetError, Rejected) as error:
                raise pytest.UsageError(str(error)) from None
        return self._matrices

    @property
    def is_controller(self) -> bool:
        return not hasattr(self.config, "workerinput")

    @property
    def isolation(self) -> Isolation:
        if self._isolation is None:
            option = self.config.option
            workers = getattr(self.config, "workerinput", {}).get("workercount", 1)
            self._isolation = Isolation(
                self.build,
                timeout_s=option.gate_timeout,
                # A tiny case keeps one thread busy in the worker and one here; a checkpoint's forwards are worth all cores.
                threads=default_threads(workers if option.gate_checkpoint else 2 * workers),
                memory_bytes=int(option.gate_memory * 2**30) if option.gate_memory else default_memory_bytes(workers),
                fresh_process=option.gate_isolate == "cell",
            )
        return self._isolation

    @property
    def execution(self) -> Execution:
        if self._execution is None:
            self.isolation.start()  # it loads the engine while this process loads the oracle
            from harness.execution import Execution

            self._execution = Execution(self.isolation, self.seed)
        return self._execution

    def start(self, selected: int, *, runs_here: bool) -> None:
        """Begin the record file, whose header says what each target says of itself; a worker is asked, never this process."""
        if self._started:
            return
        self._started = True
        if self.config.option.gate_record is not None:
            asked = {spec: self.isolation.submit(Describe(f"environment of {spec}", spec)) for spec in self.targets}
            if runs_here:
                self.execution  # noqa: B018  loads the oracle while the worker loads the targets
            environment = {self.targets[spec].name: self.isolation.result(nonce).environment for spec, nonce in asked.items()}
            flags = {"gate_isolate": self.config.option.gate_isolate, "gate_shuffle": str(self.config.option.gate_shuffle)}
            head = header(self.command, self.seed, selected + self.further, environment, flags)
            self._writer = records.Writer(self.config.option.gate_record, head)
            if not runs_here:  # its worker would stand idle
                self.isolation.close()
                self._isolation = None
        self.config.hook.pytest_gate_start(selected=selected)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        line = getattr(report, "gate_record", None)
        if line is not None and self.is_controller:
            record = records.decode(line)
            self._recorded.add(record.cell)
            if self._writer is not None:
                self._writer.write(record)
            self.config.hook.pytest_gate_record(record=record)

    def lost(self, cell_id: str) -> records.Record | None:
        """The record of a cell whose pytest process died with it; None where the cell had ended before."""
        if cell_id in self._recorded:
            return None
        target, case, check, dtype, layout = cells.parse_cell_id(cell_id)
        matrix = next(matrix for matrix in self.matrices if matrix.target.name == target)
        subject = next(subject for subject in matrix.subjects if subject.case.id == case)
        cell = Cell(matrix.target_spec, target, subject, Check(check, "", lambda case: (), ()), dtype, layout)
        return records.Record(
            cell=cell_id,
            target=target,
            build=self.build.name,
            family=subject.case.family,
            case=case,
            check=check,
            dtype=dtype,
            layout=layout,
            schedule=[],
            outcome=Outcome.CRASH,
            message="the pytest process that judged it died (from outside, or by the kernel for want of memory)",
            seed=self.seed,
            replay=cell.replay_command(self.seed),
        )

    def close(self) -> None:
        if self._execution is not None:
            self._execution.close()
        if self._isolation is not None:
            self._isolation.close()
        if self._writer is not None:
            self._writer.close()


def _build(option: str | None) -> Build:
    try:
        return Build() if option is None else Build.parse(option)
    except BuildError as error:
        raise pytest.UsageError(f"--gate-build: {error}") from None


class CellFailed(Exception):
    """A cell that did not pass; carries its record."""

    def __init__(self, record: records.Record) -> None:
        super().__init__(f"{record.outcome}: {record.message}")
        self.record = record


class TargetNode(pytest.Collector):
    """The cells of one check on one target."""

    check: Check
    matrix: Matrix

    def collect(self) -> Iterable[pytest.Collector]:
        by_case: dict[str, list[Cell]] = {}
        for cell in self.matrix.cells(self.check):
            by_case.setdefault(cell.subject.case.id, []).append(cell)
        for case, members in by_case.items():
            node: CaseNode = CaseNode.from_parent(self, name=case)
            node.cells = members
            yield node


class CaseNode(pytest.Collector):
    cells: list[Cell]

    def collect(self) -> Iterable[pytest.Item]:
        for cell in self.cells:
            yield CellItem.from_parent(self, name=f"{cell.check.name}[{cell.dtype},{cell.layout}]", cell=cell)


class CellItem(pytest.Item):
    """A cell as a pytest item."""

    def __init__(self, *, cell: Cell, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.cell = cell
        self.extra_keyword_matches.add(cell.id)
        self.record: records.Record | None = None

    def runtest(self) -> None:
        self.record = record = gate_of(self.config).execution.record(self.cell)
        if record.outcome is Outcome.UNSUPPORTED:
            pytest.skip(record.message)
        if record.outcome is not Outcome.PASS:
            raise CellFailed(record)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if not isinstance(excinfo.value, CellFailed):
            return super().repr_failure(excinfo, style)
        record = excinfo.value.record
        lines = [f"{record.outcome}: {record.message}", f"replay: {record.replay}", *record.detail.splitlines()[-40:]]
        return "\n".join(lines)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.cell.id


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Collector] | None:
    if not isinstance(obj, Check):
        return None
    nodes = []
    gate = gate_of(collector.config)
    gate.collected.add(obj.name)
    for matrix in gate.matrices:
        node: TargetNode = TargetNode.from_parent(collector, name=matrix.target.name)
        node.check, node.matrix = obj, matrix
        nodes.append(node)
    return list[pytest.Collector](nodes)


@pytest.hookimpl(trylast=True)  # after plugins that shuffle tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop what is not selected, and bring the cells into an order in which a worker keeps its model."""
    gate = gate_of(config)
    if gate.is_controller:
        unknown = [name for name in gate.selection.checks if name not in gate.collected]
        if unknown:
            raise pytest.UsageError(cells.unknown("check", unknown[0], gate.collected))
    found = [item for item in items if isinstance(item, CellItem)]
    unique = {item.cell.id: item for item in reversed(found)}  # a check that two modules import is one check
    keep = set(_rerun(config.option.gate_rerun_failed, unique)) if config.option.gate_rerun_failed else set(unique)
    chosen = [item for item in found if unique[item.cell.id] is item and item.cell.id in keep]
    if config.option.gate_shuffle:
        random.Random(gate.seed).shuffle(chosen)
    else:
        rank: dict[object, int] = {}
        chosen.sort(key=lambda item: rank.setdefault(item.cell.order, len(rank)))
    ordinary = [] if config.option.gate_only_cells else [item for item in items if not isinstance(item, CellItem)]
    dropped = set(items) - set(chosen) - set(ordinary)
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [*ordinary, *chosen]


def _rerun(file: Path, known: Iterable[str]) -> Iterator[str]:
    """Cells that did not pass in a record file; those it lacks too, where it was cut short."""
    try:
        head, recorded = records.load(file)
    except records.RecordError as error:
        raise pytest.UsageError(str(error)) from None
    good = {record.cell for record in recorded if record.outcome in (Outcome.PASS, Outcome.UNSUPPORTED)}
    bad = {record.cell for record in recorded} - good
    cut_short = len(recorded) < head.selected
    return (cell for cell in known if cell in bad or (cut_short and cell not in good))


def pytest_collection_finish(session: pytest.Session) -> None:
    gate = gate_of(session.config)
    selected = sum(isinstance(item, CellItem) for item in session.items)
    if gate.is_controller and selected and not session.config.option.collectonly:
        gate.start(selected, runs_here=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    selected = sum(cell_id_of(nodeid) is not None for nodeid in ids)
    if selected:
        gate_of(node.config).start(selected, runs_here=False)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    cell_id = cell_id_of(crashitem)
    record = gate_of(sched.config).lost(cell_id) if cell_id else None
    if record is not None:
        report.gate_record = records.encode(record)  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The worker is given the next cell too: it replays that one while this process judges the present one."""
    for ahead in (item, nextitem):
        if isinstance(ahead, CellItem):
            gate_of(item.config).execution.submit(ahead.cell)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if isinstance(item, CellItem) and item.record is not None and report.when == "call":
        report.gate_record = records.encode(item.record)
    return report
