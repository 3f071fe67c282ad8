"""Model folders that are not whole: every road refuses them in one sentence that names what is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from algorist.config.section import ModelSection
from algorist.errors import AlgoristError, CheckpointError
from algorist.extensions.model_folder.write import export
from algorist.models.load import load_policy, make_policy
from algorist.models.weights import check_weights
from tests.marks import but
from tests.warm import PYTHON

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 32, "layers": 2, "vocab_size": 400}
NORM = "model.layers.0.post_attention_layernorm.weight"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    section = ModelSection.model_validate({"name": "tiny", "tiny": SIZES})
    made = make_policy(section, device=CPU, seed=0, texts=["Tom has 14 apples."] * 20)
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapter(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    section = ModelSection.model_validate({"name": str(whole), "lora": {"rank": 2}})
    made = make_policy(section, device=CPU, seed=0)
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return folder


def weights(
    change: Callable[[dict[str, Any]], Any], file: str = "model.safetensors"
) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        held = load_file(folder / file)
        change(held)
        save_file(held, folder / file, metadata={"format": "pt"})

    return apply


def setting(**values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(found | values))

    return apply


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)

    return apply


def cut(name: str, share: float) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return apply


def tail_of_zeros(folder: Path) -> None:
    """What a copy that was broken off leaves on a disk that sets the room aside first."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def directory(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def other_tokenizer(folder: Path) -> None:
    found = json.loads((folder / "tokenizer.json").read_text())
    found["added_tokens"].append({**found["added_tokens"][-1], "id": 400, "content": "<another>"})
    (folder / "tokenizer.json").write_text(json.dumps(found))


def template(content: str) -> Callable[[Path], None]:
    return text("chat_template.jinja", content)


