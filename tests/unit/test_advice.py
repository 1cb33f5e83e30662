"""What messages advise works, in one process: settings, data, and what a Trainer or an Accelerator refuses.

tests/parity/test_advice.py follows the advice that needs two ranks, tests/unit/cli/test_advice.py that of commands,
tests/unit/inference/test_advice.py that of generation, tests/parity/test_deepspeed_advice.py that of DeepSpeed's calls. `FOLLOWED` lists the messages whose advice a test of a subject
follows.
"""

from __future__ import annotations

import importlib
import json
import re
from functools import partial
from pathlib import Path

import torch
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
from tests.advice import Case, each, failures, table
from tests.parity import cases, experts, trainers
from tests.unit.data.byte_tokenizer import TEMPLATE, tokenizer

ROOT = Path(__file__).parents[2]
SOURCES = {path: path.read_text("utf-8") for path in (ROOT / "src" / "plait").rglob("*.py")}


def checks(text):
    """Resolve a configuration, and check it with a model."""
    settings = dict(part.split("=", 1) for part in text.split())
    model = MODELS.get(settings.pop("model", ""))
    world_size = int(settings.pop("world", 8))
    overrides = [f"{name}={value}" for name, value in settings.items()]
    resolved = resolve(
        load({"train_micro_batch_size_per_gpu": 1}, overrides), world_size=world_size
    )
    if model is not None:
        made = model()
        check_all(resolved.context(model=made, blocks=find_blocks(made)))


def built(family, implementation=None, *, routers=True, **config):
    """A model without weights."""
    if family == "llama":
        made = cases.build(family, tied=False)
    else:
        made = experts.build(experts.Case(family), device="meta")
    if implementation is not None:
        made.config._attn_implementation_internal = implementation
    for name, value in config.items():
        setattr(made.config, name, value)
    if not routers:
        made.num_experts = None
    return made


