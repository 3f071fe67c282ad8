"""Warnings of a run: what its data and its model show before the first step, and the diagnosis of what it has shown so far.

The rules are those of preflight and diagnose; each cause is said once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from algorist.training.extension import Control, Event, Extension, extension

if TYPE_CHECKING:
    from algorist.diagnosis.diagnose import LiveDiagnosis
    from algorist.diagnosis.rule import Finding


@extension
class LiveWarnings(Extension):
    name = "live"
    watch: LiveDiagnosis | None = None

    def open(self, run: Any) -> None:
        from algorist.diagnosis.diagnose import LiveDiagnosis
        from algorist.diagnosis.facts import leaked_text

        if not run.processes.main:
            return
        self.run, self.watch = run, LiveDiagnosis(self.recipe, run.display.say, str(run.folder.path))
        if leaked := leaked_text([*run.train, *run.sft], run.held_out):
            run.display.say(f"warning: {leaked}")

    def seen(self, event: Event) -> Control | None:
        if self.watch is None:
            return None
        if event.kind == "loaded":
            for finding in start_findings(self.run):
                self.watch.said.add(finding.name)
                change = f" · change: {' '.join(finding.change)}" if finding.change else ""
                line = f"warning: {finding.one_line()}{change}"
                if line not in self.run.reported:
                    self.run.display.say(line)
                    self.run.reported.add(line)
        if event.kind == "rollouts":
            self.watch.on_rollouts(event.rows)
        if event.kind == "metrics":
            self.watch.on_metrics(event.step or 0, event.values, event.stage)
        return None


def start_findings(run: Any) -> list[Finding]:
    """Apply the rules that need no step to the model, tokenizer and problems of a run."""
    from algorist.data.problems import prompts_beyond
    from algorist.diagnosis.course import odd_data
    from algorist.diagnosis.rule import Facts, apply
    from algorist.diagnosis.rules import all_rules
    from algorist.diagnosis.settings import Settings
    from algorist.diagnosis.tokenization import tokenization_facts
    from algorist.models.modes import context_of
    from algorist.preflight.time import grpo_steps, sft_steps

    plan, recipe, policy, train, sft = run.plan, run.recipe, run.policy, run.train, run.sft
    context = context_of(policy.model)
    taught = sft if plan.trains("sft") else []
    facts: dict[str, Any] = {"context": context, "looked_at": len(train), "odd_data": odd_data(train, taught)}
    if plan.trains("grpo") and context:
        room = context - recipe.grpo.max_completion_tokens
        beyond = prompts_beyond(room, train, plan.form, policy.tokenizer)
        facts |= {"do_not_fit": len(beyond), "longest": max((tokens for _, tokens in beyond), default=0)}
    rendered = taught if recipe.sft.source == "problems" else ()
    facts |= tokenization_facts(policy, plan.form, train, demonstrations=rendered)
    rules = [rule for rule in all_rules().values() if rule.room == "start"]
    steps = {"sft": sft_steps(recipe.sft, len(sft)), "grpo": grpo_steps(recipe.grpo, len(train))}
    settings = Settings(recipe.model_dump())
    views = [Facts(settings, {**facts, "steps": steps[s]}, stage=s) for s in steps if plan.trains(s)]
    return apply(rules, *views)
