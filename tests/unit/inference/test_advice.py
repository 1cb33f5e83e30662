"""The remedies in messages of `generate` and `plait generate` work."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from functools import partial

import pytest
from transformers import AutoModelForCausalLM, LlamaModel

import plait
from plait.inference import generate
from tests.advice import Case, check, command, each, table
from tests.integration.model_folder import adapter_of, model_folder
from tests.unit.data.byte_tokenizer import TEMPLATE, tokenizer
from tests.unit.inference import models

TURNS = [{"role": "user", "content": "a"}]


def generated(prompts=((1, 2),), model=None, *, saved=None, **settings):
    """Generate a token of a small model. `saved` are generation settings of its folder."""
    model = model or models.built("llama", layers=1)
    for name, value in (saved or {}).items():
        setattr(model.generation_config, name, value)
    prompts = list(prompts) if isinstance(prompts, tuple) else prompts
    with closing(plait.parallelize(model, {"train_micro_batch_size_per_gpu": 1})) as sharded:
        answers = plait.generate(sharded, prompts, **{"max_new_tokens": 1, **settings})
    return all(answer.token_ids for answer in answers)


def case_of(advice, mistake, *remedies, call=generated):
    """Return a case whose mistake and remedies are arguments of `generated`."""
    mistaken_call = partial(call, **mistake)
    return Case((advice,), mistaken_call, each(lambda arguments: call(**arguments), *remedies))


def neutral_rows(name, unsupported, neutral):
    """Return the rows of a setting of which only one value is supported."""
    return {
        f"{name} = {unsupported} is not supported by generate; leave it out, or pass {neutral}": [
            {name: unsupported},
            {name: neutral},
            {},
        ],
        f"set it to {neutral} there, or pass {name}={neutral} to generate": [
            {"saved": {name: unsupported}},
            {"saved": {name: neutral}},
            {"saved": {name: unsupported}, name: neutral},
        ],
    }


def test_calls(monkeypatch):
    text = tokenizer(TEMPLATE)
    no_template = tokenizer(None)
    long = [list(range(9))]
    limit = {"saved": {"max_length": 8}, "max_new_tokens": None}
    two = ([1], [2])
    headless = LlamaModel(models.built("llama", layers=1).config)

    def with_little_memory(**settings):
        with monkeypatch.context() as changed:
            changed.setattr(generate, "free_bytes", lambda *_: 5000)
            return generated(([1, 2], [3, 4]), **settings)

    memory_advice = (
        "ask for fewer new tokens (max_new_tokens), or fewer requests at once (batch_size)"
    )
    # A mistake, and then remedies.
    rows = {
        "pass tokenizer=, or token ids": [
            {"prompts": "a"},
            {"prompts": "a", "tokenizer": text},
            {"prompts": [1]},
        ],
        "pass a string, or token ids": [
            {"prompts": TURNS, "tokenizer": no_template},
            {"prompts": "a", "tokenizer": no_template},
            {"prompts": [1]},
        ],
        "pass a tokenizer's `input_ids` as lists without padding": [
            {"prompts": text("ab")},
            {"prompts": text("ab")["input_ids"]},
        ],
        "pass for example its beginning-of-text token": [
            {"prompts": [[]]},
            {"prompts": [[text.bos_token_id or 0]]},
        ],
        "pass max_new_tokens, raise max_length, or shorten the prompt": [
            {"prompts": long, **limit},
            {"prompts": long, "saved": {"max_length": 8}},
            {"prompts": long, **limit, "max_length": 12},
            {"prompts": [long[0][:4]], **limit},
        ],
        "stop_strings requires tokenizer=": [
            {"stop_strings": "a"},
            {"stop_strings": "a", "tokenizer": text},
        ],
        "pass one for each, or one number": [
            {"prompts": two, "seed": [1], "do_sample": True},
            {"prompts": two, "seed": [1, 2], "do_sample": True},
            {"prompts": two, "seed": 1, "do_sample": True},
        ],
        "must be a whole number from 0 to 2**63 - 1, or a list of them": [
            {"seed": -1},
            {"seed": 2**63 - 1},
            {"seed": [0]},
        ],
        "pass one list per word, such as [[5, 7], [9]]": [
            {"bad_words_ids": [["a"]]},
            {"bad_words_ids": [[5, 7], [9]]},
        ],
        "leave it out, or use tokens of the model": [
            {"suppress_tokens": [10**6]},
            {},
            {"suppress_tokens": [3]},
        ],
        "must be Transformers' GenerationConfig, or a dictionary of its settings": [
            {"generation_config": 3},
            {"generation_config": {"top_k": 3}},
        ],
        "temperature = 1e-31 must be 0 (greedy), or at least 1e-30": [
            {"temperature": 1e-31, "do_sample": True},
            {"temperature": 0},
            {"temperature": 1e-30},
        ],
        "load its ...ForCausalLM class": [{"model": headless}, {}],
        "are in host memory already; leave it out": [{"offload_cache": True}, {}],
        "ask for fewer new tokens, or shorten the prompt": [
            {"max_new_tokens": 10**6},
            {"max_new_tokens": 3},
        ],
        **neutral_rows("num_beams", 2, 1),
        **neutral_rows("guidance_scale", 2.0, 1),
        **neutral_rows("renormalize_logits", True, False),
    }
    cases = [case_of(advice, *arguments) for advice, arguments in rows.items()]
    many_tokens = {"max_new_tokens": 8}
    fewer_requests = {**many_tokens, "batch_size": 1}
    fewer_tokens = {"max_new_tokens": 2}
    cases.append(
        case_of(memory_advice, many_tokens, fewer_requests, fewer_tokens, call=with_little_memory)
    )
    check(cases)


ABBREVIATIONS = {
    "ASK": "generate --model MODEL --prompt a",
    "READ": "generate --model MODEL --prompts",
    "NEW": "--max-new-tokens 1",
    "MAX": "9223372036854775806",
    "ABC": "abcdefghijklmnopqrstuvwxyz",
}
COMMANDS = """
ASK --prompts one.jsonl -> pass only one of them -> ASK NEW | READ one.jsonl --out 1.jsonl NEW
READ one.jsonl -> pass both, or neither -> READ one.jsonl --out 2.jsonl NEW | ASK NEW
READ one.jsonl --out one.jsonl -> pass another name, or remove it first
    -> READ one.jsonl --out 3.jsonl NEW
