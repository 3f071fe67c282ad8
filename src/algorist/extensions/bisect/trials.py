"""Trials: the run again with some lines changed; what each reached, and the smallest set of lines that makes the difference."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from algorist.config.load import load_recipe, load_run_recipe
from algorist.config.schema import Recipe
from algorist.config.yaml_text import one_line_yaml
from algorist.data import load_problems
from algorist.diagnosis.diagnose import diagnose
from algorist.diagnosis.signals import Moments, ends, pooled, read_signals, z_score
from algorist.errors import AlgoristError, CheckpointError, ConfigError
from algorist.evaluation.artifact import Artifact, artifact_names, read_artifact
from algorist.evaluation.compare import compare
from algorist.evaluation.estimators import Interval
from algorist.extensions.bisect.suspects import (
    Suspect,
    changed,
    differences,
    neutral_suspects,
    other_suspects,
)
from algorist.runs.pipeline import run_recipe
from algorist.store import times
from algorist.store.run_folder import RunFolder
from algorist.store.run_log import Display, clock
from algorist.store.stages import LAST_FIRST, STAGES
from algorist.types import Problem

BETTER = 3.0
"""Standard errors from which on a trial ended better."""
P_BETTER = math.erfc(BETTER / math.sqrt(2))
"""The same as a p-value of McNemar's test: 0.0027."""
MOST = 0.7
"""Part of the gain of all lines together that fewer lines must reach to be taken for them."""
SOLVED = 0.9
"""Accuracy from which on there is little to learn, and the part of it that must be left then."""
LEAST_VARIANCE = 0.01
"""Of the accuracy between groups, so that a few equal ones do not look certain."""
METRIC = "greedy_accuracy"
FEWEST = 50
"""Held-out problems to train on, at least."""


@dataclass(frozen=True)
class RunEnd:
    """Hold what a run reached: its last evaluation, the one before GRPO, and the rollouts' accuracy in the first and the last window."""

    evaluation: Artifact | None
    before: Artifact | None
    first: Moments
    last: Moments

    @classmethod
    def of(cls, run: Path) -> RunEnd:
        """Read a run.

        Raises:
            CheckpointError: It has neither an evaluation nor rollouts of six steps.
        """
        names = artifact_names(run / "eval")
        stages = [name for name in (*LAST_FIRST, "base") if name in names]
        after, before, *_ = [*(read_artifact(run / "eval", name) for name in stages[:2]), None, None]
        windows = [pooled(part, lambda b: b.accuracy) for part in ends(read_signals(run).batches)]
        if after is None and not windows[0].n:
            raise CheckpointError(
                f"{run} has neither an evaluation nor rollouts of six steps of GRPO; nothing can be compared"
            )
        return cls(after, before, *windows)

    @property
    def learned(self) -> bool:
        """Whether the accuracy rose during GRPO, on held-out problems where there are two evaluations, or hardly could."""
        if self.evaluation and self.before:
            gain = compare(self.before, self.evaluation)
            rises = (
                gain.p_value is not None and gain.p_value <= P_BETTER and gain.differences[METRIC].value > 0
            )
            before, after = (a.metrics[METRIC].value for a in (self.before, self.evaluation))
            return rises or (max(before, after) >= SOLVED and after >= SOLVED * before)
        rise = z_score(self.first, self.last, least_variance=LEAST_VARIANCE)
        return not self.last.n or rise >= BETTER or self.last.mean >= SOLVED


@dataclass
class BisectionTrial:
    """The run with other values in some lines, against the run.

    Attributes:
        suspects: The lines.
        held_out: Paired difference of the last evaluations' greedy accuracy; None without them.
        p_value: McNemar's, of the same.
        rollouts: Difference of the rollouts' accuracy in the last window, and the same in standard errors; None of other problems.
        learned: Whether its accuracy rose: a smaller harm looks better, too.
        why: What kept it from being done.
        seconds: Wall time; about 0 for one that an earlier call has done.
    """

    suspects: tuple[Suspect, ...]
    held_out: Interval | None = None
    p_value: float | None = None
    rollouts: tuple[float, float] | None = None
    learned: bool = False
    why: str = ""
    seconds: float = 0.0

    @property
    def size(self) -> float:
        """Return the gain at the end, 0 where that may be chance; held-out problems decide: others can be known by heart."""
        if self.held_out is not None and self.p_value is not None:
            return max(0.0, self.held_out.value) if self.p_value <= P_BETTER else 0.0
        value, errors = self.rollouts or (0.0, 0.0)
        return value if errors >= BETTER else 0.0

    def compare(self, run: RunEnd, trial: RunEnd, lent: set[str]) -> None:
        """Compare its end with the run's; problems that are ``lent`` were trained on, and its rollouts are of other problems then."""
        if run.evaluation and trial.evaluation:
            one, other = (_without(a, lent) for a in (run.evaluation, trial.evaluation))
            comparison = compare(one, other)
            self.held_out, self.p_value = comparison.differences[METRIC], comparison.p_value
        if run.last.n and trial.last.n and not lent:
            errors = z_score(run.last, trial.last, least_variance=LEAST_VARIANCE)
            self.rollouts = trial.last.mean - run.last.mean, errors
        self.learned = trial.learned

    def text(self) -> str:
        """Return the differences in points, or why there are none."""
        held_out = self.held_out.text(METRIC, signed=True).replace(" points", "") if self.held_out else ""
        rollouts = f"rollouts {100 * self.rollouts[0]:+.1f}" if self.rollouts else ""
        return self.why or ", ".join(filter(None, (held_out and f"held out {held_out}", rollouts)))


