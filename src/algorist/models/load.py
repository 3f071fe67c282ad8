"""Policy and tokenizer from the hub, a local folder, a checkpoint with an adapter, or from scratch."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import algorist.config.schema  # noqa: F401  # finds the extensions, whose keys the model section has
from algorist.config.section import LoraSection, ModelSection
from algorist.declared import keys_added_to
from algorist.errors import DAMAGED, AlgoristError, CheckpointError, ConfigError, is_out_of_memory, nearest
from algorist.models.attention import pick_attention, set_attention
from algorist.models.host_memory import keep_freed_memory
from algorist.models.loaders import hub_name, loadable_name, loaders, lora_targets, own_loader
from algorist.models.precision import Precision, compute_dtype, on_gpu, pick_precision, set_compute
from algorist.models.sharding import is_sharded
from algorist.models.templates import check_template
from algorist.models.tiny import tiny_model, train_tokenizer
from algorist.models.weights import check_adapter, check_loaded, check_sizes
from algorist.prompts.attached import own_template

log = logging.getLogger("algorist.models.load")
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)


@dataclass
class Policy:
    """A model and its tokenizer. ``model`` is a PeftModel when an adapter is trained."""

    model: Any
    tokenizer: PreTrainedTokenizerBase


def pick_device(name: str, key: str = "device") -> torch.device:
    """Return the device: ``auto`` is CUDA, then MPS, then CPU; ``key`` names it in the recipe.

    Raises:
        ConfigError: The named device is not there.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    numbered = ["cuda", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))] if cuda else []
    devices = ["cpu", *numbered, *(["mps"] if mps else [])]
    if name not in devices:
        raise ConfigError(
            f"{key} is '{name}', but torch {torch.__version__} sees no such device here.{nearest(name, devices)} There is: "
            f"{', '.join(devices)}; or leave {key} out"
        )
    return torch.device(name)


def check_model(section: ModelSection, device: torch.device) -> None:
    """Refuse a model section whose needs this machine lacks, before anything is loaded or written.

    Raises:
        ConfigError: An attention kernel that does not work here.
        MissingExtraError: A package of the recipe's loader is missing.
    """
    precision = pick_precision(section, device)
    if other := own_loader(section):
        other.check(section, device)
    else:
        pick_attention(section, device, precision.compute)


def _set_up(device: torch.device) -> None:
    """Set the process up for a model on ``device``."""
    if device.type == "cpu":
        keep_freed_memory()
    elif on_gpu(device):
        # It would plan anew for every shape, and each batch has its own.
        torch.backends.cuda.enable_cudnn_sdp(False)