MODELS = {
    "llama": partial(built, "llama"),
    "flash": partial(built, "llama", "flash_attention_2"),
    "mixtral": partial(built, "mixtral"),
    "unknown": partial(built, "mixtral", routers=False, output_router_logits=True),
    "sinks": partial(built, "gpt_oss", "flash_attention_2"),
    "gpt_oss": partial(built, "gpt_oss", "eager"),
}
SETTINGS = """
    fp16.enabled=true fp16.initial_scale_power=20 fp16.min_loss_scale=2000000 -> 2^20 = 1.04858e+06, is smaller; use at most 1048576, or raise fp16.initial_scale_power -> fp16.enabled=true fp16.initial_scale_power=20 fp16.min_loss_scale=1048576 | fp16.enabled=true fp16.initial_scale_power=21 fp16.min_loss_scale=2000000
    fp16.enabled=true bf16.enabled=true -> set one of them to false -> fp16.enabled=false bf16.enabled=true | fp16.enabled=true bf16.enabled=false
    zero_optimization.stage=2 parallel.compress_gradients=powersgd -> use "int8", or zero_optimization.stage 0 -> zero_optimization.stage=2 parallel.compress_gradients=int8 | zero_optimization.stage=0 parallel.compress_gradients=powersgd
    bf16.enabled=true zero_optimization.stage=2 parallel.compress_gradients=powersgd -> use "int8", or zero_optimization.stage 0 in the model's own dtype -> bf16.enabled=true zero_optimization.stage=2 parallel.compress_gradients=int8 | parallel.compress_gradients=powersgd
    bf16.enabled=true parallel.compress_gradients=powersgd -> compute in the model's own dtype, or use "int8" with zero_optimization.stage 1 -> parallel.compress_gradients=powersgd | bf16.enabled=true zero_optimization.stage=1 parallel.compress_gradients=int8
    bf16.enabled=true parallel.compress_gradients=int8 -> use zero_optimization.stage 1, or compute in the model's own dtype -> bf16.enabled=true zero_optimization.stage=1 parallel.compress_gradients=int8 | parallel.compress_gradients=int8
    parallel.compress_gradients=auto parallel.all_reduce=ring -> set parallel.all_reduce = "auto", or this to "int8" or "none" -> parallel.compress_gradients=auto | parallel.compress_gradients=int8 parallel.all_reduce=ring | parallel.all_reduce=ring
    parallel.all_reduce=ring parallel.transport=shared-memory -> set one of the two to "auto" -> parallel.all_reduce=ring | parallel.transport=shared-memory
    faults.check_collectives=true parallel.transport=shared-memory -> set parallel.transport = "torch", or set this to false -> faults.check_collectives=true parallel.transport=torch | parallel.transport=shared-memory
    bf16.enabled=true communication_data_type=bf16 data_types.grad_accum_dtype=fp32 -> set communication_data_type to "fp32", or leave this out -> bf16.enabled=true communication_data_type=fp32 data_types.grad_accum_dtype=fp32 | bf16.enabled=true communication_data_type=bf16
    zero_optimization.stage=3 zero_optimization.offload_param={"device":"nvme","nvme_path":"a"} zero_optimization.offload_optimizer.device=cpu -> set offload_optimizer.device = "nvme" (with a nvme_path) or "none", or "cpu" here -> zero_optimization.stage=3 zero_optimization.offload_param={"device":"nvme","nvme_path":"a"} zero_optimization.offload_optimizer={"device":"nvme","nvme_path":"a"} | zero_optimization.stage=3 zero_optimization.offload_param={"device":"nvme","nvme_path":"a"} | zero_optimization.stage=3 zero_optimization.offload_param.device=cpu zero_optimization.offload_optimizer.device=cpu
    zero_optimization.offload_optimizer.device=cpu -> set zero_optimization.stage to 1, 2 or 3 -> zero_optimization.stage=1 zero_optimization.offload_optimizer.device=cpu
    zero_optimization.stage=3 parallel.secondary_partition=3 -> which is 8; use 2, 4, 8 -> zero_optimization.stage=3 parallel.secondary_partition=2 | zero_optimization.stage=3 parallel.secondary_partition=4 | zero_optimization.stage=3 parallel.secondary_partition=8
    zero_optimization.stage=1 parallel.optimizer_in_backward=true parallel.unused_parameters=false -> set gradient_clipping = 0 -> zero_optimization.stage=1 parallel.optimizer_in_backward=true parallel.unused_parameters=false gradient_clipping=0
    bf16.enabled=true zero_optimization.stage=1 parallel.optimizer_in_backward=true parallel.unused_parameters=false gradient_clipping=0 -> set bf16.check_grad_overflow = false -> bf16.enabled=true bf16.check_grad_overflow=false zero_optimization.stage=1 parallel.optimizer_in_backward=true parallel.unused_parameters=false gradient_clipping=0
    zero_optimization.stage=1 optimizer.type=Adafactor -> use AdamW, or zero_optimization.stage 0 without -> zero_optimization.stage=1 optimizer.type=AdamW | optimizer.type=Adafactor
    optimizer.type=Lamb -> use AdamW or Lion -> optimizer.type=AdamW | optimizer.type=Lion
    optimizer.type=AdamW optimizer.params.fp32_optimizer_states=false -> leave it out, and build the model in that dtype (in `plait train`: model.dtype) -> optimizer.type=AdamW model.config.model_type=llama model.dtype=bfloat16
    optimizer.type=SGD optimizer.states=int8 -> leave `states` out -> optimizer.type=SGD
    optimizer.type=SGD optimizer.params.max_grad_norm=1 -> leave it out and set gradient_clipping -> optimizer.type=SGD gradient_clipping=1
    scheduler.type=ReduceLROnPlateau -> use `cosine` or `WarmupDecayLR` -> scheduler.type=cosine | scheduler.type=WarmupDecayLR
    scheduler.type=WarmupDecayLR scheduler.params.total_num_steps=auto -> write the number of optimizer steps -> scheduler.type=WarmupDecayLR scheduler.params.total_num_steps=9
    parallel.recompute.mode=budget parallel.recompute.sequence_length=8 -> set parallel.recompute.budget_gib -> parallel.recompute.mode=budget parallel.recompute.sequence_length=8 parallel.recompute.budget_gib=1
    parallel.recompute.mode=full parallel.recompute.budget_gib=1 -> leave it out, or set parallel.recompute.mode = "budget" -> parallel.recompute.mode=full | parallel.recompute.mode=budget parallel.recompute.budget_gib=1 parallel.recompute.sequence_length=8
    model=mixtral world=6 parallel.ep=3 -> and 4 % 3 = 1; use 1, 2 -> model=mixtral world=6 parallel.ep=1 | model=mixtral world=6 parallel.ep=2
    model=mixtral world=4 parallel.ep=2 bf16.enabled=true -> set zero_optimization.stage = 1 -> model=mixtral world=4 parallel.ep=2 bf16.enabled=true zero_optimization.stage=1
    model=mixtral experts.balance=global -> set output_router_logits to True, or use "micro_batch" -> model=mixtral experts.balance=micro_batch
    model=unknown experts.balance=global -> so its balance loss cannot be summed over ranks; use "micro_batch" -> model=unknown experts.balance=micro_batch
    model=llama world=2 parallel.pp=2 parallel.pipeline.stages_per_rank=4 -> use "1f1b", which has one stage per rank, leave parallel.pipeline.stages_per_rank out -> model=llama world=2 parallel.pp=2 parallel.pipeline.schedule=1f1b
    model=llama world=4 parallel.pp=4 parallel.pipeline.schedule=zbv -> use "1f1b", which has one stage per rank, and parallel.pp = 2 or less -> model=llama world=4 parallel.pp=2 parallel.pipeline.schedule=1f1b
    model=mixtral world=4 parallel.pp=2 parallel.ep=2 parallel.pipeline.schedule=zbv -> use "1f1b" or "gpipe", or parallel.ep = 1 -> model=mixtral world=4 parallel.pp=2 parallel.ep=2 parallel.pipeline.schedule=1f1b | model=mixtral world=4 parallel.pp=2 parallel.ep=2 parallel.pipeline.schedule=gpipe
    model=flash world=2 parallel.cp=2 parallel.context=ring -> use parallel.context = "ulysses", or attn_implementation="sdpa" -> model=flash world=2 parallel.cp=2 parallel.context=ulysses | model=llama world=2 parallel.cp=2 parallel.context=ring
    model=sinks world=2 parallel.cp=2 parallel.context=ring -> use attn_implementation="eager" -> model=gpt_oss world=2 parallel.cp=2 parallel.context=ring
    model=llama world=1 parallel.activation_offload={"fraction":0.1,"device":"disk","path":"a"} -> use 0.5 or more, or 0 -> model=llama world=1 parallel.activation_offload={"fraction":0.5,"device":"disk","path":"a"} | model=llama world=1 parallel.activation_offload.fraction=0
    model=llama world=1 parallel.activation_offload.fraction=0.5 -> use "disk" with a path, or fraction 0 -> model=llama world=1 parallel.activation_offload={"fraction":0.5,"device":"disk","path":"a"} | model=llama parallel.activation_offload.fraction=0
    model=llama world=2 compile.enabled=true parallel.tp=2 -> use false, or parallel.tp = 1 -> model=llama world=2 parallel.tp=2 | model=llama world=2 compile.enabled=true
"""  # fmt: skip
"""Settings, words of the message, and settings with the remedy. Settings are overrides; `model` and `world` are what they are tried on."""


