"""Recipes from YAML: ``extends``, dotted overrides, unknown keys refused with the nearest name."""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from algorist.config.other_names import ours_for
from algorist.config.own_files import copies_of, with_copies
from algorist.config.schema import DatasetSection, LossSection, Recipe, SFTSection
from algorist.config.section import merged
from algorist.config.yaml_text import ends_in_comment, leaves, read_yaml
from algorist.errors import DAMAGED, CheckpointError, ConfigError, check_known, nearest
from algorist.store.redact import refuse_secrets
from algorist.store.trust import refuse_foreign_code
from algorist.user_code import load_plugins

MAX_RECIPE_BYTES = 1_000_000
MAX_EXTENDS = 8
OF_A_DATASET = ("path", "hub", "subset", "columns", "params")
"""Keys of a data section that mean nothing for a dataset of another name."""
NAMED = re.compile(r"(data\.\w+|grpo\.loss)\.name")
"""The name in a section whose other keys belong to what it names."""
AS_TYPED = ("run_name", "output_dir", "model.revision")
"""Names, which on the command line are no numbers, dates or truth values."""
OF_A_RUN = ("environment.json", "metrics.jsonl", "stages.json", "rollouts", "eval", "sft", "grpo", ".lock")
"""Beside one of these a ``config.yaml`` is that of a run."""
_WORDING = ("system_prompt", "system_prompt_path", "tags", "template_kwargs", "system_role")
"""Keys of ``prompt`` that are about one model's prompt; a model that was trained here carries its own."""
_OWN_CODE = re.compile(r"\.py:\w+$")
_DATASET = DatasetSection.model_fields["name"].default
_LOSS = LossSection.model_fields["name"].default


_Layer = tuple[dict[str, Any], dict[str, str]]
"""Values, and for each dotted key where its value comes from."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A resolved recipe and, for each dotted key that was set, where its value comes from."""

    recipe: Recipe
    origins: dict[str, str] = field(default_factory=dict)


def recipe_names() -> list[str]:
    """List the shipped recipes."""
    return _names_in(resources.files("algorist.recipes"))


def preset_names() -> list[str]:
    """List the shipped lines of published methods: ``presets/NAME``, recipes to extend."""
    return [f"presets/{name}" for name in _names_in(resources.files("algorist.recipes") / "presets")]


def recipe_text(name: str) -> str:
    """Read a shipped recipe or preset."""
    return (resources.files("algorist.recipes") / f"{name}.yaml").read_text(encoding="utf-8")


def _names_in(folder: Traversable) -> list[str]:
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a shipped recipe by name or a YAML file by path, and apply ``key=value`` overrides.

    Raises:
        ConfigError: Unknown recipe, unreadable YAML, unknown key, wrong value, an impossible combination, a secret, or the
            recipe of a foreign run that names code.
    """
    layer = _read_with_parents(name_or_path, ())
    code = code_in(layer[0])
    changes = [parse_override(override) for override in overrides]
    for parent in [
        name for key, value in changes if key == "extends" for name in _parents(value, "command line")
    ]:
        layer = _over(layer, _read_with_parents(parent, ()))
    values, origins = layer
    changes = [(key, value) for key, value in changes if key != "extends"]
    named = {key.removesuffix(".name"): value for key, value in changes if NAMED.fullmatch(key)}
    origins = _drop_former(values, origins, named)
    origins = _drop_wording(values, origins, dict(changes).get("model.name"))
    for key, value in changes:
        _set(values, key, value, origin=f"override {key}")
        above = _above(key)
        origins = {k: v for k, v in origins.items() if not k.startswith(f"{key}.") and k not in above}
        origins |= dict.fromkeys(_leaves(value, key), "command line")
    refuse_secrets(values, f"recipe '{name_or_path}'")
    folder = Path(name_or_path).parent
    if Path(name_or_path).name == "config.yaml" and any((folder / name).exists() for name in OF_A_RUN):
        refuse_foreign_code(folder, [entry for entry in code if entry in code_in(values)])
    load_plugins(plugins_of(values))
    return LoadedRecipe(validate(values, where=f"recipe '{name_or_path}'"), origins)


def values_of(run: Path) -> dict[str, Any]:
    """Read the ``config.yaml`` of a run.

    Raises:
        CheckpointError: The folder is not a run, or the file is damaged.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise CheckpointError(f"{run} is not a run folder (config.yaml is missing); runs lie under runs/")
    try:
        values = read_yaml(read_recipe_file(file), str(file))
    except ConfigError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} is damaged: expected sections, found {type(values).__name__}")
    return values


