"""What differs between model families: where LoRA adapters go. One entry per family that is not Llama-like."""

from __future__ import annotations

from typing import Any

from algorist.errors import ConfigError

LLAMA_LIKE = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
}
FAMILIES: dict[str, dict[str, list[str]]] = {
    "gpt2": {"attention": ["c_attn"], "mlp": ["c_fc"]},
    "phi3": {"attention": ["qkv_proj", "o_proj"], "mlp": ["gate_up_proj", "down_proj"]},
    "gpt_neox": {"attention": ["query_key_value", "dense"], "mlp": ["dense_h_to_4h", "dense_4h_to_h"]},
}


def lora_targets(model: Any, modules: str | list[str]) -> str | list[str]:
    """Return PEFT's target modules for ``attention``, ``attention+mlp``, ``all-linear`` or a list of names.

    Raises:
        ConfigError: None of the names exists in the model.
    """
    if modules == "all-linear":
        return modules
    family = FAMILIES.get(model.config.model_type, LLAMA_LIKE)
    names = modules if isinstance(modules, list) else [n for part in modules.split("+") for n in family[part]]
    own = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = [n for n in names if n.rpartition(".")[2] in own]
    if not targets:
        raise ConfigError(
            f"model.lora.target_modules {names}: the model ({model.config.model_type}) has none of these modules; "
            "take all-linear"
        )
    return targets
