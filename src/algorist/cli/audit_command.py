"""``algorist rewards audit``: what is wrong with a reward, before a run optimises it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.terminal import Line, Result, View, table
from algorist.store.safe_text import printable

if TYPE_CHECKING:
    from algorist.preflight.reward_audit import Audit, AuditFinding


class Audited(Result):
    """Payments of the rewards for completions of known worth, and findings."""

    problems: Annotated[int, "problems that were tried"]
    paid: Annotated[dict[str, dict[str, float]], "reward → kind of completion → mean value"]
    findings: Annotated[
        list[dict[str, Any]],
        "per finding: reward, level (fault, note), name, text, advice, share, low, high, example",
    ]

    def view(self, width: int) -> View:
        from algorist.preflight.reward_audit import MEANING, RIGHT

        names = list(self.paid)
        kinds = [kind for kind in MEANING if any(kind in pays for pays in self.paid.values())]
        rows = [
            [
                "right" if kind in RIGHT else "wrong",
                kind,
                *(_number(self.paid[name].get(kind)) for name in names),
            ]
            for kind in kinds
        ]
        yield table(("", "completion", *names), rows)
        faults = sum(row["level"] == "fault" for row in self.findings)
        yield Line(f"\n{self.problems} problems; {faults} faults, {len(self.findings) - faults} notes")
        for row in self.findings:
            share = (
                ""
                if row["share"] is None
                else f" ({row['share']:.0%} of problems [{row['low']:.0%}, {row['high']:.0%}])"
            )
            yield Line(
                f"\n{row['level']}: {row['reward']}: {row['text']}{share}",
                "red" if row["level"] == "fault" else None,
            )
            if example := row["example"]:
                shown = printable(" ".join(example["completion"].split()))[:160] or "(empty)"
                yield Line(
                    f"  for example {example['value']:g} for: {shown} (gold answer {printable(example['gold'][:60])})"
                )
            yield Line(f"  {row['advice']}")

    def code(self) -> int:
        return 1 if any(row["level"] == "fault" for row in self.findings) else 0


def audit(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REWARD…] [KEY=VALUE…]",
            help="Rewards, registered or file.py:function; those of the recipe when left out; and settings of the recipe.",
        ),
    ] = None,
    recipe: str = "quickstart",
    data: Path | None = None,
    problems: Annotated[int, typer.Option(min=2)] = 40,
) -> Audited:
    """Try rewards on right and wrong completions of your problems, and say what they pay wrongly. Exit 1 with a fault.

    Args:
        recipe: The recipe (a shipped one or a .yaml file) whose data, prompt format, matcher and, without REWARD, rewards are used.
        data: A file of problems (JSONL, CSV, Parquet) in place of the recipe's.
        problems: Problems to try.

    Example: algorist rewards audit my_rewards.py:correct --data my.csv · Next: algorist run RECIPE 'rewards=[…]'
    """  # fmt: skip
    from algorist.config import load_recipe
    from algorist.data.load import load_problems
    from algorist.preflight.reward_audit import audit_rewards
    from algorist.prompts import get_format
    from algorist.rewards import build_rewards

    overrides = [word for word in words or [] if "=" in word]
    own = [word for word in words or [] if "=" not in word]
    if data is not None:
        overrides += ["data.train.name=local", f"data.train.path={data}"]
    resolved = load_recipe(recipe, overrides).recipe
    form = get_format(
        resolved.prompt.format, system_prompt=resolved.prompt.system_prompt, tags=resolved.prompt.tags
    )
    rewards = build_rewards(own or resolved.rewards, form, matcher=resolved.matcher)
    rows = load_problems(resolved.data.train)
    some = rows[:: max(len(rows) // problems, 1)][:problems]
    return _audited(audit_rewards(rewards, some, form, matcher=resolved.matcher))


def _audited(made: Audit) -> Audited:
    paid = {
        name: {kind: paid.overall for kind, paid in pays.items() if paid.values}
        for name, pays in made.pays.items()
    }
    return Audited(made.problems, paid, [_row(finding) for finding in made.findings])


def _row(finding: AuditFinding) -> dict[str, Any]:
    share = finding.share
    return {
        **{key: getattr(finding, key) for key in ("reward", "level", "name", "text", "advice", "example")},
        "share": None if share is None else share.value,
        "low": None if share is None else share.low,
        "high": None if share is None else share.high,
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
