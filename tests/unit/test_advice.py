"""Remedies in messages about settings, data, the Trainer and Accelerate work in one process.

tests/parity/test_advice.py follows remedies that need two ranks, tests/unit/cli/test_advice.py
those of commands, tests/unit/inference/test_advice.py those of generation, and
tests/parity/test_deepspeed_advice.py those of DeepSpeed's calls. The list
`followed` in advice.yaml has the remedies that a test of a subject follows.
"""

from __future__ import annotations

import importlib
import json
import re
from functools import partial
from pathlib import Path

import torch
import yaml
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader

from plait.config.dialects.keys import known_paths, sections
from plait.config.resolving.resolve import load, resolve
from plait.config.schema.sections import DataSection
from plait.data.conversations import encoder, row_text
from plait.data.text import open_corpus
from plait.data.tokenizer import load_tokenizer
from plait.model.blocks import find_blocks
from plait.parallel.order import check_all
from tests.advice import Case, check, each, read_table
from tests.parity import cases, experts, trainers
from tests.unit.data.byte_tokenizer import TEMPLATE, tokenizer

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("advice.yaml")
SOURCES = {path: path.read_text("utf-8") for path in (ROOT / "src" / "plait").rglob("*.py")}


def build(family, attention=None, *, routers=True, **config):
    """Return a model without weights."""
    if family == "llama":
        model = cases.build(family, tied=False)
    else:
        model = experts.build(experts.Case(family), device="meta")
    if attention is not None:
        # The public setter refuses implementations that are not installed.
        model.config._attn_implementation_internal = attention
    for name, value in config.items():
        setattr(model.config, name, value)
    if not routers:
        model.num_experts = None
    return model


MODELS = {
    "llama": partial(build, "llama"),
    "flash": partial(build, "llama", "flash_attention_2"),
    "mixtral": partial(build, "mixtral"),
    "unknown": partial(build, "mixtral", routers=False, output_router_logits=True),
    "sinks": partial(build, "gpt_oss", "flash_attention_2"),
    "gpt_oss": partial(build, "gpt_oss", "eager"),
}


def check_settings(text):
    """Resolve settings for `world` processes, and check them with the model `model`."""
    settings = dict(setting.split("=", 1) for setting in text.split())
    name = settings.pop("model", None)
    world_size = int(settings.pop("world", 8))
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load({"train_micro_batch_size_per_gpu": 1}, overrides)
    resolved = resolve(config, world_size=world_size)
    if name is not None:
        model = MODELS[name]()
        check_all(resolved.context(model=model, blocks=find_blocks(model)))


def test_settings():
    check(read_table(FILE, "settings", check_settings))


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
THINKING = ("<assistant>{% endif %}", "<assistant><think>{% endif %}")
"""Change of a template, so that generation starts with a tag."""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
SCORE_ALL = 'use data.scored = "all", or a template with {% generation %}'


def encode(template=TEMPLATE, *, form="chat", coder=None, scored="answers", ignored=(), **row):
    """Encode a row, and return whether any token is scored."""
    text = row_text(row or {"messages": CHAT}, form, where="row", ignored=ignored)
    return any(encoder(coder or tokenizer(template), form, scored=scored)(text)[1])


instruct = partial(encode, form="instruct", completion="4")


