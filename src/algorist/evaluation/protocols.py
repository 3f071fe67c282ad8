"""Named protocols: which completions an evaluation draws. The name stands in every artifact and can be asked for.

``greedy``: one greedy completion per problem. ``sampled-N@T``: N more at temperature T, such as ``sampled-8@1``;
``sampled-8`` takes temperature 1; ``sampled-16@0.6/0.95`` has a nucleus (top_p) of 0.95 as well.
"""

from __future__ import annotations

import re

from algorist.config.schema import EvalSection
from algorist.errors import ConfigError, nearest

_SAMPLED = re.compile(r"sampled-(\d+)(?:@(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?))?)?")
_USUAL = ("greedy", "sampled-4", "sampled-8@1", "sampled-16@0.6/0.95")


def protocol_name(samples: int, temperature: float, top_p: float) -> str:
    """Return the name of a protocol; ``with_protocol`` reads it back."""
    if not samples:
        return "greedy"
    nucleus = "" if top_p == 1 else f"/{top_p:g}"
    return f"sampled-{samples}@{temperature:g}{nucleus}"


def with_protocol(section: EvalSection, name: str) -> EvalSection:
    """Return ``section`` with the samples, temperature and top_p of the protocol ``name``.

    Raises:
        ConfigError: There is no such protocol.
    """
    if name == "greedy":
        return section.model_copy(update={"samples": 0, "temperature": 1.0, "top_p": 1.0})
    match = _SAMPLED.fullmatch(name)
    samples, temperature, top_p = (
        (int(match[1]), float(match[2] or 1), float(match[3] or 1)) if match else (0, 0, 0)
    )
    if samples < 1 or temperature <= 0 or not 0 < top_p <= 1:
        raise ConfigError(
            f"no protocol '{name}'.{nearest(name, _USUAL)} Expected greedy, sampled-N, sampled-N@TEMPERATURE or "
            "sampled-N@TEMPERATURE/TOP_P with N ≥ 1, a temperature above 0 and top_p in (0, 1], such as sampled-8@1"
        )
    return section.model_copy(update={"samples": samples, "temperature": temperature, "top_p": top_p})