def make_policy(
    section: ModelSection,
    *,
    device: torch.device,
    seed: int,
    texts: Iterable[str] = (),
    tags: Iterable[str] = (),
    longest: Callable[[PreTrainedTokenizerBase], int | None] | None = None,
    trained: bool = True,
    on_host: bool = False,
) -> Policy:
    """Make or load the policy that a recipe names.

    Args:
        section: The recipe's model section.
        device: Where the weights go.
        seed: Seed of a model from scratch.
        texts: Training texts for the tokenizer of a model from scratch.
        tags: Tags that this tokenizer keeps whole.
        longest: Gives the most tokens of a prompt with its completion, for a loader that sets room aside; None for the
            model's context.
        trained: The weights may be trained; else they lie in the type of the products.
        on_host: The weights stay in the host's memory until ``settle`` is called.

    Raises:
        ConfigError: The model cannot be found or has no tokenizer; the message names the way out.
        MissingExtraError: A package of the recipe's loader is missing.
    """
    _set_up(device)
    section = _located(section)
    precision = pick_precision(section, device, trained=trained, width=section.tiny.hidden_size)
    if other := own_loader(section):
        other.check(section, device)
        tokenizer = _tokenizer(section.name, section.revision, section.trust_remote_code)
        tokenizer = prepare_tokenizer(tokenizer, section.chat_template)
        most = (longest(tokenizer) if longest else None) or _context(section)
        return Policy(other.make(section, device, precision.master, seed=seed, longest=most), tokenizer)
    if section.name == "tiny":
        tokenizer = train_tokenizer(texts, vocab_size=section.tiny.vocab_size, tags=tags)
        model: Any = tiny_model(tokenizer, seed=seed, **section.tiny.model_dump())
        # Not its buffers: rotary frequencies stay exact, as in a model that is read.
        for weight in model.parameters():
            weight.data = weight.data.to(precision.master)
        set_compute(model, precision.compute)
    else:
        model, tokenizer = _pretrained(section, device, trained=trained)
    if not on_host:
        settle(model, section, device)
    policy = Policy(model, prepare_tokenizer(tokenizer, section.chat_template))
    if section.lora is not None and not hasattr(policy.model, "peft_config"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy.model = add_lora(policy.model, section.lora)
    return policy


def load_policy(
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    trainable: bool = False,
    like: ModelSection | None = None,
    on_host: bool = False,
) -> Policy:
    """Load a folder that algorist or PEFT saved: full weights, or an adapter on its base model.

    Args:
        path: The folder.
        device: Where the weights go.
        dtype: Weights' type; that of ``like`` when left out.
        trainable: The weights, or the adapter's, are trained further.
        like: The section of the run that the folder belongs to: its type of weights, attention and trust in the model's
            code hold for the folder too, and how its base is loaded for an adapter's. Our defaults when left out.
        on_host: Full weights stay in the host's memory until ``settle`` is called.

    Raises:
        CheckpointError: The folder holds neither a model nor an adapter, or no tokenizer.
    """
    device = torch.device(device)
    _set_up(device)
    folder, of_run = Path(path), {"dtype", "compute_dtype", "attn_implementation", "trust_remote_code"}
    is_adapter = (folder / "adapter_config.json").is_file()
    of_run |= keys_added_to("model") if is_adapter else {key for one in loaders() for key in one.everywhere}
    section = ModelSection(**like.model_dump(include=of_run)) if like else ModelSection()
    if is_adapter:
        from peft import PeftModel

        adapter = _adapter_settings(folder)
        with _in_words(str(folder)):
            check_sizes(adapter)
        base_name = _base_place(folder, adapter["base_model_name_or_path"])
        revision = like.revision if like and like.name == base_name else None
        section = section.model_copy(update={"name": base_name, "revision": revision})
        base, tokenizer = _pretrained(section, device, trained=False, dtype=dtype)
        settle(base, section, device)
        if (folder / "tokenizer_config.json").is_file():
            tokenizer = _tokenizer(str(folder), None)
            _take_end(tokenizer, base)
        with _in_words(str(folder)):
            model: Any = PeftModel.from_pretrained(
                base, str(folder), is_trainable=trainable, ignore_mismatched_sizes=True
            )
            check_adapter(folder, model)
        return Policy(model, prepare_tokenizer(tokenizer, None))
    with _in_words(str(folder)):
        converted = loadable_name(str(folder)) != str(folder)
    if not converted and not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no model: neither config.json nor adapter_config.json")
    section = section.model_copy(update={"name": str(folder)})
    model, tokenizer = _pretrained(section, device, trained=trainable, dtype=dtype)
    if not on_host:
        settle(model, section, device)
    return Policy(model, prepare_tokenizer(tokenizer, None))


def policy_of(model: Path | str, *, device: torch.device, like: ModelSection | None = None) -> Policy:
    """Load a model that is only asked, by its folder or hub name; ``like`` as for ``load_policy``, with its template if it names the model."""
    folder, own = Path(model).expanduser(), like if like is not None and like.name == str(model) else None
    if not (own and own.chat_template) and (isinstance(model, Path) or folder.is_dir()):
        return load_policy(folder, device=device, like=like)
    return make_policy(own or ModelSection(name=str(model)), device=device, seed=0, trained=False)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub model as training has it, with its chat template.

    Raises:
        ConfigError: It cannot be loaded, or its template is no template.
    """
    return prepare_tokenizer(_tokenizer(loadable_name(name), None), None)


def prepare_tokenizer(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None
) -> PreTrainedTokenizerBase:
    """Give the tokenizer what training needs: a pad token, left padding, a chat template.

    Raises:
        ConfigError: It has no end token, so that no completion would end, or its template is no template.
    """
    if tokenizer.eos_token_id is None:
        names = ", ".join(tokenizer.all_special_tokens or list(tokenizer.get_added_vocab()))[:200]
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no end token, and generation_config.json names none: no "
            "completion would end. Write the token that ends a turn into its tokenizer_config.json as eos_token"
            + (f"; its special tokens are {names}" if names else "")
        )
    if list(tokenizer("1")["input_ids"])[-1:] == [tokenizer.eos_token_id]:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'} writes its end token after every text, so every prompt would have "
            "ended. Turn it off: add_eos_token in its tokenizer_config.json, or the post_processor of its tokenizer.json"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    if chat_template:
        is_file = os.path.isfile(chat_template)  # noqa: PTH113 (Path.is_file raises for a text too long for a name)
        tokenizer.chat_template = Path(chat_template).read_text("utf-8") if is_file else chat_template
    elif not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE
    held: Any = tokenizer.chat_template  # some tokenizers have several, by name
    own = own_template(tokenizer)
    for name, template in held.items() if isinstance(held, dict) else [("default", held)]:
        template = own if name == "default" and own else template  # what is around it is our own
        if template != PLAIN_TEMPLATE:
            check_template(template, str(tokenizer.name_or_path or "the model"))
    return tokenizer


def add_lora(model: PreTrainedModel, section: LoraSection) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # PEFT takes floats
        lora_dropout=section.dropout,
        target_modules=lora_targets(model, section.target_modules),
        use_rslora=section.rslora,
        use_dora=section.dora,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _located(section: ModelSection) -> ModelSection:
    """Return the section with the whole path of a local model: an adapter names its base by it, and is loaded from anywhere."""
    path = Path(section.name).expanduser()
    if section.name == "tiny" or hub_name(section.name) != section.name or not path.exists():
        return section
    return section.model_copy(update={"name": str(path.resolve())})


def _pretrained(
    section: ModelSection, device: torch.device, *, trained: bool, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer; ``dtype`` is the type of weights and products in place of what the section says."""
    with _in_words(section.name):
        name = loadable_name(section.name, section.revision)
    local = Path(name).expanduser()
    looks_local = local.is_dir() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if (local / "adapter_config.json").is_file() and not (local / "config.json").is_file():
        raise ConfigError(
            f"model.name is '{section.name}', an adapter; to train on, merge it into its base first: algorist export {local} "
            "--merge --to FOLDER, then model.name=FOLDER"
        )
    if looks_local and not (local / "config.json").is_file():
        models = sorted(map(str, local.glob("*/final")))
        instead = f"; it is a run, whose models are {', '.join(models)}" if models else ""
        raise ConfigError(
            f"model.name is '{section.name}', but there is no model folder at {local} (config.json is missing){instead}; expected "
            "config.json, model.safetensors and tokenizer.json in the hub's layout"
        )
    converted, name = name != section.name, str(local) if looks_local else name
    with _in_words(name):
        config = PreTrainedConfig.get_config_dict(name, revision=section.revision or "main")[0]
        check_sizes(config)
    precision = Precision(dtype, dtype) if dtype else None
    precision = precision or pick_precision(section, device, trained=trained, width=width_of(config))
    tokenizer = _tokenizer(name, section.revision, section.trust_remote_code)
    pick_attention(section, device, precision.compute)
    more = {k: v for one in loaders() for k, v in one.arguments(section, device, precision.compute).items()}
    with _in_words(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            revision=section.revision or "main",
            dtype=precision.master,
            trust_remote_code=section.trust_remote_code,
            attn_implementation=section.attn_implementation,
            ignore_mismatched_sizes=True,  # refused below, with the shapes
            output_loading_info=True,
            **more,
        )
    moved, info = loaded
    check_loaded(name, info, moved.named_parameters())
    rows = moved.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        log.warning(
            "the tokenizer of %s has %d tokens, its model %d: a text with one of the others cannot be read; preflight says "
            "whether prompts have one",
            name,
            len(tokenizer),
            rows,
        )
    if getattr(moved.config, "output_router_logits", False):  # for a loss that is its model's own
        moved.config.output_router_logits = False
    _take_end(tokenizer, moved)
    _mark_untied(moved, name)
    if converted:  # an adapter names its base as the recipe does, not by a folder in this machine's cache
        moved.name_or_path = section.name
    set_compute(moved, precision.compute)
    return moved, tokenizer


def width_of(config: Mapping[str, Any]) -> int:
    """Return the hidden size that a model's configuration names; 0 where it names none."""
    config = config.get("text_config") or config
    return int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0)