class Ended(Exception):
    """Ctrl-C, or as many trials as there may be."""


@dataclass
class Bisection:
    """The trials of a run.

    Attributes:
        run: Folder of the run.
        folder: Where the trials lie.
        most: Trials at most.
        display: Shows the trials.
        good: A recipe that works, if one is known.

    Raises:
        CheckpointError: The run is not finished, or nothing of it can be compared.
        ConfigError: It was trained by several processes.
    """

    run: Path
    folder: Path
    most: int
    display: Display
    good: Recipe | None = None
    trials: list[BisectionTrial] = field(default_factory=list)
    cause: tuple[Suspect, ...] = ()
    stopped: bool = False
    recipe: Recipe = field(init=False)
    end: RunEnd = field(init=False)
    _lent: set[str] = field(default_factory=set)
    """Ids of the held-out problems that a trial trains on."""

    def __post_init__(self) -> None:
        self.recipe = load_run_recipe(self.run, runs="all")
        if self.recipe.grpo.processes > 1:
            raise ConfigError(
                f"{self.run} was trained by {self.recipe.grpo.processes} processes, trials by one; bisect a run of one process"
            )
        if not _is_finished(self.recipe, self.run):
            raise CheckpointError(
                f"{self.run} is not finished, and trials are: continue it first: algorist run {self.run} --resume"
            )
        self.end = RunEnd.of(self.run)

    def search(self) -> None:
        """Look for the cause; ``cause`` and ``trials`` hold what was found."""
        took = sum((RunFolder(self.run).read_json(times.FILE) or {}).values())
        self.display.say(
            f"each trial takes about as long as the run, {clock(took)}, and there are {self.most} at most; "
            f"{self.folder} keeps what they reached"
        )
        alone: list[Suspect] = []
        if self.good is not None:
            together = differences(self.recipe, self.good)
        else:
            together, alone = neutral_suspects(self.recipe), self._alone()
        try:
            first = (
                [together]
                if self.good is not None
                else [self._proposed(), together, self._own_problems(alone)]
            )
            for lines in filter(None, first):
                trial = self._try(lines)
                if trial.size and (trial.learned or self.good is not None):
                    self.cause = self._fewest(lines, ())
                    return
            parts = (together, *_halves(together)) if len(together) > 1 else ()
            tried = [self._try(part) for part in (*parts, *([suspect] for suspect in alone))]
            known = self.end.evaluation is not None  # else rollouts alone tell, whose golds may be wrong
            better = [t for t in tried if t.size and (t.learned or not known)]
            near = [t for t in better if t.size >= MOST * max(t.size for t in better)]
            if near:  # a smaller step does less harm, whatever the cause: it comes last
                best = max(near, key=lambda t: (not any(s.lowers_rate for s in t.suspects), t.size))
                self.cause = self._fewest(best.suspects, ())
        except Ended:
            pass

    def best(self) -> BisectionTrial | None:
        """Return the trial of the cause; where none is known yet, the one of fewest lines that ended better."""
        if self.cause:
            return self._trial_of(self.cause)
        better = [t for t in self.trials if t.size]
        return min(better, key=lambda t: (len(t.suspects), -t.size), default=None)

    def _trial_of(self, suspects: Sequence[Suspect]) -> BisectionTrial | None:
        names = _names(suspects)
        return next((t for t in self.trials if _names(t.suspects) == names), None)

    def _proposed(self) -> list[Suspect]:
        """Return the lines that ``diagnose`` proposes first."""
        lines = next((finding.change for finding in diagnose(self.run) if finding.change), ())
        config = str(self.run / "config.yaml")
        with suppress(ConfigError):
            return differences(*(load_recipe(config, changes).recipe for changes in ((), lines)))
        return []

    def _alone(self) -> list[Suspect]:
        """Return the lines that are tried one by one; the last is to train on half of the held-out problems."""
        train = load_problems(self.recipe.data.train)
        suspects = other_suspects(self.recipe, demonstrated=all(p.solution for p in train[:100]))
        if self.end.evaluation and self.recipe.grpo.enabled:
            seen = {row["problem_id"] for row in self.end.evaluation.samples}
            half = [p for p in load_problems(self.recipe.data.eval) if p.id in seen][::2]
            if len(half) >= FEWEST:
                self._lent = {p.id for p in half}
                now = self.recipe.data.train.model_dump(mode="json")
                suspects.append(Suspect("data.train", now, self._dataset(half)))
        return suspects

    def _own_problems(self, alone: Sequence[Suspect]) -> list[Suspect]:
        """Return the line of the training problems where they are a file of the user's: a gold in it may be wrong."""
        return [s for s in alone if s.key == "data.train" and self.recipe.data.train.path is not None]

    def _dataset(self, problems: Sequence[Problem]) -> dict[str, Any]:
        """Write problems to a file and return the dataset."""
        rows = (json.dumps({**p.columns(), "id": p.id}, default=str) for p in problems)
        RunFolder(self.folder).write_text("held-out.jsonl", "\n".join(rows) + "\n")
        return {"name": "local", "path": str((self.folder / "held-out.jsonl").absolute()), "split": "train"}

    def _fewest(self, suspects: Sequence[Suspect], beside: Sequence[Suspect]) -> tuple[Suspect, ...]:
        """Return the fewest of the suspects that, with those beside them, reach most of what all do (delta debugging, Zeller 1999)."""
        if len(suspects) == 1:
            return tuple(suspects)
        whole = self._try([*suspects, *beside]).size
        left, right = _halves(suspects)
        sizes = [self._try([*half, *beside]).size for half in (left, right)]
        if max(sizes) >= MOST * whole:
            return self._fewest(left if sizes[0] >= sizes[1] else right, beside)
        first = self._fewest(left, (*beside, *right))
        return first + self._fewest(right, (*beside, *first))

    def _try(self, suspects: Sequence[Suspect]) -> BisectionTrial:
        """Do a trial, or return the one that was done."""
        if (known := self._trial_of(suspects)) is not None:
            return known
        if len(self.trials) >= self.most:
            raise Ended
        texts = [s.text() for s in suspects] if len(suspects) <= 3 else [s.short for s in suspects]
        count = f"{len(suspects)} line{'s' if len(suspects) > 1 else ''}"
        self.display.say(f"trial {len(self.trials) + 1} of at most {self.most}, {count}: {' · '.join(texts)}")
        trial, began = BisectionTrial(tuple(suspects)), time.monotonic()
        lent = self._lent if self.good is None and any(s.key == "data.train" for s in suspects) else set()
        try:
            trial.compare(self.end, self._run(self._recipe(suspects)), lent)
        except AlgoristError as error:
            trial.why = str(error)
        trial.seconds = time.monotonic() - began
        self.trials.append(trial)
        self.display.say(f"  {'better' if trial.size else 'not better'}: {trial.text()}")
        return trial

    def _run(self, recipe: Recipe) -> RunEnd:
        """Run a trial and return its end; its weights go."""
        if not _is_finished(recipe, recipe.path):
            resume = (recipe.path / "config.yaml").is_file()
            if run_recipe(recipe, display=self.display, resume=resume).stopped:
                self.stopped = True
                raise Ended
            for stage in STAGES:
                shutil.rmtree(recipe.path / stage, ignore_errors=True)
        end = RunEnd.of(recipe.path)
        return replace(end, before=end.before or self.end.before)

    def words(self, suspects: Sequence[Suspect]) -> list[str]:
        """Return the words that change the lines; none for held-out problems, which are not to be trained on."""
        if self.good is None and any(s.key == "data.train" for s in suspects):
            return []
        words = [f"{s.key}={one_line_yaml(s.other)}" for s in suspects if not s.key.startswith("rewards.")]
        if len(words) < len(suspects):
            rewards = changed(self.recipe.model_dump(mode="json"), suspects).rewards
            shown = [reward.model_dump(mode="json", exclude_defaults=True) for reward in rewards]
            words.append(f"rewards={one_line_yaml(shown)}")
        return words

    def _recipe(self, suspects: Sequence[Suspect]) -> Recipe:
        """Return the recipe of a trial; where no line changes the start of GRPO, it begins with the run's finished SFT."""
        recipe = changed(self.recipe.model_dump(mode="json"), suspects)
        digest = hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()
        update: dict[str, Any] = {"output_dir": str(self.folder), "run_name": f"trial-{digest[:10]}"}
        start, both = self.run / "sft" / "final", recipe.sft.enabled and recipe.grpo.enabled
        if both and start.is_dir() and not any(s.of_start for s in suspects):
            update["sft"] = recipe.sft.model_copy(update={"enabled": False})
            update["model"] = recipe.model.model_copy(update={"name": str(start.absolute())})
        if self.end.before is None and recipe.eval.enabled:  # what did the trial itself gain?
            update["eval"] = recipe.eval.model_copy(update={"baseline": True})
        return recipe.model_copy(update=update)


def _is_finished(recipe: Recipe, run: Path) -> bool:
    last = next((stage for stage in LAST_FIRST if getattr(recipe, stage).enabled), LAST_FIRST[0])
    return RunFolder(run).is_finished(f"eval-{last}" if recipe.eval.enabled else last)


def _names(suspects: Sequence[Suspect]) -> set[str]:
    return {json.dumps((s.key, s.other), default=str, sort_keys=True) for s in suspects}


def _without(artifact: Artifact, problems: set[str]) -> Artifact:
    return replace(artifact, samples=[row for row in artifact.samples if row["problem_id"] not in problems])


def _halves(suspects: Sequence[Suspect]) -> tuple[Sequence[Suspect], Sequence[Suspect]]:
    middle = len(suspects) // 2
    return suspects[:middle], suspects[middle:]
