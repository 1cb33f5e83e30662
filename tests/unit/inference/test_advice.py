"""What `generate` and `plait generate` advise works when it is followed."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
from transformers import AutoModelForCausalLM, LlamaModel

import plait
from plait.inference import generate
from tests.advice import Case, check, command, each, table
from tests.integration.model_folder import adapter_of, model_folder
from tests.unit.data.byte_tokenizer import TEMPLATE, tokenizer
from tests.unit.inference import models

ONE = {"train_micro_batch_size_per_gpu": 1}
TURNS = [{"role": "user", "content": "a"}]


def generated(prompts=((1, 2),), model=None, *, saved=None, parallel=None, **settings):
    """Generate a token. `saved` are settings of the model's folder."""
    made = model or models.built("llama", layers=1)
    for name, value in (saved or {}).items():
        setattr(made.generation_config, name, value)
    sharded = plait.parallelize(made, {**ONE, **(parallel or {})})
    settings = {"max_new_tokens": 1, **settings}
    answers = plait.generate(
        sharded, list(prompts) if isinstance(prompts, tuple) else prompts, **settings
    )
    return all(answer.token_ids for answer in answers)


def test_calls(monkeypatch):
    text = tokenizer(TEMPLATE)
    long = list(range(9))
    neutral = {"num_beams": (2, 1), "num_return_sequences": (2, 1), "num_beam_groups": (2, 1), "guidance_scale": (2.0, 1), "renormalize_logits": (True, False)}  # fmt: skip

    def crowded(**settings):
        with monkeypatch.context() as changed:
            changed.setattr(generate, "free_bytes", lambda *_: 5000)
            return generated(([1, 2], [3, 4]), **settings)

    rows = [
        Case(("pass tokenizer=, or token ids",), lambda: generated("a"), lambda: generated("a", tokenizer=text) and generated([1])),
        Case(("pass a string, or token ids",), lambda: generated(TURNS, tokenizer=tokenizer(None)), lambda: generated("a", tokenizer=tokenizer(None)) and generated([1])),
        Case(("pass a tokenizer's `input_ids` as lists without padding",), lambda: generated(text("ab")), lambda: generated(text("ab")["input_ids"])),
        Case(("pass for example its beginning-of-text token",), lambda: generated([[]]), lambda: generated([[text.bos_token_id or 0]])),
        Case(("pass max_new_tokens, raise max_length, or shorten the prompt",), lambda: generated([long], saved={"max_length": 8}, max_new_tokens=None), lambda: generated([long], saved={"max_length": 8}) and generated([long], max_length=12, max_new_tokens=None) and generated([long[:4]], saved={"max_length": 8}, max_new_tokens=None)),
        Case(("stop_strings requires tokenizer=",), lambda: generated(stop_strings="a"), lambda: generated(stop_strings="a", tokenizer=text)),
        Case(("pass one for each, or one number",), lambda: generated(([1], [2]), seed=[1], do_sample=True), each(lambda seed: generated(([1], [2]), seed=seed, do_sample=True), [1, 2], 1)),
        Case(("must be a whole number from 0 to 2**63 - 1, or a list of them",), lambda: generated(seed=-1), each(lambda seed: generated(seed=seed), 2**63 - 1, [0])),
        Case(("pass one list per word, such as [[5, 7], [9]]",), lambda: generated(bad_words_ids=[["a"]]), lambda: generated(bad_words_ids=[[5, 7], [9]])),
        Case(("leave it out, or use tokens of the model",), lambda: generated(suppress_tokens=[10**6]), lambda: generated() and generated(suppress_tokens=[3])),
        Case(("must be Transformers' GenerationConfig, or a dictionary of its settings",), lambda: generated(generation_config=3), lambda: generated(generation_config={"top_k": 3})),
        Case(("temperature = 1e-31 must be 0 (greedy), or at least 1e-30",), lambda: generated(temperature=1e-31, do_sample=True), each(lambda value: generated(temperature=value), 0, 1e-30)),
        Case(("load its ...ForCausalLM class",), lambda: generated(model=LlamaModel(models.built("llama", layers=1).config)), generated),
        Case(("offload_cache: this model computes on the CPU", "leave it out"), lambda: generated(offload_cache=True), generated),
        Case(("ask for fewer new tokens (max_new_tokens), or fewer requests at once (batch_size)",), lambda: crowded(max_new_tokens=8), lambda: crowded(max_new_tokens=8, batch_size=1) and crowded(max_new_tokens=2)),
        Case(("ask for fewer new tokens, or shorten the prompt",), lambda: generated(max_new_tokens=10**6), lambda: generated(max_new_tokens=3)),
        *(
            Case((f"leave it out, or pass {value}",), partial(generated, **{name: changed}), partial(generated, **{name: value}))
            for name, (changed, value) in neutral.items()
        ),
        *(
            Case((f"set it to {value} there, or pass {name}={value} to generate",), partial(generated, saved={name: changed}), each(lambda arguments: generated(**arguments), {"saved": {name: value}}, {"saved": {name: changed}, name: value}))
            for name, (changed, value) in neutral.items()
        ),
    ]  # fmt: skip
    check(rows)


