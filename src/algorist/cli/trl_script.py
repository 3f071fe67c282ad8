"""A training script for TRL, read by its syntax tree and never run: what a recipe can take from it, and what not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from algorist.cli.trl_columns import take_columns
from algorist.cli.trl_data import take_data
from algorist.cli.trl_syntax import Script, called, words
from algorist.config import load_recipe
from algorist.config.other_names import other_names
from algorist.errors import ConfigError
from algorist.store.safe_text import one_line

STAGES = {"grpo": "GRPO", "sft": "SFT"}
CONFIGS = ("Config", "Trainer")
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {
        "num_generations": 8,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "linear",
        "num_train_epochs": 3.0,
        "max_completion_length": 512,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "weight_decay": 0.0,
        "adam_beta2": 0.999,
    },
    "sft": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "linear",
        "num_train_epochs": 3.0,
        "max_length": 1024,
        "weight_decay": 0.0,
        "adam_beta2": 0.999,
    },
}
"""TRL's, which hold where a script says nothing."""
HERE_ANYWAY = set(
    "self model args processing_class tokenizer train_dataset eval_dataset peft_config reward_funcs reward_weights bf16 fp16 tf32 "
    "output_dir run_name remove_unused_columns gradient_checkpointing_kwargs log_level dataloader_num_workers".split()
)
"""Settings that are read elsewhere, or that algorist decides for itself."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 8, "alpha": 8, "dropout": 0.0, "target_modules": None},
    "ModelConfig": {"r": 16, "alpha": 32, "dropout": 0.05, "target_modules": None},
    "get_peft_model": {"r": 16, "alpha": 16, "dropout": 0.0, "target_modules": "attention+mlp"},
}
"""Adapters' defaults: of PEFT, of TRL's command line, and of Unsloth; names without ``lora_``."""
ADAPTER = {"r": "rank", "alpha": "alpha", "dropout": "dropout", "target_modules": "target_modules", "use_rslora": "rslora", "use_dora": "dora"}  # fmt: skip
ADAPTER_ANYWAY = "task_type inference_mode peft_type base_model_name_or_path".split()
PEFT_MODULES = {
    r"qwen(1\.5|2|3)|llama|smollm|mistral|mixtral|gemma|opt-\d|gpt-j|gpt-neo-|stablelm": ["q_proj", "v_proj"],
    r"phi-(1|1_5|2)$": ["q_proj", "v_proj", "fc1", "fc2"],
    r"gpt2": ["c_attn"],
    r"pythia|gpt-neox|bloom|falcon-\d": ["query_key_value"],
}
"""Part of a model's name → modules that PEFT adapts where ``LoraConfig`` names none."""
SCALES = {"group": "group_normalized", "batch": "batch_normalized", "none": "group_centered", "True": "group_normalized", "False": "group_centered"}  # fmt: skip
FORM_OF = {
    "<reasoning>": "reasoning_answer",
    "<think>": "think_answer",
    "\\boxed": "boxed",
    "####": "last_number",
}
"""Mark in a system prompt → the prompt format that reads such answers."""
BARE = {
    "question_only": "asks the question alone, as raw text, and reads the last \\boxed{}",
    "last_number": "asks the question alone, as a chat, and reads the last number",
    "think_answer": "has a system prompt that asks for <think> and <answer> tags",
    "reasoning_answer": "has a system prompt that asks for <reasoning> and <answer> tags",
}
"""Format that a script without a system message gets → what it does."""
REWARDS = {"accuracy_reward": "accuracy", "think_format_reward": "think_answer_format"}
"""Of ``trl.rewards``."""


def read_script(path: Path) -> Script:
    """Read a script that trains with TRL.

    Raises:
        ConfigError: It cannot be read, is no Python, or builds no trainer of TRL.
    """
    try:
        script = Script(path, ast.parse(path.read_text(encoding="utf-8")))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as Python: {error}") from None
    stages = {stage for stage, name in STAGES.items() if script.calls(*(name + end for end in CONFIGS))}
    if not stages:
        raise ConfigError(
            f"{path} builds no GRPOConfig, GRPOTrainer, SFTConfig or SFTTrainer; expected a script that trains with TRL"
        )
    script.settings |= {f"{stage}.enabled": stage in stages for stage in STAGES}
    _set_later(script)
    _model(script)
    take_data(script)
    for stage in sorted(stages):
        _stage(script, stage)
    if "grpo" in stages:
        _rewards(script)
        _environment(script)
    if not _prompt(script):
        _no_prompt(script, stages)
    take_columns(script)
    _keep_what_fits(script)
    return script


