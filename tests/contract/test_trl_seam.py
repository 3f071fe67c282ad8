"""TRL's private names, signatures and contracts that the trainer relies on."""

from __future__ import annotations

import inspect

import pytest
import torch
from trl import GRPOTrainer, SFTTrainer
from trl.trainer.utils import RepeatSampler, shuffle_sequence_dict, split_tensor_dict

from algorist.errors import MissingExtraError
from algorist.training import trl_seam
from algorist.training.checkpoint import ExactCheckpoints
from algorist.training.faults import FaultTolerant
from algorist.training.grpo import AlgoristGRPOTrainer


def test_installed_release_is_admitted() -> None:
    trl_seam.check_trl_version()
    assert trl_seam.check_seams() == []


@pytest.mark.parametrize("version", ["1.15.4", "1.17.0", "2.0.0"])
def test_untested_release_is_refused(version: str) -> None:
    with pytest.raises(MissingExtraError, match=r"pip install .*trl"):
        trl_seam.check_trl_version(version)


def test_changed_signature_is_named() -> None:
    class Changed(GRPOTrainer):
        def _compute_loss(self, inputs: object) -> None:  # type: ignore[override]
            """A seam that moved."""

    problems = trl_seam.check_seams(Changed)
    assert len(problems) == 1 and "_compute_loss" in problems[0]


def test_every_override_is_listed() -> None:
    ours = {n for c in (AlgoristGRPOTrainer, ExactCheckpoints, FaultTolerant) for n in vars(c)}
    private = {
        name for name in ours if callable(getattr(GRPOTrainer, name, None)) and not name.startswith("__")
    }
    assert private == set(trl_seam.OVERRIDDEN_METHODS)


def test_loss_reads_what_we_fill() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    for text in (
        'inputs.get("old_per_token_logps")',
        "compute_entropy=True",
        'inputs["num_items_in_batch"]',
        'self._metrics[mode]["entropy"].append(global_masked_mean(entropies))',
    ):
        assert text in source
    scoring = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    old, reference = (
        scoring.index("old_per_token_logps, _, _ = self._get"),
        scoring.index("ref_per_token_logps, _, _"),
    )
    assert old < reference  # the first no-grad pass is the one for old log-probs
    assert "self.args.gradient_accumulation_steps % generate_every != 0" in scoring


def test_nan_metrics_are_left_out_of_the_mean() -> None:
    assert "valid = [v for v in val if not math.isnan(v)]" in inspect.getsource(GRPOTrainer.log)


def test_prompts_arrive_repeated() -> None:
    sampler = RepeatSampler(range(4), mini_repeat_count=3, batch_size=2, repeat_count=2, shuffle=False)
    assert list(sampler) == [0, 0, 0, 1, 1, 1] * 2 + [2, 2, 2, 3, 3, 3] * 2


def test_buffer_is_shuffled_then_split() -> None:
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._prepare_inputs))
    assert source.index("shuffle_sequence_dict") < source.index("split_tensor_dict")
    torch.manual_seed(0)
    shuffled = shuffle_sequence_dict({"a": torch.arange(6), "n": torch.tensor(3)})
    parts = split_tensor_dict(shuffled, 3)
    assert [p["a"].shape for p in parts] == [(2,)] * 3 and all(p["n"] == 3 for p in parts)


def test_telemetry_is_off_by_default() -> None:
    import os

    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


def test_sft_reads_what_our_head_gives() -> None:
    source = inspect.getsource(SFTTrainer.compute_loss)
    for text in (
        "outputs = model(**inputs, fused_lm_head=True)",
        "per_token_loss = -outputs.log_probs",
        "outputs.label_mask.sum()",
        "outputs.entropy.detach().sum()",
        "outputs.is_top1.sum()",
    ):
        assert text in source
