"""``algorist diagnose RUN``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from algorist.cli.arguments import AsJsonObject
from algorist.cli.terminal import Screen, console

if TYPE_CHECKING:
    from algorist.diagnosis.findings import Finding
    from algorist.diagnosis.signals import Signals

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: algorist diagnose runs/quickstart · Next: change the lines it prints and run again"
)
def diagnose(
    run: Annotated[Path, typer.Argument(help="A run folder, finished or still training.")],
    as_json: AsJsonObject = False,
) -> int:
    """Say why a run does not learn: causes, evidence, what to change. Exit 1 when something was found, else 0."""
    from algorist.diagnosis.diagnose import find_causes, too_little
    from algorist.diagnosis.signals import read_signals
    from algorist.store.run_folder import RunFolder

    RunFolder.open(run)
    signals = read_signals(run)
    findings = find_causes(signals)
    if as_json:
        print(
            json.dumps(
                {
                    "run": str(run),
                    "healthy": None if not findings and too_little(signals) else not findings,
                    "looked_at": _counts(signals),
                    "findings": [f.as_dict() for f in findings],
                }
            )
        )
    else:
        _show(console(), run, signals, findings)
    return 1 if findings else 0


def show_finding(screen: Screen, finding: Finding, number: str = "") -> None:
    """Print a finding: its sentence, evidence, completions, and the lines to change, quoted for the shell, with the value in force."""
    colour = "bold red" if finding.severity == 1 else "bold yellow"
    screen.say(f"\n{number}{finding.name} ({finding.stage})", style=colour)
    screen.say(f"   {finding.sentence}")
    for text in finding.evidence:
        screen.say(f"   · {text}")
    for sample in finding.samples:
        screen.say(f"   > {sample}", style="dim")
    if finding.change:
        screen.say("   change, as words after algorist run RECIPE:")
    for line, now in zip(finding.change, finding.before, strict=True):
        remark = f"  # is {now}" if now else ""
        screen.print(f"     {shlex.quote(line)}{remark}", style="cyan", soft_wrap=True)


def _counts(signals: Signals) -> dict[str, int]:
    return {
        "grpo_steps": len(signals.batches),
        "rollouts": sum(b.rollouts for b in signals.batches),
        "metric_lines": sum(len(lines) for lines in signals.lines.values()),
    }


def _show(screen: Screen, run: Path, signals: Signals, findings: list[Finding]) -> None:
    from algorist.diagnosis.diagnose import too_little
    from algorist.diagnosis.rule import all_rules

    seen = _counts(signals)
    looked = (
        f"{seen['rollouts']} rollouts of {seen['grpo_steps']} GRPO steps, {seen['metric_lines']} metric lines"
    )
    if not findings and (why := too_little(signals)):
        screen.say(
            f"{run}: too little to judge yet: {why} (looked at {looked}); look again after a few steps"
        )
        return
    if not findings:
        screen.say(f"{run}: nothing is wrong", style="bold green")
        screen.say(
            f"None of {len(all_rules())} rules applies: {', '.join(sorted(all_rules()))}. Looked at {looked}."
        )
        return
    screen.say(f"{run}: {len(findings)} finding{'s' if len(findings) > 1 else ''} (looked at {looked})")
    for number, finding in enumerate(findings, start=1):
        show_finding(screen, finding, f"{number}. ")
    screen.say(f"\nEach cause is explained in docs/troubleshooting.md. The rollouts: algorist inspect {run}")
