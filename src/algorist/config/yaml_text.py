"""YAML from anywhere: the values of ``yaml.safe_load`` and ``1e-5`` as a number, with limits of depth, of size after aliases, and of numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import yaml

from algorist.declared import leave_out_unused
from algorist.errors import ConfigError

if TYPE_CHECKING:
    from algorist.config.schema import Recipe

MAX_DEPTH, MAX_NODES, MAX_DIGITS, MAX_TEXT = 40, 100_000, 300, 1_000_000


class YAMLReader(yaml.SafeLoader):
    """Reads ``1e-5`` as a number, as YAML 1.2 does; in quotes it is a text."""


class Dumper(yaml.SafeDumper):
    """Quotes a text like ``1e-5``, and escapes the line ends that only YAML knows; as they are, they would be read back as blanks."""


for _kind in (YAMLReader, Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML.

    Raises:
        ConfigError: It is not YAML, an alias holds itself, or a limit is passed.
    """
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{where} has {len(text)} characters; expected at most {MAX_TEXT}")
    try:
        node = (_node if len(text) < 20_000 else _node.__wrapped__)(text)
        return None if node is None else YAMLReader("").construct_document(node)
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply; expected at most {MAX_DEPTH} levels") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"{where} is not valid YAML: {said}") from None


@lru_cache(maxsize=128)
def _node(text: str) -> Any:
    """Return the checked nodes of a text; recipes, presets and settings are read several times by one command."""
    if (node := yaml.compose(text, Loader=YAMLReader)) is not None:
        _size(node, {}, 0)
    return node


def ends_in_comment(text: str) -> bool:
    """Tell whether a comment follows the value of a text, or is all of it."""
    node = _node(text)
    return text[node.end_mark.index if node else 0 :].lstrip().startswith("#")


def one_line_yaml(value: Any) -> str:
    """Return a value as YAML on one line, as it is written after a key."""
    text: str = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def leaves(
    value: Any, key: str = "", *, lists: bool = True, whole: Container[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of what nested settings hold; an empty mapping or list is a value, without ``lists`` every list
    is, and so is what a key of ``whole`` names."""
    inner: Any = ()
    if isinstance(value, dict) and key not in whole:
        inner = value.items()
    elif lists and isinstance(value, (list, tuple)):
        inner = enumerate(value)
    if not inner or not value:
        yield key, value
    for name, part in inner:
        yield from leaves(part, f"{key}.{name}" if key else str(name), lists=lists, whole=whole)


def flat(value: Any) -> dict[str, Any]:
    """Return nested keys as dotted ones."""
    return {key: inner for key, inner in leaves(value, lists=False) if inner != {}}


def _size(node: Any, known: dict[int, int], depth: int) -> int:
    """Count the nodes of a node once every alias is written out."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if id(node) in known:
        if known[id(node)] < 0:
            raise ValueError("an alias holds itself")
        return known[id(node)]
    if isinstance(node, yaml.ScalarNode):
        if len(node.value) > MAX_DIGITS and node.tag.endswith((":int", ":float", ":timestamp")):
            raise ValueError(f"a number of {len(node.value)} characters; expected at most {MAX_DIGITS}")
        if node.tag.endswith((":int", ":float")) and (
            ":" in node.value or re.match(r"[-+]?0[\d_]+$", node.value)
        ):
            raise ValueError(
                f"{node.value} is a number to the base 60 or 8 in YAML; write it to the base 10, or quote a text"
            )
        node.value = _joined(node.value)
        return 1
    if node.tag.endswith(":set"):
        raise ValueError("a !!set has no order; write a list")
    known[id(node)] = -1
    parts = node.value
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
        names = Counter(k.value for k, _ in node.value if isinstance(k, yaml.ScalarNode) and k.value != "<<")
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise ValueError(f"'{twice[:80]}' appears twice in one section; keep one")
    size = 1 + sum(_size(part, known, depth + 1) for part in parts)
    if size > MAX_NODES:
        raise ValueError(f"its aliases grow to more than {MAX_NODES} values")
    known[id(node)] = size
    return size


def _joined(text: str) -> str:
    """Join the halves of a character that JSON escapes as two (``\\ud83d\\ude00``): YAML reads each alone."""
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as error:
        half = int.from_bytes(error.object[error.start : error.start + 2], "little")
        raise ValueError(f"\\u{half:04x} is half of a character; write it whole") from None


def _text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if any(c in text for c in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, _text)


def to_yaml(recipe: Recipe) -> str:
    """Return the recipe as YAML that ``load_recipe`` reads back to the same recipe."""
    values = recipe.model_dump(mode="json")
    leave_out_unused(values)
    return str(yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True))