def encode_after_a_space(prompt):
    """Encode an answer with a tokenizer that adds a space before a text, as that of Llama 2."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*"▁2+=4\n", "</s>", "=4", "▁4"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocabulary, [("=", "4"), ("▁", "4")]))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    coder = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")
    return instruct(None, prompt=prompt, coder=coder)


def read_documents(folder, source="jsonl", path="a.jsonl", **section):
    """Read the documents of a section, and return whether there are any."""
    settings = DataSection(source=source, paths=(str(folder / path),), **section)
    return bool(list(open_corpus(settings, cache=folder / "cache").documents()))


def test_data(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("text")
    Dataset.from_dict({"body": ["one"]}).save_to_disk(tmp_path / "set")
    for name in ("complete", "bare"):
        tokenizer().save_pretrained(tmp_path / name)
    config = tmp_path / "bare" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": None}))
    read = partial(read_documents, tmp_path)
    rows = partial(read, "datasets", "set")
    half = [CHAT[0], {**CHAT[1], "weight": 0.5}]
    check(
        [
            Case(
                ("starts generation with '<think>'", SCORE_ALL),
                lambda: encode(UNMARKED.replace(*THINKING)),
                lambda: (
                    encode(TEMPLATE.replace(*THINKING))
                    and encode(UNMARKED.replace(*THINKING), scored="all")
                ),
            ),
            Case(
                ("cannot be located", SCORE_ALL),
                lambda: encode("{{ messages | length }}" + UNMARKED),
                lambda: encode("{{ messages | length }}" + TEMPLATE),
            ),
            Case(
                ('with a chat template, or set data.format to "instruct" and give each row',),
                lambda: encode(None),
                lambda: encode() and instruct(None, prompt="p "),
            ),
            Case(
                ("has no place for 'system'; set data.tokenizer to one with a template",),
                lambda: instruct(None, prompt="p ", system="s"),
                lambda: instruct(prompt="p", system="s"),
            ),
            Case(
                (
                    "the beginning of its answer into one token, '2+2= 4'",
                    "end the prompt with a line break",
                ),
                lambda: encode_after_a_space("2+2= "),
                lambda: encode_after_a_space("2+2=\n"),
            ),
            Case(
                ('remove them, or name them in data.ignored_columns = ["tag"]',),
                lambda: encode(messages=CHAT, tag=1),
                lambda: encode(messages=CHAT) and encode(messages=CHAT, tag=1, ignored=("tag",)),
            ),
            Case(
                ("does not read `tools`; leave them out, or use a template that does",),
                lambda: encode(messages=CHAT, tools=TOOLS),
                lambda: (
                    encode()
                    and encode("{{ tools | length }}" + UNMARKED, messages=CHAT, tools=TOOLS)
                ),
            ),
            Case(
                ("write 0 for an answer that is not trained on, and 1 or no weight",),
                lambda: encode(messages=half),
                lambda: encode(messages=[CHAT[0], {**CHAT[1], "weight": 1}]),
            ),
            Case(
                ("has no field 'text'; it has 'body'; set data.field",),
                read,
                partial(read, field="body"),
            ),
            Case(("has the columns body; set data.field",), rows, partial(rows, field="body")),
            Case(
                ("has no such split; set data.split to one of 'train'",),
                partial(rows, field="body", split="test"),
                partial(rows, field="body", split="train"),
            ),
            Case(
                ("has no file that ends in .txt or .md; name the files with a glob such as",),
                partial(read, "files", "logs"),
                partial(read, "files", "logs/**/*.*"),
            ),
            Case(
                ("set eos_token in its tokenizer_config.json",),
                lambda: load_tokenizer(tmp_path / "bare"),
                lambda: load_tokenizer(tmp_path / "complete"),
            ),
            Case(
                ("name its folder, with eos_token in a tokenizer_config.json there",),
                lambda: load_tokenizer(tmp_path / "complete" / "tokenizer.json"),
                lambda: load_tokenizer(tmp_path / "complete"),
            ),
        ]
    )


def run_step(step=None, loader=None, **arguments):
    """Prepare a model with Accelerate, and run a step.

    `step` is called before the update, with the accelerator, the model and the optimizer.
    """
    from plait.hf import Accelerator

    accelerator = Accelerator(cpu=True, **arguments)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        if loader is not None:
            next(iter(accelerator.prepare(loader)))
        loss = model(torch.ones(1, 2)).sum()
        accelerator.backward(loss)
        if step is not None:
            step(accelerator, model, optimizer)
        optimizer.step()
    finally:
        accelerator.free_memory()


def clip(accelerator, model, optimizer, *, parts=False, between=None):
    parameters = model[0].parameters() if parts else model.parameters()
    accelerator.clip_grad_norm_(parameters, 1.0)
    if between is not None:
        between(optimizer)
        accelerator.backward(model(torch.ones(1, 2)).sum())


def run_with(**config):
    return partial(run_step, plait_config=config)


def run_after_a_clip(between):
    run_step(partial(clip, between=between))


def test_loops():
    clipping = partial(run_step, clip, plait_config={"gradient_clipping": 0.3})
    four = run_with(gradient_accumulation_steps=4)
    early = {"parallel": {"optimizer_in_backward": True}, "gradient_clipping": 0}
    steps = (lambda optimizer: optimizer.step(), lambda optimizer: optimizer.zero_grad())
    loader = partial(DataLoader, torch.arange(4))
    with trainers.launched_alone():
        check(
            [
                Case(
                    ("call optimizer.step(), or optimizer.zero_grad(), first",),
                    lambda: run_after_a_clip(id),
                    each(run_after_a_clip, *steps),
                ),
                Case(
                    ("both decide it; leave one of them out",),
                    clipping,
                    lambda: (run_step(clip), run_with(gradient_clipping=0.3)()),
                ),
                Case(
                    ("pass model.parameters() of the prepared model",),
                    lambda: run_step(partial(clip, parts=True)),
                    lambda: run_step(clip),
                ),
                Case(
                    ('write "auto" in the file, or the same in both',),
                    four,
                    lambda: (
                        four(gradient_accumulation_steps=4),
                        run_with(gradient_accumulation_steps="auto")(),
                    ),
                ),
                Case(
                    ("parallel.optimizer_in_backward = True", "use false"),
                    run_with(**early),
                    run_with(gradient_clipping=0),
                ),
                Case(
                    ("leave it out of the configuration",),
                    run_with(optimizer={"type": "AdamW"}),
                    run_with(),
                ),
                Case(
                    ('{"compile": {"enabled": true}}',),
                    lambda: run_step(dynamo_backend="inductor"),
                    run_with(compile={"enabled": True, "backend": "eager"}),
                ),
                Case(
                    ("has no batches to share between ranks; give it a batch_size",),
                    lambda: run_step(loader=loader(batch_size=None)),
                    lambda: run_step(loader=loader(batch_size=2)),
                ),
            ]
        )


def train(folder, config=None, resume=None, trained=False, **settings):
    """Train with a Trainer that resumes, and has trained before if `trained` is set."""
    trainer = trainers.trainer_of(str(folder), config or {}, **{"max_steps": 1, **settings})
    try:
        if trained:
            trainer.train()
        trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    finally:
        if trainer.engine is not None:
            trainer.engine.close()


def train_and_save(folder, config):
    """Save the engine's checkpoint after the training, and read its weights."""
    import plait

    trainer = trainers.trainer_of(str(folder), config, max_steps=1)
    trainer.train()
    trainer.engine.save_checkpoint(folder / "checkpoints")
    trainer.engine.close()
    plait.load_trained(trainers.model(), folder / "checkpoints")


