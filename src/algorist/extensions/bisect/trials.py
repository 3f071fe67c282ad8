"""Trials: the run again with some lines changed; what each reached, and the smallest set of lines that makes the difference."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from algorist.config.load import load_run_recipe
from algorist.config.schema import Recipe
from algorist.data import load_problems
from algorist.errors import AlgoristError, CheckpointError, ConfigError
from algorist.extensions.bisect.suspects import (
    Suspect,
    changed,
    differences,
    neutral_suspects,
    other_suspects,
)
from algorist.runs.pipeline import run_recipe
from algorist.store import times
from algorist.store.read import query
from algorist.store.run_folder import RunFolder
from algorist.store.run_log import Display, clock
from algorist.store.stages import STAGES
from algorist.types import Problem

BETTER = 3.0
"""Standard errors from which on a trial ended better: of a dozen trials of a run without a cause 1 in 60 does by chance."""
MOST = 0.7
"""Part of the gain of all lines together that fewer lines must reach to be taken for them."""
THIRDS = 3
"""Levels of GRPO are those of its first and its last third."""
SOLVED = 0.9
"""Accuracy from which on there is little to learn."""
LOOKED = ("rollouts", "evaluation")
LEVEL = "level.json"
"""In the folder of a trial: what it reached."""


@dataclass(frozen=True)
class Level:
    """Share of right completions of each problem: in the first and last third of GRPO's rollouts, and in the last stage's evaluation."""

    first: dict[str, float]
    rollouts: dict[str, float]
    evaluation: dict[str, float]

    @property
    def learned(self) -> bool:
        """Whether the accuracy rose during GRPO, or hardly could."""
        rise = _difference(self.first, self.rollouts)
        return not rise or rise[0] >= BETTER * rise[1] or float(np.mean([*self.rollouts.values()])) >= SOLVED

    @classmethod
    def of(cls, run: Path) -> Level:
        """Read a run.

        Raises:
            CheckpointError: It holds neither.
        """
        last = query(run, "SELECT max(step) AS step FROM rollouts WHERE stage = 'grpo'")[0]["step"] or 0
        window = (
            "SELECT problem_id, avg(correct::INT) AS level FROM rollouts WHERE stage = 'grpo' AND step BETWEEN ? AND ? "
            "GROUP BY problem_id"
        )
        first, rows = (
            query(run, window, ends) for ends in ([0, last / THIRDS], [last - last / THIRDS, last])
        )
        stages = (
            "SELECT evaluation FROM samples WHERE evaluation IN ('sft', 'grpo') ORDER BY evaluation LIMIT 1"
        )
        seen = query(
            run,
            f"SELECT problem_id, avg(correct::INT) AS level FROM samples WHERE evaluation = ({stages}) GROUP BY problem_id",
        )
        if not rows and not seen:
            raise CheckpointError(
                f"{run} has neither rollouts of GRPO nor an evaluation; nothing can be compared yet"
            )
        return cls(
            *({str(row["problem_id"]): float(row["level"]) for row in part} for part in (first, rows, seen))
        )


@dataclass(frozen=True)
class Improvement:
    """Difference of a trial's end from the run's: (difference, standard error) of rollouts and of the evaluation; None where one lacks it."""

    rollouts: tuple[float, float] | None
    evaluation: tuple[float, float] | None

    @classmethod
    def between(cls, run: Level, trial: Level) -> Improvement:
        return cls(_difference(run.rollouts, trial.rollouts), _difference(run.evaluation, trial.evaluation))

    @property
    def deciding(self) -> tuple[float, float] | None:
        """The difference that counts: of held-out problems where they were evaluated, for those of training can be learned by heart."""
        return self.evaluation or self.rollouts

    @property
    def better(self) -> bool:
        return self.deciding is not None and self.deciding[0] >= BETTER * self.deciding[1]


def _difference(before: dict[str, float], after: dict[str, float]) -> tuple[float, float] | None:
    """Return mean difference and standard error: over the same problems where they are the same, else of independent ones."""
    if not before or not after:
        return None
    a, b = np.array([*before.values()]), np.array([*after.values()])
    if before.keys() == after.keys():
        difference = np.array([after[key] - before[key] for key in before])
        value, variance = difference.mean(), difference.var() / len(difference)
    else:
        value, variance = b.mean() - a.mean(), a.var() / len(a) + b.var() / len(b)
    return float(value), float(np.sqrt(variance + 1 / (2 * min(len(a), len(b))) ** 2))


@dataclass
class Attempt:
    """The run with other values in some lines.

    Attributes:
        suspects: The lines.
        gain: Against the run; None where it could not be done.
        learned: Whether its accuracy rose: a smaller harm looks better, too.
        why: What kept it from being done.
        seconds: Wall time; 0 for one that an earlier call has done.
    """

    suspects: tuple[Suspect, ...]
    gain: Improvement | None = None
    learned: bool = False
    why: str = ""
    seconds: float = 0.0

    @property
    def better(self) -> bool:
        return self.gain is not None and self.gain.better

    @property
    def size(self) -> float:
        """The difference that counts where it is beyond chance, else 0."""
        return self.gain.deciding[0] if self.gain and self.gain.better and self.gain.deciding else 0.0


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
    """

    run: Path
    folder: Path
    most: int
    display: Display
    good: Recipe | None = None
    trials: list[Attempt] = field(default_factory=list)
    cause: tuple[Suspect, ...] = ()
    stopped: bool = False
    recipe: Recipe = field(init=False)
    level: Level = field(init=False)
    _lent: set[str] = field(default_factory=set)
    """Ids of the held-out problems that a trial trains on."""

    def __post_init__(self) -> None:
        self.recipe = load_run_recipe(self.run, runs="all")
        if self.recipe.grpo.processes > 1:
            raise ConfigError(
                f"{self.run} was trained by {self.recipe.grpo.processes} processes, trials by one; bisect a run of one process"
            )
        self.level = Level.of(self.run)

    def search(self) -> None:
        """Look for the cause; ``cause`` and ``trials`` hold what was found."""
        took = sum((RunFolder(self.run).read_json(times.FILE) or {}).values())
        self.display.say(
            f"each trial takes about as long as the run, {clock(took)}, and there are {self.most} at most; "
            f"{self.folder} keeps what they reached"
        )
        try:
            if self.good is not None:
                together, alone = differences(self.recipe, self.good), []
            else:
                together, alone = neutral_suspects(self.recipe), self._alone()
            if (
                together
                and (whole := self._try(together)).better
                and (whole.learned or self.good is not None)
            ):
                self.cause = self._fewest(together, ())
                return
            parts = (together, *_halves(together)) if len(together) > 1 else ()
            tried = [self._try(part) for part in (*parts, *([suspect] for suspect in alone))]
            best = max(tried, key=lambda t: t.size, default=None)
            if best is not None and best.better:
                self.cause = self._fewest(best.suspects, ())
        except Ended:
            pass

    def best(self) -> Attempt | None:
        """Return the trial of the fewest lines that ended better."""
        return min((t for t in self.trials if t.better), key=lambda t: len(t.suspects), default=None)

    def trial_of(self, suspects: Sequence[Suspect]) -> Attempt | None:
        names = _names(suspects)
        return next((t for t in self.trials if _names(t.suspects) == names), None)

    def _alone(self) -> list[Suspect]:
        """Return the lines that are tried one by one, those of the data among them."""
        train = load_problems(self.recipe.data.train)
        suspects = other_suspects(self.recipe, demonstrated=all(p.solution for p in train[:100]))
        if self.recipe.eval.enabled:
            suspects += self._data(train, load_problems(self.recipe.data.eval))
        return suspects

    def _data(self, train: Sequence[Problem], held_out: Sequence[Problem]) -> list[Suspect]:
        """Return trials that train on half of the held-out problems, or evaluate on training problems."""
        values = self.recipe.model_dump(mode="json")["data"]
        seen = self.level.evaluation
        half = [p for p in held_out if p.id in seen][::2]
        suspects = []
        if len(half) >= 50 and self.recipe.grpo.enabled:
            self._lent = {p.id for p in half}
            suspects.append(Suspect("data.train", values["train"], self._rows("held-out", half)))
        if len(train) >= 200:
            suspects.append(Suspect("data.eval", values["eval"], self._rows("training", train[-100:])))
        return suspects

    def _rows(self, name: str, problems: Sequence[Problem]) -> dict[str, Any]:
        """Write problems to a file and return the dataset."""
        rows = [
            {
                "id": p.id,
                "question": p.question,
                "answer": p.answer,
                "solution": p.solution or "",
                **({"checker": p.extra["checker"]} if p.extra.get("checker") else {}),
            }
            for p in problems
        ]
        RunFolder(self.folder).write_text(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        path = str((self.folder / f"{name}.jsonl").absolute())
        return {"name": "local", "path": path, "split": "train"}

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

    def _try(self, suspects: Sequence[Suspect]) -> Attempt:
        """Do a trial, or return the one that was done."""
        if (known := self.trial_of(suspects)) is not None:
            return known
        if len(self.trials) >= self.most:
            raise Ended
        text = (
            " · ".join(s.text() for s in suspects)
            if len(suspects) <= 3
            else f"{len(suspects)} lines: {', '.join(s.short for s in suspects)}"
        )
        self.display.say(f"trial {len(self.trials) + 1} of at most {self.most}: {text}")
        trial = Attempt(tuple(suspects))
        began = time.monotonic()
        try:
            level = self._level(self._recipe(suspects))
            trial.gain, trial.learned = self._gain(suspects, level), level.learned
        except AlgoristError as error:
            trial.why = str(error)
        trial.seconds = time.monotonic() - began
        self.trials.append(trial)
        if trial.gain is not None:
            self.display.say(f"  {'better' if trial.better else 'not better'}: {gain_text(trial.gain)}")
        return trial

    def _level(self, recipe: Recipe) -> Level:
        """Run a trial and return its level; once that is kept, its weights go."""
        folder = RunFolder(recipe.path)
        if (known := folder.read_json(LEVEL)) is not None:
            return Level(**known)
        done = run_recipe(recipe, display=self.display, resume=folder.config.is_file())
        if done.stopped:
            self.stopped = True
            raise Ended
        level = Level.of(recipe.path)
        folder.write_json(LEVEL, asdict(level))
        for stage in STAGES:
            shutil.rmtree(recipe.path / stage, ignore_errors=True)
        return level

    def _gain(self, suspects: Sequence[Suspect], trial: Level) -> Improvement:
        """Compare a trial with the run; one that trained on half of the held-out problems by the other half."""
        if self.good is None and any(s.key == "data.train" for s in suspects):
            before, after = (
                {k: v for k, v in level.evaluation.items() if k not in self._lent}
                for level in (self.level, trial)
            )
            return Improvement(None, _difference(before, after))
        return Improvement.between(self.level, trial)

    def recipe_with(self, suspects: Sequence[Suspect]) -> Recipe:
        """Return the run's recipe with the other value of each suspect."""
        return changed(self.recipe.model_dump(mode="json"), suspects)

    def _recipe(self, suspects: Sequence[Suspect]) -> Recipe:
        """Return the recipe of a trial; where no line changes the start of GRPO, it begins with the run's finished SFT."""
        recipe = self.recipe_with(suspects)
        digest = hashlib.sha256("".join(sorted(_names(suspects))).encode()).hexdigest()
        update: dict[str, Any] = {"output_dir": str(self.folder), "run_name": f"trial-{digest[:10]}"}
        start = self.run / "sft" / "final"
        if (
            recipe.sft.enabled
            and recipe.grpo.enabled
            and start.is_dir()
            and not any(s.of_start for s in suspects)
        ):
            update["sft"] = recipe.sft.model_copy(update={"enabled": False})
            update["model"] = recipe.model.model_copy(update={"name": str(start.absolute())})
        return recipe.model_copy(update=update)


def _names(suspects: Sequence[Suspect]) -> set[str]:
    return {json.dumps((s.key, s.other), default=str, sort_keys=True) for s in suspects}


def gain_text(gain: Improvement) -> str:
    """Return both differences in points, with 95 % intervals."""
    pairs = zip(LOOKED, (gain.rollouts, gain.evaluation), strict=True)
    return ", ".join(
        f"{name} {100 * pair[0]:+.1f} points [{100 * (pair[0] - 1.96 * pair[1]):+.1f}, {100 * (pair[0] + 1.96 * pair[1]):+.1f}]"
        for name, pair in pairs
        if pair is not None
    )


def _halves(suspects: Sequence[Suspect]) -> tuple[Sequence[Suspect], Sequence[Suspect]]:
    middle = len(suspects) // 2
    return suspects[:middle], suspects[middle:]
