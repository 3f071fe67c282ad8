"""A short trial of ``algorist new``: how a recipe can learn from questions and answers alone, measured on this model and these problems.

What is tried, in this order, and ends it: the forms in which a model may answer; GRPO from the best one where it is written reliably; SFT
on the right completions among those sampled (rejection sampling, STaR: 2203.14465, RFT: 2308.01825), or on a teacher's; SFT on generated
problems. Where nothing is right after that, the trial refuses.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from algorist.cli.first_recipe import FORMS, TAUGHT, TEMPERATURE, Route
from algorist.cli.terminal import TerminalDisplay
from algorist.config.load import validate
from algorist.errors import AlgoristError, DataError, EngineError
from algorist.models.loaders import loadable_name

if TYPE_CHECKING:
    from algorist.models.load import Policy
    from algorist.preflight.completions import Sampler
    from algorist.runs.plan import Plan
    from algorist.runs.sample import SampleCounts
    from algorist.types import Group, Problem

PROBLEMS, SAMPLES = 16, 2
"""Sampled with each form; with the best one as many more problems as the time allows."""
WORTH = 0.05
"""Share of right completions from which more are sampled, to imitate them."""
RELIABLE, OFTEN = 0.9, 0.25
"""Shares of completions in the form, and right, from which GRPO needs no SFT."""
PASSES = 2
"""Over the right completions, in SFT."""
FEWEST = 8
"""Right completions that SFT can imitate."""
HOPELESS = 0.03
"""Share of right completions below which fewer than one group of 8 in four teaches."""
STORIES = "{name: mixture, params: {seed: 1, parts: [{name: story_problems, params: {count: 1920, seed: 1, traps: true}}, {name: equations, params: {count: 1920, seed: 1}}]}}"
SUMS = "{name: arithmetic, params: {count: 8000, seed: 2}}"
"""Generated problems: for a model that reads, and for one made from nothing."""
WHAT = "imitate generated problems first: the form, and arithmetic"


def at_hand(model: str) -> bool:
    """Return whether a model needs no download."""
    if model == "tiny" or Path(model).expanduser().exists():
        return True
    try:
        name = loadable_name(model)
    except AlgoristError:
        return False
    if Path(name).is_dir():
        return True
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


class Trial:
    """A trial of a model, or of a teacher, on a recipe's training problems.

    Args:
        recipe: Returns the values of the recipe that ``new`` would write for a choice.
        teacher: The model that is sampled instead of the recipe's.
        minutes: How long it may take once the model is loaded.
        display: Shows what is being done.
    """

    def __init__(
        self,
        recipe: Callable[[Route], dict[str, Any]],
        teacher: str | None,
        minutes: float,
        display: TerminalDisplay,
    ) -> None:
        self.recipe, self.teacher, self.display = recipe, teacher, display
        first = recipe(Route())
        self.name, self.model = first["name"], first["model"]["name"]
        self.minutes, self.ends = minutes, 0.0
        self.policy: Policy | None = None
        self.lines: list[str] = []

    @property
    def sampled(self) -> str:
        """The model that is sampled."""
        return self.teacher or self.model

    def choose(self) -> Route:
        """Choose the way in which the recipe learns.

        Raises:
            DataError: The model cannot learn from these problems.
        """
        from algorist.models.memory import bounded_memory

        with bounded_memory(self._plan(Route()).device):
            if self.sampled != "tiny":
                begun = [drawn for drawn in map(self._ask, FORMS) if drawn]
                tried = [drawn for drawn in begun if drawn.groups]
                if not tried:
                    return self._generated()
                drawn = max(tried, key=lambda drawn: drawn.rank)
                if self.teacher is None and drawn.needs_no_sft:
                    why = self._why("GRPO at once")
                    return Route(drawn.form, why, temperature=TEMPERATURE)
                if drawn.share >= WORTH:
                    return self._imitate(drawn)
                if len(tried) < len(begun):
                    raise self._too_short(
                        f"after {len(tried)} of {len(begun)} forms: {'; '.join(self.lines)}"
                    )
            return self._generated()

    # ---- the model's own right completions, or a teacher's

    def _ask(self, form: str) -> _Drawn | None:
        """Sample a few problems in a form, none where half of the time is over before; None where its prompts do not fit."""
        drawn = _Drawn(form, *self._ready(self._plan(Route(form, temperature=TEMPERATURE))))
        self.display.say(f"{form}: sampling {PROBLEMS} problems × {SAMPLES}, {FORMS[form]} …")
        try:
            drawn.draw(PROBLEMS, self.ends - 30 * self.minutes * bool(self.lines), self.display)
        except EngineError as error:
            self.lines.append(f"{form}: not tried, {error}")
            self.display.say(f"  not tried: {error}")
            return None
        if not drawn.groups and not self.lines:
            raise self._too_short(f"before {PROBLEMS} problems × {SAMPLES} completions were sampled")
        self.lines.append(f"{form}: {drawn.text()}")
        self.display.say(f"  {drawn.text()}")
        return drawn

    def _imitate(self, drawn: _Drawn) -> Route:
        from algorist.runs.sample import provenance

        self.display.say(f"sampling more, {FORMS[drawn.form]}, for SFT on what is right …")
        while (
            fitting := int((self.ends - time.monotonic()) / (1.1 * drawn.seconds / len(drawn.groups)))
        ) and len(drawn.groups) < len(drawn.plan.problems.train):
            if not drawn.draw(min(fitting, 2 * len(drawn.groups)), self.ends, self.display):
                break
        text, counts = drawn.demonstrations()
        self.lines.append(f"{drawn.form}, more problems: {drawn.text()}")
        if counts.written < FEWEST:
            raise DataError(
                f"{counts.right} of {counts.completions} completions of {self.sampled} are right and {counts.written} of them can be "
                f"imitated; expected at least {FEWEST}. Sample longer: --minutes {4 * self.minutes:g}; or a stronger model's: --teacher MODEL"
            )
        whose = f"of {self.teacher}" if self.teacher else "of its own"
        what = f"imitate {counts.written} right completions {whose}"
        data = f"{{name: local, path: {self.name}_right.jsonl}}"
        return Route(
            TAUGHT if drawn.form == "few_shot" else drawn.form,
            self._why(f"SFT on right completions {whose} ({self.name}_right.jsonl), then GRPO"),
            (data, what, max(2, PASSES * counts.written // 8)),
            (text, provenance(drawn.plan, self.sampled, SAMPLES, text, counts)),
            TEMPERATURE,
        )

    # ---- generated problems

    def _generated(self) -> Route:
        """Teach generated problems for half of the time that is left, and sample the user's."""
        sft = (SUMS, WHAT, 800) if self.model == "tiny" else (STORIES, WHAT, 240)
        if self.teacher:
            self.teacher, self.policy = None, None
        plan, sampler, policy = self._ready(self._plan(Route(sft=sft)))
        most, left = sft[2] // 4, self.ends - time.monotonic()
        self.display.say(f"SFT on generated problems, up to {most} steps, then sampling yours …")
        shown = partial(self.display.progress, "sft", total=most)
        done = _teach(plan, policy, most, time.monotonic() + left / 2, shown)
        self.display.finished("sft")
        drawn = _Drawn(TAUGHT, plan, sampler, policy)
        drawn.draw(3 * PROBLEMS, self.ends, self.display)
        after = f"after {done} steps of SFT on generated problems: {drawn.text()}"
        if not drawn.groups or done < most / 5:
            raise self._too_short(f"after {done} of {most} steps of SFT")
        if drawn.share >= HOPELESS:
            self.lines.append(after)
            why = self._why("SFT on generated problems, then GRPO")
            return Route(why=why, sft=sft)
        figures = "; ".join([*self.lines, after])
        raise DataError(
            f"this model cannot learn from this: {figures}. GRPO learns from right completions. What helps: a column of worked solutions "
            "(--solution), a stronger model (--model), or its right completions (--teacher MODEL); the recipe all the same: --no-trial"
        )

    # ---- what both need

    def _too_short(self, when: str) -> DataError:
        return DataError(
            f"the time for a trial of {self.sampled}, {self.minutes:g} minutes, was over {when}. More: --minutes {4 * self.minutes:g}; "
            "a recipe without a trial: --no-trial"
        )

    def _why(self, verdict: str) -> list[str]:
        whose = f" of {self.teacher}" if self.teacher else ""
        return [
            f"Completions{whose} before training:",
            *(f"  {line}" for line in self.lines),
            f"So {verdict}",
        ]

    def _plan(self, choice: Route) -> Plan:
        """Return the plan of the recipe of a choice, with the grader's verdict as the only reward."""
        from algorist.runs.draft import Draft
        from algorist.runs.plan import make_plan

        values = {**self.recipe(choice), "rewards": ["correct"]}
        if choice.form == "few_shot":
            values["grpo"]["stop_strings"] = ["</answer>"]  # else the next problem follows
        if self.teacher:
            values |= {"model": {"name": self.teacher}, "prompt": {"format": choice.form}}
        return make_plan(Draft.of(validate(values, where="the trial"), in_folder=False))

    def _ready(self, plan: Plan) -> tuple[Plan, Sampler, Policy]:
        """Return a plan for the model, with its sampler; the model is loaded once, and the time begins then."""
        import torch

        from algorist.preflight.completions import Sampler
        from algorist.preflight.run import start_policy

        if plan.recipe.threads:
            torch.set_num_threads(plan.recipe.threads)
        if self.policy is None:
            self.policy = start_policy(plan, None)
            self.ends = self.ends or time.monotonic() + 60 * self.minutes
        plan = plan.opened(self.policy.tokenizer)
        return plan, Sampler(plan, self.policy), self.policy


