"""SFT from a hub data set, with a model that is loaded first."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained(
    "HuggingFaceTB/SmolLM2-135M", quantization_config=BitsAndBytesConfig(load_in_4bit=True)
)
dataset = load_dataset("me/worked-solutions", split="train[:1000]")
trainer = SFTTrainer(
    model=model,
    train_dataset=dataset,
    args=SFTConfig(
        max_length=512, packing=True, max_steps=60, learning_rate=2e-4, per_device_train_batch_size=2
    ),
)
trainer.train()
raise SystemExit("this script was run")