def _take_end(tokenizer: PreTrainedTokenizerBase, model: Any) -> None:
    """Give a tokenizer without an end token the first one of the model's generation config."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    if tokenizer.eos_token_id is None and isinstance(ends[0], int):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])


def _mark_untied(model: Any, name: str) -> None:
    """Let the configuration say that head and embedding are two tensors where the files hold two: what is saved is read by it."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    config = model.config.get_text_config(decoder=True)
    if not config.tie_word_embeddings or head is None or head.weight is embedding.weight:
        return
    for each in (config, model.config):
        each.tie_word_embeddings = False
    log.warning(
        "config.json of %s says tie_word_embeddings=true, but its lm_head.weight is not its embedding: it is taken as it is, and saved "
        "with false. Other programs (vLLM) read its embedding as the head; correct its config.json",
        name,
    )


def settle(model: Any, section: ModelSection, device: torch.device) -> None:
    """Put a loaded model where it will run, with its kernels; weights that are sharded or quantised are where they belong."""
    _set_up(device)
    if getattr(model, "hf_quantizer", None) is None and not is_sharded(model):
        model.to(device)
    set_attention(model, section, device, compute_dtype(model))
    for one in loaders():
        one.loaded(model, section)


def _tokenizer(name: str, revision: str | None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    folder = Path(name)
    if folder.is_dir() and not any(
        (folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json")
    ):
        raise ConfigError(
            f"the model folder {folder} has no tokenizer (tokenizer.json, tokenizer_config.json); copy the tokenizer "
            "files of the model beside config.json"
        )
    with _in_words(name):
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=revision or "main", trust_remote_code=trust_remote_code
        )
        if not len(tokenizer):
            raise ValueError("its tokenizer is empty")
        return tokenizer


@contextmanager
def _in_words(name: str) -> Iterator[None]:
    """Reduce a library's loading error to one sentence, whatever it raises, and keep its report of tensors away."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except AlgoristError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(_not_loaded(name, error)) from error
    finally:
        logging.set_verbosity(level)


def _adapter_settings(adapter: Path) -> dict[str, Any]:
    file = adapter / "adapter_config.json"
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(settings["base_model_name_or_path"], str):
            return settings
        raise TypeError(f"base_model_name_or_path is {settings['base_model_name_or_path']!r}")
    except DAMAGED as error:
        raise CheckpointError(
            f"{file} does not say which model the adapter belongs to ({type(error).__name__}: {str(error)[:200]}); "
            "copy the adapter again"
        ) from None


def _base_place(adapter: Path, base: str) -> str:
    """Return the name or folder of an adapter's base; a relative folder beside the adapter or above it is not asked of the hub.

    Raises:
        CheckpointError: It was a folder, which is gone.
    """
    if base.startswith("."):
        return str((adapter / base).resolve())
    if Path(base).is_absolute() and not Path(base).exists():
        raise CheckpointError(
            f"the base model of the adapter {adapter} was the folder {base}, which is not there. Copy it back, or write its place "
            f"now into {adapter / 'adapter_config.json'} (base_model_name_or_path)"
        )
    above = [place / base for place in adapter.resolve().parents]
    return next((str(place) for place in above if place.exists()), base)


def _not_loaded(name: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])[:300]
    if not isinstance(error, (OSError, ValueError, ImportError)):
        reason = f"{type(error).__name__}: {reason}"
    if advice := next(filter(None, (one.advice(name) for one in loaders())), ""):
        return f"cannot load the model '{name}': {reason}\n{advice}"
    if Path(name).is_dir():
        return (
            f"cannot load the model '{name}': {reason}\nThe folder is damaged or not in the hub's layout (config.json, "
            "model.safetensors, tokenizer.json); copy it again from where it came"
        )
    return (
        f"cannot load the model '{name}': {reason}\nIf this machine has no network, download the model elsewhere "
        f"(hf download {name} --local-dir FOLDER) and give the folder: model.name=FOLDER in a recipe, "
        "--model FOLDER elsewhere. For a model from scratch: model.name=tiny."
    )


def keep_base(policy: Policy, folder: Path) -> None:
    """Save the base of an adapter on a model from scratch as ``folder`` and name it ``../../base`` in the adapter's config.

    The adapter lies two folders below the run (``sft/final``, ``grpo/checkpoint-N``). Other bases have a name of their own.
    """
    for config in policy.model.peft_config.values():
        config.base_model_name_or_path = f"../../{folder.name}"
    if (folder / "config.json").is_file():
        return
    base = policy.model.get_base_model()
    states = base.state_dict().items()
    weights = {name.replace(".base_layer.", "."): value for name, value in states if "lora_" not in name}
    partial = folder.with_name(f"{folder.name}.partial")
    base.save_pretrained(partial, state_dict=weights)
    policy.tokenizer.save_pretrained(partial)
    partial.rename(folder)


def _context(section: ModelSection) -> int:
    config = AutoConfig.from_pretrained(
        section.name, revision=section.revision or "main", trust_remote_code=section.trust_remote_code
    )
    return int(config.get_text_config(decoder=True).max_position_embeddings)
