"""Each reference protocol against the code it comes from, item by item, on the same completions.

    python benchmarks/protocols.py rows ../shared/data > rows.jsonl
    ORIGINALS/bin/python benchmarks/protocols.py lm_eval rows.jsonl > verdicts.jsonl
    ORIGINALS/bin/python benchmarks/protocols.py lighteval rows.jsonl >> verdicts.jsonl
    ORIGINALS/bin/python benchmarks/protocols.py MATHARENA_CHECKOUT rows.jsonl >> verdicts.jsonl
    python benchmarks/protocols.py compare verdicts.jsonl

``ORIGINALS`` is an environment of its own: lm_eval 0.4.13 with math-verify 0.9.0, sympy 1.14 and antlr4-python3-runtime 4.11, or lighteval
0.13.0 with latex2sympy2_extended 1.0.6, which it demands; MathArena is a checkout (https://github.com/eth-sri/matharena). ``compare verdicts.jsonl
tests/data/protocol_verdicts.jsonl`` remakes the rows that the tests check.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Score = Callable[[Row], dict[str, bool]]


# --- the completions


def rows(data: Path) -> Iterator[Row]:
    """Yield protocol, problem and completion: what models and people wrote, right and wrong answers, and hostile forms of both."""
    draw = random.Random(0)
    solutions = [
        json.loads(line) for line in (data / "gsm8k/example_model_solutions.jsonl").open(encoding="utf-8")
    ]
    golds = [json.loads(line) for line in (data / "gsm8k/test.jsonl").open(encoding="utf-8")]
    for row, gold in draw.sample(list(zip(solutions, golds, strict=True)), 250):
        problem = {
            "question": gold["question"],
            "answer": gold["answer"].split("#### ")[1],
            "solution": gold["answer"],
        }
        for writer in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            steps, _, number = row[writer]["solution"].rpartition("\nA:")
            for form in draw.sample(GSM8K_FORMS, 2):
                completion = form.format(steps=steps, x=number.strip(), gold=problem["answer"])
                yield {"protocol": "gsm8k", "problem": problem, "completion": completion}
            for form in draw.sample(COT_FORMS, 2):
                completion = form.format(steps=steps, x=number.strip(), gold=problem["answer"])
                yield {"protocol": "gsm8k_cot_zeroshot", "problem": problem, "completion": completion}
    math = [json.loads(line) for line in (data / "math500/test.jsonl").open(encoding="utf-8")]
    for place, row in enumerate(math):
        problem = {"question": row["problem"], "answer": row["answer"], "solution": row["solution"]}
        other = math[(place + 1) % len(math)]
        for answer, steps in (
            *((form, row["solution"]) for form in respelled(row["answer"], draw)),
            (other["answer"], other["solution"]),
        ):
            for protocol, forms in BOXED_FORMS.items():
                if protocol == "lighteval_aime" and not row["answer"].isdigit():
                    continue
                form = draw.choice(forms)
                yield {"protocol": protocol, "problem": problem, "completion": filled(form, steps, answer)}
    for name in ("aime24", "aime25", "amc23"):
        for row in table(data / name):
            gold = str(row["answer"]).removesuffix(".0").replace("^\\circ", "")
            problem = {"question": row.get("problem") or row["question"], "answer": gold, "solution": ""}
            for answer in (
                gold,
                str(int(gold) + 1),
                f"{int(gold):03d}",
                f"{gold}.0",
                f"{gold}^\\circ",
                f"\\text{{{gold}}}",
                f"{gold[0]},{gold[1:]}",
                f"2\\cdot{gold}",
            ):
                for form in draw.sample(BOXED_FORMS["lighteval_aime"], 1):
                    completion = filled(form, row.get("solution") or "We count.", answer)
                    yield {"protocol": "lighteval_aime", "problem": problem, "completion": completion}
                    yield {"protocol": "matharena", "problem": problem, "completion": completion}


GSM8K_FORMS = [
    "{steps}\n#### {x}",
    "{steps}\nA: {x}",
    "{steps}\n#### {x}.",
    "{steps}\n#### ${x}",
    "{steps}\n####{x}",
    "{steps}\n#### {x}.00",
    "{steps}\n#### {x}\n\nQuestion: What is 2 + 2?",
    "#### {gold}\n{steps}\n#### {x}",
    "{steps}",
    "{steps}\n#### -{x}",
    "{steps}\n#### 1,{x}",
    "{steps}\n#### {x} dollars and 50 cents",
    "{steps} The answer is \\boxed{{{x}}}",
    "{steps}\n#### {x}%.",
    "####",
    "",
    "{steps}\n#### .",
    "#### ,",
    "{steps}\n#### {gold}",
    "{steps} So it is $.",
    "#### {gold}…",
    "#### {gold}",
    "#### {gold}.,",
    "#### {gold}..",
    "#### ０",
]
COT_FORMS = [form.replace("#### ", "The answer is ") for form in GSM8K_FORMS] + [
    "{steps} The answer is {x}",
    "{steps} The answer is {gold}!",
    "{steps} the answer is {x}.",
    "{steps} The answer is ${x}.",
    "The answer is 7. {steps} The answer is {x}.",
]
_FINAL = "Final Answer: The final answer is ${x}$. I hope it is correct."
BOXED_FORMS = {
    "minerva_math500": [
        "{steps}\n" + _FINAL, "{steps}\n" + _FINAL, "{steps}\n" + _FINAL, "Final Answer: The final answer is {x}. I hope it is correct.", "{steps}", "\\boxed{{x}}",
        "{steps}\nFinal Answer: The final answer is $\\boxed{{x}}$. I hope it is correct.", "{steps}\nFinal Answer: The final answer is ${x}$",
        "{steps}\nfinal answer is ${x}$.", "Final Answer: The final answer is $x = {x}$. I hope it is correct. Final Answer: The final answer is $0$. I hope it is correct.",
        "Final Answer: The final answer is $$ {x} $$. I hope it is correct.", "Final Answer: The final answer is\n${x}$. I hope it is correct.",
        "Final Answer: The final answer is \\({x}\\). I hope it is correct.", "", "Final Answer: The final answer is . I hope it is correct.",
    ],
    "lighteval_math_500": [
        "{steps}\n\nANSWER: {x}", "{steps}\n\nANSWER: ${x}$", "ANSWER: {x}", "**ANSWER: ${x}$**", "{steps}", "{steps} The answer is {x}.", "\\boxed{{x}}",
        "{steps}\n\nANSWER: \\boxed{{x}}", "<think>\n{steps}\n</think>\nANSWER: ${x}$", "I cannot say.", "ANSWER: \\({x}\\)", "ANSWER: \\[{x}\\]", "", "Answer : ${x}$", "so ${x}$ or ${x}$",
    ],
    "lighteval_aime": [
        "{steps}\nTherefore, the final answer is: $\\boxed{{x}}$. I hope it is correct", "{steps} $\\boxed{{x}}$", "{steps}\n\\[\\boxed{{x}}\\]", "\\boxed{{x}}", "The answer is {x}.",
        "**Answer:** {x}", "{steps}", "Therefore, the final answer is: ${x}$. I hope it is correct", "\\boxed{7} but no: \\boxed{{x}}", "\\boxed{{x}}. Or \\boxed{7}?",
        "<think>\\boxed{7}</think> $\\boxed{{x}}$", "{x}", "It is {x}, I think", "\\boxed{{x}", "", "$\\boxed{x = {x}}$", "$\\fbox{{x}}$", "x = {x}", "\\boxed{\\text{{x}}}", "about 12.5 % of {x}",
    ],
    "matharena": [
        "{steps}\n$\\boxed{{x}}$", "\\boxed{{x}}", "{steps}", "\\boxed{x = {x}}", "\\boxed{7} and then \\boxed{{x}}", "\\fbox{{x}}", "\\boxed{{x}.}", "\\boxed{${x}$}", "the answer is {x}", "\\boxed{{x}",
        "\\boxed{ {x} }", "\\boxed{\\boxed{{x}}}", "", "\\boxed{}", "\\boxed{{x} \\text{ units}}", "\\boxed{\\left({x}\\right)}", "\\boxed{{x}\\approx 3.1}",
    ],
}  # fmt: skip


def filled(form: str, steps: str, answer: str) -> str:
    """Return a form with its parts; braces of LaTeX stay."""
    return form.replace("{steps}", steps).replace("{x}", answer)


def respelled(answer: str, draw: random.Random) -> list[str]:
    """Return an answer, and up to three of its other spellings and near misses."""
    forms = [
        answer.replace("\\frac", "\\dfrac"), answer.replace("\\frac", "\\tfrac"), re.sub(r"\\frac\{(\w+)\}\{(\w+)\}", r"\1/\2", answer), answer.replace(" ", ""),
        f"{answer} ", f"\\text{{{answer}}}", f"{answer}.", f"x = {answer}", f"{answer}\\text{{ cm}}", f"{answer} units", f"-{answer}", f"{answer}+0", f"2\\cdot {answer}/2",
        answer.replace("\\pi", "3.14159265"), answer.replace("\\sqrt", "sqrt"), f"\\left({answer}\\right)", f"{answer}\\%", f"{answer}^\\circ", f"\\mathbf{{{answer}}}",
        re.sub(r"(\d)(\d{3})$", r"\1,\2", answer), re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", lambda m: str(round(int(m[1]) / max(1, int(m[2])), 6)), answer), f"{answer}1",
        ", ".join(reversed(answer.split(", "))), " and ".join(answer.split(",")), f"\\boxed{{{answer}}}", f"{{{answer}}}", f"\\$ {answer}",
    ]  # fmt: skip
    changed = [form for form in dict.fromkeys(forms) if form != answer]
    return [answer, *draw.sample(changed, 3)]


def table(folder: Path) -> list[Row]:
    """Return the rows of a dataset's test split."""
    if (folder / "test.jsonl").is_file():
        return [json.loads(line) for line in (folder / "test.jsonl").open(encoding="utf-8")]
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(folder / "test.parquet").to_pylist()
    truths = [row["reward_model"]["ground_truth"] if "reward_model" in row else row for row in rows]
    return [
        {"question": t.get("question") or t.get("problem"), "answer": t.get("target") or t.get("answer")}
        for t in truths
    ]