COMMANDS = """
    generate --model MODEL --prompt a --prompts one.jsonl -> pass only one of them -> generate --model MODEL --prompt a NEW | generate --model MODEL --prompts one.jsonl --out 1.jsonl NEW
    generate --model MODEL --prompts one.jsonl -> pass both, or neither -> generate --model MODEL --prompts one.jsonl --out 2.jsonl NEW | generate --model MODEL --prompt a NEW
    generate --model MODEL --prompts one.jsonl --out one.jsonl -> pass another name, or remove it first -> generate --model MODEL --prompts one.jsonl --out 3.jsonl NEW
    generate --model MODEL --prompts one.jsonl --out gone/a.jsonl -> create it first, or pass a file in an existing folder -> generate --model MODEL --prompts one.jsonl --out 4.jsonl NEW
    generate --model MODEL --prompts ids.jsonl --out 5.jsonl --seed 9223372036854775807 --temperature 1 -> use at most 9223372036854775806 -> generate --model MODEL --prompts ids.jsonl --out 5.jsonl --seed 9223372036854775806 --temperature 1 NEW
    generate --model MODEL --prompt a --tp x -> pass a number of devices, or auto -> generate --model MODEL --prompt a --tp 1 NEW | generate --model MODEL --prompt a --tp auto NEW
    generate --model MODEL --prompt a --tp 3 -> use one of 1, 2 -> generate --model MODEL --prompt a --tp 1 NEW
    generate --model MODEL --prompt a --pp 7 -> must be between 1 and the model's 6 layers; use fewer -> generate --model MODEL --prompt a --pp 1 NEW
    generate --model MODEL --prompt a --tp 1 --cpu-budget 1GiB -> leave one of them out -> generate --model MODEL --prompt a --tp 1 NEW | generate --model MODEL --prompt a --cpu-budget 1GiB NEW
    generate --model MODEL --prompt a --scratch . -> this model has none; leave it out -> generate --model MODEL --prompt a NEW
    generate --model MODEL --prompt a --gpu-budget 1GiB -> use --cpu-budget instead -> generate --model MODEL --prompt a --cpu-budget 1GiB NEW
    generate --model MODEL --prompt a --offload-cache -> leave it out -> generate --model MODEL --prompt a NEW
    generate --model MODEL --prompt a --max-new-tokens 999 -> ask for fewer new tokens, or shorten the prompt -> generate --model MODEL --prompt a NEW
    generate --model short --prompt abcdefghijklmnopqrstuvwxyz -> pass max_new_tokens, raise max_length, or shorten the prompt -> generate --model short --prompt abcdefghijklmnopqrstuvwxyz --max-new-tokens 1 | generate --model short --prompt a
    generate --model beams --prompt a -> set it to 1 there, or pass num_beams=1 to generate -> generate --model beams --prompt a --num-beams 1 NEW
    generate --model words --prompt a -> write the prompts as token_ids in a file of --prompts -> generate --model words --prompts ids.jsonl --out 6.jsonl NEW
    generate --model gone --prompt a -> pass one of save_pretrained, a run's folder, or one of its checkpoints -> generate --model MODEL --prompt a NEW
    generate --model broken --prompt a -> correct or remove them -> generate --model mended --prompt a NEW
    generate --model MODEL --adapter MODEL --prompt a -> pass a folder that PEFT's save_pretrained wrote -> generate --model MODEL --adapter lora --prompt a NEW
    generate --model lora --adapter lora --prompt a -> pass the base model as --model -> generate --model MODEL --adapter lora --prompt a NEW
    generate --model lost --prompt a -> pass --model BASE --adapter lost -> generate --model MODEL --adapter lost --prompt a NEW
    generate --model MODEL --adapter lora --adapter lost --prompt a -> or merge one into the model -> generate --model merged --adapter lost --prompt a NEW
    generate --model MODEL --adapter pickled --prompt a -> save it with safe_serialization=True -> generate --model MODEL --adapter lora --prompt a NEW
    generate --model MODEL --adapter pissa --prompt a -> merge it into the model with PEFT (merge_and_unload), and save the merged model -> generate --model merged --prompt a NEW
    generate --model MODEL --adapter ia3 --prompt a -> merge it into the model with PEFT, and save the merged model -> generate --model merged --prompt a NEW
    generate --model MODEL --prompts gone.jsonl --out 8.jsonl -> name a readable JSONL file -> generate --model MODEL --prompts one.jsonl --out 8.jsonl NEW
    generate --model MODEL --prompts empty.jsonl --out 9.jsonl -> write one JSON object per line, such as {"prompt": "Once"} -> generate --model MODEL --prompts once.jsonl --out 9.jsonl NEW
    generate --model MODEL --prompts answer.jsonl --out a.jsonl -> give it another name -> generate --model MODEL --prompts named.jsonl --out a.jsonl NEW
    generate --model MODEL --prompts twice.jsonl --out b.jsonl -> leave one of them out -> generate --model MODEL --prompts one.jsonl --out b.jsonl NEW
    generate --model MODEL --prompts nan.jsonl --out c.jsonl -> write null -> generate --model MODEL --prompts null.jsonl --out c.jsonl NEW
    generate --model MODEL --prompts latin.jsonl --out d.jsonl -> save the file as UTF-8 -> generate --model MODEL --prompts one.jsonl --out d.jsonl NEW
    generate --model MODEL --prompts half.jsonl --out e.jsonl -> correct the line -> generate --model MODEL --prompts one.jsonl --out e.jsonl NEW
    generate --model MODEL --prompts one.jsonl --out left.jsonl NEW -> pass another --out, or remove left.jsonl.partial -> generate --model MODEL --prompts one.jsonl --out f.jsonl NEW
"""  # fmt: skip
PROMPTS = {
    "one": '{"prompt": "a"}', "once": '{"prompt": "Once"}', "ids": '{"token_ids": [3]}\n{"token_ids": [4]}', "empty": "",
    "answer": '{"prompt": "a", "text": 1}', "named": '{"prompt": "a", "name": 1}', "twice": '{"prompt": "a", "prompt": "b"}',
    "nan": '{"prompt": "a", "score": NaN}', "null": '{"prompt": "a", "score": null}', "half": '{"prompt": "\\ud800"}',
}  # fmt: skip


