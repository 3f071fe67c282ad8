"""Expert iteration: rounds of sampling, SFT on the right completions, and evaluation (``algorist iterate``)."""