def moved_out(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder.parent / "out.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../out.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a * b %}{% endfor %}{% endfor %}"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (weights(lambda w: w.pop(NORM)), f"lacks {NORM}"),
    "missing layer": (setting(num_hidden_layers=3, layer_types=None), "lacks model.layers.2.*more"),
    "unexpected tensor": (weights(lambda w: w.update(extra=torch.ones(2))), "does not know: extra"),
    "other shape": (
        weights(lambda w: w.update({NORM: torch.ones(3)})),
        rf"{NORM} \(3 in the folder, 32 in the model\)",
    ),
    "not finite": (weights(lambda w: w[NORM].fill_(torch.nan)), f"not finite in {NORM}"),
    "half copied": (tail_of_zeros, "nothing but zeros in"),
    "truncated weights": (cut("model.safetensors", 0.5), "cannot load the model"),
    "empty weights": (text("model.safetensors", b""), "cannot load the model"),
    "huge header": (text("model.safetensors", b"\xff" * 64), "cannot load the model"),
    "a folder for weights": (directory, "cannot load the model"),
    "a missing shard": (
        lambda f: (
            (f / "model.safetensors").unlink(),  # type: ignore[func-returns-value]
            text(
                "model.safetensors.index.json",
                '{"metadata": {}, "weight_map": {"a": "model-00001-of-2.safetensors"}}',
            )(f),
        )[1],
        "cannot load the model",
    ),
    "an index that leads out": (
        lambda f: (
            (f / "model.safetensors").unlink(),  # type: ignore[func-returns-value]
            text(
                "model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": "../../../etc/passwd"}}'
            )(f),
        )[1],
        "cannot load the model",
    ),
    "config that is no JSON": (text("config.json", "{"), "cannot load the model"),
    "config that is empty": (text("config.json", ""), "cannot load the model"),
    "config that is a list": (text("config.json", "[1]"), "cannot load the model"),
    "config without a type": (text("config.json", "{}"), "cannot load the model"),
    "config of deep JSON": (text("config.json", "[" * 100_000), "cannot load the model"),
    "an unknown type": (setting(model_type="no-such-type"), "cannot load the model"),
    "a million layers": (setting(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "negative width": (setting(hidden_size=-32), "hidden_size"),
    "heads that are text": (setting(num_attention_heads="many"), "cannot load the model"),
    "no heads": (setting(num_attention_heads=0), "cannot load the model"),
    "broken tokenizer": (text("tokenizer.json", "{"), "cannot load the model"),
    "empty tokenizer": (text("tokenizer.json", ""), "cannot load the model"),
    "tokenizer of another version": (text("tokenizer.json", '{"version": "9"}'), "cannot load the model"),
    "broken tokenizer config": (text("tokenizer_config.json", "[]"), "cannot load the model"),
    "broken generation config": (text("generation_config.json", "{"), ""),
    "broken template": (template("{% for %}"), "chat template of .* cannot be used: line 1"),
    "template that hangs": (template(LOOPS), "does not render a short chat within"),
    "template that fills the memory": (template("{{ 'x' * 10**10 }}"), "needs more than 256 MiB"),
    "template that grows": (template("{{ 'x' * 10**7 }}"), "10000000 characters"),
    "template without the question": (template("{{ 'hi' }}"), "it leaves the question out"),
    "integers": (weights(lambda w: w.update({NORM: w[NORM].int()})), f"holds integers in {NORM}"),
    "an index of a file elsewhere": (moved_out, r"names \.\./out\.safetensors, which lies outside"),
    "template that fails": (template("{{ 1 // 0 }}"), "ZeroDivisionError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", but(BROKEN, "template that hangs"))
def test_a_broken_model_folder_is_refused_in_one_sentence(
    case: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    damage, message = BROKEN[case]
    damage(folder)
    if not message:  # not needed for what we do
        assert load_policy(folder, device=CPU).model is not None
        return
    with pytest.raises(AlgoristError, match=message) as found:
        load_policy(folder, device=CPU)
    assert len(str(found.value)) < 1200 and isinstance(found.value, (ValueError, CheckpointError))
    with pytest.raises(AlgoristError, match=message):
        make_policy(ModelSection(name=str(folder)), device=CPU, seed=0)
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_a_whole_folder_loads_the_same_twice(whole: Path) -> None:
    one, two = (dict(load_policy(whole, device=CPU).model.state_dict()) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_tokenizer_with_more_tokens_than_the_model_is_told(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Preflight refuses it where a prompt has such a token; many texts have none."""
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    other_tokenizer(folder)
    rows = load_policy(whole, device=CPU).model.get_input_embeddings().weight.shape[0]
    assert "tokens, its model" not in caplog.text
    policy = load_policy(folder, device=CPU)
    assert len(policy.tokenizer) > rows == policy.model.get_input_embeddings().weight.shape[0]
    assert f"has {len(policy.tokenizer)} tokens, its model {rows}" in caplog.text


def test_a_tied_head_is_not_missing(whole: Path) -> None:
    assert "lm_head.weight" not in load_file(whole / "model.safetensors")
    load_policy(whole, device=CPU)


FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FILE = "adapter_model.safetensors"
BROKEN_ADAPTERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (weights(lambda w: w.pop(FACTOR), FILE), f"lacks {FACTOR}"),
    "unexpected": (
        weights(lambda w: w.update({"base_model.model.x.lora_A.weight": torch.ones(2)}), FILE),
        "does not know",
    ),
    "not finite": (weights(lambda w: w[FACTOR].fill_(torch.inf), FILE), "not finite"),
    "other shape": (
        weights(lambda w: w.update({FACTOR: torch.ones(3, 32)}), FILE),
        r"3×32 in the folder, 2×32 in the model",
    ),
    "truncated": (cut(FILE, 0.4), "cannot load the model"),
    "no base": (text("adapter_config.json", '{"peft_type": "LORA"}'), "does not say which model"),
    "no JSON": (text("adapter_config.json", "{"), "does not say which model"),
    "no weights": (lambda f: (f / FILE).unlink(), "cannot load the model"),
}


@pytest.mark.parametrize("case", BROKEN_ADAPTERS)
def test_a_broken_adapter_is_refused_in_one_sentence(case: str, adapter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    damage, message = BROKEN_ADAPTERS[case]
    damage(folder)
    with pytest.raises(AlgoristError, match=message):
        load_policy(folder, device=CPU)


def test_a_whole_adapter_loads_and_merges(adapter: Path, tmp_path: Path) -> None:
    load_policy(adapter, device=CPU, trainable=True)
    export(adapter, tmp_path / "merged", merge=True)
    load_policy(tmp_path / "merged", device=CPU)


def test_an_adapter_that_lacks_a_factor_is_not_merged(adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "adapter")
    weights(lambda w: w.pop(FACTOR), FILE)(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="lacks"):
        export(tmp_path / "adapter", tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()


def test_a_folder_that_lacks_a_tensor_is_not_given_away(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "model")
    weights(lambda w: w.pop(NORM))(tmp_path / "model")
    with pytest.raises(CheckpointError, match=f"lacks {NORM}"):
        export(tmp_path / "model", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.slow
def test_solve_ends_with_exit_2_and_one_sentence(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "model")
    weights(lambda w: w.pop(NORM))(tmp_path / "model")
    command = [PYTHON, "-m", "algorist", "solve", "1 + 1 = ?", "--model", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stdout == ""
    assert f"lacks {NORM}" in done.stderr and "Traceback" not in done.stderr
    assert "LOAD REPORT" not in done.stderr


def test_names_are_counted_beyond_three() -> None:
    with pytest.raises(
        CheckpointError, match=r"lacks a, b, c and 2 more;.*1×2 in the folder, 3×4 in the model"
    ):
        check_weights("F", missing=list("edcba"), mismatched=[("w", (1, 2), (3, 4))])
    check_weights("F", tensors=[("zero", torch.zeros(2, 2))], whole=False)