def changed_copy(source, target, name, **values):
    """A copy of a folder, with other values in one of its files."""
    shutil.copytree(source, target)
    file = target / name
    before = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**before, **values}))


def test_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plait_command = command(capsys)
    peft = pytest.importorskip("peft")
    model = model_folder(tmp_path / "MODEL")
    adapter_of(model, tmp_path / "lora")
    changed_copy(model, tmp_path / "short", "generation_config.json", max_length=20)
    changed_copy(model, tmp_path / "beams", "generation_config.json", num_beams=2)
    changed_copy(
        tmp_path / "lora", tmp_path / "lost", "adapter_config.json", base_model_name_or_path="none"
    )
    changed_copy(
        tmp_path / "lora", tmp_path / "pissa", "adapter_config.json", init_lora_weights="pissa"
    )
    changed_copy(tmp_path / "lora", tmp_path / "ia3", "adapter_config.json", peft_type="IA3")
    shutil.copytree(tmp_path / "lora", tmp_path / "pickled")
    (tmp_path / "pickled" / "adapter_model.safetensors").rename(
        tmp_path / "pickled" / "adapter_model.bin"
    )
    merged = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model), tmp_path / "lora"
    ).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    for file in model.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "merged")
    shutil.copytree(model, tmp_path / "words", ignore=shutil.ignore_patterns("tokenizer*"))
    for name in ("broken", "mended"):
        shutil.copytree(model, tmp_path / name)
    (tmp_path / "mended" / "generation_config.json").unlink()
    (tmp_path / "broken" / "generation_config.json").write_text("[")
    for name, text in PROMPTS.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    (tmp_path / "left.jsonl.partial").write_text('{"prompt": "b", "text": "c"}\n')

    def run(line):
        plait_command(line.replace("NEW", "--max-new-tokens 1"))

    check(table(COMMANDS, run))
