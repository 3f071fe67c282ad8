"""Self-contained model folder: the files to give away with their card, or an adapter merged into its base."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from algorist.errors import CheckpointError, ConfigError
from algorist.extensions.model_folder import check_new
from algorist.extensions.model_folder.card import CARD, base_of, model_card
from algorist.models.load import load_policy
from algorist.models.precision import DTYPES
from algorist.prompts.attached import attached
from algorist.prompts.chat import encode_prompt
from algorist.rollouts.model_info import ModelSetting
from algorist.store.safe_text import first_line, one_line
from algorist.store.stages import checkpoints

ADAPTER = "adapter_config.json"
TRIED_TOKENS = 32
"""Tokens that an exported model writes when it is tried."""
TRAINING_FILES = (
    "optimizer.pt optimizer.bin scheduler.pt scaler.pt rng_state*.pth algorist_state.pt* training_args.bin manifest.json"
).split()
"""Files of a checkpoint that only a continued training needs."""


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model, an adapter or a checkpoint that others need to load it."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and path.name != CARD
        and not any(path.match(pattern) for pattern in TRAINING_FILES)
    )


def gather(
    folder: Path,
    target: Path,
    *,
    run: Path | None = None,
    name: str | None = None,
    place: str = "FOLDER",
    links: bool = False,
) -> None:
    """Put a model's files and its card into ``target``, as copies or hard links; ``place`` is what the card loads without a ``name``.

    Raises:
        CheckpointError: ``folder`` holds no model.
    """
    files = model_files(folder)
    if not any(path.name in ("config.json", ADAPTER) for path in files):
        raise CheckpointError(
            f"{folder} holds no model: neither config.json nor adapter_config.json is there"
        )
    state = _trainer_state(folder)
    target.mkdir(parents=True, exist_ok=True)
    for path in [*files, *([state] if state else [])]:
        put_file(path, target / path.name, links)
    base = base_of(folder) or ""
    if base.startswith("."):  # from scratch: it lies in the run, and is named from the adapter's place there
        settings = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = str((folder / base).resolve())
        (target / ADAPTER).unlink()  # it may be a link to the run's
        (target / ADAPTER).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (target / CARD).write_text(model_card(target, run, name=name, place=place), encoding="utf-8")


def _trainer_state(folder: Path) -> Path | None:
    """Return the trainer's state of the newest checkpoint beside a stage's ``final``."""
    if folder.name != "final":
        return None
    states = [path / "trainer_state.json" for path in checkpoints(folder.parent)]
    return next((path for path in states if path.is_file()), None)


def put_file(source: Path, target: Path, links: bool) -> None:
    """Copy a file, or link it where the disk can."""
    if links:
        try:
            os.link(source, target)
            return
        except OSError:
            pass  # another disk, or one without links
    shutil.copy2(source, target)


def export(
    folder: Path,
    target: Path,
    *,
    run: Path | None = None,
    merge: bool = False,
    dtype: str = "auto",
    name: str | None = None,
) -> list[str]:
    """Write a self-contained model folder, with its card; it appears whole or not at all.

    Args:
        folder: A model, an adapter, a stage's ``final`` or a checkpoint.
        target: The new folder.
        run: The run it belongs to; its recipe and evaluations go into the card.
        merge: Merge an adapter into its base model.
        dtype: Type of the weights; ``auto`` is that of the model, or of the base model of a merged adapter.
        name: The repository that it will be uploaded to, for the card.

    Returns:
        Names of the files.

    Raises:
        ConfigError: ``target`` is there already and not empty, or a type is asked for an adapter.
        CheckpointError: ``folder`` holds no model.
    """
    check_new(target)
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if merge and (folder / ADAPTER).is_file():
            _merge(folder, partial, dtype)
            card = model_card(partial, run, name=name, base=base_of(folder), place=target.name)
            (partial / CARD).write_text(card, "utf-8")
        else:
            gather(folder, partial, run=run, name=name, place=target.name)
            if (partial / ADAPTER).is_file():
                if dtype != "auto":
                    raise ConfigError(
                        f"--dtype {dtype} is the type of whole weights, and {folder} is an adapter; add --merge"
                    )
            elif dtype != "auto":
                _cast(folder, partial, dtype)
            else:
                _check(folder)
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors writes for the owner alone
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target}: {error.strerror or error}; make room or give --to another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sorted(path.name for path in target.iterdir())


def tried(folder: Path, question: str) -> str:
    """Ask an exported model as others will, with nothing of algorist: transformers' classes and the chat template of the folder.

    Returns:
        What was seen, in a sentence; or why it was not tried.
    """
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind: Any = AutoPeftModelForCausalLM if (folder / ADAPTER).is_file() else AutoModelForCausalLM
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        model = kind.from_pretrained(str(folder), dtype=torch.bfloat16)
        messages = [{"role": "user", "content": question}]
        inputs: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=TRIED_TOKENS, do_sample=False)
    except (OSError, ValueError, ImportError, RuntimeError, TemplateError) as error:
        return f"not tried in plain transformers: {first_line(error)}"
    prompt = inputs["input_ids"][0].tolist()
    text = one_line(str(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)), 200)
    form = attached(folder)
    same = form is not None and prompt == encode_prompt(form.prompt_format, tokenizer, question)
    how = (
        "its chat template makes the prompt of the training"
        if same
        else "its chat template does not make the prompt of the training: ask it as the card does"
    )
    return f"tried in plain transformers ({how}): {one_line(question, 200)} → {text}"


def _check(folder: Path) -> None:
    """Load the model once, so that no folder with missing or damaged weights is given away."""
    import torch

    load_policy(folder, device=torch.device("cpu"), dtype=torch.bfloat16)


def _merge(folder: Path, target: Path, dtype: str) -> None:
    """Merge in float32 and save in ``dtype``."""
    import torch
    from transformers import AutoConfig

    if not base_of(folder):
        raise CheckpointError(
            f"{folder} names no base model (it was made from scratch and not saved), so the adapter cannot be merged; "
            "train it on a saved model: model.name=FOLDER"
        )
    policy = load_policy(folder, device=torch.device("cpu"), dtype=torch.float32)
    base = policy.model.get_base_model().config.name_or_path
    _untie(policy.model.get_base_model())
    kind = DTYPES[dtype] if dtype != "auto" else AutoConfig.from_pretrained(base).dtype or torch.float32
    merged = policy.model.merge_and_unload(safe_merge=True).to(kind)
    merged.config.dtype = kind
    # What SFT taught as the end is the tokenizer's; the base's generation may end with another token alone.
    merged.generation_config.eos_token_id = [*ModelSetting(merged, policy.tokenizer).eos_token_ids]
    merged.save_pretrained(str(target))
    policy.tokenizer.save_pretrained(str(target))


def _untie(base: Any) -> None:
    """Give the head a tensor of its own where it is the embedding's and an adapter changes one of the two."""
    import torch

    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head is None or not any(
        hasattr(m, "base_layer") or hasattr(m, "modules_to_save") for m in (embedding, head)
    ):
        return
    inner = [getattr(m, "base_layer", m) for m in (embedding, head)]
    if getattr(inner[0], "weight", None) is getattr(inner[1], "weight", inner):
        inner[1].weight = torch.nn.Parameter(inner[0].weight.detach().clone(), requires_grad=False)
        base.config.tie_word_embeddings = base.config.get_text_config().tie_word_embeddings = False


def _cast(folder: Path, target: Path, dtype: str) -> None:
    """Write the weights of a whole model in another type over those that were copied."""
    import torch

    model = load_policy(folder, device=torch.device("cpu"), dtype=torch.float32).model.to(DTYPES[dtype])
    model.config.dtype = DTYPES[dtype]
    for path in (*target.glob("*.safetensors*"), *target.glob("pytorch_model*")):
        path.unlink()
    model.save_pretrained(str(target))


def fetch(name: str) -> Path:
    """Return the folder of a hub model, downloaded where it is not in the cache.

    Raises:
        ConfigError: The hub does not know it, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot load '{name}' from the hub: {first_line(error)}; expected a run folder, a model folder or a hub name "
            "owner/model"
        ) from None
