"""The raw-text R1-Zero prompt: one paragraph, ``User:``, ``Assistant: <think>``; exactly one space between blocks."""

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