def train_for_best(folder, **settings):
    """Load the best model at the end."""
    every = {"save_steps": 1, "eval_steps": 1, "save_strategy": "steps", "eval_strategy": "steps"}
    data = {"eval_dataset": trainers.samples(4)}
    train(folder, given=data, load_best_model_at_end=True, **every, **settings)


def answer(folder, *, beams=None, call=None, **settings):
    """Evaluate with generation."""
    from plait.hf import Seq2SeqTrainer, Seq2SeqTrainingArguments

    generation = {"predict_with_generate": True, "include_num_input_tokens_seen": "no"}
    arguments = trainers.arguments(Seq2SeqTrainingArguments, str(folder), **generation, **settings)
    model = trainers.model()
    if beams is not None:
        model.generation_config.num_beams = beams
    data = {"eval_dataset": trainers.samples(4), "compute_metrics": lambda _: {}}
    trainer = Seq2SeqTrainer(model=model, args=arguments, **data)
    try:
        trainer.evaluate(**call or {})
    finally:
        if trainer.engine is not None:
            trainer.engine.close()


def test_trainers(tmp_path):
    complete = tmp_path / "complete"
    weights = tmp_path / "weights"
    states = tmp_path / "states"
    saves = {"save_strategy": "steps", "save_steps": 1}
    recompute = {"parallel": {"recompute": {"mode": "full"}}}
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "files")}
    in_files = {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}
    in_files["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    zero = {**in_files["zero_optimization"], "offload_param": {"device": "none"}}
    in_memory = {**in_files, "zero_optimization": zero}
    run = partial(train, tmp_path)
    evaluate = partial(answer, tmp_path)
    resume = partial(train, resume="checkpoint-1", max_steps=2)
    resume_with_fewer = partial(resume, complete, gradient_accumulation_steps=1)
    both = ("both decide it", 'write "auto" in the file, or ')
    auto = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    with trainers.launched_alone():
        train(complete, **saves)
        train(weights, **saves, save_only_model=True)
        train(states, **saves)
        (states / "checkpoint-1" / "trainer_state.json").unlink()
        check(
            [
                Case(
                    ("make the samples per step equal, or set ignore_data_skip=True",),
                    resume_with_fewer,
                    lambda: (resume(complete), resume_with_fewer(ignore_data_skip=True)),
                ),
                Case(
                    ("has weights only", "load the weights in a new Trainer"),
                    lambda: resume(weights, trained=True),
                    lambda: resume(weights),
                ),
                Case(
                    ("leave it out, or train with save_only_model=False",),
                    lambda: train_for_best(tmp_path / "best", save_only_model=True),
                    lambda: train_for_best(tmp_path / "best"),
                ),
                Case(
                    (
                        'use "no", and after the training trainer.engine.save_checkpoint(folder)',
                        'set offload_param.device to "none"',
                    ),
                    lambda: run(in_files, **saves),
                    lambda: (
                        train_and_save(tmp_path / "engine", in_files),
                        run(in_memory, **saves),
                    ),
                ),
                Case(
                    (
                        "pass another checkpoint-N of the run",
                        "or load the weights alone with from_pretrained",
                    ),
                    lambda: resume(states),
                    lambda: type(trainers.model()).from_pretrained(states / "checkpoint-1"),
                ),
                Case(
                    (*both, "3.0 in both"),
                    lambda: run({"gradient_clipping": 3.0}),
                    lambda: (
                        run({"gradient_clipping": "auto"}),
                        run({"gradient_clipping": 3.0}, max_grad_norm=3.0),
                    ),
                ),
                Case(
                    (*both, "4 in both"),
                    lambda: run({"train_batch_size": 8}),
                    lambda: (
                        run({"train_batch_size": "auto"}),
                        run(auto),
                        run({"train_batch_size": 8}, per_device_train_batch_size=4),
                    ),
                ),
                Case(
                    ("leave `activation_checkpointing` out, or `parallel.recompute.mode`",),
                    lambda: run(recompute, activation_checkpointing=True),
                    lambda: (run(recompute), run(activation_checkpointing=True)),
                ),
                Case(
                    ("raise generation_max_length, or pass max_new_tokens to evaluate or predict",),
                    lambda: evaluate(generation_max_length=5),
                    lambda: (
                        evaluate(generation_max_length=20),
                        evaluate(generation_max_length=5, call={"max_new_tokens": 2}),
                    ),
                ),
                Case(
                    ("num_beams = 2", "set it to 1 there, or pass num_beams=1 to generate"),
                    lambda: evaluate(beams=2, generation_max_length=14),
                    lambda: evaluate(beams=1, generation_max_length=14),
                ),
            ]
        )


FREE = ("optimizer.params.", "scheduler.params.")
"""Sections whose keys are those of a library."""
NO_SETTINGS = {"run.json", "checkpoint.client_state"}


QUOTED = re.compile(r"(?m)^\s*(?:\w+[(=]|\w+ = )?f?([\"'])(?!\1)(.* .*)\1[,)]*$")
"""Line with nothing but a text, or a part of one."""


def test_settings_functions_and_pages_in_messages_exist():
    settings = known_paths() | sections() | NO_SETTINGS
    tops = "|".join({name.split(".")[0] for name in sections()} - {"model"})
    checks = {
        rf"(?<![\w./-])(?:{tops})(?:\.[a-z_]+)+(?![\w(]|\.\w)": lambda name: (
            name in settings or name.startswith(FREE)
        ),
        r"(?<![\w.])plait\.(?:hf\.)?\w+(?!\w|\.\w)": is_public,
        r"(?<![\w/] )docs/[\w/-]+\.md": lambda name: (ROOT / name).is_file(),
    }
    missing = []
    for path, source in SOURCES.items():
        # Without the expressions of f-strings.
        lines = "\n".join(line for _, line in QUOTED.findall(source))
        texts = re.sub(r"\{[^{}]*\}", "", lines)
        for pattern, exists in checks.items():
            names = set(re.findall(pattern, texts))
            missing += [f"{path.name}: {name}" for name in names if not exists(name)]
    assert not missing


def is_public(name):
    """Return whether a public name exists."""
    package, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(package), attribute)


def test_followed_messages_and_their_tests_exist():
    # Texts that are split into several literals are joined.
    source = re.sub(r"[\"']\s*\n\s*f?[\"']", "", "".join(SOURCES.values()))
    for row in yaml.safe_load(FILE.read_text("utf-8"))["followed"]:
        path, _, name = row["test"].partition("::")
        assert row["message"] in source, row["message"]
        assert f"def {name}(" in (ROOT / "tests" / path).read_text("utf-8"), row["test"]
