"""Raw text with three solved problems before the question, for base models that know neither chat nor tags."""

from algorist.prompts.base import PromptFormat, Tags, add_format

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
