"""Datasets of a script of TRL: names, files, splits and the choice of rows."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from algorist.cli.trl_syntax import Script, called, words

DATASETS = {
    "openai/gsm8k": "gsm8k", "EleutherAI/hendrycks_math": "math", "HuggingFaceH4/MATH-500": "math500", "AI-MO/NuminaMath-TIR": "numina_tir",
    "open-r1/DAPO-Math-17k-Processed": "dapo", "ChilleD/SVAMP": "svamp", "bespokelabs/Bespoke-Stratos-17k": "bespoke_stratos",
}  # fmt: skip
FILES = ("json", "csv", "parquet")
"""Kinds of files, which ``load_dataset`` takes as a name."""


def take_data(script: Script) -> None:
    """Take the hub names of the datasets; what the script makes of their rows is its own."""
    ways = {"train": _way(script, "train_dataset", 3), "eval": _way(script, "eval_dataset", 4)}
    if script.calls("SFTTrainer"):  # beside one of GRPO, with demonstrations of its own
        sft = _way(script, "train_dataset", 3, "SFTTrainer")
        ways |= {"sft": sft} if sft[0][:1] != ways["train"][0][:1] else {}
    of_role = {role: way[0] for role, (way, _) in ways.items() if way}
    begun: dict[str, ast.Call] = {}
    for call in script.calls("load_dataset"):
        words = {w.arg: w.value for w in call.keywords}
        if "revision" in words:
            script.leave(words["revision"], "a dataset's revision is not in a recipe")
        try:
            name, *more = [
                script.value(node) for node in (*call.args, *[words[k] for k in ("name",) if k in words])
            ]
            splits = script.value(words["split"]) if "split" in words else "train"
        except ValueError:
            script.leave(call, "known only when the script runs: set data.train")
            continue
        texts = [splits] if isinstance(splits, str) else splits
        parts = [("eval" if text.startswith(("test", "val")) else "train", text) for text in texts]
        if isinstance(splits, str):
            parts = [(role, of or splits) for role, (way, of) in ways.items() if way[:1] == [call]] or parts
        if parts and not any(of_role.get(section, call) is call for section, _ in parts):
            script.leave(call, f"the trainer has another dataset (line {of_role[parts[0][0]].lineno})")
        for section, text in parts:
            if of_role.get(section, call) is not call:
                continue
            if begun.setdefault(section, call) is not call:
                keys = [key for key in script.settings if key.startswith(f"data.{section}.")]
                for key in keys:
                    del script.settings[key]
                script.leave(
                    call, f"one of several datasets, joined or chosen by the script: set data.{section}"
                )
                continue
            split, _, part = text.partition("[")
            ours = DATASETS.get(name, "local")
            values = {"name": ours, "split": split} | ({"hub": name} if ours == "local" else {})
            if ours == "local" and more:
                values["subset"] = more[0]
            if name in FILES:
                path = _file(script, words, split)
                if not path:
                    why = f"one file or folder on this disk is expected: set data.{section}.path"
                    script.leave(call, why)
                    continue
                values = {"name": "local", "path": path}
            script.settings |= {f"data.{section}.{key}": value for key, value in values.items()}
            if part:
                script.leave(call, f"a part of the split {split}: set data.{section}.limit")
    _rows(script, ways)
    if "data.train.name" not in script.settings:
        script.left.append("no load_dataset names the training data: set data.train")
    elif "data.eval.name" not in script.settings:
        script.settings["eval.enabled"] = False
        hint = "set data.eval and eval.enabled=true to see a gain"
        held_out = [node for node in _given(script, "eval_dataset", 4) if ast.unparse(node) != "None"]
        for node in held_out:
            script.leave(node, f"problems held out are not carried over: {hint}")
        script.left += [] if held_out else [f"the script holds no problems out: {hint}"]


def _given(script: Script, name: str, place: int, *kinds: str) -> list[ast.expr]:
    """Return the values of an argument of the trainers, by its name or place: those of GRPO, else of SFT."""
    trainers = script.calls(*kinds) if kinds else script.calls("GRPOTrainer") or script.calls("SFTTrainer")
    return words(trainers, name) + [call.args[place] for call in trainers if len(call.args) > place]


def _way(script: Script, name: str, place: int, *kinds: str) -> tuple[list[ast.Call], str | None]:
    """Return the calls that make a dataset, ``load_dataset`` first, and the split taken; no calls where not all of them are told."""
    node: ast.expr | None = next(iter(_given(script, name, place, *kinds)), None)
    calls: list[ast.Call] = []
    split, line = None, 1e9
    while node is not None and called(node) != "load_dataset":
        if isinstance(node, ast.Name):
            node = script.assigned(line).get(node.id)
            line = node.lineno if node else line
        elif isinstance(node, ast.Subscript):
            split, node = getattr(node.slice, "value", None), node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if called(node) == "train_test_split":
                return [], None
            calls.append(node)
            node = node.func.value
        else:
            return [], None
    return ([node, *reversed(calls)] if isinstance(node, ast.Call) else []), split


def _rows(script: Script, ways: Mapping[str, tuple[list[ast.Call], str | None]]) -> None:
    """Take ``shuffle(seed=…)`` and then ``select(range(…))`` or ``take(…)``; whatever else chooses rows is left."""
    sometimes, carried = script.sometimes(), set()
    for role, (way, _) in ways.items():
        section = f"data.{role}"
        for call in way[1:] if f"{section}.name" in script.settings else ():
            argument = [*words([call], "seed"), *words([call], "n"), *words([call], "indices"), *call.args][
                :1
            ]
            if called(call) == "select":
                counts = [
                    node.args for node in argument if isinstance(node, ast.Call) and called(node) == "range"
                ]
                argument = counts[0] if counts and len(counts[0]) == 1 else []
            key = {"shuffle": "shuffle_seed", "select": "limit", "take": "limit"}.get(called(call))
            try:
                value = script.value(argument[0] if argument else None)
            except ValueError:
                continue
            if (
                key
                and type(value) is int
                and call not in sometimes
                and f"{section}.limit" not in script.settings
            ):
                script.settings[f"{section}.{key}"] = value
                carried.add(call)
                if key == "shuffle_seed":
                    script.leave(call, f"{section}.shuffle_seed={value} draws an order of its own")
    for call in script.calls("shuffle", "select", "take", "skip", "shard", "train_test_split"):
        if call not in carried:
            script.leave(
                call,
                f"the choice of rows ({called(call)}) is not carried over: set data.….shuffle_seed, limit or path",
            )


def _file(script: Script, words: Mapping[str | None, ast.expr], split: str) -> str:
    """Return the one local file that ``load_dataset`` reads for a split, or the folder; empty where there is none."""
    try:
        files = script.value(words.get("data_files", words.get("data_dir")))
    except ValueError:
        return ""
    files = files.get(split) if isinstance(files, dict) else files
    files = files[0] if isinstance(files, (list, tuple)) and len(files) == 1 else files
    return files if isinstance(files, str) and not set("*?[") & set(files) and "://" not in files else ""
