"""Measures what the bounds and the cases rest on, for harness/tolerance.py and harness/cases/build.py.

    python -m suites.harness.measure --seeds 20

For each dtype and case: the largest error ratio of honest second implementations, the chance of a row to go beyond K by the
slope of its tail, and for each fault the least and the median over seeds of the cell's error ratio, in units of the bound.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from harness.cases import Case, all_cases, build
from harness.oracle import Oracle
from harness.replay import Plan, replay
from harness.schedule import Schedule
from harness.tokens import special_ids
from harness.verdict import Verdict, judge
from suites.harness.second_llama import FAULTS, SecondLlama

__all__ = ["cells", "verdict"]


def schedules(case: Case) -> list[Schedule]:
    """Pieces, single tokens, rewind, reopening: what each fault needs to show."""
    first, second = case.prompt // 3, 7 if case.prompt < 100 else 160
    rest = case.prompt - first - second
    tail = f"step {rest}" if case.prompt < 100 else f"feed {rest} all"
    text = f"feed {first} all; feed {second} all; {tail}; rewind 9; step 4; close; open; feed {first} all; feed {second} all"
    return [Schedule.parse(text.replace("close", "close a").replace("open", "open a"))]


def verdict(case: Case, seed: int, oracle: Oracle, dtype: str, fault: str | None, rotate_in_dtype: bool = False) -> Verdict:
    plans = [
        Plan(schedule, seed, oracle.vocab, special_ids(oracle.config), planted=case.planted) for schedule in schedules(case)
    ]
    replays = [
        replay(SecondLlama(oracle.config, oracle.weights, dtype, fault, rotate_in_dtype=rotate_in_dtype), plan)
        for plan in plans
    ]
    return judge(replays, plans, oracle, dtype)


def cells(seeds: int, directory: Path) -> Iterator[tuple[Case, int, Oracle]]:
    for case in all_cases():
        if case.family == "llama":
            for seed in range(seeds if case.prompt < 100 else max(1, seeds // 5)):
                yield case, seed, Oracle(build.build(case, seed, directory))


def _tail(ratios: np.ndarray, bound: float) -> float:
    """log10 of the chance of a row beyond the bound, from the slope between the 99th and the 99.9th percentile."""
    two, three = np.quantile(ratios, [0.99, 0.999])
    return -3 - (bound - three) / (three - two)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measured: dict[tuple[str, str], list[tuple[np.ndarray, dict[str, float], str]]] = {}
        for case, seed, oracle in cells(arguments.seeds, Path(directory)):
            for dtype in arguments.dtypes:
                good = [verdict(case, seed, oracle, dtype, None, way) for way in (False, True)]
                rows = np.array([row.error_ratio for one in good for row in one.judged])
                faults = {fault: verdict(case, seed, oracle, dtype, fault) for fault in FAULTS}
                powers = {fault: (one.error_ratio or math.inf) / (one.bound or 1) for fault, one in faults.items()}
                measured.setdefault((dtype, case.name), []).append((rows, powers, "/".join(one.outcome for one in good)))
        for dtype in arguments.dtypes:
            print(
                f"\n{dtype:14} good  " + "".join(f"{fault:>24}" for fault in FAULTS) + "   (least, median: error ratio / bound)"
            )
            mine = {name: values for (d, name), values in measured.items() if d == dtype}
            for name, values in mine.items():
                columns = [np.array([powers[fault] for _, powers, _ in values]) for fault in FAULTS]
                largest = max(rows.max() for rows, _, _ in values)
                text = "".join(f"{column.min():>13.4g}{np.median(column):>11.4g}" for column in columns)
                print(f"{name:14} {largest:.2f}  {text}  {sorted({outcomes for _, _, outcomes in values})}")
            everything = np.concatenate([rows for values in mine.values() for rows, _, _ in values])
            chances = [_tail(everything, bound) for bound in (3.0, 3.0 / 1.25)]
            print(f"{len(everything)} rows, largest {everything.max():.3f}; log10 of the chance of a row beyond the bound:")
            print(f"{chances[0]:.1f}, and {chances[1]:.1f} for a target that is 1.25 times as coarse")


if __name__ == "__main__":
    main()
