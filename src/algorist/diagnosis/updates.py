"""Facts of the update: what the loss reaches of a completion, and what moves the weights beside the optimizer."""

from __future__ import annotations

from algorist.diagnosis.course import rises
from algorist.diagnosis.rule import Changes, Facts, Share, fact
from algorist.diagnosis.signals import middle
from algorist.diagnosis.unchanged import LOSS

COUNTED = 0.5
"""Share of the sampled tokens that count, below which what decides may be among the others."""
PULLED = 0.3
"""Way that weights go between the steps of the optimizer, of the way that they go in them."""


@fact("{} of the tokens are in the loss")
def tokens_counted(f: Facts) -> Share:
    return _counted(f, "tokens")


@fact("the loss reaches {} of the tokens of a completion")
def loss_counts(f: Facts) -> Share:
    return _counted(f, "gradient")


def _counted(f: Facts, part: str) -> Share:
    series = f.signals.series(f"ledger/{part}/counted")
    return Share(middle(series) if series else 1.0)


@fact("between the steps of the optimizer the weights move by {} of what they move in them")
def moved_outside(f: Facts) -> Share | None:
    names = ("ledger/step/outside", "ledger/step/length")
    outside, steps = (sum(value for _, value in f.signals.series(name)) for name in names)
    return Share(outside / steps) if steps else None


LEFT_OUT: Changes = {
    "plugins": lambda f: [] if f.get("tokens_counted", 0.0) < COUNTED else None,
    "grpo.loss": lambda f: LOSS if f.get("loss_counts", 0.0) < COUNTED else None,
}
"""Lines of the recipe instead of what leaves tokens out."""


def tokens_left_out(f: Facts) -> bool:
    """Return whether an extension or a loss of the user's counts few tokens, and the accuracy does not rise."""
    own = f.settings.get("plugins") or ":" in str(f.settings.get("grpo.loss.name"))
    return bool(own) and min(f["tokens_counted"], f["loss_counts"]) < COUNTED and not rises(f)


def plugin_moves_weights(f: Facts) -> bool:
    return bool(f.settings.get("plugins")) and f["moved_outside"] >= PULLED and not rises(f)
