"""Direct preference optimisation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from algorist.extensions.toolkit.log_probs import token_log_probs
from algorist.extensions.toolkit.packed_dataset import INSTRUCTION_TEMPLATE
from algorist.extensions.toolkit.tokenize import tokenize_prompt_and_output


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> Tensor:
    """Return -log sigmoid(beta · (policy's log-odds - reference's log-odds)).

    Args:
        chosen: Log-probability of the chosen response under the policy, any shape.
        rejected: The same for the rejected response.
        ref_chosen: The same for the chosen response under the reference.
        ref_rejected: The same for the rejected response under the reference.
        beta: Strength of the tie to the reference.

    Returns:
        The loss, the shape of the inputs. Source: DPO (2305.18290) eq. 7.
    """
    return -F.logsigmoid(beta * ((chosen - rejected) - (ref_chosen - ref_rejected)))


def compute_per_instance_dpo_loss(
    lm: Any,
    lm_ref: Any,
    tokenizer: Any,
    beta: float,
    prompt: str,
    response_chosen: str,
    response_rejected: str,
    *,
    template: str = INSTRUCTION_TEMPLATE,
) -> Tensor:
    """Return the DPO loss of one pair of responses.

    Prompt and response are put into ``template`` and closed with the tokenizer's end-of-text token. Only response
    tokens are counted; those of the prompt would cancel.

    Args:
        lm: The policy, a causal model; the gradient flows here.
        lm_ref: The frozen reference.
        tokenizer: The tokenizer of both.
        beta: Strength of the tie to the reference.
        prompt: The instruction.
        response_chosen: The preferred response.
        response_rejected: The other one.
        template: Text with ``{prompt}`` and, at its end, ``{response}``; ``"{prompt}{response}"`` joins them plainly.

    Returns:
        A scalar, on the policy's device.
    """
    head = template.partition("{response}")[0].replace("{prompt}", prompt)
    outputs = [text + (tokenizer.eos_token or "") for text in (response_chosen, response_rejected)]
    batch = tokenize_prompt_and_output([head, head], outputs, tokenizer)

    def scores(model: Any) -> Tensor:
        device = next(model.parameters()).device
        on = {name: tensor.to(device) for name, tensor in batch.items()}
        log_probs = token_log_probs(model(input_ids=on["input_ids"]).logits, on["labels"])
        return (log_probs * on["response_mask"]).sum(-1)

    policy = scores(lm)
    with torch.no_grad():
        reference = scores(lm_ref).to(policy.device)
    return dpo_loss(policy[0], policy[1], reference[0], reference[1], beta)