def load_run_recipe(run: Path, *, runs: str = "nothing") -> Recipe:
    """Return the recipe that a run folder was made with; the user's files (rewards, prompt, template) are the folder's copies.

    Args:
        run: The folder.
        runs: What the caller will run of the code that the recipe names: ``nothing``, that of the ``model``, or ``all``.

    Raises:
        CheckpointError: The folder is not a run, or its ``config.yaml`` is damaged.
        ConfigError: Its settings are not those of this version, or it is from elsewhere and names such code.
    """
    values = values_of(run)
    if runs != "nothing":
        refuse_foreign_code(run, code_in(values, model_only=runs == "model"))
    if plugins := plugins_of(values):  # without them their keys are unknown, whatever the caller will run
        refuse_foreign_code(run, [f"plugins={', '.join(plugins)}"])
        load_plugins(copies_of(run, "plugins", plugins))
    return with_copies(validate(values, where=str(run / "config.yaml")), run)


def plugins_of(values: dict[str, Any]) -> list[str]:
    """Return the files of ``plugins``; anything else is left to the schema, which says what is wrong with it."""
    files = values.get("plugins")
    return files if isinstance(files, list) and all(isinstance(f, str) for f in files) else []


def code_in(settings: Any, *, model_only: bool = False) -> list[str]:
    """Return the settings that name code: ``file.py:function`` anywhere, ``plugins``, and ``trust_remote_code``."""

    def names_code(key: str, value: Any) -> bool:
        if isinstance(value, str):
            return not model_only and bool(_OWN_CODE.search(value) or key.startswith("plugins."))
        return value is True and key.endswith("trust_remote_code")

    return [
        f"{key}={'true' if value is True else value}"
        for key, value in leaves(settings)
        if names_code(key, value)
    ]


def validate(values: dict[str, Any], *, where: str) -> Recipe:
    """Return the recipe that ``values`` describe.

    Raises:
        ConfigError: Every problem on its own line: key, what is wrong, the nearest valid name.
    """
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        grpo = values.get("grpo")
        sft_only = isinstance(grpo, dict) and grpo.get("enabled") is False
        lines = [_explain(item, sft_only) for item in error.errors()]
        raise ConfigError(f"{where}:\n" + "\n".join(f"  {line}" for line in lines)) from None
    read = dict(leaves(recipe.model_dump()))
    for key, value in leaves(values):
        if isinstance(value, bool) and not isinstance(read.get(key, value), bool | str):
            raise ConfigError(f"{where}:\n  {key}: expected a number, not {str(value).lower()}")
    return recipe