def test_settings():
    assert not failures(table(SETTINGS, checks))


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
ASKS = ("<assistant>{% endif %}", "<assistant><think>{% endif %}")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ALL = 'use data.scored = "all", or a template with {% generation %}'


def encoded(template=TEMPLATE, *, form="chat", made=None, scored="answers", ignored=(), **row):
    """Encode a row. Some tokens are scored."""
    text = row_text(row or {"messages": CHAT}, form, where="row", ignored=ignored)
    return any(encoder(made or tokenizer(template), form, scored=scored)(text)[1])


instruct = partial(encoded, form="instruct", completion="4")


def after_a_space(prompt):
    """Encode an answer with a tokenizer that writes a space before a text, as that of Llama 2."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    letters = [*"▁2+=4\n", "</s>", "=4", "▁4"]
    vocabulary = {name: at for at, name in enumerate(letters)}
    made = Tokenizer(models.BPE(vocabulary, [("=", "4"), ("▁", "4")]))
    before = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(before)
    after = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(after)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    return instruct(None, prompt=prompt, made=fast)


def texts(folder, source="jsonl", path="a.jsonl", **section):
    """Read the documents of a section."""
    settings = DataSection(source=source, paths=(str(folder / path),), **section)
    return bool(list(open_corpus(settings, cache=folder / "cache").documents()))


def test_data(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("text")
    Dataset.from_dict({"body": ["one"]}).save_to_disk(tmp_path / "set")
    for name in ("whole", "bare"):
        tokenizer().save_pretrained(tmp_path / name)
    config = tmp_path / "bare" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": None}))
    read = partial(texts, tmp_path)
    rows = partial(read, "datasets", "set")
    half = [CHAT[0], {**CHAT[1], "weight": 0.5}]
    assert not failures([
        Case(("starts generation with '<think>'", ALL), lambda: encoded(UNMARKED.replace(*ASKS)), lambda: encoded(TEMPLATE.replace(*ASKS)) and encoded(UNMARKED.replace(*ASKS), scored="all")),
        Case(("cannot be located", ALL), lambda: encoded("{{ messages | length }}" + UNMARKED), lambda: encoded("{{ messages | length }}" + TEMPLATE)),
        Case(('with a chat template, or "instruct" with rows of a prompt and its completion',), lambda: encoded(None), lambda: encoded() and instruct(None, prompt="p ")),
        Case(("has no place for 'system'; set data.tokenizer to one with a template",), lambda: instruct(None, prompt="p ", system="s"), lambda: instruct(prompt="p", system="s")),
        Case(("the beginning of its answer into one token, '2+2= 4'", "end the prompt with a line break"), lambda: after_a_space("2+2= "), lambda: after_a_space("2+2=\n")),
        Case(("remove them, or name them in data.ignored_columns = [\"tag\"]",), lambda: encoded(messages=CHAT, tag=1), lambda: encoded(messages=CHAT) and encoded(messages=CHAT, tag=1, ignored=("tag",))),
        Case(("does not read `tools`; leave them out, or use a template that does",), lambda: encoded(messages=CHAT, tools=TOOLS), lambda: encoded() and encoded("{{ tools | length }}" + UNMARKED, messages=CHAT, tools=TOOLS)),
        Case(("write 0 for an answer that is not trained on, and 1 or no weight",), lambda: encoded(messages=half), lambda: encoded(messages=[CHAT[0], {**CHAT[1], "weight": 1}])),
        Case(("has no field 'text'; it has 'body'; set data.field",), read, partial(read, field="body")),
        Case(("has the columns body; set data.field",), rows, partial(rows, field="body")),
        Case(("has no such split; set data.split to one of 'train'",), partial(rows, field="body", split="test"), partial(rows, field="body", split="train")),
        Case(("has no file that ends in .txt or .md; name the files with a glob such as",), partial(read, "files", "logs"), partial(read, "files", "logs/**/*.*")),
        Case(("set eos_token in its tokenizer_config.json",), lambda: load_tokenizer(tmp_path / "bare"), lambda: load_tokenizer(tmp_path / "whole")),
        Case(("name its folder, with eos_token in a tokenizer_config.json there",), lambda: load_tokenizer(tmp_path / "whole" / "tokenizer.json"), lambda: load_tokenizer(tmp_path / "whole")),
    ])  # fmt: skip


def prepared(step=None, loader=None, **arguments):
    """Prepare a model with Accelerate, and run a step. `step` receives the accelerator, the model, the optimizer and a loss."""
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


def clips(accelerator, model, optimizer, *, parts=False, between=None):
    parameters = model[0].parameters() if parts else model.parameters()
    accelerator.clip_grad_norm_(parameters, 1.0)
    if between is not None:
        between(optimizer)
        accelerator.backward(model(torch.ones(1, 2)).sum())


def configured(**config):
    return partial(prepared, plait_config=config)


def after_a_clip(between):
    prepared(partial(clips, between=between))


def test_loops():
    clipping = partial(prepared, clips, plait_config={"gradient_clipping": 0.3})
    four = configured(gradient_accumulation_steps=4)
    early = {"parallel": {"optimizer_in_backward": True}, "gradient_clipping": 0}
    steps = (lambda optimizer: optimizer.step(), lambda optimizer: optimizer.zero_grad())
    loader = partial(DataLoader, torch.arange(4))
    with trainers.launched_alone():
        assert not failures([
            Case(("call optimizer.step(), or optimizer.zero_grad(), first",), lambda: after_a_clip(id), each(after_a_clip, *steps)),
            Case(("both decide it; leave one of them out",), clipping, lambda: (prepared(clips), configured(gradient_clipping=0.3)())),
            Case(("pass model.parameters() of the prepared model",), lambda: prepared(partial(clips, parts=True)), lambda: prepared(clips)),
            Case(('write "auto" in the file, or the same in both',), four, lambda: (four(gradient_accumulation_steps=4), configured(gradient_accumulation_steps="auto")())),
            Case(("parallel.optimizer_in_backward = True", "use false"), configured(**early), configured(gradient_clipping=0)),
            Case(("leave it out of the configuration",), configured(optimizer={"type": "AdamW"}), configured()),
            Case(('{"compile": {"enabled": true}}',), lambda: prepared(dynamo_backend="inductor"), configured(compile={"enabled": True, "backend": "eager"})),
            Case(("has no batches to share between ranks; give it a batch_size",), lambda: prepared(loader=loader(batch_size=None)), lambda: prepared(loader=loader(batch_size=2))),
        ])  # fmt: skip


def trained(folder, config=None, resume=None, first=0, **settings):
    """Train with a Trainer, for `first` steps before it resumes."""
    trainer = trainers.trainer_of(str(folder), config or {}, **{"max_steps": 1, **settings})
    try:
        if first:
            trainer.train()
        trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    finally:
        if trainer.engine is not None:
            trainer.engine.close()


def engine_saved(folder, config):
    """Save the engine's checkpoint after the training, and read its weights."""
    import plait

    trainer = trainers.trainer_of(str(folder), config, max_steps=1)
    trainer.train()
    trainer.engine.save_checkpoint(folder / "checkpoints")
    trainer.engine.close()
    plait.load_trained(trainers.model(), folder / "checkpoints")


