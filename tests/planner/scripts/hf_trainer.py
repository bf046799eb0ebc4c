"""Fine-tunes a small BERT with Hugging Face's Trainer, as run_glue.py does."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(42)


class Sentences(Dataset):
    def __init__(self, count):
        self.tokens = torch.randint(1, 500, (count, 24))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {
            "input_ids": self.tokens[index],
            "attention_mask": torch.ones(24, dtype=torch.long),
            "labels": torch.tensor(index % 2),
        }


config = BertConfig(
    vocab_size=500, hidden_size=128, num_hidden_layers=1, num_attention_heads=4, intermediate_size=256,
    max_position_embeddings=32,
)  # fmt: skip
model = BertForSequenceClassification(config)
args = TrainingArguments(
    output_dir="tmp_trainer", per_device_train_batch_size=8, max_steps=4, logging_steps=1, save_steps=1, report_to=[],
    save_total_limit=1, learning_rate=5e-5, warmup_steps=2, disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    eval_strategy="steps", eval_steps=4,
)  # fmt: skip
trainer = Trainer(model=model, args=args, train_dataset=Sentences(64), eval_dataset=Sentences(8))
result = trainer.train()
print(f"train_loss {result.training_loss:.6f}")
trainer.save_model("final")
