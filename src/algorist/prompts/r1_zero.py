"""The raw-text R1-Zero prompt: one paragraph, ``User:``, ``Assistant: <think>``; exactly one space between blocks.

The wording is ours, after the published prompt (DeepSeek-R1, arXiv 2501.12948, table 1; the file of CS336's assignment 5): the same
sentences in the same order, tags and line ends, in other words. Figures measured with the published text are not comparable to the
digit; rows of ``prompt`` and ``response`` that carry it keep their own prompt only where the data adapter says so.
"""

from algorist.prompts.base import PromptFormat, Tags, add_format

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
