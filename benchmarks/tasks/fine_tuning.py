"""Fine-tunes a classifier with the Hugging Face Trainer: from which package of the standard library is a snippet?

Without --model a small BERT starts from random weights, because weights cannot be assumed to be on this machine.

torchrun --nproc-per-node 2 benchmarks/tasks/fine_tuning.py --engine torch
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from task_job import Job, parse_arguments
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

PACKAGES = ("asyncio", "email", "encodings", "idlelib", "tkinter", "unittest")
LENGTH = 96  # bytes per snippet; each byte is a token


class Snippets(Dataset[dict[str, Tensor]]):
    """Snippets of LENGTH bytes with the number of their package, every tenth of a file held out."""

    def __init__(self, is_held_out: bool) -> None:
        self.rows: list[tuple[bytes, int]] = []
        root = Path(sysconfig.get_path("stdlib"))
        for label, package in enumerate(PACKAGES):
            for path in sorted(root.glob(f"{package}/**/*.py")):
                text = path.read_bytes()
                for index, start in enumerate(range(0, len(text) - LENGTH, LENGTH)):
                    if (index % 10 == 9) == is_held_out:
                        self.rows.append((text[start : start + LENGTH], label))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text, label = self.rows[index]
        return {"input_ids": torch.tensor(list(text)), "labels": torch.tensor(label)}


class Timed(TrainerCallback):
    """Passes the Trainer's steps and losses to the job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.steps = iter(job.steps())

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        next(self.steps)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        next(self.steps, None)


def make_model(name: str | None) -> nn.Module:
    if name is not None:
        model: nn.Module = AutoModelForSequenceClassification.from_pretrained(name, num_labels=len(PACKAGES))
        return model
    config = BertConfig(
        vocab_size=256,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=LENGTH,
        id2label=dict(enumerate(PACKAGES)),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def main() -> None:
    parser = parse_arguments(__doc__, num_steps=100, batch_size=16)
    parser.add_argument("--model", help="folder or name of a model whose tokens are bytes, such as google/canine-s")
    args = parser.parse_args()
    with Job(args) as job:
        if args.engine == "drivetrain":
            import drivetrain

            drivetrain.install(optim=True)  # the Trainer builds its wrapper and its AdamW from torch's names
        model = make_model(args.model)
        arguments = TrainingArguments(
            output_dir="unused",
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=1e-3,
            warmup_steps=args.steps // 10,
            optim="adamw_torch",
            use_cpu=job.device.type == "cpu",
            seed=args.seed,
            logging_steps=1,
            average_tokens_across_devices=False,  # the loss is a mean over snippets, not over tokens
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=Snippets(is_held_out=False), callbacks=[Timed(job)])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        for step, loss in enumerate(entry["loss"] for entry in trainer.state.log_history if "loss" in entry):
            job.note(torch.tensor(loss), step)
        job.result("held-out loss", trainer.evaluate(Snippets(is_held_out=True))["eval_loss"])


if __name__ == "__main__":
    main()
