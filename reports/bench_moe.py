"""The table of products with experts, a pure function of its result (harness.bench.moe.measure)."""

from __future__ import annotations

from typing import Any

from harness.bench.moe import BASELINE
from harness.bench.statistics import interval, ratio, verdict
from reports.bench import interval_note, interval_text
from reports.text import plural

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
                row["verdict"] = verdict(row["speedup"])
            found.append(row)
    return found


def table(result: dict[str, Any]) -> str:
    """Markdown: what was measured, one row for each contender, and the surroundings."""
    lines = [
        f"{result['rows']} rows, top {result['top_k']} of {result['experts']} experts, matrices of {result['hidden']} x "
        f"{result['hidden']}, {plural(result['rounds'], 'interleaved round')}; median [interval]; speed-up over {BASELINE}, "
        "paired by round; ~ = no difference shown; error = largest difference from float64, relative to the largest output.",
        "",
        "| format | product | ms | speed-up | verdict | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows(result):
        speedup = f"{interval_text(row['speedup'])}×" if row["speedup"] else ""
        milliseconds = interval_text(row["milliseconds"])
        cells = (row["format"], row["contender"], milliseconds, speedup, row["verdict"], f"{row['error']:.1e}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"{interval_note(result['rounds'])}."]
    lines.append("- " + " · ".join(f"{name} {value}" for name, value in result["environment"].items()))
    lines += [f"- {measured['format']}: the map takes path {measured['path']}" for measured in result["formats"]]
    lines += [f"- Warning: {warning}" for warning in result["warnings"]]
    return "\n".join(lines) + "\n"
