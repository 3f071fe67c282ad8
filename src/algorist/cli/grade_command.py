"""``algorist grade`` and ``rewards``: what answers and completions are worth."""

from __future__ import annotations

import inspect
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from algorist.cli.arguments import Overrides, read_pairs
from algorist.cli.audit_command import audit
from algorist.cli.terminal import Line, Result, TableResult, View, say, table, verb
from algorist.errors import ConfigError
from algorist.store.run_log import without_warnings

app = typer.Typer(add_completion=False)
rewards_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="List rewards; explain or audit what one pays.",
    epilog="Example: algorist rewards explain --completion '<answer>7</answer>' --answer 7",
)


class Graded(Result):
    """The verdicts of the grader."""

    verdicts: Annotated[list[dict[str, Any]], "per answer: correct, reason, extracted, gold, seconds"]

    def view(self, width: int) -> View:
        from algorist_grader.command import verdict_line

        yield from (Line(verdict_line(verdict)) for verdict in self.verdicts)

    def code(self) -> int:
        return 0 if all(verdict["correct"] for verdict in self.verdicts) else 1


@verb(app)
def grade_one(
    words: Annotated[
        list[str] | None, typer.Argument(help="An answer and its gold.", metavar="ANSWER GOLD")
    ] = None,
    answer: str | None = None,
    completion: str | None = None,
    gold: str | None = None,
    file: Path | None = None,
    prompt_format: Annotated[str, typer.Option("--format")] = "reasoning_answer",
    matcher: str = "symbolic",
) -> Graded:
    """Grade an answer or a completion, with the reason. Exit 0 when all are right, 1 otherwise.

    Args:
        words: An answer and its gold, in place of --answer and --gold.
        answer: An extracted answer.
        completion: A whole completion, read in --format.
        gold: The gold answer.
        file: A JSONL file with answer or completion, and gold; or rows of SFT with response and ground_truth.
        prompt_format: Prompt format of completions; algorist eval --help names them.
        matcher: How answers are compared: symbolic, numeric, exact and others (docs/grading.md).

    Example: algorist grade 0.5 1/2 · algorist grade --completion '<answer>0.5</answer>' --gold 1/2 ·
    Next: algorist rewards explain --help
    """
    from algorist.data.files import read_rows
    from algorist.prompts import get_format
    from algorist_grader.command import grade_rows, present

    if words:
        if len(words) != 2 or answer or completion or gold:
            raise ConfigError(
                f"expected an answer and its gold and nothing else, as in algorist grade 0.5 1/2; found the words {words}"
            )
        answer, gold = words
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as copy:
        if file and file.is_fifo():  # <(a command) of a shell
            Path(copy.name).write_bytes(file.read_bytes())
            file = Path(copy.name)
        rows = (
            [_graded_row(row) for row in read_rows(file)]
            if file
            else [present(answer=answer, completion=completion, gold=gold)]
        )
    verdicts = grade_rows(rows, matcher, get_format(prompt_format).parse)
    return Graded([asdict(verdict) for verdict in verdicts])


def _graded_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of prompt and response, which SFT takes, under the names of ``grade``; any other as it is."""
    if "response" not in row:
        return row
    return {"completion": row["response"], "gold": row.get("ground_truth", row.get("answer"))}


@verb(rewards_app, "list")
def list_rewards() -> TableResult:
    """List the registered rewards with their range and other names.

    Example: algorist rewards list · Next: algorist rewards explain --help
    """
    from algorist.rewards import REWARDS

    names: dict[Any, list[str]] = {}
    for name in REWARDS:
        names.setdefault(REWARDS.get(name).function, []).append(name)
    rows = [
        {
            "reward": ", ".join(same),
            "range": f"{REWARDS.get(same[0]).low:g} … {REWARDS.get(same[0]).high:g}",
            "what it pays": (inspect.getdoc(function) or "").partition("\n")[0].replace("``", ""),
        }
        for function, same in names.items()
    ]
    return TableResult(rows)


class Explained(Result):
    """Rewards of a completion."""

    total: Annotated[float, "the weighted sum"]
    rewards: Annotated[dict[str, dict[str, Any]], "name → value, weight"]
    failed: Annotated[dict[str, str], "name → error, of rewards that failed"]

    def view(self, width: int) -> View:
        rows = [[name, str(row["value"]), f"{row['weight']:g}"] for name, row in self.rewards.items()]
        yield table(("reward", "value", "weight"), [*rows, ["total", f"{self.total:g}", ""]])

    def code(self) -> int:
        return 1 if self.failed else 0


@verb(rewards_app, "explain")
def explain(
    completion: Annotated[str, typer.Option()],
    answer: Annotated[str, typer.Option()],
    overrides: Overrides = None,
    recipe: str = "quickstart",
    row: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE")] = None,
    tokens: Annotated[int | None, typer.Option(min=0)] = None,
) -> Explained:
    """Show each reward of a completion, its weight and the total; exit 1 if one fails. Next: algorist rewards list.

    Args:
        completion: The completion.
        answer: The gold answer.
        recipe: The recipe (a shipped one or a .yaml file) whose rewards, prompt format and matcher are used.
        row: A column of the problem's row under your data's name (also question, subject, level); may be repeated.
        tokens: Length in tokens, for rewards that count them; the number of words when left out.

    Example: algorist rewards explain --completion '<answer>7</answer>' --answer 7 --recipe quickstart 'rewards=[
    correct, {name: "my_rewards.py:brevity", weight: 0.1}]'
    """
    from algorist.config import load_recipe
    from algorist.prompts import get_format
    from algorist.rewards import build_rewards
    from algorist_grader import grade_completion

    for word in overrides or []:
        if "=" not in word:
            raise ConfigError(f"'{word}' is not key=value; a recipe follows --recipe: --recipe {word}")
    columns = read_pairs("--row", row, "level=easy")
    resolved = load_recipe(recipe, overrides or []).recipe
    form = get_format(resolved.prompt.format, tags=resolved.prompt.tags)
    rewards = build_rewards(resolved.rewards, form, matcher=resolved.matcher)
    length = len(completion.split()) if tokens is None else tokens
    with without_warnings():  # a failure is shown below, once
        breakdown = rewards.explain(completion, answer, completion_ids=[0] * length, **columns)
    failed = {reward.__name__: str(reward.first_failure) for reward in rewards if reward.failures}
    for name, why in failed.items():
        say(f"error: reward '{name}' failed and got its floor: {why}", stderr=True)
        if missing := re.match(r"(?:KeyError:|TypeError: there is no column) '(\w+)'", why):
            say(f"if {missing[1]} is a column of your data: --row {missing[1]}=VALUE", stderr=True)
    if silent := rewards.silence([breakdown.components]):
        say(f"warning: {silent}", stderr=True)
    values = {
        name: {"value": value, "weight": breakdown.weights[name]}
        for name, value in breakdown.components.items()
    }
    verdict = grade_completion(completion, answer, parsed=form.parse(completion), matcher=resolved.matcher)
    if not verdict.correct:
        say(f"graded {verdict.reason}; read as the answer: {verdict.extracted}", stderr=True)
    return Explained(breakdown.total, values, failed)


verb(rewards_app, "audit")(audit)
