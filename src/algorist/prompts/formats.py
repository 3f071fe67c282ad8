"""The built-in prompt formats. Each is registered under its name; a new one is one more ``add_format`` here."""

from __future__ import annotations

from algorist.grading.extract import from_boxes
from algorist.grading.markers import after_reasoning
from algorist.prompts.base import PromptFormat, Tags, add_format
from algorist.types import Parsed

REASONING_ANSWER = add_format(
    PromptFormat(
        name="reasoning_answer",
        tags=Tags("<reasoning>", "</reasoning>", "<answer>", "</answer>"),
        system_prompt=(
            "Solve the problem step by step, then give the final number. Respond in the following format:\n"
            "<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
        ),
    )
)
"""``<reasoning>`` then ``<answer>``, each tag on its own line: the GSM8K format of OneShotGRPO and willgist."""


WORKING_SOLUTION = add_format(
    PromptFormat(
        name="working_solution",
        tags=Tags("<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>"),
        system_prompt=(
            "You are given a problem.\n"
            "Think about it and provide your working out.\n"
            "Place it between <start_working_out> and <end_working_out>.\n"
            "Then, provide your solution between <SOLUTION> and </SOLUTION>."
        ),
        prefilled_start=True,
    )
)
"""``<start_working_out>`` … ``<end_working_out>`` then ``<SOLUTION>``: the prompt already opens the working."""


THINK_ANSWER = add_format(
    PromptFormat(
        name="think_answer",
        tags=Tags("<think>", "</think>", "<answer>", "</answer>"),
        system_prompt=(
            "The user asks a question and you solve it. First think about the reasoning process, then give the "
            "answer. Enclose the reasoning in <think> and </think> tags and the final answer in <answer> and "
            "</answer> tags, each tag on its own line:\n<think>\n...\n</think>\n\n<answer>\n...\n</answer>"
        ),
        block_join="\n\n",
    )
)
"""``<think>`` then ``<answer>`` with a blank line between: the R1-Zero reproduction on NuminaMath."""


R1_ZERO = add_format(
    PromptFormat(
        name="r1_zero",
        tags=Tags("<think>", "</think>", "<answer>", "</answer>"),
        raw_template=(
            "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
            "Assistant first thinks about the reasoning process and then gives the answer. The reasoning is enclosed "
            "in <think> </think> tags and the answer in <answer> </answer> tags, that is, "
            "<think> reasoning process here </think> <answer> answer here </answer>.\n"
            "User: {question}\n"
            "Assistant: <think>"
        ),
        prefilled_start=True,
        block_join=" ",
        inner=" ",
    )
)
"""The raw-text R1-Zero prompt: one paragraph, ``User:``, ``Assistant: <think>``; exactly one space between blocks.

The wording is ours, after the published prompt (DeepSeek-R1, arXiv 2501.12948, table 1; the file of CS336's assignment 5): the same
sentences in the same order, tags and line ends, in other words. Figures measured with the published text are not comparable to the
digit; rows of ``prompt`` and ``response`` that carry it keep their own prompt only where the data adapter says so.
"""


FEW_SHOT = add_format(
    PromptFormat(
        name="few_shot",
        tags=Tags("<reasoning>", "</reasoning>", "<answer>", "</answer>"),
        raw_template=(
            "Problem: A box holds 12 pencils. Mia has 3 boxes and gives 7 pencils away. How many pencils are left?\n"
            "Solution: <reasoning> 3 boxes hold 3 * 12 = 36 pencils. 36 - 7 = 29 are left. </reasoning> "
            "<answer> 29 </answer>\n\n"
            "Problem: Solve x/4 + 5 = 8.\n"
            "Solution: <reasoning> x/4 = 8 - 5 = 3, so x = 3 * 4 = 12. </reasoning> <answer> 12 </answer>\n\n"
            "Problem: A shirt costs $40 and is 15% off. What does it cost now?\n"
            "Solution: <reasoning> 15% of 40 is 0.15 * 40 = 6. 40 - 6 = 34. </reasoning> <answer> 34 </answer>\n\n"
            "Problem: {question}\n"
            "Solution: <reasoning>"
        ),
        prefilled_start=True,
        block_join=" ",
        inner=" ",
    )
)
"""Raw text with three solved problems before the question, for base models that know neither chat nor tags."""


class QuestionOnly(PromptFormat):
    """The prompt is the bare question; a completion is well formed when it has exactly one distinct box."""

    def demonstrate(self, reasoning: str, answer: str) -> str:
        """Return the reasoning followed by the boxed answer."""
        return f"{reasoning.strip()}\n\\boxed{{{answer.strip()}}}"

    def parse(self, text: str) -> Parsed:
        """Read the last balanced box after the reasoning; boxes that say different things are flagged ``several_answers``."""
        body = after_reasoning(text)
        if body is None:
            return Parsed(text.strip() or None, None, False, ("unfinished_reasoning",))
        answer, boxes = from_boxes(body)
        if answer.answer is None:
            flag = "unclosed_answer" if "\\boxed" in body and not boxes else "no_answer"
            return Parsed(text.strip() or None, None, False, (flag,))
        reasoning = text[: len(text) - len(body) + boxes[-1].command].strip()
        distinct = {body[box.start : box.end].strip() for box in boxes}
        flags = ("several_answers",) if answer.ambiguous else ()
        return Parsed(reasoning or None, answer.answer, len(distinct) == 1, flags)


QUESTION_ONLY = add_format(QuestionOnly(name="question_only", tags=Tags(), raw_template="{question}"))
"""Nothing but the question; the answer is the last ``\\boxed{}`` of the completion, after any reasoning block."""
