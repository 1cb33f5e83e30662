"""`plait generate`: text from a folder of Transformers or a checkpoint of `plait train`. Runs
`plait.inference`.

The command that a person types checks everything, decides the layout, and starts the processes
where there are several; each of them runs this module again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli import answer_lines, launch
from plait.cli.chat_lines import lines_said
from plait.cli.interrupts import ending_in_order
from plait.cli.launching.settings import Settings
from plait.cli.options import Adapters, in_panel, one_adapter, refuse_given
from plait.cli.stdout import close_stdout
from plait.cluster.topology import place
from plait.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from plait.inference.prompt_file import Line
    from plait.inference.requests import Generation
    from plait.inference.source import Source
    from plait.sharded.model import ShardedModel

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
AUTO = "auto"
DEFAULT_TOKENS = 1024
"""Of keys and values of a request, where the command chooses a layout before it knows the prompts
(a chat).
"""

GRACE_SECONDS = 10.0
"""After a signal, for processes that have nothing to save: one may wait for another that has ended
already.
"""


class Dtype(StrEnum):
    """Of the weights, and of the computation."""

    stored = "stored"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(frozen=True)
class Asked:
    """What a process of the command gets."""

    model: str
    adapter: str | None
    dtype: str
    tp: int
    pp: int
    prompt: str | None
    prompts: str | None
    out: str | None
    batch_size: int
    seed: int | None
    budget_bytes: int | None = None
    """Where weights are streamed."""
    other_bytes: int = 0
    """Of it, for keys, values and activations."""
    host_bytes: int = 0
    """That may be pinned."""
    scratch: str | None = None
    offload_cache: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


_layout = in_panel("Layout")
_tokens = in_panel("Choice of tokens")


@app.command()
def generate_command(
    model: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Of save_pretrained, or a run, or one of its checkpoints."
        ),
    ],
    adapter: Adapters = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="One prompt; the answer goes to standard output."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL: each line has prompt, token_ids or messages."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL to write, one line for each of --prompts."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, _tokens(min=1, metavar="N", help="At most. (default: the model's, else 128)")
    ] = None,
    temperature: Annotated[
        float | None,
        _tokens(metavar="T", help="0 takes the likeliest token. (default: the model's)"),
    ] = None,
    top_k: Annotated[int | None, _tokens(metavar="N", help="Draw among the N likeliest.")] = None,
    top_p: Annotated[
        float | None,
        _tokens(metavar="P", help="Draw among the likeliest that have probability P together."),
    ] = None,
    min_p: Annotated[
        float | None,
        _tokens(metavar="P", help="Draw among those with P times the best one's probability."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, _tokens(metavar="X", help="Above 1: tokens that were there are less likely.")
    ] = None,
    num_beams: Annotated[
        int | None,
        _tokens(min=1, metavar="N", help="1: without the beams of the model's own settings."),
    ] = None,
    stop: Annotated[
        list[str] | None, _tokens(metavar="TEXT", help="Ends an answer; may be repeated.")
    ] = None,
    seed: Annotated[
        int | None,
        _tokens(min=0, metavar="N", help="Of the first prompt; the next has N + 1. (default: new)"),
    ] = None,
    tp: Annotated[
        str, _layout(metavar="N", help="Tensor parallelism; auto: the fewest devices.")
    ] = AUTO,
    pp: Annotated[str, _layout(metavar="N", help="Pipeline stages; or auto.")] = AUTO,
    nproc_per_node: Annotated[
        int | None,
        _layout(min=1, metavar="N", help="Devices of this machine to use at most. (default: all)"),
    ] = None,
    dtype: Annotated[
        Dtype, _layout(metavar="NAME", help="float32, bfloat16, float16; or as stored.")
    ] = Dtype.stored,
    scratch: Annotated[
        Path | None,
        _layout(
            metavar="FOLDER", help="For streamed layers that are written first. (default: /tmp)"
        ),
    ] = None,
    gpu_budget: Annotated[
        str | None,
        _layout(metavar="SIZE", help="Of a GPU's memory; other layers are streamed to it."),
    ] = None,
    cpu_budget: Annotated[
        str | None,
        _layout(metavar="SIZE", help="Of host memory; what does not fit is read from disk."),
    ] = None,
    batch_size: Annotated[
        int, _layout(min=1, metavar="N", help="Prompts that are decoded together.")
    ] = 16,
    offload_cache: Annotated[
        bool, _layout("--offload-cache", help="Keep keys and values in host memory, for a GPU.")
    ] = False,
) -> None:
    """Generate text from a model, on as many devices as it needs.

    With --prompt or --prompts it ends when they are answered; with neither it is a chat in the
    terminal, which an empty line ends. Sampling options that are not given are those of the model's
    generation_config.json.
    """
    from plait.inference.deployment import Work, deploy, deploy_in_budget
    from plait.inference.prompt_file import read_prompts
    from plait.inference.source import open_source
    from plait.units import bytes_of

    if prompt is not None and prompts is not None:
        raise InputError("--prompt and --prompts: give one of them")
    if (prompts is None) != (out is None):
        raise InputError("--prompts and --out belong together: give both, or neither")
    if out is not None and out.exists():
        raise InputError(f"--out {out}: exists; give another name, or remove it first")
    if out is not None and not out.parent.is_dir():
        raise InputError(
            f"--out {out}: {out.parent} is no folder; make it first, or give a file in one that is"
            " there"
        )
    lines = read_prompts(prompts) if prompts is not None else []
    if seed is not None and seed > (last := (1 << 63) - max(len(lines), 1)):
        raise InputError(
            f"--seed {seed}: each prompt has the next number, and the last must be under 2**63;"
            f" give {last} at most"
        )
    source = open_source(model, one_adapter(adapter))
    if source.tokenizer_folder is None and not (
        lines and all("token_ids" in line.fields for line in lines)
    ):
        raise InputError(
            f"--model {model}: has no tokenizer, so prompts have to be token_ids in a file of"
            " --prompts"
        )
    chosen = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "num_beams": num_beams,
        "stop_strings": list(stop) if stop else None,
    }
    settings = {name: value for name, value in chosen.items() if value is not None}
    asked_for = (("--gpu-budget", gpu_budget), ("--cpu-budget", cpu_budget))
    budgets = [None if value is None else bytes_of(value, name) for name, value in asked_for]
    known = (
        [("--prompt", prompt)]
        if prompt is not None
        else [(line.name, line.prompt) for line in lines]
    )
    unloaded = source.model(_torch_dtype(dtype))
    tokenizer = source.tokenizer()
    longest = _longest(known, settings, unloaded, tokenizer)
    work = Work(source, unloaded, longest, min(batch_size, len(known) or 1), offload_cache)
    degrees = [
        None if value == AUTO else _degree(name, value)
        for name, value in (("--tp", tp), ("--pp", pp))
    ]
    if any(budgets):
        given = {"--tp": degrees[0], "--pp": degrees[1], "--nproc-per-node": nproc_per_node}
        refuse_given(
            given,
            "chooses a layout of several devices, and a budget streams weights to one",
            "leave one of them out",
        )
        found, at_once = deploy_in_budget(work, gpu_budget=budgets[0], cpu_budget=budgets[1])
        if at_once < work.requests:
            print(
                f"{at_once} prompts at once, not {work.requests}: more do not fit into the budget",
                file=sys.stderr,
            )
            batch_size = at_once
    else:
        found = deploy(work, tp=degrees[0], pp=degrees[1], devices=nproc_per_node)
    if scratch is not None and not found.written:
        raise InputError(
            "--scratch: holds layers that are written anew to be streamed, and none are; leave"
            " it out"
        )
    print(found.why, file=sys.stderr)
    if getattr(tokenizer, "chat_template", None) and any(
        isinstance(text, str) for _, text in known
    ):
        print(
            "note: the model has a chat template, and a prompt that is a text is given to it"
            " without; for an answer as in a chat write it as `messages` in a file of --prompts, or"
            " leave --prompt out",
            file=sys.stderr,
        )
    asked = Asked(
        str(model),
        None if not adapter else str(adapter[0]),
        dtype.value,
        found.tp,
        found.pp,
        prompt,
        None if prompts is None else str(prompts.resolve()),
        None if out is None else str(out),
        batch_size,
        seed,
        found.budget_bytes,
        found.other_bytes,
        found.host_bytes,
        None if scratch is None else str(scratch),
        offload_cache,
        settings,
    )
    if asked.tp * asked.pp == 1:
        raise typer.Exit(_answers(asked, source, tokenizer, lines))
    with _told(asked, lines) as told:
        raise typer.Exit(
            launch.run(
                ["plait.cli.generate", str(told)],
                Settings(asked.tp * asked.pp, grace_seconds=GRACE_SECONDS),
            )
        )


@contextmanager
def _told(asked: Asked, lines: list[Line]) -> Iterator[Path]:
    """A file with what each of several processes is to do, and the lines beside it: --prompts may
    be a pipe, or change meanwhile. A prompt may also be longer than an argument of a process, and
    is nobody else's.
    """
    with ExitStack() as stack:
        try:
            told = (
                Path(stack.enter_context(TemporaryDirectory(prefix="plait-generate-")))
                / "asked.json"
            )
            if asked.prompts is not None:
                beside = told.with_name("prompts.jsonl")
                beside.write_text(
                    "".join(json.dumps(line.fields) + "\n" for line in lines), encoding="utf-8"
                )
                asked = replace(asked, prompts=str(beside))
            told.write_text(json.dumps(asdict(asked)), encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"the folder for temporary files: {error.strerror}; several processes read there"
                " what they are to do: make room, or name another one with TMPDIR"
            ) from None
        yield told


def _longest(
    prompts: list[tuple[str, Any]], settings: dict[str, Any], model: nn.Module, tokenizer: Any
) -> int:
    """Tokens of the longest request. `prompts` are (name, prompt). Raises InputError, with the
    name, for one that the model cannot answer: before any of them is.
    """
    from plait.inference.capacity import check_positions
    from plait.inference.requests import check_ids, check_room, ids_of
    from plait.inference.settings import settings_of
    from plait.inference.vocabulary import tokens_of_model

    found = settings_of(model, settings)
    size = tokens_of_model(model)
    longest = 0
    for name, prompt in prompts:
        ids = ids_of(prompt, name, tokenizer)
        check_ids(ids, name, size)
        tokens = len(ids) + check_room(len(ids), name, found)
        if tokens <= longest:
            continue
        try:
            check_positions(getattr(model, "config", None), tokens)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        longest = tokens
    return longest or DEFAULT_TOKENS


def _degree(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value)):
        raise InputError(f"{name} {value}: give a number of devices, or auto")
    return int(value)


def _torch_dtype(dtype: Dtype) -> Any:
    import torch

    return None if dtype is Dtype.stored else getattr(torch, dtype.value)


def _process(asked: Asked) -> int:
    """One of several."""
    from plait.inference.prompt_file import read_prompts
    from plait.inference.source import open_source

    source = open_source(Path(asked.model), None if asked.adapter is None else Path(asked.adapter))
    lines = [] if asked.prompts is None else read_prompts(Path(asked.prompts))
    return _answers(asked, source, source.tokenizer(), lines)


def _answers(asked: Asked, source: Source, tokenizer: Any, lines: list[Line]) -> int:
    """On each process. Signals end the first in order, as it alone has files: the answers, and
    layers that are written to be streamed.
    """
    first = place().rank == 0
    with ending_in_order() if first else nullcontext():
        if asked.out is not None:
            from plait.inference.generate import generate

            def answer(
                sharded: ShardedModel, prompts: list[Any], seed: int | None
            ) -> list[Generation]:
                return generate(sharded, prompts, tokenizer=tokenizer, seed=seed, **_ways(asked))

            command = _command(asked, source) if first else {}
            several = asked.tp * asked.pp > 1
            work = answer_lines.Work(
                lines, Path(asked.out), asked.batch_size, asked.seed, command, first, several
            )
            answer_lines.answer_lines(work, lambda: _loaded(asked, source), answer)
            return 0
        with closing(_loaded(asked, source)) as sharded:
            if asked.prompt is not None:
                _answer(asked, sharded, tokenizer, asked.prompt, first=first)
            else:
                _chat(asked, sharded, tokenizer, first=first)
    return 0


def _loaded(asked: Asked, source: Source) -> ShardedModel:
    from plait.inference.load import load_model
    from plait.inference.streamed import load_streamed

    dtype = _torch_dtype(Dtype(asked.dtype))
    if asked.budget_bytes is None:
        return load_model(source, tp=asked.tp, pp=asked.pp, dtype=dtype)
    of = {name: getattr(asked, name) for name in ("budget_bytes", "other_bytes", "host_bytes")}
    scratch = None if asked.scratch is None else Path(asked.scratch)
    return load_streamed(source, **of, dtype=dtype, scratch=scratch)[0]


def _command(asked: Asked, source: Source) -> dict[str, Any]:
    """What the tokens of an answer follow from, by the names that a person knows."""
    adapter = None if asked.adapter is None else str(Path(asked.adapter).resolve())
    of_model = {
        "--model": str(Path(source.name).resolve()),
        "--adapter": adapter,
        "--dtype": asked.dtype,
    }
    settings = {
        f"--{name.replace('_', '-').removesuffix('-strings')}": value
        for name, value in asked.settings.items()
    }
    return {**of_model, "the model's files": source.stamp(), "--seed": asked.seed, **settings}


def _ways(asked: Asked) -> dict[str, Any]:
    """What every call of `generate` gets."""
    return {"offload_cache": asked.offload_cache, **asked.settings}


def _answer(
    asked: Asked, sharded: ShardedModel, tokenizer: Any, prompt: Any, *, first: bool
) -> str:
    """Answer one prompt, and print its text as it comes. Returns the text as a turn of a
    conversation, without the space that parts it from the prompt.
    """
    from plait.inference.generate import generate
    from plait.inference.requests import ids_of
    from plait.inference.text_stream import TextStream, text_of

    stream = TextStream(tokenizer, ids_of(prompt, "the prompt", tokenizer) if first else ())

    def show(_: int, token: int) -> None:
        if first:
            _write(asked, stream.add(token))

    (made,) = generate(
        sharded, [prompt], tokenizer=tokenizer, seed=asked.seed, on_token=show, **_ways(asked)
    )
    if first:
        _write(asked, f"{stream.rest()}\n")
    return text_of(tokenizer, made.token_ids, skip_special_tokens=True)


def _write(asked: Asked, text: str) -> None:
    """On standard output. Where it takes no more, one of several processes ends at once, and the
    others are ended with it.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        if asked.tp * asked.pp == 1:
            raise
        from plait.cluster.ending import end_process

        end_process(close_stdout(error))


def _chat(asked: Asked, sharded: ShardedModel, tokenizer: Any, *, first: bool) -> None:
    """Until an empty line. A model without a chat template goes on from the text alone."""
    import torch.distributed as dist

    turns: list[dict[str, str]] = []
    has_template = getattr(tokenizer, "chat_template", None) is not None
    several = asked.tp * asked.pp > 1
    for said in lines_said(first, several=several):
        box = [said]
        if several:
            dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            continue
        if not box[0]:
            return
        turns.append({"role": "user", "content": box[0]})
        answer = _answer(
            asked, sharded, tokenizer, list(turns) if has_template else box[0], first=first
        )
        turns.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    from plait.cluster.ending import end_process

    end_process(_process(Asked(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
