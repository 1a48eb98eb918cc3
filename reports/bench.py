"""The benchmark's table, a pure function of its result (harness.bench.run.measure)."""

from __future__ import annotations

from typing import Any

from harness.bench.statistics import Interval, interval, ratio, shown

__all__ = ["rows", "table"]

METRICS = {"decode": "decode_tok_s", "prefill": "prefill_tok_s"}


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each metric and peer: medians with intervals in tokens a second, and ours / theirs where it is not ours."""
    ours = result["peers"][0]
    found = []
    for metric, field in METRICS.items():
        for peer in result["peers"]:
            speed = interval([sample[field] for sample in peer["samples"]])
            row: dict[str, Any] = {"metric": metric, "peer": peer["name"], "speed": speed, "ratio": None, "verdict": ""}
            if peer is not ours:
                row["ratio"] = ratio([s[field] for s in ours["samples"]], [s[field] for s in peer["samples"]])
                row["verdict"] = "~" if not shown(row["ratio"]) else "faster" if row["ratio"].median > 1 else "slower"
            found.append(row)
    return found


def same_tokens(result: dict[str, Any], peer: dict[str, Any]) -> int:
    """How many greedy tokens of a peer are ours before the first that is not."""
    pairs = zip(result["peers"][0]["samples"][0]["tokens"], peer["samples"][0]["tokens"], strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), result["decode_tokens"])


def table(result: dict[str, Any]) -> str:
    """Markdown: what was measured, then correctness, then speed; a peer that did not run is named with its reason."""
    ours = result["peers"][0]["name"]
    lines = [
        f"Prompt {result['prompt_tokens']} tokens, greedy decode of {result['decode_tokens']}, "
        f"{result['rounds']} interleaved rounds; median [interval], tokens a second; "
        f"ratio = {ours} / peer, paired by round; ~ = no difference shown.",
        "",
        "| metric | peer | tok/s | ratio | verdict |",
        "|---|---|---|---|---|",
    ]
    for peer in result["peers"][1:]:
        lines.append(f"| same greedy tokens | {peer['name']} | {same_tokens(result, peer)} of {result['decode_tokens']} | | |")
    for row in rows(result):
        versus = f"{_text(row['ratio'])}×" if row["ratio"] else ""
        lines.append(f"| {row['metric']} | {row['peer']} | {_text(row['speed'])} | {versus} | {row['verdict']} |")
    coverage = interval([0.0] * result["rounds"]).coverage
    lines += ["", f"n = {result['rounds']}, the interval covers the median with {coverage:.1%}."]
    for peer in result["peers"]:
        lines.append(f"- {peer['name']}: " + ", ".join(f"{name} {value}" for name, value in peer["environment"].items()))
    lines += [f"- {missing['name']}: not measured: {missing['reason']}" for missing in result["missing"]]
    lines += [f"- Warning: {warning}" for warning in result["warnings"]]
    return "\n".join(lines) + "\n"


def _text(found: Interval) -> str:
    def number(value: float) -> str:
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"

    return f"{number(found.median)} [{number(found.low)}, {number(found.high)}]"