def _set_later(script: Script) -> None:
    """Take ``args.name = value`` for an argument of the configuration that it changes; what not every run does is left."""
    assigned, sometimes = script.assigned(), script.sometimes()
    trainers = script.calls(*(name + "Trainer" for name in STAGES.values()))
    passed = [*words(trainers, "args"), *(node for call in trainers for node in call.args[1:3])]
    of_parsers = {node.id for node in passed if isinstance(node, ast.Name)}
    configs = {*(name + "Config" for name in STAGES.values()), "LoraConfig", "ModelConfig"}
    changes = [node for node in ast.walk(script.tree) if isinstance(node, (ast.Assign, ast.AugAssign))]
    for node in sorted(changes, key=lambda change: change.lineno):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            owner = target.value if isinstance(target, ast.Attribute) else None
            if (
                isinstance(owner, ast.Attribute)
                and owner.attr == "args"
                and any(assigned.get(getattr(owner.value, "id", "")) is trainer for trainer in trainers)
            ):
                script.leave(node, "changes the trainer once it is made, which may have no effect")
            if not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Name):
                continue
            name = target.value.id
            made = assigned.get(name)
            known = isinstance(made, ast.Call) and called(made) in configs
            if (
                isinstance(made, ast.Call)
                and known
                and isinstance(node, ast.Assign)
                and node not in sometimes
            ):
                word = ast.keyword(target.attr, node.value, lineno=node.lineno, col_offset=0)
                made.keywords = [*(w for w in made.keywords if w.arg != target.attr), word]
            elif known or name in of_parsers:
                script.leave(node, "known only when the script runs")
    for call in script.calls("setattr"):
        script.leave(call, "known only when the script runs")


def _stage(script: Script, stage: str) -> None:
    """Take the arguments of a stage's configuration; TRL's defaults where it says nothing."""
    configs = script.calls(STAGES[stage] + "Config")
    if not configs:
        script.left.append(
            f"{STAGES[stage]}Config is not built here (a parser's command line?): {stage} has TRL's defaults"
        )
    values = dict(DEFAULTS[stage])
    for call in configs[-1:]:
        for word in call.keywords:
            if word.arg is None:
                script.leave(word.value, "known only when the script runs")
            elif word.arg not in HERE_ANYWAY:
                try:
                    values[word.arg] = script.value(word.value)
                except ValueError:
                    script.leave(word, "known only when the script runs")
                    values.pop(word.arg, None)
    written = {word.arg for call in configs[-1:] for word in call.keywords}
    for name, value in values.items():
        key, ours = _ours(stage, name, value)
        if key:
            script.settings[key] = ours
            if name not in written:
                script.by_default.add(key)
        elif name in written and (
            value not in (None, False, "no", "none", -1) or (value is None and name in DEFAULTS[stage])
        ):
            script.left.append(f"{STAGES[stage]}Config({name}={value!r}): not in a recipe")


def _ours(stage: str, name: str, value: Any) -> tuple[str, Any]:
    """Return our key and value of an argument of TRL; an empty key where there is none."""
    if (stage, name) == ("sft", "max_length"):
        return "sft.max_length", value
    if value is None or (name == "max_steps" and value < 1):
        return "", None
    if name == "scale_rewards":
        return f"{stage}.advantage", SCALES.get(str(value), str(value))
    if name == "loss_type":
        return f"{stage}.loss.name", value
    if name == "use_vllm":
        return (f"{stage}.engine", "vllm") if value else ("", None)
    if name == "vllm_importance_sampling_correction":
        return ("", None) if value else (f"{stage}.sampler_correction", None)
    if name == "report_to":
        trackers = [value] if isinstance(value, str) else list(value)
        return "report_to", [each for each in trackers if each not in ("none", "all")]
    if name == "hub_model_id":
        return "hub.model_id", value
    if name == "push_to_hub":
        return ("hub.push", True) if value else ("", None)
    if name == "eval_steps":
        return f"{stage}.eval_every", value
    key = other_names().get(name, f"{stage}.{name}")
    if "=" in key or " " in key:
        return "", None
    return key.replace("grpo.", f"{stage}."), value


