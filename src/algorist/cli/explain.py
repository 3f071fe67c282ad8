"""The origin of each value of a recipe, the meaning of each key, and the pages of the documentation that say them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from algorist.config.load import LoadedRecipe, load_recipe, recipe_names, sections_of
from algorist.config.schema import GRPOSection, LossSection, Recipe, SFTSection
from algorist.config.yaml_text import Dumper, leaves, one_line_yaml
from algorist.objectives import LOSSES
from algorist.parameters import Parameter
from algorist.store.safe_text import one_line


def explain(loaded: LoadedRecipe) -> list[tuple[str, Any, str]]:
    """Return (dotted key, value, origin) for every leaf; the origin is a file, ``command line`` or ``default``."""
    values = leaves(loaded.recipe.model_dump(mode="json"), lists=False, whole=loaded.origins)
    return [(key, value, loaded.origins.get(key, "default")) for key, value in values]


def annotated_yaml(rows: Iterable[tuple[str, Any, str]], meaning: Callable[[str], str]) -> str:
    """Return rows of ``explain`` as a recipe file, each value with its origin as a comment, its ``meaning`` above it."""
    lines: list[str] = []
    before: list[str] = []
    for dotted, value, origin in rows:
        *sections, key = dotted.split(".")
        same = next(
            (i for i, (a, b) in enumerate(zip(sections, before)) if a != b), min(len(sections), len(before))
        )
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(same, len(sections))]
        before, indent = sections, "  " * len(sections)
        text = yaml.dump({key: value}, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10**9)
        first, *more = text.rstrip("\n").split("\n")
        own = more and not first.endswith(":")  # a text of several lines bears no comment inside
        said = textwrap.wrap(meaning(dotted), 76 - len(indent)) + ([one_line(origin)] if own else [])
        lines += [
            indent + line
            for line in (*(f"# {s}" for s in said), first if own else f"{first}  # {one_line(origin)}", *more)
        ]
    return "\n".join(lines) + "\n"


def describe(dotted: str, loss: str = "dapo") -> str:
    """Describe a key's meaning and values, in one line; ``loss`` is the one whose parameters ``grpo.loss`` holds."""
    if dotted.startswith("grpo.loss.") and loss in LOSSES:
        own = LOSSES.get(loss).parameters.get(dotted.rpartition(".")[2])
        if own is not None:
            return f"{own.meaning} Takes {values_of(_field(own))}."
    models: list[type[BaseModel]] = [Recipe]
    text = ""
    for part in dotted.split("."):
        info = next((model.model_fields[part] for model in models if part in model.model_fields), None)
        if info is None:
            return text
        text = f"{_line(info)} Takes {values_of(info)}."
        models = sections_of(info.annotation)
    return text


def values_of(info: FieldInfo) -> str:
    """Return the values that a field takes, in words."""
    bounds = {type(m).__name__: m for m in info.metadata}
    limits = [
        f"{sign} {getattr(bounds[name], name.lower()):g}"
        for name, sign in (("Ge", "≥"), ("Gt", ">"), ("Le", "≤"), ("Lt", "<"))
        if name in bounds
    ]
    kind, null, _ = _kind(info.annotation).partition(" or null")
    return " ".join([kind, *limits]) + null


def settings_page() -> str:
    """Return ``docs/settings.md``: the keys of each section, from the schema."""
    lines = [_HEAD]
    sections: list[tuple[str, type[BaseModel]]] = [("", Recipe)]
    while sections:
        prefix, model = sections.pop(0)
        below = []
        lines += ["", f"## {prefix.rstrip('.') or 'The recipe'}{_mode_of(model)}", ""]
        for name, info in model.model_fields.items():
            key = f"{prefix}{name}"
            inner = sections_of(info.annotation)
            below += [(f"{key}[N]." if "list" in str(info.annotation) else f"{key}.", one) for one in inner]
            shared = name in _SHARED and prefix in ("sft.", "grpo.")
            if shared and prefix == "sft.":
                lines += _entry(f"{key}`, `grpo.{name}", info, _line(info))
            elif not shared and (not inner or info.get_default(call_default_factory=True) is None):
                lines += _entry(key, info, _line(info))
        if prefix == "grpo.":
            lines += ["", "The keys that SFT has too are [above](#sft)."]
        if model is LossSection:
            lines += _losses(prefix)
        sections = below + sections
        if prefix.startswith("data.train."):  # the three datasets have the same keys
            sections = [s for s in sections if s[0] not in ("data.sft.", "data.eval.")]
            lines += ["", "`data.sft` and `data.eval` have the same keys."]
    return "\n".join(lines) + "\n"


def in_order() -> list[Recipe]:
    """Return the shipped recipes: the quickstart, those that need no hub, the others."""
    recipes = [load_recipe(name).recipe for name in recipe_names()]
    return sorted(recipes, key=lambda r: ("/" in r.model.name, r.name != "quickstart", r.name))


