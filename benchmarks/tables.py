"""The tables of figures in docs, made from ``baselines/*.json`` and the recipes; nothing in them is typed by hand.

python benchmarks/tables.py            # write them between <!-- figures NAME --> and <!-- /figures -->
python benchmarks/tables.py --check    # exit 1 when a page is not up to date
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASELINES = ROOT / "benchmarks" / "baselines"
PAGES = ("docs/engine.md", "docs/grading.md")
BLOCK = re.compile(r"(<!-- figures (\w+) -->\n).*?(<!-- /figures -->)", re.DOTALL)

Row = tuple[str, str, str, str]
"""What, against what, the ratio, the script."""


def load_all(name: str) -> list[dict[str, Any]]:
    """Return what each processor measured."""
    files = [BASELINES / f"{name}.json", *sorted(BASELINES.glob(f"{name}@*.json"))]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]


def load(name: str) -> dict[str, Any] | None:
    """Return a baseline, or None when it was not measured."""
    return next(iter(load_all(name)), None)


def ratio(found: dict[str, Any]) -> str:
    """Return ``4.4× [4.2, 5.1]``."""
    return f"{found['ratio']:.3g}× [{found['low']:.3g}, {found['high']:.3g}]"


def _threads(found: dict[str, Any]) -> str:
    return "1 thread" if found["threads"] == 1 else f"{found['threads']} threads"


def _timed(kind: str, what: str, unit: str) -> list[Row]:
    rows = []
    for size in ("tiny", "small", "wide"):
        for found in load_all(f"{kind}-{size}-1t"):
            ours = next(v for k, v in found["variants"].items() if k != "trl")
            rates = (found["variants"]["trl"]["rate"]["median"], ours["rate"]["median"])
            rows.append(
                (
                    f"{what}, {'150k vocabulary' if size == 'wide' else size}, {found['rows']} rows",
                    f"TRL: {rates[0]:.0f} → {rates[1]:.0f} {unit}",
                    ratio(found["speed_up"]),
                    f"`{kind}.py --size {size}`",
                )
            )
    return rows


def equal() -> str:
    """Steps on equal work, of each kind the groups, rows and processor with the lowest ratio."""
    lines = [
        "| prompt+completion, groups | core | TRL → algorist, s | ratio [95 %] | memory | limit |",
        "|---|---|---|---|---|---|",
    ]
    lowest: dict[Any, Any] = {}
    for found in load_all("equal"):
        for cell in found["results"]:
            kind = tuple(cell[name] for name in ("prompt_tokens", "tokens", "half", "dtype"))
            cell["core"] = found["environment"]["cpu"].removeprefix("AMD EPYC ")
            if kind not in lowest or cell["speed_up"]["ratio"] < lowest[kind]["speed_up"]["ratio"]:
                lowest[kind] = cell
    for _, cell in sorted(lowest.items()):
        seconds = {name: side["second"]["median"] for name, side in cell["variants"].items()}
        work = f"{cell['prompt_tokens']}+{cell['tokens']}, {cell['rows'] // cell['group']}×{cell['group']}"
        words = [f"{work}, {cell['dtype']}", *(["half without signal"] if cell["half"] else [])]
        memory = f"{cell['memory']:.2f}" if "memory" in cell else "–"
        share = cell.get("share_of_limit")
        columns = [
            ", ".join(words),
            cell["core"],
            f"{seconds['trl']:.3g} → {seconds['algorist']:.3g}",
            ratio(cell["speed_up"]),
            memory,
            f"{share['sampling']:.2f}, {share['update']:.2f}" if share else "–",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join([*lines, ""]) + _where("equal")


def _memory() -> list[Row]:
    found = load("update-wide-memory")
    if found is None:
        return []
    peaks = found["variants"]
    return [
        (
            "peak memory of an update, 150k vocabulary",
            f"TRL: {peaks['trl']['peak_mib']:.0f} → {peaks['algorist']['peak_mib']:.0f} MiB",
            f"{found['peak_ratio']:.2f}×",
            "`update.py --size wide --memory`",
        )
    ]


def _accuracy() -> list[Row]:
    rows: list[Row] = []
    how = {"algorist": "", "refill": ", `resample`", "teacher": ", `teacher`"}
    for name, task in (
        ("time-to-accuracy-1t", "the quickstart"),
        ("time-to-accuracy-sums-1t", "sums (SmolLM2)"),
    ):
        for found in load_all(name):
            middle = {
                who: statistics.median(run["seconds"] for run in found["runs"] if run["who"] == who)
                for who in ("trl", *found["ratios"])
            }
            for who, times in found["ratios"].items():
                rows.append(
                    (
                        f"time to {found['target']:.0%} on {task}{how[who]}",
                        f"TRL: {middle['trl']:.0f} → {middle[who]:.0f} s",
                        ratio(times),
                        "`time_to_accuracy.py`",
                    )
                )
    return rows


def _vllm() -> list[Row]:
    rows, found = [], load("vllm-small-1t")
    for case in found["cases"] if found else []:
        rates = {name: found["rate"]["median"] for name, found in case["variants"].items()}
        rows.append(
            (
                f"rollouts, small, {case['rows']} rows, {case['dtype']}",
                f"vLLM: {rates['vllm']:.0f} → {rates['native']:.0f} tokens/s",
                ratio(case["native_over_vllm"]),
                "`vllm_rollout.py`",
            )
        )
    return rows


def _grading() -> list[Row]:
    found = load("grading")
    if found is None:
        return []
    rows = []
    for name, label, key, unit in (
        ("gsm8k self", "grading a GSM8K answer, median", "ratio_of_medians", "median_us"),
        ("math next", "grading MATH answers against another gold, all", "ratio_of_totals", "total_s"),
    ):
        one = found["speed"][name]
        mark = "µs" if unit == "median_us" else "s"
        rows.append(
            (
                label,
                f"math-verify: {one['math_verify'][unit]:g} → {one['algorist'][unit]:g} {mark}",
                ratio(one[key]),
                "`grading.py`",
            )
        )
    return rows


def _table(rows: list[Row]) -> str:
    lines = ["| what | against | ratio [95 %] | in `benchmarks/` |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _machine(environment: dict[str, Any]) -> str:
    versions = environment["libraries"]
    kept = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "transformers", "trl") if name in versions
    )
    return f"{environment['cpu']}, {environment['cores']} cores, Python {environment['python']}, {kept}"


def _where(*kinds: str) -> str:
    """Say on which machines the baselines of these kinds were measured: one of each processor."""
    files = [file for kind in kinds for file in sorted(BASELINES.glob(f"{kind}*json"))]
    found = [json.loads(file.read_text(encoding="utf-8"))["environment"] for file in files]
    machines: dict[str, list[str]] = {}  # processors by what they have in common
    for machine in dict.fromkeys(_machine(environment) for environment in found):
        cpu, _, rest = machine.partition(", ")
        machines.setdefault(rest, []).append(cpu)
    where = ", and on ".join(
        f"{', '.join([cpus[0], *(cpu.removeprefix('AMD EPYC ') for cpu in cpus[1:])])}, {rest}"
        for rest, cpus in machines.items()
    )
    note = f"Measured on {where}; both sides in turns in one run, one thread."
    return f"\n{textwrap.fill(note, 118)}\n" if machines else ""


def engine() -> str:
    """All figures of the engine."""
    rows = [
        *_vllm(),
        *_timed("update", "an update", "tokens/s"),
        *_timed("sft", "an SFT step", "tokens/s"),
        *_accuracy(),
        *_memory(),
    ]
    return _table(rows) + _where("update-", "sft-", "time-to-accuracy", "vllm-")


def grading() -> str:
    """Speed, and the verdicts on real gold answers."""
    found = load("grading")
    if found is None:
        return ""
    lines = [
        "| dataset | golds | itself: ours | math-verify | next: ours | math-verify |",
        "|---|---|---|---|---|---|",
    ]
    plain = []
    for row in found["datasets"]:
        verdicts = [row["self"]["algorist"], row["self"]["math_verify"], *row["next_equal"].values()]
        if verdicts == [row["golds"], row["golds"], 0, 0]:
            plain.append(row["golds"])
        else:
            lines.append(
                f"| {row['dataset']} | {row['golds']} | {row['self']['algorist']} | {row['self']['math_verify']} | "
                f"{row['next_equal']['algorist']} | {row['next_equal']['math_verify']} |"
            )
    total = sum(plain)
    lines.append(f"| {len(plain)} other datasets | {total} | {total} | {total} | 0 | 0 |")
    return f"{_table(_grading())}{_where('grading.')}\n" + "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {"engine": engine, "equal": equal, "grading": grading}


def main() -> None:
    """Write or check the pages."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for page in PAGES:
        file = ROOT / page
        old = file.read_text(encoding="utf-8")
        new = BLOCK.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[3]}", old)
        if new != old:
            stale.append(page)
            if not check:
                file.write_text(new, encoding="utf-8")
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'nothing'}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
