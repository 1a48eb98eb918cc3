"""The table of products with experts, a pure function of its result (harness.bench.moe.measure)."""

from __future__ import annotations

from typing import Any

from harness.bench.moe import BASELINE
from harness.bench.statistics import Interval, interval, ratio, shown

__all__ = ["rows", "table"]


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each format and contender: milliseconds, and baseline / contender, paired by round, for all but the first."""
    found = []
    for measured in result["formats"]:
        baseline = measured["samples"][BASELINE]
        for name, samples in measured["samples"].items():
            row: dict[str, Any] = {
                "format": measured["format"],
                "contender": name,
                "milliseconds": interval([1e3 * sample for sample in samples]),
                "error": measured["largest_error"][name] / measured["largest"],
                "speedup": None,
                "verdict": "",
            }
            if name != BASELINE:
                row["speedup"] = ratio(baseline, samples)
                row["verdict"] = "~" if not shown(row["speedup"]) else "faster" if row["speedup"].median > 1 else "slower"
            found.append(row)
    return found


def table(result: dict[str, Any]) -> str:
    """Markdown: what was measured, one row for each contender, and the surroundings."""
    lines = [
        f"{result['rows']} rows, top {result['top_k']} of {result['experts']} experts, matrices of {result['hidden']} x "
        f"{result['hidden']}, {result['rounds']} interleaved rounds; median [interval]; speed-up over {BASELINE}, paired by "
        "round; ~ = no difference shown; error = largest difference from float64, relative to the largest output.",
        "",
        "| format | product | ms | speed-up | verdict | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows(result):
        speedup = f"{_text(row['speedup'])}×" if row["speedup"] else ""
        cells = (row["format"], row["contender"], _text(row["milliseconds"]), speedup, row["verdict"], f"{row['error']:.1e}")
        lines.append(f"| {' | '.join(cells)} |")
    coverage = interval([0.0] * result["rounds"]).coverage
    lines += ["", f"n = {result['rounds']}, the interval covers the median with {coverage:.1%}."]
    lines.append("- " + ", ".join(f"{name} {value}" for name, value in result["environment"].items()))
    lines += [f"- {measured['format']}: the map takes path {measured['path']}" for measured in result["formats"]]
    lines += [f"- Warning: {warning}" for warning in result["warnings"]]
    return "\n".join(lines) + "\n"


def _text(found: Interval) -> str:
    return f"{found.median:.3g} [{found.low:.3g}, {found.high:.3g}]"
