"""run_clm_no_trainer, small.

It has accumulate, clipping, a checkpoint in mid-epoch, skip_first_batches and save_pretrained.
Imports no Plait.
"""

import argparse
import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator, get_scheduler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_grad_norm", type=float, default=0.5)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(7)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    blocks = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (40, 12)).tolist()]
    train_dataloader = DataLoader(blocks, collate_fn=default_data_collator, batch_size=2)
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **shape, num_key_value_heads=2)
    )
    no_decay = ["norm.weight"]
    groups = [
        {
            "params": [
                p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)
            ],
            "weight_decay": 0.1,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    lr_scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=2 * accelerator.num_processes, num_training_steps=20
    )
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    losses = []
    norms = []

    def epoch(dataloader, stop=None):
        model.train()
        for step, batch in enumerate(dataloader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(
                        float(accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm))
                    )
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if step == stop:
                accelerator.save_state(os.path.join(args.output_dir, "step"))

    epoch(train_dataloader)
    epoch(train_dataloader, stop=5)
    before = losses[-4:]
    accelerator.load_state(os.path.join(args.output_dir, "step"))
    epoch(accelerator.skip_first_batches(train_dataloader, 6))
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    saved = load_file(os.path.join(args.output_dir, "model.safetensors"))
    total = sum(tensor.double().abs().sum().item() for tensor in saved.values())
    print(
        "\nRESULT "
        + json.dumps(
            [accelerator.process_index, losses[:20], norms[:10], before, len(saved), total]
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