def _keep_what_fits(script: Script) -> None:
    """Leave out, with the reason, what the recipe refuses; settings that must fit each other are tried together."""
    kept: dict[str, Any] = {}
    sizes = ("batch_size", "group_size", "gradient_accumulation_steps", "steps_per_generation")
    together = {k: v for k, v in script.settings.items() if k.endswith((".enabled", *sizes))}
    for part in (together, *({k: v} for k, v in script.settings.items() if k not in together)):
        try:
            load_recipe("smoke-cpu", as_overrides(kept | part))
            kept |= part
        except ConfigError as error:
            reason = one_line(str(error).split("\n", 1)[-1], 150).partition("unknown key")
            why = "not in a recipe" if reason[1] else reason[0]
            script.left.append(f"{', '.join(f'{k}={v!r}' for k, v in part.items())}: {why}")
    script.settings = kept


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as dotted overrides."""
    from algorist.config.yaml_text import one_line_yaml

    return [f"{key}={one_line_yaml(value)}" for key, value in settings.items()]


def _model(script: Script) -> None:
    """Take the model's name, its adapter and its quantization."""
    name: Any = None
    loads = script.calls("from_pretrained")
    trainers = script.calls("GRPOTrainer", "SFTTrainer")
    nodes = [w.value for call in trainers for w in call.keywords if w.arg == "model"]
    nodes += [call.args[0] for call in trainers if call.args]
    for call in loads:
        nodes += [w.value for w in call.keywords if w.arg in ("model_name", "pretrained_model_name_or_path")]
        nodes += call.args[:1]
    for node in nodes:
        try:
            name = name or script.value(node)
        except ValueError:
            continue
    if isinstance(name, str):
        script.settings["model.name"] = name
    else:
        script.left.append("the model's name is known only when the script runs: set model.name")
    revisions = {ast.unparse(node): node for node in words(loads, "revision")}
    for node in revisions.values():
        try:
            script.settings["model.revision"] = script.value(node)
        except ValueError:
            script.leave(node, "known only when the script runs: set model.revision")
    _adapter(script, str(name))
    command_line = script.calls("ModelConfig") if script.calls("get_quantization_config") else []
    for call in [*loads, *script.calls("BitsAndBytesConfig"), *command_line]:
        for bits in (4, 8):
            if any(w.arg == f"load_in_{bits}bit" and ast.unparse(w.value) == "True" for w in call.keywords):
                script.settings["model.quantization"] = f"{bits}bit"


def _adapter(script: Script, model: str) -> None:
    """Take the last adapter: of PEFT, of Unsloth, or of TRL's ``get_peft_config``; their defaults where the script says nothing."""
    makers = [
        call
        for call in script.calls("LoraConfig", "get_peft_model")
        if called(call) == "LoraConfig"
        or (isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) != "peft")
    ]
    for call in script.calls("get_peft_config"):
        node = call.args[0] if call.args else None
        made = script.assigned().get(node.id) if isinstance(node, ast.Name) else node
        known = isinstance(made, ast.Call) and called(made) == "ModelConfig"
        used = [ast.unparse(word) for word in words([made], "use_peft")] if isinstance(made, ast.Call) else []
        if isinstance(made, ast.Call) and known and used == ["True"]:
            makers.append(made)
        elif not known or used not in ([], ["False"]):
            script.leave(call, "known only when the script runs: set model.lora")
    for call in [maker for maker in makers if not script.gives(maker)]:
        makers.remove(call)
        script.leave(call, "made and not used" + ("" if makers else ": all weights are trained"))
    for call in makers[-1:]:
        values = dict(ADAPTERS[called(call)])
        written = _adapter_words(script, call, values)
        if values.get("target_modules", ()) is None:
            modules = [names for part, names in PEFT_MODULES.items() if re.search(part, model.lower())]
            values["target_modules"] = modules[0] if modules else ["q_proj", "v_proj"]
            if not modules:
                script.leave(
                    call,
                    "PEFT's target modules for this model are not known here: [q_proj, v_proj] are taken",
                )
        for name, value in values.items():
            script.settings[f"model.lora.{ADAPTER[name]}"] = value
            if name not in written:
                script.by_default.add(f"model.lora.{ADAPTER[name]}")
    passed = words(script.calls("GRPOTrainer", "SFTTrainer"), "peft_config")
    if not makers and not script.calls("get_peft_config"):
        for node in passed:
            if ast.unparse(node) != "None":
                script.leave(node, "no LoraConfig is read: all weights are trained; set model.lora")


