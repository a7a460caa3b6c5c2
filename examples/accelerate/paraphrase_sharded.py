"""Learns whether two sentences mean the same, by Accelerate."""

import argparse
import json
from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from pairs import loaders, small_bert
from polyshard import ShardConfig
from polyshard_accelerate import Accelerator
from transformers import get_linear_schedule_with_warmup


def train(options):
    accelerator = Accelerator(
        shard=ShardConfig(policy={"name": "transformer", "layers": "transformers.models.bert.modeling_bert:BertLayer"}),
        cpu=options.cpu,
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        # The batch is that of all ranks together, and its order in an epoch follows from the seed.
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        project_dir=options.output_dir,
    )
    set_seed(options.seed)
    train_loader, eval_loader = loaders(options.examples, options.batch_size)
    model = small_bert(options.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=4,
        num_training_steps=len(train_loader) * options.epochs // options.gradient_accumulation_steps,
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    output = Path(options.output_dir)
    done = 0
    if options.resume_from:
        accelerator.load_state(options.resume_from)
        done = int(Path(options.resume_from).name.removeprefix("step_"))
    losses = []
    for epoch in range(done // len(train_loader), options.epochs):
        model.train()
        train_loader.set_epoch(epoch)
        skipped = max(done - epoch * len(train_loader), 0)
        batches = accelerator.skip_first_batches(train_loader, skipped) if skipped else train_loader
        for step, batch in enumerate(batches, epoch * len(train_loader) + skipped + 1):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if step == options.save_at:
                accelerator.save_state(output / f"step_{step}")

        model.eval()
        right = seen = 0
        for batch in eval_loader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right += (predictions == labels).sum().item()
            seen += len(labels)
        accelerator.print(f"epoch {epoch}: accuracy {right / seen:.3f} of {seen}")

    accelerator.save_model(model, output / "model")
    if accelerator.is_main_process:
        (output / "losses.json").write_text(json.dumps(losses))
    accelerator.end_training()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"])
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--examples", type=int, default=1280)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--save_at", type=int)
    parser.add_argument("--resume_from")
    parser.add_argument("--output_dir", default="out")
    options = parser.parse_args(arguments)
    Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    train(options)


if __name__ == "__main__":
    main()
