"""run_clm of Transformers, small.

HfArgumentParser, datasets, group_texts, evaluation with a perplexity, save_metrics.
Imports no Plait.
"""

import json
import math
import os
from dataclasses import dataclass, field
from itertools import chain

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, PreTrainedTokenizerFast
from transformers import TrainingArguments, default_data_collator, set_seed
from transformers import Trainer


@dataclass
class DataTrainingArguments:
    block_size: int = field(default=12)


def main():
    parser = HfArgumentParser((DataTrainingArguments, TrainingArguments))
    options = """
        --output_dir out --do_train --do_eval --per_device_train_batch_size 2
        --per_device_eval_batch_size 3 --num_train_epochs 2 --gradient_accumulation_steps 2
        --learning_rate 0.01 --weight_decay 0.1 --warmup_steps 2 --max_grad_norm 0.5
        --logging_steps 1 --lr_scheduler_type cosine --save_strategy no --report_to none
        --use_cpu true --seed 11 --disable_tqdm true
    """
    data_args, training_args = parser.parse_args_into_dataclasses(options.split())
    set_seed(training_args.seed)
    names = [f"w{i}" for i in range(60)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="w0")
        )
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    raw = Dataset.from_dict(
        {
            "text": [
                " ".join(names[(i * k * k + 3) % 60] for k in range(5 + i % 9)) for i in range(60)
            ]
        }
    )
    tokenized = raw.map(
        lambda batch: tokenizer(batch["text"]), batched=True, remove_columns=["text"]
    )

    def group_texts(examples):
        joined = {key: list(chain(*examples[key])) for key in ("input_ids", "attention_mask")}
        size = data_args.block_size
        total = (len(joined["input_ids"]) // size) * size
        result = {
            key: [value[i : i + size] for i in range(0, total, size)]
            for key, value in joined.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    grouped = tokenized.map(group_texts, batched=True, remove_columns=tokenized.column_names)
    train_dataset = grouped.select(range(32))
    eval_dataset = grouped.select(range(32, 44))
    shape = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    config = AutoConfig.for_model("gpt2", **shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    train_result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.save_metrics("eval", metrics)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    rank = int(os.environ.get("RANK", 0))
    columns = [[row[key] for row in logs] for key in ("loss", "grad_norm", "learning_rate")]
    print(
        "\nRESULT "
        + json.dumps([rank, *columns, metrics["perplexity"], trainer.state.global_step]),
        flush=True,
    )


if __name__ == "__main__":
    main()
