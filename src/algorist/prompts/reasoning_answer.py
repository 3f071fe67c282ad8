"""``<reasoning>`` then ``<answer>``, each tag on its own line: the GSM8K format of OneShotGRPO and willgist."""

from algorist.prompts.base import PromptFormat, Tags, add_format

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