class _Drawn:
    """Completions of some problems in one form."""

    def __init__(self, form: str, plan: Plan, sampler: Sampler, policy: Policy) -> None:
        self.form, self.plan, self.sampler = form, plan, sampler
        self.groups: list[Group] = []
        self.seconds = 0.0

    def draw(self, count: int, ends: float, display: TerminalDisplay) -> bool:
        """Sample ``count`` more problems; return whether they were finished in time."""
        from algorist.evaluation.run import Pulse
        from algorist.rollouts.base import OutOfTime

        problems: Sequence[Problem] = self.plan.problems.train[len(self.groups) :][:count]
        total = len(problems) * SAMPLES * self.limit
        began = time.monotonic()
        try:
            with Pulse(partial(display.progress, "tokens"), total) as pulse:
                tokens = getattr(self.sampler.engine, "tokens", lambda: 0)
                pulse.sampling(SimpleNamespace(share=lambda: tokens() / total), 0, total)
                self.groups += self.sampler.draw(problems, SAMPLES, ends)
        except OutOfTime:
            return False
        finally:
            display.finished("tokens")
        self.seconds += time.monotonic() - began
        return True

    @property
    def limit(self) -> int:
        return self.plan.recipe.grpo.max_completion_tokens

    @property
    def facts(self) -> dict[str, Any]:
        return self.sampler.facts(self.groups)

    @property
    def share(self) -> float:
        return self.facts["pass_rate"]

    @property
    def rank(self) -> tuple[float, bool]:
        """Right completions; where as many are, a form that says where the answer is comes first."""
        return self.share, self.form != "last_number"

    @property
    def needs_no_sft(self) -> bool:
        return self.form != "few_shot" and self.facts["well_formed"] >= RELIABLE and self.share >= OFTEN

    def text(self) -> str:
        """Count the right completions, those in the form, and those that were cut off."""
        if not self.groups:
            return "not finished in time"
        facts, count = self.facts, len(self.groups) * SAMPLES
        right, read = round(facts["pass_rate"] * count), round(facts["well_formed"] * count)
        cut = round(facts["truncated"] * count)
        return f"{right} of {count} right, {read} in the form, {cut} cut off"

    def demonstrations(self) -> tuple[str, SampleCounts]:
        """Return the right completions as JSONL, each once, and the counts."""
        from algorist.runs.sample import demonstrations
        from algorist.store.write import rows_of

        rows = [row for group in self.groups for row in rows_of(group)]
        problems = [group.problem for group in self.groups]
        return demonstrations(rows, problems, self.plan.form, Path(), per_problem=2)


def _teach(plan: Plan, policy: Policy, most: int, until: float, shown: Callable[[int], None]) -> int:
    """Train the first steps of SFT on the policy, ``most`` or until a time, each one ``shown``; return how many."""
    from transformers import TrainerCallback

    from algorist.training.sft import demonstrations, make_sft_trainer

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            shown(state.global_step)
            control.should_training_stop = time.monotonic() > until or state.global_step >= most

    short = {"save_steps": 10**9, "logging_steps": 10**9}
    section = plan.recipe.sft.model_copy(update=short)
    demos = demonstrations(plan.problems.sft, plan.form, policy.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_sft_trainer(
            demos=demos, section=section, model=policy.model, tokenizer=policy.tokenizer, output_dir=Path(folder),
            seed=plan.recipe.seed, device=plan.device, callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    policy.model.eval()
    return trainer.state.global_step
