"""``<think>`` then ``<answer>`` with a blank line between: the R1-Zero reproduction on NuminaMath."""

from algorist.prompts.base import PromptFormat, Tags, add_format

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