# --- the verdicts of the originals


def lm_eval_scores() -> dict[str, Score]:
    """Return lm_eval's own scoring of its gsm8k tasks (from their YAML) and of minerva_math500."""
    import lm_eval
    import yaml
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter
    from lm_eval.tasks.minerva_math import utils

    def gsm8k(file: str) -> Score:
        path = Path(lm_eval.__file__).parent / "tasks/gsm8k" / file
        task = yaml.safe_load(path.read_text(encoding="utf-8"))
        metric = {k: v for k, v in task["metric_list"][0].items() if k.startswith(("ignore", "regexes"))}

        def score(row: Row) -> dict[str, bool]:
            verdicts = {}
            for name, entry in zip(("strict", "lenient"), task["filter_list"], strict=True):
                options = {k: v for k, v in entry["filter"][0].items() if k != "function"}
                answer = next(iter(RegexFilter(**options).apply([[row["completion"]]], [{}])))[0]
                gold = row["problem"]["solution"]
                verdicts[name] = bool(exact_match_hf_evaluate([answer], [gold], **metric)["exact_match"])
            return verdicts

        return score

    def minerva(row: Row) -> dict[str, bool]:
        solution = row["problem"]["solution"]
        boxed = utils.remove_boxed(utils.last_boxed_only_string(solution))
        doc = {"solution": solution, "answer": utils.normalize_final_answer(boxed)}
        found = utils.process_results(doc, [row["completion"]])
        return {"strict": bool(found["exact_match"]), "lenient": bool(found["math_verify"])}

    return {
        "gsm8k": gsm8k("gsm8k.yaml"),
        "gsm8k_cot_zeroshot": gsm8k("gsm8k-cot-zeroshot.yaml"),
        "minerva_math500": minerva,
    }