def best(folder, **settings):
    """Load the best model at the end."""
    every = {"save_steps": 1, "eval_steps": 1, "save_strategy": "steps", "eval_strategy": "steps"}
    data = {"eval_dataset": trainers.samples(4)}
    trained(folder, given=data, load_best_model_at_end=True, **every, **settings)


def answered(folder, *, beams=None, call=None, **settings):
    """Evaluate with generation."""
    from plait.hf import Seq2SeqTrainer, Seq2SeqTrainingArguments

    arguments = trainers.arguments(Seq2SeqTrainingArguments, str(folder), predict_with_generate=True, include_num_input_tokens_seen="no", **settings)  # fmt: skip
    model = trainers.model()
    if beams is not None:
        model.generation_config.num_beams = beams
    trainer = Seq2SeqTrainer(model=model, args=arguments, eval_dataset=trainers.samples(4), compute_metrics=lambda _: {})  # fmt: skip
    try:
        trainer.evaluate(**call or {})
    finally:
        if trainer.engine is not None:
            trainer.engine.close()


def test_trainers(tmp_path):
    whole, weights, states = (tmp_path / name for name in ("whole", "weights", "states"))
    saves = {"save_strategy": "steps", "save_steps": 1}
    recompute = {"parallel": {"recompute": {"mode": "full"}}}
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "files")}
    in_files = {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}
    in_files["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    zero = {**in_files["zero_optimization"], "offload_param": {"device": "none"}}
    in_memory = {**in_files, "zero_optimization": zero}
    train, answer = partial(trained, tmp_path), partial(answered, tmp_path)
    resumed = partial(trained, resume="checkpoint-1", max_steps=2)
    other = partial(resumed, whole, gradient_accumulation_steps=1)
    both = ("both decide it", 'write "auto" in the file, or ')
    auto = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    with trainers.launched_alone():
        trained(whole, **saves)
        trained(weights, **saves, save_only_model=True)
        trained(states, **saves)
        (states / "checkpoint-1" / "trainer_state.json").unlink()
        assert not failures([
            Case(("make the samples per step equal, or set ignore_data_skip=True",), other, lambda: (resumed(whole), other(ignore_data_skip=True))),
            Case(("has weights only", "load the weights in a new Trainer"), lambda: resumed(weights, first=1), lambda: resumed(weights)),
            Case(("leave it out, or train with save_only_model=False",), lambda: best(tmp_path / "best", save_only_model=True), lambda: best(tmp_path / "best")),
            Case(('use "no", and after the training trainer.engine.save_checkpoint(folder)', 'set offload_param.device to "none"'), lambda: train(in_files, **saves), lambda: (engine_saved(tmp_path / "engine", in_files), train(in_memory, **saves))),
            Case(("pass another checkpoint-N of the run, or load the weights alone with from_pretrained",), lambda: resumed(states), lambda: type(trainers.model()).from_pretrained(states / "checkpoint-1")),
            Case((*both, "3.0 in both"), lambda: train({"gradient_clipping": 3.0}), lambda: (train({"gradient_clipping": "auto"}), train({"gradient_clipping": 3.0}, max_grad_norm=3.0))),
            Case((*both, "4 in both"), lambda: train({"train_batch_size": 8}), lambda: (train({"train_batch_size": "auto"}), train(auto), train({"train_batch_size": 8}, per_device_train_batch_size=4))),
            Case(("leave `activation_checkpointing` out, or `parallel.recompute.mode`",), lambda: train(recompute, activation_checkpointing=True), lambda: (train(recompute), train(activation_checkpointing=True))),
            Case(("raise generation_max_length, or pass max_new_tokens to evaluate or predict",), lambda: answer(generation_max_length=5), lambda: (answer(generation_max_length=20), answer(generation_max_length=5, call={"max_new_tokens": 2}))),
            Case(("num_beams = 2", "set it to 1 there, or pass num_beams=1 to generate"), lambda: answer(beams=2, generation_max_length=14), lambda: answer(beams=1, generation_max_length=14)),
        ])  # fmt: skip


FREE = ("optimizer.params.", "scheduler.params.")
"""Sections whose keys are those of a library."""
NO_SETTINGS = {"run.json", "checkpoint.client_state"}


QUOTED = re.compile(r"(?m)^\s*(?:\w+[(=]|\w+ = )?f?([\"'])(?!\1)(.* .*)\1[,)]*$")
"""A line with nothing but a text, or a part of one."""


def test_what_messages_name_exists():
    """Settings, functions of `plait`, and pages of the documentation."""
    settings = known_paths() | sections() | NO_SETTINGS
    tops = "|".join({name.split(".")[0] for name in sections()} - {"model"})
    kinds = {
        rf"(?<![\w./-])(?:{tops})(?:\.[a-z_]+)+(?![\w(]|\.\w)": lambda name: (
            name in settings or name.startswith(FREE)
        ),
        r"(?<![\w.])plait\.(?:hf\.)?\w+(?!\w|\.\w)": is_there,
        r"(?<![\w/] )docs/[\w/-]+\.md": lambda name: (ROOT / name).is_file(),
    }
    missing = []
    for path, source in SOURCES.items():
        # Without the expressions of f-strings.
        lines = "\n".join(line for _, line in QUOTED.findall(source))
        texts = re.sub(r"\{[^{}]*\}", "", lines)
        for pattern, exists in kinds.items():
            names = set(re.findall(pattern, texts))
            missing += [f"{path.name}: {name}" for name in names if not exists(name)]
    assert not missing


def is_there(name):
    """Whether a public name exists."""
    package, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(package), attribute)


