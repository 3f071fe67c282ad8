"""The best checkpoint of a GRPO run by held-out accuracy, and the end of a run that collapses or no longer improves.

Everything is found from the lines of ``metrics.jsonl``, so a resumed run decides as the uninterrupted one. ``grpo/best.json`` says which
checkpoint is the best and, when the run was ended, why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from algorist.config.section import Section
from algorist.diagnosis.rule import Facts, Unknown, fact, make_rule
from algorist.store.atomic import replace_text
from algorist.store.stages import START
from algorist.store.write import read_metrics
from algorist.training.extension import Control, Event, Extension, extension

if TYPE_CHECKING:
    from algorist.config.schema import Recipe

ACCURACY = "eval/greedy_accuracy"
FILE = "best.json"
START_LINES = 3
"""Logged lines whose median is a metric's value at the start."""
SHRUNK = 0.2
"""Share of the first mean length below which completions have collapsed."""
CUT, CUT_AT_START = 0.9, 0.5
"""Share of truncated completions that is a collapse, where it was below the second at the start."""


@dataclass(frozen=True)
class Best:
    """The best held-out accuracy so far and the optimizer step that it was measured after."""

    step: int
    accuracy: float

    @property
    def checkpoint(self) -> str:
        """Name of its folder."""
        return f"checkpoint-{self.step}" if self.step else START


class StopSection(Section):
    """When GRPO ends before its last step, at the best checkpoint by held-out accuracy (``grpo.eval_every``)."""

    patience: int = Field(20, ge=1)
    """Steps without a better held-out accuracy (plateau), or with the same sign of collapse in each logged line, before the run ends."""
    on: list[Literal["collapse", "plateau"]] = Field(default_factory=lambda: ["collapse"], min_length=1)  # type: ignore[arg-type]
    """Reasons to stop. Collapse: the held-out accuracy halved, the entropy fell to a tenth or doubled, completions became a fifth as long or
    are all cut off, or the KL is above 0.5 nats per token."""

    @model_validator(mode="before")
    @classmethod
    def _read_on(cls, values: Any) -> Any:
        """Take YAML's ``on``, which is true, for the word."""
        if not isinstance(values, dict):
            return values
        return {"on" if key is True else key: value for key, value in values.items()}


class _Keys(Section):
    keep_best: bool = True
    """Save the best checkpoint by held-out accuracy (``eval_every``) and keep it beside the last ones."""
    stop: StopSection | None = None
    """End a run that collapses or no longer improves, at its best checkpoint."""


@fact("{ended_why}; {best_checkpoint}", "ended")
def _ended(f: Facts) -> dict[str, Any]:
    """Read the ``grpo/best.json`` of a run that was ended."""
    from algorist.store.run_folder import RunFolder

    best = RunFolder(f.signals.run).read_json(f"grpo/{FILE}") if f.signals.run else None
    if not isinstance(best, dict) or not best.get("ended"):
        raise Unknown("ended")
    return best


@fact("{}")
def ended_why(f: Facts) -> str:
    return str(f["ended"]["ended"].get("why"))


@fact("{}")
def best_checkpoint(f: Facts) -> str:
    best = f["ended"]
    return f"held-out accuracy of grpo/{best.get('checkpoint')}: {best.get('greedy_accuracy', 0.0):.3f}"


def _collapsed(f: Facts) -> bool:
    return bool(f["ended"]["ended"].get("reason") == "collapse")


def ended_early(f: Facts) -> bool:
    """`grpo.stop` ended the run: the policy collapsed, or its held-out accuracy no longer rose. `grpo/final` is the best checkpoint, not
    the last; `grpo/best.json` says which and why.

    **Recognised**: by the record of the run. [What a collapse is](settings.md#grpostop).

    **Change**: after a collapse a smaller learning rate; after a plateau nothing, or more patience.
    """
    return bool(f["ended"])