def lighteval_scores() -> dict[str, Score]:
    """Return lighteval's own scoring of math_500 and aime24."""
    from lighteval.models.model_output import ModelResponse
    from lighteval.tasks.tasks import aime, math_500

    def of(task: Any, prompt: Callable[..., Any]) -> Score:
        def score(row: Row) -> dict[str, bool]:
            problem = row["problem"]
            doc = prompt({"problem": problem["question"], **problem}, task.name)
            right = task.metrics[0].value if hasattr(task.metrics[0], "value") else task.metrics[0]
            right.sample_level_fn.n = 1
            value = right.sample_level_fn.compute(
                doc=doc, model_response=ModelResponse(text=[row["completion"]])
            )
            return {"strict": bool(value)}

        return score

    return {
        "lighteval_math_500": of(math_500.math_500, math_500.math_500_prompt),
        "lighteval_aime": of(aime.aime24, aime.aime_prompt),
    }


def matharena_scores(checkout: Path) -> dict[str, Score]:
    """Return MathArena's own extraction and comparison (``matharena.grader.extract_and_grade`` without its warnings)."""
    sys.path.insert(0, str(checkout / "src"))
    from loguru import logger
    from matharena.parser import check_answers, extract_answer, parse_answer

    logger.remove()

    def score(row: Row) -> dict[str, bool]:
        gold = row["problem"]["answer"]
        is_list = "," in gold
        answer, _ = extract_answer(row["completion"], strict_parsing=False, parse=True, list_answer=is_list)
        return {"strict": check_answers(answer, parse_answer(gold, list_answer=is_list)[0])}

    return {"matharena": score}


