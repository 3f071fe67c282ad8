"""``<start_working_out>`` … ``<end_working_out>`` then ``<SOLUTION>``: the prompt already opens the working."""

from algorist.prompts.base import PromptFormat, Tags, add_format

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