ENDED_EARLY = make_rule(
    ended_early,
    2,
    facts="ended_why best_checkpoint",
    says=lambda f: (
        f"The run was ended after step {f['ended']['ended'].get('step')} because it "
        f"{'collapsed' if _collapsed(f) else 'stopped improving'}; grpo/final is its best checkpoint, of step {f['ended'].get('step')}."
    ),
    change={
        "grpo.learning_rate": lambda f: float(f"{f['learning_rate'] / 10:.1e}") if _collapsed(f) else None,
        "grpo.eval_every": lambda f: int(f.number("grpo.eval_every", 10)),
        "grpo.stop.patience": lambda f: 2 * int(f.number("grpo.stop.patience", 20)),
    },
)


@extension
class KeepBest(Extension):
    """Saves and keeps the best checkpoint; ends the run as ``grpo.stop`` says."""

    name, keys = "best", {"grpo": _Keys}

    @classmethod
    def takes_part(cls, recipe: Recipe) -> bool:
        section: Any = recipe.grpo
        return bool(section.enabled and (section.stop or section.keep_best))

    rules = (ENDED_EARLY,)

    def check(self, plan: Any) -> Iterable[str]:
        if self.recipe.grpo.stop and not self._keeps():
            yield (
                "grpo.stop is set, which needs held-out evaluations during the stage and its best checkpoint; take for example "
                "grpo.eval_every=10, with eval.enabled and grpo.keep_best true"
            )

    def _keeps(self) -> bool:
        grpo: Any = self.recipe.grpo
        return bool(grpo.keep_best and grpo.eval_every and self.recipe.eval.enabled)

    def open(self, run: Any) -> None:
        self.folder, self.processes, self.say = run.folder.path / "grpo", run.processes, run.display.say
        self.held_out = max(1, len(run.held_out))
        self.limits: StopSection | None = self.recipe.grpo.stop
        self.best: Best | None = None
        self.last: Best | None = None
        self.ended: dict[str, Any] | None = None
        self._start: dict[str, list[float]] = {}
        self._signs: dict[str, int] = {}
        self._unsaved = False

    def seen(self, event: Event) -> Control | None:
        if event.stage != "grpo" or not self._keeps():
            return None
        if event.kind == "stage":
            lines = self.processes.from_main(lambda: read_metrics(self.folder.parent / "metrics.jsonl"))
            self.begin(event.trainer, lines)
            first = self.limits is not None and self.last is None and not event.trainer.is_deepspeed_enabled
            return Control(stop=self.ended is not None, evaluate=first)
        if event.kind in ("metrics", "evaluation_line"):
            self.see(event.step or 0, event.values)
        if event.kind == "metrics":  # end the run after a last checkpoint
            if self.limits is not None:
                self.ended = self.processes.from_main(lambda: self.ended)
            return Control(save=self.ended is not None, stop=self.ended is not None)
        if event.kind == "step" and self._unsaved:  # this step was evaluated as the best
            self._unsaved = False
            return Control(save=True)
        if event.kind == "stage_end":
            self.finish(event.trainer, self.say)
        return None

    def begin(self, trainer: Any, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take the lines of the run so far, and let ``trainer`` keep the best checkpoint."""
        trainer.best_checkpoint = lambda: self.best.checkpoint if self.best else ""
        for line in lines:
            if line.get("stage") == "grpo":
                self.see(int(line["step"]), {k: v for k, v in line.items() if isinstance(v, (int, float))})
        self._unsaved = False
        if self.processes.main:
            (self.folder / FILE).unlink(missing_ok=True)  # of evaluations that are done again
        self._write()

    def see(self, step: int, values: Mapping[str, float]) -> None:
        """Take one line of metrics, that of a held-out evaluation included."""
        if self.ended:
            return
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        if ACCURACY in values:
            self.last = Best(step, values[ACCURACY])
            if self.best is None or self.last.accuracy > self.best.accuracy:
                self.best, self._unsaved, self._signs = self.last, step > 0, {}
                self._write()
        for name in ("entropy", "completions/mean_length", "completions/clipped_ratio"):
            if name in values and len(self._start.setdefault(name, [])) < START_LINES:
                self._start[name].append(values[name])
        if self.limits is not None and self.best is not None:
            self._judge(self.limits, step, values)

    def _judge(self, stop: StopSection, step: int, values: Mapping[str, float]) -> None:
        assert self.best is not None
        # A policy that was never better does not collapse.
        signs = {} if self.last == self.best else self._signs_of_collapse(values)
        self._signs = {n: first for n, first in self._signs.items() if signs.get(n, " ")}
        shown = {name: text for name, text in signs.items() if text}
        waited = step - self.best.step
        for name, text in shown.items():
            lasts = step - self._signs.setdefault(name, step) >= stop.patience - 1
            if "collapse" in stop.on and lasts and not self.ended:
                self._end(step, "collapse", text)
        if "plateau" in stop.on and ACCURACY in values and waited >= stop.patience and not self.ended:
            why = next(iter(shown.values()), f"no better held-out accuracy for {waited} steps")
            self._end(step, "collapse" if shown else "plateau", why)

    def _signs_of_collapse(self, values: Mapping[str, float]) -> dict[str, str]:
        """Return for each sign that ``values`` has a say in: what shows it, or an empty text when it is not there."""
        from algorist.diagnosis.rules import (
            COLLAPSED,
            ENTROPY_NATS,
            ENTROPY_TIMES,
            HALVED,
            KL_LARGE,
            LEAST_DROP,
            LEAST_ENTROPY,
        )

        assert self.best is not None and self.last is not None
        best, now = self.best.accuracy, self.last.accuracy
        noise = 2 * math.sqrt((best * (1 - best) + now * (1 - now)) / self.held_out)
        fell = now < HALVED * best and best - now > max(LEAST_DROP, noise)
        signs = {"accuracy": f"held-out accuracy {best:.3f} → {now:.3f}" if fell else ""}
        for name, start in ((n, sorted(v)[len(v) // 2]) for n, v in self._start.items()):
            value = values.get(name)
            if value is None:
                continue
            if name == "entropy":
                low = start > LEAST_ENTROPY and value < COLLAPSED * start
                gone = low or (value > ENTROPY_TIMES * start and value > start + ENTROPY_NATS)
            elif name.endswith("mean_length"):
                gone = value < SHRUNK * start
            else:
                gone = value > CUT and start < CUT_AT_START
            signs[name] = f"{name} {start:.3g} → {value:.3g}" if gone else ""
        if "kl" in values:
            signs["kl"] = f"kl {values['kl']:.3g} nats per token" if values["kl"] > KL_LARGE else ""
        return signs

    def _end(self, step: int, reason: str, why: str) -> None:
        self.ended = {"step": step, "reason": reason, "why": why}
        self._write()

    def _write(self) -> None:
        if not self.processes.main or self.best is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "checkpoint": self.best.checkpoint,
            "step": self.best.step,
            "greedy_accuracy": self.best.accuracy,
            "ended": self.ended,
        }
        replace_text(self.folder / FILE, json.dumps(state) + "\n")

    def finish(self, trainer: Any, say: Callable[[str], None]) -> None:
        """Take the best weights where the run was ended, and say what became of the best checkpoint."""
        if self.best is None:
            return
        best = f"grpo/{self.best.checkpoint} (held-out accuracy {self.best.accuracy:.3f})"
        if self.ended is None:
            say(f"grpo: the best checkpoint during training is {best}")
            return
        from algorist.training.checkpoint import load_weights

        load_weights(trainer, self.folder / self.best.checkpoint)
        say(
            f"grpo: ended after step {self.ended['step']}: {self.ended['reason']}, {self.ended['why']}; grpo/final is the best "
            f"checkpoint, {best}"
        )