def recipes_page() -> str:
    """Return ``docs/recipes.md``: what each shipped recipe trains, on what, for how long."""
    lines: list[str] = []
    for recipe in in_order():
        if "/" in recipe.model.name and _HUB not in lines:
            lines += ["", _HUB, ""]
        both: dict[str, Any] = {"sft": recipe.sft, "grpo": recipe.grpo}
        stages = ", ".join(_stage(name, stage) for name, stage in both.items() if stage.enabled)
        about = f"{recipe.name} {recipe.description}".lower()
        parts = (recipe.model.name, recipe.data.train.name)  # where name and description do not say them
        more = [part for part in parts if part.rpartition("/")[2].lower().replace("_", "-") not in about]
        what = "; ".join((*more, stages or "evaluation only"))
        lines += textwrap.wrap(f"- `{recipe.name}` ({what}): {recipe.description}", 118, subsequent_indent="  ",
                               break_long_words=False, break_on_hyphens=False)  # fmt: skip
    text = (resources.files("algorist.recipes") / "overview.md").read_text(encoding="utf-8")
    return text.replace("<!-- recipes -->", "\n".join(lines))


_HUB = "From the hub or local files; none was run to the end here ([published numbers](results.md#published-not-ours)):"


def _stage(name: str, section: Any) -> str:
    length = f"{section.max_steps} steps" if section.max_steps else f"{section.epochs:g} epochs"
    return f"{name.upper()} {length.removesuffix('s') if length.startswith('1 ') else length}"


_HEAD = """# Settings

Every key of a recipe with its default, written by `algorist recipes settings`. On the command line:
`grpo.max_steps=200`; in a recipe file each key is in its section. For the values in force:
`algorist recipes show RECIPE --resolved --describe`."""


_SHARED = {
    name
    for name, info in SFTSection.model_fields.items()
    if (other := GRPOSection.model_fields.get(name))
    and (info.default, info.description) == (other.default, other.description)
}
"""Keys that are the same in both stages."""


def _losses(prefix: str) -> list[str]:
    """Return the losses' own parameters, each with the defaults of the losses that have it."""
    parameters: dict[tuple[str, str], dict[str, list[str]]] = {}
    for loss in LOSSES:
        for p in LOSSES.get(loss).parameters.values():
            parameters.setdefault((p.name, p.meaning), {}).setdefault(_default(_field(p)), []).append(loss)
    return [
        line
        for (name, meaning), defaults in parameters.items()
        for p in [LOSSES.get(next(iter(defaults.values()))[0]).parameters[name]]
        for text in ["; ".join(f"{', '.join(losses)}: {default}" for default, losses in defaults.items())]
        for line in _entry(f"{prefix}{name}", _field(p), meaning, text)
    ]


def _entry(key: str, info: FieldInfo, meaning: str, default: str = "") -> list[str]:
    """Return one key as a list item: default, meaning, the names that it may take; a bound is in the error of a bad value."""
    names = [name for name in re.findall(r"`([\w+-]+)`", values_of(info)) if name not in ("true", "false")]
    values = f" `{'|'.join(names)}`." if any(f"`{name}`" not in meaning for name in names) else ""
    text = f"- `{key}` ({default or _default(info) or 'required'}): {meaning}{values}"
    return textwrap.wrap(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _field(parameter: Parameter) -> FieldInfo:
    return FieldInfo.from_annotated_attribute(parameter.kind, parameter.default)


def _mode_of(model: type[BaseModel]) -> str:
    mode = model.model_fields.get("mode")
    return f", mode: {mode.default}" if mode and len(get_args(mode.annotation)) == 1 else ""


def _line(info: FieldInfo) -> str:
    return " ".join((info.description or "").replace("``", "`").split())


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return ""
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "a section"
    if isinstance(value, list):
        value = [v.model_dump(exclude_defaults=True) if isinstance(v, BaseModel) else v for v in value]
    return f"`{one_line_yaml(value)}`"


def _kind(annotation: Any) -> str:
    """Return a type in words: ``an integer``, ``auto, cpu or cuda``, ``a list of …``."""
    if annotation is type(None):
        return "null"
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values_of(FieldInfo.from_annotation(annotation))
    if origin is Literal:
        return " or ".join(f"`{v}`" for v in inner)
    if origin is list:
        one = _kind(inner[0]).removeprefix("a ").removeprefix("an ")
        return f"a list of {one if one.startswith('`') else one + 's'}"
    if origin is dict:
        return "a mapping"
    if inner:
        return " or ".join(dict.fromkeys(_kind(a) for a in inner))
    if sections_of(annotation):
        return "a section"
    return {int: "an integer", float: "a number", bool: "`true` or `false`", str: "a text"}.get(
        annotation, "a value"
    )
