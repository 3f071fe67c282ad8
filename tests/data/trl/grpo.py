"""GRPO with chat rows, functions of one's own and an adapter: the shape of TRL's and Unsloth's notebooks."""

import re

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

SYSTEM_PROMPT = """
Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>
"""
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
NUMBER = re.compile(r"-?\d+")


def get_gsm8k_questions(split="train"):
    data = load_dataset("openai/gsm8k", "main")[split]
    return data.map(
        lambda x: {
            "prompt": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": x["question"]},
            ],
            "answer": x["answer"].split("####")[1].strip(),
        }
    )


dataset = get_gsm8k_questions()
model_device = input  # a script that runs would wait here


def extract_xml_answer(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    return [2.0 if extract_xml_answer(r) == a else 0.0 for r, a in zip(responses, answer)]


def int_reward_func(completions, **kwargs):
    return [0.5 if NUMBER.fullmatch(extract_xml_answer(c[0]["content"])) else 0.0 for c in completions]


training_args = GRPOConfig(
    output_dir="outputs/Qwen-0.5B-GRPO",
    learning_rate=5e-6,
    adam_beta1=0.9,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_steps=10,
    lr_scheduler_type="cosine",
    logging_steps=1,
    bf16=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    num_generations=16,
    max_completion_length=200,
    num_train_epochs=1,
    save_steps=100,
    max_grad_norm=0.1,
    log_on_each_node=False,
    use_vllm=False,
    report_to="wandb",
    reward_weights=[1.0, 0.5],
    scale_rewards=False,
    loss_type="dr_grpo",
    epsilon=0.2,
    epsilon_high=0.28,
    num_iterations=2,
)
peft_config = LoraConfig(
    r=16, lora_alpha=64, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.05
)
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[correctness_reward_func, int_reward_func],
    args=training_args,
    train_dataset=dataset,
    peft_config=peft_config,
)
trainer.train()
raise SystemExit("this script was run")