def parse_override(text: str) -> tuple[str, Any]:
    """Split ``a.b=value``; the value is read as YAML, but for ``AS_TYPED``. ``grpo.loss=NAME`` is ``grpo.loss.name=NAME``."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override '{text}' is not key=value; write for example grpo.max_steps=200")
    if key.strip() in AS_TYPED and re.fullmatch(r"[\w.:+-]+", raw) and raw != "null":
        return key.strip(), raw
    if key.strip() == "prompt.system_prompt" and not raw:
        return key.strip(), ""  # none at all; null is the format's own
    try:
        value = read_yaml(raw, "the value")
        if ends_in_comment(raw):
            raise ConfigError("what follows # is a comment in YAML")
    except ConfigError as error:
        raise ConfigError(f"override '{text[:200]}': {error}; quote it") from None
    key = key.strip()
    return ("grpo.loss.name" if key == "grpo.loss" and isinstance(value, str) else key), value


def _locate(name_or_path: str, base: Path | None) -> tuple[str, Path | None, str]:
    """Return text, folder and label of a recipe."""
    for candidate in ([base / name_or_path] if base else []) + [Path(name_or_path)]:
        if candidate.suffix in (".yaml", ".yml"):
            if _is_file(candidate):
                return read_recipe_file(candidate), candidate.parent, str(candidate)
            if candidate == Path(name_or_path):
                beside = [p.name for p in sorted(candidate.parent.glob("*.y*ml"))[:1000]]
                raise ConfigError(
                    f"no recipe file at {candidate}.{nearest(candidate.name, beside)} "
                    "algorist recipes lists the shipped ones"
                )
    names = [*recipe_names(), *preset_names()]
    name = name_or_path.replace("_", "-") if name_or_path not in names else name_or_path
    expected = "Shipped recipes: {}; or give the path of a .yaml file"
    check_known(name, names, f"unknown recipe '{name_or_path}'", expected)
    return recipe_text(name), None, name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise ConfigError(f"{str(path)[:200]} cannot be read: {error.strerror}") from None


def read_recipe_file(path: Path) -> str:
    if path.stat().st_size > MAX_RECIPE_BYTES:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes; a recipe has at most {MAX_RECIPE_BYTES}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from None


def _read_with_parents(name: str, chain: tuple[str, ...], base: Path | None = None) -> _Layer:
    text, folder, label = _locate(name, base)
    if label in chain or len(chain) >= MAX_EXTENDS:
        raise ConfigError(
            f"recipe {label}: extends forms a loop or is too deep: {' → '.join((*chain, label))}"
        )
    values = read_yaml(text, f"recipe {label}")
    if not isinstance(values, dict) or not all(isinstance(k, str) for k in values):
        raise ConfigError(
            f"recipe {label}: expected keys and values at the top, found {'nothing' if values is None else type(values).__name__}"
        )
    parents = _parents(values.pop("extends", []), f"recipe {label}")
    grpo = values.get("grpo")
    if isinstance(grpo, dict) and isinstance(grpo.get("loss"), str):
        grpo["loss"] = {"name": grpo["loss"]}
    layer: _Layer = ({}, {})
    for parent in parents:
        layer = _over(layer, _read_with_parents(parent, (*chain, label), folder))
    return _over(layer, (values, dict.fromkeys(_leaves(values), label)))


def _parents(value: Any, where: str) -> list[str]:
    parents = [value] if isinstance(value, str) else value
    if not isinstance(parents, list) or not all(isinstance(name, str) for name in parents):
        raise ConfigError(
            f"{where}: extends is {value!r}; expected the name or path of a recipe, or a list of them"
        )
    return parents


def _over(below: _Layer, above: _Layer) -> _Layer:
    """Lay the values of one recipe over those of another; a dataset or loss of another name brings its own settings."""
    (values, origins), (changes, labels) = below, above
    origins = _drop_former(values, origins, _names(changes))
    model = changes.get("model")
    origins = _drop_wording(values, origins, model.get("name") if isinstance(model, dict) else None)
    sections = {section for key in labels for section in _above(key)}
    replaced = {key for key in origins if set(_above(key)) & set(labels)}  # by a plain value or null
    rest = {k: v for k, v in origins.items() if k not in sections | replaced}
    return merged(values, changes), rest | labels


def _above(key: str) -> list[str]:
    """Return the sections that a dotted key lies in."""
    return [key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1)]


def _names(values: dict[str, Any]) -> dict[str, Any]:
    """Return section → name of its dataset or loss, where ``values`` say one."""
    data = values.get("data")
    sections = {f"data.{key}": section for key, section in data.items()} if isinstance(data, dict) else {}
    grpo = values.get("grpo")
    sections["grpo.loss"] = grpo.get("loss") if isinstance(grpo, dict) else None
    return {key: s["name"] for key, s in sections.items() if isinstance(s, dict) and "name" in s}


def _drop_former(values: dict[str, Any], origins: dict[str, str], named: dict[str, Any]) -> dict[str, str]:
    """Drop from ``values`` the settings of a dataset or loss that is replaced; record that in the origins and return them.

    ``quickstart data.train.name=gsm8k`` drops quickstart's ``data.train.params``: they say how arithmetic is made, and GSM8K
    has none. The origin of ``data.train.params`` then reads "default; what quickstart says is for the dataset arithmetic".
    """
    for dotted, name in named.items():
        top, section = dotted.split(".")
        above = values.get(top)
        before = above.get(section) if isinstance(above, dict) else None
        kind, default = ("loss", _LOSS) if dotted == "grpo.loss" else ("dataset", _DATASET)
        if not isinstance(before, dict) or before.get("name", default) == name:
            continue
        former = before.get("name", default)
        for key in OF_A_DATASET if kind == "dataset" else [key for key in before if key != "name"]:
            dropped, full = before.pop(key, None), f"{dotted}.{key}"
            mine = [k for k in origins if k == full or k.startswith(f"{full}.")]
            label = next((origins[k] for k in mine), "the recipe")
            origins = {k: v for k, v in origins.items() if k not in mine}
            if dropped and kind == "dataset":
                origins[full] = f"default; what {label} says is for the dataset {former}"
    return origins


def _drop_wording(values: dict[str, Any], origins: dict[str, str], model: Any) -> dict[str, str]:
    """Drop from ``values`` how a prompt is worded where a model is named that carries its own wording; return the other origins.

    ``quickstart model.name=runs/mine/sft/final`` drops quickstart's ``prompt.system_prompt``: it is that of quickstart's own model.
    Another prompt format than the model's keeps the recipe's wording.
    """
    file = Path(str(model)).expanduser() / "tokenizer_config.json"
    prompt = values.get("prompt")
    try:
        carried = json.loads(file.read_text(encoding="utf-8"))["algorist"]["prompt_format"]
    except DAMAGED:
        return origins
    if not isinstance(prompt, dict) or prompt.get("format", carried) != carried:
        return origins
    for key in _WORDING:
        prompt.pop(key, None)
    former = {f"prompt.{key}" for key in _WORDING}
    return {key: value for key, value in origins.items() if not former & {key, *_above(key)}}


def _leaves(value: Any, key: str = "") -> list[str]:
    return [name for name, _ in leaves(value, key, lists=False) if name]


def _set(values: dict[str, Any], key: str, value: Any, *, origin: str) -> None:
    node: Any = values
    *parents, last = key.split(".")
    for part in parents:
        if isinstance(node, list):
            node = _list_item(node, part, key)
            continue
        if not isinstance(node.get(part), (dict, list)):
            node[part] = {}
        node = node[part]
    if isinstance(node, list):
        _list_item(node, last, key)
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"{origin}: '{key}' goes through a plain value")


def _list_item(node: list[Any], part: str, key: str) -> Any:
    if not part.isdecimal() or int(part) >= len(node):
        raise ConfigError(
            f"override {key}: '{part}' is not a position in a list of {len(node)} (0 … {len(node) - 1})"
        )
    return node[int(part)]


def _explain(item: Any, sft_only: bool) -> str:
    keys, model, others = _place([str(part) for part in item["loc"]], item["type"] == "extra_forbidden")
    dotted = ".".join(keys) or "recipe"
    if item["type"] == "extra_forbidden":
        valid = list(model.model_fields) if model else []
        section = dotted.rpartition(".")[0]
        elsewhere = next((mode for mode, other in others.items() if keys[-1] in other.model_fields), None)
        if elsewhere:
            mode = model.model_fields["mode"].default if model else ""
            return (
                f"{dotted}: a key of {section}.mode={elsewhere}, not of {mode}. Set that mode, or take the key out: on the command line "
                f'"{section}={{mode: {mode}}}" replaces the whole section. Known here: {", ".join(valid)}'
            )
        if re.fullmatch(r"\w+:\S+", keys[-1]):
            return f"{dotted}: unknown key. YAML wants a space after the colon: {keys[-1].replace(':', ': ')}"
        where = ("sft", SFTSection.model_fields) if sft_only and not section else (section, valid)
        ours = ours_for(keys[-1], *where)
        return f"{dotted}: unknown key.{ours or nearest(keys[-1], valid) + _known(keys[-1], valid)}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return message
    if item["type"] == "union_tag_invalid":
        tag, expected = item["ctx"]["tag"], item["ctx"]["expected_tags"]
        choices = re.findall(r"'([^']*)'", expected)
        return f"{dotted}.mode is '{tag}'.{nearest(tag, choices)} Expected {' or '.join(choices)}"
    got = item.get("input")
    if item["type"] == "list_type":
        return f"{dotted} is {got!r}; expected a list, in brackets: {dotted}=[…]"
    if item["type"] in ("model_type", "dict_type"):
        return f"{dotted} is {got!r}; expected a section, as {{KEY: VALUE}}, or one of its keys: {dotted}.KEY=VALUE"
    shown = f" (got {got!r})" if not isinstance(got, dict) and len(repr(got)) < 80 else ""
    if item["type"] == "literal_error":
        shown += nearest(str(got), re.findall(r"'([^']*)'", item["ctx"]["expected"]))
    return f"{dotted}: {message[0].lower()}{message[1:]}{shown}"


def _known(key: str, valid: list[str]) -> str:
    """Return ``" Known here: …"``, of many keys the eight nearest."""
    few = valid if len(valid) <= 12 else difflib.get_close_matches(key, valid, n=8, cutoff=0.0)
    more = f" and {len(valid) - len(few)} more (docs/settings.md)" if len(few) < len(valid) else ""
    return f" Known here: {', '.join(few)}{more}"


_Sections = dict[str, type[BaseModel]]


def _place(location: Sequence[str], unknown: bool) -> tuple[list[str], type[BaseModel] | None, _Sections]:
    """Locate an error: its keys, the section that they are in, and the sections of the other modes where a mode decides.

    Args:
        location: pydantic's, which also has the mode in it where a section is a union.
        unknown: The last part is a key that the section does not have.
    """
    keys: list[str] = []
    model: type[BaseModel] | None = Recipe
    modes: _Sections = {}
    for part in location[:-1] if unknown else location:
        if part in modes:
            model = modes.pop(part)
            continue
        keys.append(part)
        if model is not None and part in model.model_fields:
            sections = sections_of(model.model_fields[part].annotation)
            model = sections[0] if sections else None
            modes = {str(s.model_fields["mode"].default): s for s in sections} if len(sections) > 1 else {}
    return [*keys, location[-1]] if unknown else keys, model, modes


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that an annotation names: alone, in a list, beside None, or several where a mode decides."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [s for argument in typing.get_args(annotation) for s in sections_of(argument)]
