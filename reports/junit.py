"""gate.xml: JUnit for CI dashboards. One testsuite for each build, target and family; one testcase for each cell.

fail and vacuous are failures; error, crash, timeout and infra are errors (nothing that did not run looks green); unsupported is
skipped; a flake carries `flakyFailure`. A run that was cut short has one more testcase, which says so and fails.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from itertools import groupby

from harness.outcomes import Outcome
from harness.records import Record
from reports.summary import MARKS, Run, Summary, case_id, environment
from reports.text import figure, one_line, visible

__all__ = ["render"]

_ELEMENT = {
    Outcome.FAIL: "failure",
    Outcome.VACUOUS: "failure",
    Outcome.ERROR: "error",
    Outcome.CRASH: "error",
    Outcome.TIMEOUT: "error",
    Outcome.INFRA: "error",
    Outcome.UNSUPPORTED: "skipped",
    Outcome.FLAKE: "flakyFailure",
}


def render(report: Summary) -> str:
    """The XML text; valid XML 1.0 whatever the records hold."""
    root = ET.Element("testsuites")
    ordered = sorted(report.records, key=lambda record: (report.column(record), record.family))
    for (column, family), group in groupby(ordered, key=lambda record: (report.column(record), record.family)):
        records = list(group)
        suite = ET.SubElement(root, "testsuite", name=one_line(f"{column} {family}"))
        for record in records:
            _testcase(suite, record)
    for run in report.runs:
        suite = ET.SubElement(root, "testsuite", name=one_line(f"run {run.name}") if len(report.runs) > 1 else "run")
        properties = ET.SubElement(suite, "properties")
        for name, value in environment(run.header):
            ET.SubElement(properties, "property", name=one_line(name), value=one_line(value))
        if run.missing:
            _unfinished(suite, run)
    root.set("name", "decodegate")
    for element in (root, *root.iter("testsuite")):
        _count(element)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _count(element: ET.Element) -> None:
    """Totals of a testsuite, or of all of them."""
    testcases = list(element.iter("testcase"))
    element.set("tests", str(len(testcases)))
    for attribute, child in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(attribute, str(sum(testcase.find(child) is not None for testcase in testcases)))
    element.set("time", f"{math.fsum(float(testcase.get('time', '0')) for testcase in testcases):.3f}")


def _testcase(suite: ET.Element, record: Record) -> None:
    name = one_line(f"{record.check}[{record.dtype},{record.layout}]")
    classname = one_line(f"{record.target}.{case_id(record).replace('/', '.')}")
    testcase = ET.SubElement(suite, "testcase", classname=classname, name=name, time=f"{record.duration_s:.3f}")
    measured = {name: getattr(record, name) for name in ("error_ratio", "bound", "max_abs", "rmse", "noise_max", "noise_rmse")}
    numbers = {name: figure(value) for name, value in measured.items() if value is not None}
    properties = ET.SubElement(testcase, "properties")
    for key, value in {"cell": record.cell, "outcome": str(record.outcome), "replay": record.replay, **numbers}.items():
        ET.SubElement(properties, "property", name=key, value=one_line(value))
    if record.outcome not in _ELEMENT:
        return
    message = one_line(record.message) or MARKS[record.outcome].meaning
    element = ET.SubElement(testcase, _ELEMENT[record.outcome], message=message)
    if record.outcome is not Outcome.UNSUPPORTED:
        element.set("type", str(record.outcome))
        element.text = visible("\n".join(filter(None, [record.message, f"replay: {record.replay}", record.detail])))


def _unfinished(suite: ET.Element, run: Run) -> None:
    testcase = ET.SubElement(suite, "testcase", classname="decodegate.run", name="every selected cell finished", time="0.000")
    message = f"{run.missing} of {run.header.selected} selected cells have no record: the run was cut short, or is still going"
    ET.SubElement(testcase, "error", message=message, type="unfinished")
