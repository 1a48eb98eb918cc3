"""The benchmark's table, a pure function of its result (harness.bench.run.measure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.bench.statistics import Interval, interval, ratio, verdict
from reports.text import build_name, code_span, figure, one_line, plural, shorten

__all__ = ["METRICS", "interval_note", "interval_text", "rows", "table"]

METRICS = {"decode": "decode_tok_s", "prefill": "prefill_tok_s"}


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each metric and peer: medians with intervals in tokens a second, and ours / theirs where it is not ours."""
    ours = result["peers"][0]
    found = []
    for metric, field in METRICS.items():
        for peer in result["peers"]:
            speed = interval([sample[field] for sample in peer["samples"]])
            row: dict[str, Any] = {"metric": metric, "peer": peer["name"], "speed": speed, "ratio": None, "verdict": ""}
            if peer is not ours:
                row["ratio"] = ratio([s[field] for s in ours["samples"]], [s[field] for s in peer["samples"]])
                row["verdict"] = verdict(row["ratio"])
            found.append(row)
    return found


def same_tokens(result: Mapping[str, Any], peer: Mapping[str, Any]) -> int:
    """How many greedy tokens of a peer are ours before the first that is not."""
    pairs = zip(result["peers"][0]["samples"][0]["tokens"], peer["samples"][0]["tokens"], strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), result["decode_tokens"])


def table(result: Mapping[str, Any]) -> str:
    """Markdown: what was measured, then correctness, then speed; a peer that did not run is named with its reason."""
    ours = result["peers"][0]["name"]
    lines = [
        f"Prompt {result['prompt_tokens']} tokens, greedy decode of {result['decode_tokens']}, "
        f"{plural(result['rounds'], 'interleaved round')}; median [interval], tokens a second; "
        f"ratio = {ours} / peer, paired by round; ~ = no difference shown.",
        "",
        "| metric | peer | tok/s | ratio | verdict |",
        "|---|---|---|---|---|",
    ]
    for peer in result["peers"][1:]:
        lines.append(f"| same greedy tokens | {peer['name']} | {same_tokens(result, peer)} of {result['decode_tokens']} | | |")
    for row in rows(result):
        versus = f"{interval_text(row['ratio'])}×" if row["ratio"] else ""
        lines.append(f"| {row['metric']} | {row['peer']} | {interval_text(row['speed'])} | {versus} | {row['verdict']} |")
    lines += ["", f"{interval_note(result['rounds'])}."]
    lines += [f"- {peer['name']}: {' · '.join(_facts(peer, result['peers'][0]))}" for peer in result["peers"]]
    lines += [f"- {missing['name']}: not measured: {one_line(missing['reason'])}" for missing in result["missing"]]
    lines += [f"- Warning: {warning}" for warning in result["warnings"]]
    return "\n".join(lines) + "\n"


def _facts(peer: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    if build := peer["build"]:
        yield build_name(build)
        if build["name"] != ours["build"]["name"]:
            yield code_span(shorten(build["subject"], 100), table=False)
            if build["fingerprint"] == ours["build"]["fingerprint"]:
                yield f"the same code as {ours['name']}"
    yield from (f"{name} {value}" for name, value in peer["environment"].items())


def interval_text(found: Interval | None) -> str:
    """`12.1 [11.8, 12.6]`; one sample has no interval, and no sample is a dash."""
    if found is None:
        return "–"
    return figure(found.median) + (f" [{figure(found.low)}, {figure(found.high)}]" if found.n > 1 else "")


def interval_note(rounds: int) -> str:
    """What the intervals of so many rounds are worth."""
    if rounds == 1:
        return "n = 1, no interval"
    return f"n = {rounds}, the interval covers the median with {interval([0.0] * rounds).coverage:.1%}"