FOLLOWED = {
    # 1: decisions taken at first use
    "requires_grad_(True) before plait.initialize, and requires_grad_(False) after it": "parity/test_unfreezing.py::test_gradual_unfreezing",
    "call requires_grad_(False) on the other engine's model before its forward": "parity/test_unfreezing.py::test_generator_first",
    'would change it twice; use parallel.recompute.mode = "none"': "unit/parallel/activations/test_recompute.py::test_a_tensor_that_begins_to_change_is_named",
    # 2: ranks that do different things
    "or use ZeRO stage 1 or 2, where ranks may skip different blocks": "parity/test_skipped_blocks.py::test_ranks_skip_different_blocks",
    # 6: what was changed after the model was wrapped
    "PeftModel.from_pretrained(model, folder).merge_and_unload()": "parity/test_saved_weights.py::test_adapters_of_which_ranks_have_parts",
    "merge its adapters and assign the result to trainer.model": "parity/test_saved_weights.py::test_merged_adapters",
    "each process holds a part of the weights; call {remedy}": "parity/test_saved_weights.py::test_parts_are_no_weights",
    "load the model, resize it, and then train it": "unit/sharded/test_resized.py::test_resized_after_training",
    "resize and save it once": "unit/sharded/test_resized.py::test_more_tokens_than_a_saved_model_has",
    "delete the line, and build the model with plait.from_pretrained(name)": "unit/sharded/test_resized.py::test_configuration_of_transformers_without_deepspeed",
    "call plait.from_pretrained(name) without zero.Init()": "unit/sharded/test_resized.py::test_pretrained_inside_of_zero_init",
    ".from_pretrained, which loads it in full in every process": "unit/sharded/test_resized.py::test_adapters_on_a_model_without_weights",
    "if it returns a mean, set loss_is_scaled_for_ga = False": "parity/test_own_steps.py::test_own_steps_are_one_process",
    "multiply the term by self.accelerator.num_processes": "parity/test_own_steps.py::test_own_steps_are_one_process",
    "for small states leave it out, and": "parity/test_trainer_mistakes.py::test_a_refused_optimizer_names_one_that_trains",
    "train it in full (modules_to_save)": "parity/test_adapters.py::test_layers_that_are_trained_in_full",
    "use lora_dropout=0": "parity/test_adapters.py::test_adapters_are_one_process",
    "copy the model before plait.initialize or the Trainer": "parity/test_trainer_mistakes.py::test_mistakes",
    # 7: data
    "and pass shuffle=True to the DataLoader to shuffle": "parity/test_split_data.py::test_a_loop_reads_every_row_once",
    "let every rank have all rows in one order": "parity/test_split_data.py::test_a_loop_reads_every_row_once",
    "set data.append_end_of_text to true": "unit/data/test_templates.py::test_a_template_that_ends_no_turn",
    "set is_decoder to true where the architecture has it": "unit/train/test_build.py::test_causal_models_are_built",
    # 8: settings
    "leave {' or '.join(left_out) or 'both'} out": "unit/config/resolving/test_degrees.py::test_the_product_is_the_world_or_it_is_refused",
    "or change a factor": "unit/config/resolving/test_batch.py::test_the_product_holds_or_is_refused_with_a_remedy",
    "use {below} or {above}": "unit/parallel/schedules/test_schedule.py::test_refused_numbers",
    "pass at least": "unit/inference/test_deployment.py::test_the_least_budget_suffices",
    "In Python, on one device: plait.generate": "unit/inference/test_quantised_folders.py::test_the_page",
    "and set model.path to that folder": "unit/sharded/test_resized.py::test_more_tokens_than_a_saved_model_has",
    # commands
    "reachable from the others.": "unit/cli/launching/test_meeting.py::test_a_machine_that_does_not_come",
    "finds no address for the name": "unit/cli/launching/test_meeting.py::test_a_name_without_an_address",
    "raise the limit on its machine: {remedy}": "unit/cluster/test_open_files.py::test_the_advised_limit_suffices",
    "pass model.config, or a folder with a config.json": "fake/test_dry_run.py::test_what_it_advises_works",
    # checkpoints and generation
    "was written by DeepSpeed; convert it with `plait import": "unit/checkpoint/test_import.py::test_advice",
    "{remedy}; or use_cache=False": "unit/inference/test_rope_by_length.py::test_without_a_cache_that_transformers_has",
}  # fmt: skip
"""Test that follows an advice, by words of the message, where it is not one of the tests of advice."""


def test_list_is_of_messages_and_tests():
    source = re.sub(r"[\"']\s*\n\s*f?[\"']", "", "".join(SOURCES.values()))
    for words, place in FOLLOWED.items():
        path, _, name = place.partition("::")
        assert words in source, words
        assert f"def {name}(" in (ROOT / "tests" / path).read_text("utf-8"), place
