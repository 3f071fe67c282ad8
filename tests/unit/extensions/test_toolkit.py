"""From text to tensors with a real tokenizer and a real (tiny) model: masks, log-probs, packing, DPO, two parsers."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from algorist.errors import ConfigError, DataError
from algorist.extensions.toolkit import (
    MathTrainingSetup,
    build_chat_prompt,
    compute_entropy,
    compute_per_instance_dpo_loss,
    create_math_training_setup,
    get_packed_sft_dataset,
    get_response_log_probs,
    iterate_batches,
    parse_gsm8k_response,
    parse_mmlu_response,
    tokenize_prompt_and_output,
)
from algorist.models.tiny import tiny_model, train_tokenizer
from tests.tiny import APPLES, tiny_policy

PROMPTS = ["What is 1 + 1?", "Name a number.", ""]
OUTPUTS = [" It is 2.", "7", " forty-two, as everybody knows"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([*PROMPTS, *OUTPUTS] * 20, vocab_size=320)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return tiny_model(tokenizer, hidden_size=32, layers=2, heads=2, kv_heads=1).eval()


def test_mask_covers_the_output_and_nothing_else(tokenizer: Any) -> None:
    batch = tokenize_prompt_and_output(PROMPTS, OUTPUTS, tokenizer)
    ids = [
        (tokenizer(p)["input_ids"], tokenizer(o)["input_ids"]) for p, o in zip(PROMPTS, OUTPUTS, strict=True)
    ]
    width = max(len(p) + len(o) for p, o in ids) - 1
    assert {k: tuple(v.shape) for k, v in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "response_mask"), (3, width)
    )
    for row, (p, o) in enumerate(ids):
        mask = batch["response_mask"][row]
        kept = o if p else o[1:]  # the very first token has nothing before it and is never a label
        assert batch["labels"][row][mask].tolist() == kept
        assert (
            batch["input_ids"][row][: len(p) + len(o) - 1].tolist()
            == (p + o)[: min(width, len(p) + len(o) - 1)]
        )
        assert torch.equal(batch["labels"][row, :-1], batch["input_ids"][row, 1:])
        assert not mask[len(p) + len(o) - 1 :].any() and not mask[: max(0, len(p) - 1)].any()
        padding = batch["labels"][row][len(p) + len(o) - 1 :]
        assert (padding == tokenizer.pad_token_id).all()


def test_numbers_of_prompts_and_outputs_must_agree(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="3 prompts for 1 outputs"):
        tokenize_prompt_and_output(PROMPTS, ["x"], tokenizer)


def test_bos_in_front_of_the_prompt_only_and_no_eos_in_the_middle(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str()),
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
    )
    bos, eos = tokenizer.pad_token, tokenizer.eos_token
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A {eos}",
        special_tokens=[(bos, tokenizer.pad_token_id), (eos, tokenizer.eos_token_id)],
    )
    plain = tokenize_prompt_and_output(["1 + 1"], ["2"], tokenizer)
    ours = tokenize_prompt_and_output(["1 + 1"], ["2"], other)
    assert ours["input_ids"][0].tolist() == [tokenizer.pad_token_id, *plain["input_ids"][0].tolist()]
    assert ours["labels"][0][ours["response_mask"][0]].tolist() == plain["labels"][0][-1:].tolist()


def test_response_log_probs_equal_log_softmax(tokenizer: Any, model: Any) -> None:
    batch = tokenize_prompt_and_output(PROMPTS, OUTPUTS, tokenizer)
    ids, labels = batch["input_ids"], batch["labels"]
    result = get_response_log_probs(model, ids, labels, return_token_entropy=True)
    logits = model(ids).logits.double()
    expected = torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(result["log_probs"].double(), expected, atol=1e-5, rtol=1e-5)
    p = torch.softmax(logits, -1)
    torch.testing.assert_close(result["token_entropy"].double(), -(p * p.log()).sum(-1), atol=1e-5, rtol=1e-5)
    assert result["log_probs"].requires_grad and not result["token_entropy"].requires_grad
    assert list(get_response_log_probs(model, ids, labels)) == ["log_probs"]
    hot = get_response_log_probs(model, ids, labels, True, temperature=2.0)
    torch.testing.assert_close(
        hot["token_entropy"].double(), compute_entropy(logits / 2), atol=1e-5, rtol=1e-5
    )


def test_padding_of_a_batch_does_not_change_log_probs(tokenizer: Any, model: Any) -> None:
    together = tokenize_prompt_and_output(PROMPTS, OUTPUTS, tokenizer)
    whole = get_response_log_probs(model, together["input_ids"], together["labels"])["log_probs"]
    for row in range(3):
        one = tokenize_prompt_and_output(PROMPTS[row : row + 1], OUTPUTS[row : row + 1], tokenizer)
        alone = get_response_log_probs(model, one["input_ids"], one["labels"])["log_probs"]
        torch.testing.assert_close(
            alone[one["response_mask"]], whole[row][together["response_mask"][row]], atol=1e-5, rtol=1e-5
        )


def test_dpo_loss_of_a_pair(tokenizer: Any, model: Any) -> None:
    reference = tiny_model(tokenizer, seed=5, hidden_size=32, layers=2, heads=2, kv_heads=1).eval()
    args = (tokenizer, 0.5, "Say a number.", "7", "forty-two")
    same = compute_per_instance_dpo_loss(model, model, *args)
    assert float(same.detach()) == pytest.approx(math.log(2), abs=1e-6)
    loss = compute_per_instance_dpo_loss(model, reference, *args)

    def score(lm: Any, response: str) -> float:
        head = tokenizer(
            "Below is an instruction that describes a task. Write a response that appropriately completes the "
            "request.\n\n### Instruction:\nSay a number.\n\n### Response:\n"
        )["input_ids"]
        tail = [*tokenizer(response)["input_ids"], tokenizer.eos_token_id]
        ids = torch.tensor([head + tail])
        logp = torch.log_softmax(lm(ids).logits.double(), -1)[0, :-1]
        return sum(float(logp[len(head) - 1 + i, token].detach()) for i, token in enumerate(tail))

    margin = (score(model, "7") - score(model, "forty-two")) - (
        score(reference, "7") - score(reference, "forty-two")
    )
    assert float(loss.detach()) == pytest.approx(math.log1p(math.exp(-0.5 * margin)), rel=1e-4)
    swapped = compute_per_instance_dpo_loss(
        model, reference, tokenizer, 0.5, "Say a number.", "forty-two", "7"
    )
    assert float(swapped.detach()) == pytest.approx(math.log1p(math.exp(0.5 * margin)), rel=1e-4)
    model.zero_grad()
    loss.backward()
    assert all(p.grad is None for p in reference.parameters())
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("packed", [False, True])
def test_packed_data_is_the_documents_one_after_the_other(
    tokenizer: Any, tmp_path: Path, packed: bool
) -> None:
    rows = [{"prompt": f"Add {i}.", "response": f"It is {i}." * i} for i in range(1, 6)]
    text = "\n".join(json.dumps(r) for r in rows) + "\n\n"
    path = tmp_path / ("data.jsonl.gz" if packed else "data.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    dataset = get_packed_sft_dataset(tokenizer, path, 16, False, template="Q: {prompt} A: {response}")
    stream: list[int] = []
    for row in rows:
        stream += tokenizer(f"Q: {row['prompt']} A: {row['response']}")["input_ids"] + [
            tokenizer.eos_token_id
        ]
    assert len(dataset) == (len(stream) - 1) // 16 > 3
    for i in range(len(dataset)):
        assert dataset[i]["input_ids"].tolist() == stream[16 * i : 16 * i + 16]
        assert dataset[i]["labels"].tolist() == stream[16 * i + 1 : 16 * i + 17]
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    shuffled = get_packed_sft_dataset(tokenizer, path, 16, True, template="Q: {prompt} A: {response}")
    assert sorted(shuffled.token_ids.tolist()) == sorted(stream) and shuffled.token_ids.tolist() != stream


def test_batches_cover_the_data_once(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": str(i), "response": "one two"}) for i in range(9)))
    dataset = get_packed_sft_dataset(tokenizer, path, 8, False)
    for shuffle in (False, True):
        batches = list(iterate_batches(dataset, 4, shuffle))
        assert [len(b["input_ids"]) for b in batches] == [4] * (len(dataset) // 4) + [
            len(dataset) % 4
        ] * bool(len(dataset) % 4)
        seen = sorted(tuple(row) for b in batches for row in b["labels"].tolist())
        assert seen == sorted(tuple(d["labels"].tolist()) for d in (dataset[i] for i in range(len(dataset))))
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match=r"line 1: has prompt; expected prompt and response"):
        get_packed_sft_dataset(tokenizer, path, 8, False)


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        ("The correct answer is B. There is only one.", "B"),
        ("the answer is (c)", "C"),
        ("Answer is: D", "D"),
        ("B", "B"),
        ("A. 100", "A"),
        ("(C) because", "C"),
        ("unknown.", "D"),
        ("A virus is small.", None),
        ("The answer is B. No, the answer is C.", None),
        ("The correct answer is 10000 polyomaviruses.", None),
        ("", None),
    ],
)
def test_parse_mmlu_response(output: str, letter: str | None) -> None:
    example = {"options": ["100", "1", "10", "unknown"], "answer": "A"}
    assert parse_mmlu_response(example, output) == letter


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("She sold 48/2 = 24 in May and 48+24 = 72 in all.", "72"),
        ("It costs $1,250.", "1250"),
        ("minus: -3.5", "-3.5"),
        ("She sold twenty-four clips.", None),
        ("", None),
    ],
)
def test_parse_gsm8k_response(output: str, number: str | None) -> None:
    assert parse_gsm8k_response(output) == number


SETUP = {"num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 1, "max_completion_length": 8}


def setup_of(rows: Any, folder: Path, **changes: Any) -> MathTrainingSetup:
    policy = tiny_policy()
    return create_math_training_setup(
        policy.model,
        tokenizer=policy.tokenizer,
        dataset=rows,
        device="cpu",
        output_dir=folder,
        grpo_args=SETUP | {"max_prompt_length": None},
        **changes,
    )


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": APPLES, "answer": 17}, "17"),
        ({"question": APPLES, "answer": 0}, "0"),
        ({"question": APPLES, "answer": 17.0}, "17"),
        ({"problem": APPLES, "expected_answer": "14 + 3\n#### 17"}, "17"),
        ({"prompt": [{"role": "user", "content": APPLES}], "answer": "It is \\boxed{17}."}, "17"),
    ],
)
def test_rows_of_a_setup_have_the_usual_columns(row: dict[str, Any], answer: str, tmp_path: Path) -> None:
    found = setup_of([row] * 4, tmp_path)
    (problem, *_) = found.artifacts.trainer.problems
    assert (problem.question, problem.answer) == (APPLES, answer)
    assert len(found.dataset) == 4 and found.dataset[0]["reference_answer"] == answer
    assert found.dataset[0]["prompt"] == build_chat_prompt(APPLES)


def test_a_row_without_an_answer_ends_a_setup(tmp_path: Path) -> None:
    for missing in (None, float("nan")):
        with pytest.raises(DataError, match="row 2 has no gold answer"):
            rows = [{"question": APPLES, "answer": 17.5}, {"question": "1 + 1?", "answer": missing}]
            setup_of(rows, tmp_path)


def test_rewards_of_a_setup_keep_their_weights(tmp_path: Path) -> None:
    rows = [{"question": APPLES, "answer": "17"}] * 4
    rewards = ["correct", {"name": "well_formed", "weight": 0.2}]
    assert setup_of(rows, tmp_path, reward_funcs=rewards).reward_funcs.weights == [1.0, 0.2]
    with pytest.raises(ConfigError, match="reward_funcs has weights, and reward_weights is given too"):
        setup_of(rows, tmp_path, reward_funcs=rewards, reward_weights=[1.0, 0.5])
