"""The shape of TRL's own example scripts: settings come from the command line, rewards from trl.rewards."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser
from trl.rewards import accuracy_reward, think_format_reward

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    train_dataset, eval_dataset = load_dataset("AI-MO/NuminaMath-TIR", split=["train[:5%]", "test[:5%]"])
    SYSTEM_PROMPT = "First thinks, then answers, within <think></think> tags."
    train_dataset = train_dataset.map(
        lambda row: {
            "prompt": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": row["problem"]},
            ]
        }
    )
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward, accuracy_reward],
        train_dataset=train_dataset,
    )
    trainer.train()
    raise SystemExit("this script was run")