READ one.jsonl --out gone/a.jsonl -> create it first, or pass a file in an existing folder
    -> READ one.jsonl --out 4.jsonl NEW
READ ids.jsonl --out 5.jsonl --seed 9223372036854775807 --temperature 1 -> use at most MAX
    -> READ ids.jsonl --out 5.jsonl --seed MAX --temperature 1 NEW
generate --model garbled --prompt a -> its config.json is not JSON -> ASK NEW
ASK --tp x -> pass a number of devices, or auto -> ASK --tp 1 NEW | ASK --tp auto NEW
ASK --tp 3 -> use one of 1, 2 -> ASK --tp 1 NEW
ASK --pp 7 -> must be between 1 and the model's 6 layers; use fewer -> ASK --pp 1 NEW
ASK --tp 1 --cpu-budget 1GiB -> leave one of them out -> ASK --tp 1 NEW | ASK --cpu-budget 1GiB NEW
ASK --scratch . -> this model has none; leave it out -> ASK NEW
ASK --gpu-budget 1GiB -> use --cpu-budget instead -> ASK --cpu-budget 1GiB NEW
ASK --offload-cache -> leave it out -> ASK NEW
ASK --max-new-tokens 999 -> ask for fewer new tokens, or shorten the prompt -> ASK NEW
generate --model short --prompt ABC -> pass max_new_tokens, raise max_length, or shorten the prompt
    -> generate --model short --prompt ABC NEW | generate --model short --prompt a
generate --model beams --prompt a -> set it to 1 there, or pass num_beams=1 to generate
    -> generate --model beams --prompt a --num-beams 1 NEW
generate --model words --prompt a -> write the prompts as token_ids in a file of --prompts
    -> generate --model words --prompts ids.jsonl --out 6.jsonl NEW
generate --model gone --prompt a
    -> pass one of save_pretrained, a run's folder, or one of its checkpoints -> ASK NEW
generate --model broken --prompt a -> correct or remove them
    -> generate --model mended --prompt a NEW