def _adapter_words(script: Script, call: ast.Call, values: dict[str, Any]) -> set[str]:
    """Take an adapter's arguments into values, and return the names of those that are written and not None."""
    written = set()
    for node in call.args[called(call) == "get_peft_model" :]:  # after the model
        script.leave(node, "an argument without a name: set model.lora")
    for word in call.keywords:
        name = (word.arg or "").removeprefix("lora_")
        if name in ADAPTER_ANYWAY:
            continue
        if called(call) == "ModelConfig" and word.arg and name == word.arg and name not in ADAPTER:
            continue
        try:
            value = script.value(word.value if word.arg else None)
        except ValueError:
            script.leave(word, "known only when the script runs")
            values.pop(name, None)
            continue
        if name in ADAPTER and value is not None:
            values[name] = list(value) if isinstance(value, (tuple, set)) else value
            written.add(name)
        elif value not in (None, "none") and value is not (name == "init_lora_weights"):
            script.leave(
                word, "not in a recipe"
            )  # False, which only init_lora_weights has as True, is the default
    return written


def _prompt(script: Script) -> bool:
    """Take the system message of the script's chat rows, and the format whose tags it names; tell whether there is one."""
    found = False
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Dict):
            continue
        row = {
            key.value: value
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
        }
        if getattr(row.get("role"), "value", None) != "system" or "content" not in row:
            continue
        found = True
        try:
            text = script.value(row["content"])
        except ValueError:
            script.leave(node, "known only when the script runs: set prompt.system_prompt")
            continue
        if not isinstance(text, str):
            script.leave(node, "no text: set prompt.system_prompt")
            continue
        script.settings["prompt.system_prompt"] = text
        form = next((form for mark, form in FORM_OF.items() if mark in text), None)
        if form:
            script.settings["prompt.format"] = form
        else:
            script.left.append(
                "the system prompt names no <reasoning> or <think> tags, no \\boxed and no ####: choose prompt.format (algorist "
                "recipes show, docs/extending.md)"
            )
    return found


def _no_prompt(script: Script, stages: set[str]) -> None:
    """Choose how a script without a system message asks, and name it: a recipe's own format would bring a system prompt."""
    texts = {node.value for node in ast.walk(script.tree) if isinstance(node, ast.Constant)}
    rewards = {reward["name"] for reward in script.settings.get("rewards", ())}
    if "environment" in script.settings or words(script.calls("GRPOTrainer"), "tools"):
        form = "reasoning_answer"
    elif "think_answer_format" in rewards:
        form = "think_answer"
    else:
        form = "last_number" if texts & {"role", "content"} else "question_only"
    script.settings["prompt.format"] = form
    as_written = "sft" in stages and form == "question_only" and not script.calls("map")
    if as_written and script.settings.get("data.train.name") == "local":
        script.settings["sft.source"] = "prompt_response"
        script.left.append(
            "SFT imitates prompt and completion of a row as they are; chat messages need sft.source=problems"
        )
    script.left.append(
        f"no system message is found: prompt.format is {form}, which {BARE[form]}; choose what fits the rows (algorist recipes show, "
        "docs/extending.md)"
    )