def original(name: str, path: Path) -> Iterator[Row]:
    """Yield the rows of a harness's protocols with the verdicts of its own code."""
    makers = {"lm_eval": lm_eval_scores, "lighteval": lighteval_scores}
    scores = makers[name]() if name in makers else matharena_scores(Path(name))
    for line in path.open(encoding="utf-8"):
        row = json.loads(line)
        if row["protocol"] in scores:
            try:
                row |= scores[row["protocol"]](row)
            except (
                Exception
            ) as error:  # the original's own failure ends its evaluation: there is no verdict to equal
                row["error"] = f"{type(error).__name__}: {error}"
            yield row


def prompts(name: str) -> Iterator[Row]:
    """Yield the prompts that a harness makes for the first rows of tests/data/gsm8k, shots from its training rows."""
    if name == "lm_eval":
        from lm_eval.api.samplers import ContextSampler
        from lm_eval.tasks.minerva_math import utils

        train, test = (
            [
                json.loads(line)
                for line in Path(f"tests/data/gsm8k/{split}.jsonl").read_text(encoding="utf-8").splitlines()
            ]
            for split in ("train", "test")
        )
        sampler = ContextSampler(train, rnd=1234)
        for row in test[:3]:
            shots = [
                f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in sampler.sample(5)
            ]
            yield {"protocol": "gsm8k", "prompt": "".join(shots) + f"Question: {row['question']}\nAnswer:"}
        shots = [f"{utils.doc_to_text(shot)} {shot['solution']}\n\n" for shot in utils.list_fewshot_samples()]
        yield {
            "protocol": "minerva_math500",
            "prompt": "".join(shots) + utils.doc_to_text({"problem": "What is 1 + 1?"}),
        }
    elif name == "lighteval":
        from lighteval.tasks.tasks import aime, math_500

        line = {"problem": "What is 1 + 1?", "answer": "2", "solution": "2"}
        yield {"protocol": "math_500", "prompt": math_500.math_500_prompt(line).query}
        yield {"protocol": "aime_avg", "prompt": aime.aime_prompt(line).query}


# --- ours beside them

OURS = {"lighteval_math_500": "math_500", "lighteval_aime": "aime_avg"}


def compare(path: Path, golden: Path | None) -> None:
    """Print the share of equal verdicts of each protocol, and every difference; write golden rows of both kinds."""
    from algorist.evaluation.protocols import REFERENCES

    counts: dict[str, list[int]] = {}
    kept: dict[tuple[Any, ...], list[Row]] = {}
    for line in path.open(encoding="utf-8"):
        row = json.loads(line)
        name = OURS.get(row["protocol"], row["protocol"])
        if "prompt" in row:
            kept[name, row["prompt"]] = [{"protocol": name, "prompt": row["prompt"]}]
            continue
        answer, *ours = REFERENCES[name].score(row["completion"], row["problem"])
        theirs = [row[column] for column in ("strict", "lenient") if column in row]
        for column, mine, original in zip(("strict", "lenient"), ours, theirs, strict=False):
            count = counts.setdefault(f"{name} {column}", [0, 0, 0])
            count[:] = count[0] + 1, count[1] + (mine == original), count[2] + original
        same = theirs == ours[: len(theirs)]
        if not same:
            print(f"{name}: original {theirs}, ours {ours} ({answer!r}); gold {row['problem']['answer']!r}, "
                  f"ends with {row['completion'][-90:]!r}", file=sys.stderr)  # fmt: skip
        if len(row["completion"]) + len(row["problem"]["solution"]) < 320:
            problem = {key: row["problem"][key] for key in ("answer", "solution")}
            item = {"protocol": name, "problem": problem, "completion": row["completion"], "original": theirs}
            rows = kept.setdefault((name, same, *theirs), [])
            if len(rows) < (15 if same else 5):
                rows.append(item if same else item | {"ours": ours[: len(theirs)]})
    for name, (total, same, right) in counts.items():
        print(f"{name:<28} {same:>5,} of {total:>5,} equal   {right:>5,} right by the original")
    if golden:
        lines = [json.dumps(row, ensure_ascii=False) for rows in kept.values() for row in rows]
        golden.write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    verb, place, *rest = sys.argv[1:]
    if verb == "compare":
        compare(Path(place), Path(rest[0]) if rest else None)
    else:
        out, sys.stdout = sys.stdout, sys.stderr  # the originals log to it
        for item in rows(Path(place)) if verb == "rows" else (*prompts(verb), *original(verb, Path(place))):
            print(json.dumps(item, ensure_ascii=False), file=out)