ASK --adapter MODEL -> pass a folder that PEFT's save_pretrained wrote -> ASK --adapter lora NEW
generate --model lora --adapter lora --prompt a -> pass the base model as --model
    -> ASK --adapter lora NEW
generate --model lost --prompt a -> pass --model BASE --adapter lost -> ASK --adapter lost NEW
ASK --adapter lora --adapter lost -> or merge one into the model
    -> generate --model merged --adapter lost --prompt a NEW
ASK --adapter pickled -> save it with safe_serialization=True -> ASK --adapter lora NEW
ASK --adapter pissa
    -> merge it into the model with PEFT (merge_and_unload), and save the merged model
    -> generate --model merged --prompt a NEW
ASK --adapter ia3 -> merge it into the model with PEFT, and save the merged model
    -> generate --model merged --prompt a NEW
READ gone.jsonl --out 8.jsonl -> name a readable JSONL file -> READ one.jsonl --out 8.jsonl NEW
READ empty.jsonl --out 9.jsonl -> write one JSON object per line, such as {"prompt": "Once"}
    -> READ once.jsonl --out 9.jsonl NEW
READ answer.jsonl --out a.jsonl -> give it another name -> READ named.jsonl --out a.jsonl NEW
READ twice.jsonl --out b.jsonl -> leave one of them out -> READ one.jsonl --out b.jsonl NEW
READ nan.jsonl --out c.jsonl -> write null -> READ null.jsonl --out c.jsonl NEW
READ latin.jsonl --out d.jsonl -> save the file as UTF-8 -> READ one.jsonl --out d.jsonl NEW
READ half.jsonl --out e.jsonl -> correct the line -> READ one.jsonl --out e.jsonl NEW
READ one.jsonl --out left.jsonl NEW -> pass another --out, or remove left.jsonl.partial
    -> READ one.jsonl --out f.jsonl NEW
"""
PROMPT_FILES = {
    "one": '{"prompt": "a"}',
    "once": '{"prompt": "Once"}',
    "ids": '{"token_ids": [3]}\n{"token_ids": [4]}',
    "empty": "",
    "answer": '{"prompt": "a", "text": 1}',
    "named": '{"prompt": "a", "name": 1}',
    "twice": '{"prompt": "a", "prompt": "b"}',
    "nan": '{"prompt": "a", "score": NaN}',
    "null": '{"prompt": "a", "score": null}',
    "half": '{"prompt": "\\ud800"}',
}


def changed_copy(source, target, name, **values):
    """Copy a folder, and change values in one of its JSON files."""
    shutil.copytree(source, target)
    file = target / name
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **values}))


def make_adapters(model, folder):
    """Make an adapter of the model, its variants that are refused, and the merged model."""
    peft = pytest.importorskip("peft")
    lora = adapter_of(model, folder / "lora")
    for name, values in {
        "lost": {"base_model_name_or_path": "none"},
        "pissa": {"init_lora_weights": "pissa"},
        "ia3": {"peft_type": "IA3"},
    }.items():
        changed_copy(lora, folder / name, "adapter_config.json", **values)
    pickled = folder / "pickled"
    shutil.copytree(lora, pickled)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")

    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), lora)
    adapted.merge_and_unload().save_pretrained(folder / "merged")
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder / "merged")


def test_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = model_folder(tmp_path / "MODEL")
    make_adapters(model, tmp_path)
    changed_copy(model, tmp_path / "short", "generation_config.json", max_length=20)
    changed_copy(model, tmp_path / "beams", "generation_config.json", num_beams=2)
    shutil.copytree(model, tmp_path / "words", ignore=shutil.ignore_patterns("tokenizer*"))
    for name in ("broken", "mended", "garbled"):
        shutil.copytree(model, tmp_path / name)
    (tmp_path / "mended" / "generation_config.json").unlink()
    (tmp_path / "broken" / "generation_config.json").write_text("[")
    (tmp_path / "garbled" / "config.json").write_text('{"model_type": ')
    for name, text in PROMPT_FILES.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    (tmp_path / "left.jsonl.partial").write_text('{"prompt": "b", "text": "c"}\n')

    lines = COMMANDS.replace("\n    ->", " ->")
    for abbreviation, meaning in ABBREVIATIONS.items():
        lines = lines.replace(abbreviation, meaning)
    check(table(lines, command(capsys)))