def _rewards(script: Script) -> None:
    """Take the reward functions: those of the script go into a file of their own."""
    trainers = script.calls("GRPOTrainer")
    nodes = [w.value for call in trainers for w in call.keywords if w.arg == "reward_funcs"]
    nodes += [call.args[1] for call in trainers if len(call.args) > 1]
    nodes = [script.assigned().get(n.id, n) if isinstance(n, ast.Name) else n for n in nodes]
    entries = [
        e for node in nodes for e in (node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node])
    ]
    weights: list[Any] = []
    for call in script.calls("GRPOConfig"):
        for word in call.keywords:
            if word.arg == "reward_weights":
                try:
                    weights = list(script.value(word.value) or ())
                except (TypeError, ValueError):
                    script.leave(word, "known only when the script runs: set the rewards' weights")
    local = {node.name: node.args for node in script.tree.body if isinstance(node, ast.FunctionDef)}
    file, rewards = rewards_file(script.path), []
    for place, node in enumerate(entries):
        name, weight = called(node), weights[place] if place < len(weights) else 1.0
        if isinstance(node, ast.Name) and name in local and _required(local[name]) == ["environments"]:
            script.paying[name] = weight
        elif isinstance(node, ast.Name) and name in local:
            script.rewards.append(name)
            rewards.append({"name": f"{file}:{name}", "weight": weight})
        elif isinstance(node, ast.Name) and name in REWARDS:
            rewards.append({"name": REWARDS[name], "weight": weight})
        else:
            script.leave(node, "no function of this script: name it as file.py:function in rewards")
    if rewards:
        script.settings["rewards"] = rewards
    elif not words(trainers, "environment_factory"):
        script.left.append("no reward function is read: set rewards")
    for node in words(trainers, "tools"):
        script.leave(node, "a tool here takes and returns a text: name yours in tools (docs/tools.md)")


def _required(arguments: ast.arguments) -> list[str]:
    """Return the arguments that have no default."""
    return [argument.arg for argument in arguments.args[: len(arguments.args) - len(arguments.defaults)]]


def _environment(script: Script) -> None:
    """Take the environment class, or the classes by name; with ``get_reward`` it is a reward, too."""
    assigned = script.assigned()
    classes = {node.name: node for node in script.tree.body if isinstance(node, ast.ClassDef)}

    def target(node: ast.expr) -> str | None:
        node = assigned.get(node.id, node) if isinstance(node, ast.Name) else node
        if isinstance(node, ast.Lambda) and isinstance(node.body, ast.Call):  # lambda: Class()
            call = node.body
            node = node if call.args or call.keywords else call.func
        if not isinstance(node, ast.Name) or node.id not in classes:
            script.leave(node, "no class of this script without arguments: set environment: file.py:Class")
            return None
        script.environment_classes.append(node.id)
        return f"{environments_file(script.path)}:{node.id}"

    for node in words(script.calls("GRPOTrainer"), "environment_factory"):
        node = assigned.get(node.id, node) if isinstance(node, ast.Name) else node
        if isinstance(node, ast.Dict):
            names = [getattr(key, "value", None) for key in node.keys]
            targets: Any = {str(n): t for n, v in zip(names, node.values, strict=True) if (t := target(v))}
        else:
            targets = target(node)
        if targets:
            script.settings["environment"] = targets
    if script.paying and (_pays(classes, script.environment_classes) or not script.environment_classes):
        why = "pays what an environment knows: let get_reward of its class return that"
        script.left += [f"reward function {name}: {why}" for name in script.paying]
        script.paying.clear()
    if script.paying or _pays(classes, script.environment_classes):
        script.settings.setdefault("rewards", []).append({"name": "environment", "weight": 1.0})


def _pays(classes: Mapping[str, ast.ClassDef], names: Iterable[str]) -> bool:
    """Tell whether one of the classes, or of those of the script that it inherits from, has ``get_reward``."""
    return any(
        any(getattr(member, "name", "") == "get_reward" for member in classes[name].body)
        or _pays(classes, [base.id for base in classes[name].bases if isinstance(base, ast.Name)])
        for name in names
        if name in classes
    )


def rewards_file(path: Path) -> str:
    """Return the name of the file that takes a script's reward functions."""
    return f"{path.stem}_rewards.py"


def environments_file(path: Path) -> str:
    """Return the name of the file that takes a script's environments."""
    return f"{path.stem}_environments.py"
