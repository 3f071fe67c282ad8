"""lm-evaluation-harness's ``gsm8k_cot_zeroshot`` (version 3.0): its prompt, and its strict-match filter as the parser."""

from __future__ import annotations

import re

from algorist.prompts.base import PromptFormat, Tags, add_format
from algorist.types import Parsed

# As the harness has it: any one character must follow the number, so that an answer which ends the text loses its last digit.
_STRICT = re.compile(r"The answer is (\-?[0-9\.\,]+).")


class CotZeroshot(PromptFormat):
    """Raw text; the answer is the first number after "The answer is"."""

    def demonstrate(self, reasoning: str, answer: str) -> str:
        """Return the reasoning and the sentence that the filter reads."""
        return f" {reasoning.strip()} The answer is {answer.strip()}.\n"

    def parse(self, text: str) -> Parsed:
        """Read the first match of the strict filter; a completion without one has no answer."""
        match = _STRICT.search(text)
        answer = match[1].rstrip(".,") if match else ""
        reasoning = (text[: match.start()] if match else text).strip()
        return Parsed(reasoning or None, answer or None, bool(answer), () if answer else ("no_answer",))


GSM8K_COT_ZEROSHOT = add_format(
    CotZeroshot(
        name="gsm8k_cot_zeroshot", tags=Tags(), raw_template="Q: {question}\nA: Let's think step by step."
    )
)
