"""``algorist diagnose RUN`` and ``doctor``: what is wrong with a run, and with this machine."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.terminal import Line, Result, View, table, verb
from algorist.cli.verbs import FILES

if TYPE_CHECKING:
    from algorist.diagnosis.rule import Finding
    from algorist.diagnosis.signals import Signals

SOME_CUT = 0.1
"""Share of completions that are cut off from which on it is said, though nothing is wrong with the run."""
app = typer.Typer(add_completion=False)
doctor_app = typer.Typer(add_completion=False)


class Diagnosis(Result):
    """What is wrong with a run."""

    run: Annotated[str, "its folder"]
    healthy: Annotated[bool | None, "true: no finding; null: too little to judge, or not explained"]
    looked_at: Annotated[dict[str, int], "grpo_steps, rollouts, metric_lines"]
    missing_tags: Annotated[dict[str, int], "tag → completions"]
    moved: Annotated[list[str], "a line for each cause that moved the weights"]
    findings: Annotated[
        list[Any], "name, stage, severity (1–3), explanation, evidence, samples, change, helped"
    ]
    not_explained: Annotated[str, "accuracy that did not rise, without a finding"]
    why_too_little: str
    gained: str
    cut_off: float
    shown: Any

    def view(self, width: int) -> View:
        from algorist.diagnosis.rules import all_rules

        seen = self.looked_at
        looked = f"{seen['rollouts']} rollouts of {seen['grpo_steps']} GRPO steps, {seen['metric_lines']} metric lines"
        if self.moved:
            yield Line("what moved the weights, median over the steps:", "bold")
            yield from (f"  {line}" for line in self.moved)
        for tag, count in self.missing_tags.items():
            yield f"{count} of {seen['rollouts']} rollouts lack {tag} alone; the answer in them is not read"
        if self.not_explained:
            yield Line(f"{self.run}: not explained", "bold yellow")
            yield f"{self.not_explained}; none of {len(all_rules())} rules says why. Looked at {looked}."
            yield f"Look at wrong completions: algorist inspect {self.run} --wrong"
            if "bisect" in FILES:
                yield f"Repeat it with some lines of its recipe changed, then fewer: algorist bisect {self.run}"
        elif self.healthy is None:
            yield (
                f"{self.run}: too little to judge yet: {self.why_too_little} (looked at {looked}); look again after a few steps"
            )
        elif self.healthy:
            yield Line(f"{self.run}: no known fault", "bold green")
            yield f"None of {len(all_rules())} rules applies (algorist recipes rules prints them). Looked at {looked}."
            if self.gained:
                yield self.gained
            if self.cut_off >= SOME_CUT:
                yield f"but {self.cut_off:.0%} of the last rollouts are cut off: a higher grpo.max_completion_tokens may gain more"
        else:
            count = len(self.shown)
            yield f"{self.run}: {count} finding{'s' if count > 1 else ''} (looked at {looked})"
            for number, finding in enumerate(self.shown, start=1):
                yield from view_of(finding, f"{number}. ", Path(self.run))
            yield f"\nEach cause is explained in docs/troubleshooting.md. The rollouts: algorist inspect {self.run}"

    def code(self) -> int:
        return 1 if self.findings else 0


@verb(app)
def diagnose(run: Path) -> Diagnosis:
    """Say why a run does not learn: causes, evidence, what to change. Exit 1 when there is a finding, else 0.

    Args:
        run: A run folder, finished or still training.

    Example: algorist diagnose runs/quickstart · Next: change the lines it prints and run again
    """
    from algorist.diagnosis.diagnose import find_causes, moved, not_explained, too_little
    from algorist.diagnosis.signals import read_signals
    from algorist.report.results import gained
    from algorist.store.read import opened
    from algorist.store.run_folder import RunFolder

    RunFolder.open(run)
    with opened(run):
        signals = read_signals(run)
        findings = find_causes(signals)
        why = "" if findings else too_little(signals)
        open_question = "" if findings or why else not_explained(signals)
    healthy = None if why or open_question else not findings
    return Diagnosis(
        str(run),
        healthy,
        _counts(signals),
        _missing(signals),
        moved(signals),
        [finding.as_dict() for finding in findings],
        open_question,
        why,
        gained(run),
        _cut_off(signals),
        findings,
    )


def _cut_off(signals: Signals) -> float:
    from algorist.diagnosis.signals import recent

    last = recent(signals.batches)
    return sum(b.truncated for b in last) / max(1, sum(b.rollouts for b in last))


def _again(run: Path, change: tuple[str, ...]) -> str:
    """Return the command of a run with lines changed and a name of its own; an empty string where it was made otherwise."""
    from algorist.store.redact import HIDDEN
    from algorist.store.run_folder import RunFolder

    words = RunFolder(run).command()
    if words[1:2] != ["run"] or not change or "--" in words or HIDDEN in " ".join(words):
        return ""
    new = {line.partition("=")[0] for line in change} | {"run_name"}
    kept = [word for word in words if word != "--resume" and word.partition("=")[0] not in new]
    return shlex.join([*kept, *change, f"run_name={run.resolve().name}-2"])


def view_of(finding: Finding, number: str = "", run: Path | None = None) -> View:
    """Return a finding: its sentence, evidence, completions, and the lines to change, quoted for the shell, with the value in force."""
    yield Line(
        f"\n{number}{finding.name} ({finding.stage})", "bold red" if finding.severity == 1 else "bold yellow"
    )
    yield f"   {finding.sentence}"
    for text in finding.evidence:
        yield f"   · {text}"
    for sample in finding.samples:
        yield Line(f"   > {sample}", "dim")
    if finding.change:
        yield "   change, as words after algorist run RECIPE:"
    for line, now in zip(finding.change, finding.before, strict=True):
        yield Line(f"     {shlex.quote(line)}{f'  # is {now}' if now else ''}", "cyan", whole=True)
    if again := _again(run, finding.change) if run else "":
        yield Line(f"   the whole command: {again}", whole=True)
    if finding.change and finding.helped:
        yield f"   it helped if {finding.helped}"


def _counts(signals: Signals) -> dict[str, int]:
    return {
        "grpo_steps": len(signals.batches),
        "rollouts": sum(b.rollouts for b in signals.batches),
        "metric_lines": sum(len(lines) for lines in signals.lines.values()),
    }


def _missing(signals: Signals) -> dict[str, int]:
    from algorist.diagnosis.signals import missing_tags
    from algorist.prompts import FORMATS

    name, settings = signals.settings.get("prompt.format", ""), signals.settings
    usual = asdict(FORMATS.get(name).tags) if name in FORMATS.names() else {}
    reasons = sum((batch.reasons for batch in signals.batches), Counter[str]())
    return missing_tags(reasons, usual | settings.get("prompt.tags", {}))


class Environment(Result):
    """What this machine can run."""

    versions: Annotated[dict[str, str | None], "package → version, null where it is not installed"]
    device: Annotated[str, "what torch computes on"]
    vllm: Annotated[str, "whether vLLM can be used"]
    disk: Annotated[str, "free space"]
    hub: Annotated[str, "whether the hub can be reached"]
    system: Annotated[list[str], "what this system lacks; empty on Linux"]
    problems: Annotated[list[str], "what is broken, and what to do"]

    def view(self, width: int) -> View:
        from algorist.diagnosis.environment import TESTED

        rows = {}
        for name, version in self.versions.items():
            tested = TESTED.get(name)
            note = "" if tested is None or version == tested else f" (tests pass with {tested})"
            rows[name] = f"{version or 'not installed'}{note}"
        rows |= {"device": self.device, "vllm": self.vllm, "disk": self.disk, "hub": self.hub}
        yield table(("", ""), rows.items())
        yield from (f"this system lacks {text}" for text in self.system)
        yield "\n".join(f"problem: {text}" for text in self.problems) or "everything needed is there"

    def code(self) -> int:
        return 1 if self.problems else 0


@verb(doctor_app)
def doctor(hub: bool = True) -> Environment:
    """Check versions, devices, the vLLM / TRL pair, disk space and hub access. Exit 1 if something is broken.

    Args:
        hub: Try to reach the hub (two seconds).

    Example: algorist doctor --json · Next: algorist run quickstart
    """
    from algorist.diagnosis.environment import environment

    return Environment(**environment(hub))
