"""The prompts of published evaluations; ``evaluation.protocols`` says where each comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from algorist.prompts.base import Tags, add_format
from algorist.prompts.formats import QuestionOnly
from algorist.types import Message, Parsed, Problem


@dataclass(frozen=True)
class Published(QuestionOnly):
    """A prompt without tags.

    The answer is the first match of ``stated``, or the last box
    where there is no such pattern; ``closing`` states one in a demonstration. ``shots`` has by question what comes before it.
    """

    stated: str = ""
    closing: str = "\n\\boxed{{answer}}"
    shots: Mapping[str, str] = field(default_factory=dict, hash=False)

    def render(self, question: str) -> list[Message] | str:
        """Return the prompt of a question."""
        prompt = super().render(question)
        return self.shots.get(question.strip(), "") + prompt if isinstance(prompt, str) else prompt

    def demonstrate(self, reasoning: str, answer: str) -> str:
        """Return the reasoning and the sentence that states the answer."""
        return f" {reasoning.strip()}{self.closing.replace('{answer}', answer.strip())}"

    def parse(self, text: str) -> Parsed:
        """Read the first match of ``stated``, else the last box where answers are boxed."""
        match = re.search(self.stated, text) if self.stated else None
        if match is None and "\\boxed" in self.closing:
            return super().parse(text)
        answer = match[1].strip().rstrip(".,") if match else ""
        reasoning = (text[: match.start()] if match else text).strip()
        return Parsed(reasoning or None, answer or None, bool(answer), () if answer else ("no_answer",))


def harness_shots(problems: Sequence[Problem], train: Sequence[Problem], count: int) -> dict[str, str]:
    """Return the solved problems that lm-evaluation-harness puts before each question of ``gsm8k``: drawn anew for each, seed 1234."""
    draw, rows = Random(1234), [problem.extra for problem in train]
    return {
        problem.question: "".join(
            f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in draw.sample(rows, count)
        )
        for problem in problems
    }


def _add(name: str, **parts: str) -> None:
    add_format(Published(name, Tags(), **parts))  # type: ignore[arg-type]


_FINAL = "\nFinal Answer: The final answer is ${answer}$. I hope it is correct."
_SOLVED = (
    (
        "Find the domain of the expression  $\\frac{\\sqrt{x-2}}{\\sqrt{5-x}}$.",
        "The expressions inside each square root must be non-negative. Therefore, $x-2 \\ge 0$, so $x\\ge2$, and $5 - x \\ge 0$, so $x \\le 5$. "
        "Also, the denominator cannot be equal to zero, so $5-x>0$, which gives $x<5$. Therefore, the domain of the expression is "
        "$\\boxed{[2,5)}$.",
        "[2,5)",
    ),
    (
        "If $\\det \\mathbf{A} = 2$ and $\\det \\mathbf{B} = 12,$ then find $\\det (\\mathbf{A} \\mathbf{B}).$",
        "We have that $\\det (\\mathbf{A} \\mathbf{B}) = (\\det \\mathbf{A})(\\det \\mathbf{B}) = (2)(12) = \\boxed{24}.$",
        "24",
    ),
    (
        "Terrell usually lifts two 20-pound weights 12 times. If he uses two 15-pound weights instead, how many times must Terrell lift them in "
        "order to lift the same total weight?",
        "If Terrell lifts two 20-pound weights 12 times, he lifts a total of $2\\cdot 12\\cdot20=480$ pounds of weight.  If he lifts two 15-pound "
        "weights instead for $n$ times, he will lift a total of $2\\cdot15\\cdot n=30n$ pounds of weight.  Equating this to 480 pounds, we can "
        "solve for $n$:\n\\begin{align*}\n30n&=480\\\\\n\\Rightarrow\\qquad n&=480/30=\\boxed{16}\n\\end{align*}",
        "16",
    ),
    (
        "If the system of equations\n\n\\begin{align*}\n6x-4y&=a,\\\\\n6y-9x &=b.\n\\end{align*}has a solution $(x, y)$ where $x$ and $y$ are "
        "both nonzero,\nfind $\\frac{a}{b},$ assuming $b$ is nonzero.",
        "If we multiply the first equation by $-\\frac{3}{2}$, we obtain\n\n$$6y-9x=-\\frac{3}{2}a.$$Since we also know that $6y-9x=b$, we "
        "have\n\n$$-\\frac{3}{2}a=b\\Rightarrow\\frac{a}{b}=\\boxed{-\\frac{2}{3}}.$$",
        "-\\frac{2}{3}",
    ),
)
"""The four solved problems of Minerva (Lewkowycz et al. 2022, appendix D)."""
_SHOTS = "".join(
    f"Problem:\n{problem}\n\nSolution: {solution}{_FINAL.replace('{answer}', answer)}\n\n"
    for problem, solution, answer in _SOLVED
)

_add(
    "gsm8k_cot_zeroshot",
    raw_template="Q: {question}\nA: Let's think step by step.",
    # As the harness has it: any one character must follow the number, so that an answer which ends the text loses its last digit.
    stated=r"The answer is (\-?[0-9\.\,]+).",
    closing=" The answer is {answer}.\n",
)
_add(
    "gsm8k_shots",
    raw_template="Question: {question}\nAnswer:",
    stated=r"#### (\-?[0-9\.\,]+)",
    closing="\n#### {answer}",
)
_add(
    "minerva_shots",
    raw_template=f"{_SHOTS}Problem:\n{{question}}\n\nSolution:",
    stated=r"Final Answer: The final answer is \$?(.*?)\$?\. I hope it is correct",
    closing=_FINAL,
)
_add(
    "lighteval_math_500",
    message="Solve the following problem. The final line of your response MUST be of the following format:\n"
    '"ANSWER: $ANSWER" (without quotes) where $ANSWER is the final answer. Think step by step before answering.\n\n{question}',
    stated=r"ANSWER:\s*(.+)",
    closing="\nANSWER: {answer}",
)
_add(
    "lighteval_aime",
    message="\nSolve the following math problem efficiently and clearly.  The last line of your response should be of the following format: "
    "'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without quotes) where ANSWER is just the final number or "
    "expression that solves the problem. Think step by step before answering.\n\n{question}\n",
    stated=r"\nTherefore, the final answer is: \$\\boxed\{(.*)\}\$",
    closing="\nTherefore, the final answer is: $\\boxed{{answer}}$. I hope it is correct",
)
_add("boxed", message="Put your final answer within \\boxed{}.\n\n{question}")
_add(
    "boxed_aime",
    message="Put your final answer within \\boxed{}.\nThe answer is an integer between 0 and 999 inclusive.\n\n{question}",
)
