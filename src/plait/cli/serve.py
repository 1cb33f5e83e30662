"""`plait serve`: an endpoint as OpenAI's, on loopback, for one model in one process. Runs `plait.inference.serving`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.interrupts import ending_in_order
from plait.cli.options import Adapters, in_panel, one_adapter
from plait.errors import InputError
from plait.importing import require_extra

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

MOST_TOKENS = 4096
"""Of a request, where neither the option nor the model says fewer."""

_EPILOG = """Examples:

plait serve --model trained --port 8000

plait serve --model trained --cpu-budget 2GiB --quant int8

curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "def read", "max_tokens": 20}'"""


class Dtype(StrEnum):
    """Of the weights, and of the computation."""

    stored = "stored"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quant(StrEnum):
    """Of the linear layers' weights."""

    none = "none"
    int8 = "int8"
    int4 = "int4"


_memory = in_panel("Memory")


@app.command(epilog=_EPILOG)
def serve_command(
    model: Annotated[Path, typer.Option(metavar="FOLDER", help="Of save_pretrained, or a run.")],
    adapter: Adapters = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="On 127.0.0.1; 0 is a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What requests call the model. (default: its folder)")
    ] = None,
    max_model_len: Annotated[
        int | None, _memory(min=2, metavar="N", help="Most tokens of a request, prompt included. (default: the model's, at most 4096)")
    ] = None,
    batch_size: Annotated[int, _memory(min=1, max=4096, metavar="N", help="Requests decoded together; others wait.")] = 8,
    max_waiting: Annotated[int, _memory(min=1, metavar="N", help="Requests that may wait; more are refused.")] = 1000,
    dtype: Annotated[Dtype, _memory(metavar="NAME", help="float32, bfloat16, float16; or as stored.")] = Dtype.stored,
    quant: Annotated[Quant, _memory(metavar="NAME", help="Linear layers in int8, int4; or none.")] = Quant.none,
    scratch: Annotated[Path | None, _memory(metavar="FOLDER", help="For streamed layers that are written first. (default: /tmp)")] = None,
    gpu_budget: Annotated[str | None, _memory(metavar="SIZE", help="Of a GPU's memory; other layers are streamed to it.")] = None,
    cpu_budget: Annotated[str | None, _memory(metavar="SIZE", help="Of host memory; what does not fit is read from disk.")] = None,
    offload_cache: Annotated[bool, _memory("--offload-cache", help="Keep keys and values in host memory, for a GPU.")] = False,
) -> None:
    """Answer OpenAI's requests (completions and chat, also streamed) on this machine's loopback, with one device.

    To try a model that was trained: there are no users, keys or limits of use. Keys and values of --batch-size requests of --max-model-len
    tokens are reserved at the start. SIGTERM and Ctrl-C end it.
    """
    require_extra("plait serve", "serve", fastapi="FastAPI", uvicorn="uvicorn")
    import torch

    from plait.inference.deployment import Work, deploy, deploy_streamed
    from plait.inference.load import load_model
    from plait.inference.quantised import quantised_copy
    from plait.inference.serving.bodies import Served
    from plait.inference.serving.http import app_of, listening, serve
    from plait.inference.serving.scheduler import Scheduler
    from plait.inference.source import open_source
    from plait.inference.streamed import load_streamed
    from plait.units import bytes_of

    source = open_source(model, one_adapter(adapter))
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError(f"--model {model}: has no tokenizer; save one into the folder")
    asked_for = (("--gpu-budget", gpu_budget), ("--cpu-budget", cpu_budget))
    budgets = [None if value is None else bytes_of(value, name) for name, value in asked_for]
    kind = None if dtype is Dtype.stored else getattr(torch, dtype.value)
    form = None if quant is Quant.none else quant.value
    unloaded = source.model(kind)
    most = _most_tokens(unloaded, max_model_len)
    work = Work(source, unloaded if form is None else quantised_copy(unloaded, form), most, batch_size, form is not None, offload_cache)
    if any(budgets):
        found = deploy_streamed(work, gpu_budget=budgets[0], cpu_budget=budgets[1])
    else:
        found = deploy(work, tp=None, pp=None, devices=None)
    if found.tp * found.pp > 1:
        raise InputError(
            f"plait serve runs on one device, and this model takes {found.tp * found.pp}: {found.why}; give --gpu-budget to stream its "
            "weights to one, --quant int8, fewer requests at once (--batch-size), or fewer tokens of each (--max-model-len)"
        )
    if scratch is not None and not found.written:
        raise InputError("--scratch: holds layers that are written anew to be streamed, and none are; leave it out")
    on = listening(port)  # before minutes of loading
    print(found.why, file=sys.stderr)
    with ending_in_order():
        if found.budget_bytes is None:
            sharded = load_model(source, dtype=kind, quant=form)
        else:
            of = {name: getattr(found, name) for name in ("budget_bytes", "other_bytes", "host_bytes")}
            sharded, _ = load_streamed(source, **of, dtype=kind, quant=form, scratch=scratch)
    name = served_model_name or model.resolve().name
    scheduler = Scheduler(sharded, tokenizer, at_once=batch_size, waiting=max_waiting, offload_cache=offload_cache)
    scheduler.start()
    try:
        print(f"http://127.0.0.1:{on.getsockname()[1]}/v1 has {name!r}, {batch_size} requests of {most:,} tokens at once", file=sys.stderr)
        serve(app_of(Served(name, sharded.model, tokenizer, most), scheduler), on, scheduler)
    finally:
        scheduler.stop()
        sharded.close()


def _most_tokens(model: object, asked: int | None) -> int:
    """Raises InputError for more than the model has positions for."""
    from plait.inference.capacity import check_positions
    from plait.inference.rope_by_length import refuse_served, rope_of_config

    config = getattr(model, "config", None)
    if asked is not None:
        check_positions(config, asked)
        refuse_served(rope_of_config(config), asked)
        return asked
    known = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) if config is not None else None
    return min(MOST_TOKENS, known) if isinstance(known, int) and known > 1 else MOST_TOKENS
