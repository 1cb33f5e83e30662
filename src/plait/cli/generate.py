"""Command `plait generate`: generates text from a Transformers folder or a Plait checkpoint.

The command checks its options, chooses the layout and starts the processes if there are several.
Each process runs this module again. Generation itself is in `plait.inference`.

Prompts come from an option, from a file or from the terminal. Answers for --out are saved after
every batch, so that the same command continues after an interruption.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from io import TextIOWrapper
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from plait.cli import launch
from plait.cli.launching.launch_settings import LaunchSettings
from plait.cli.options import (
    Adapters,
    WeightDtype,
    in_panel,
    parse_budget,
    refuse_options,
    single_adapter,
)
from plait.cli.terminal import close_stdout, exit_on_signals, progress_bar
from plait.cluster.topology import place
from plait.errors import InputError
from plait.names import number_of

if TYPE_CHECKING:
    from torch import nn

    from plait.inference.prompt_files import AnswerFile, PromptLine
    from plait.inference.requests import Generation
    from plait.inference.source import Source
    from plait.sharded.model import ShardedModel

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
AUTO = "auto"
CHAT_TOKENS = 1024
"""Length of a chat for which the layout is chosen, before its prompts are known."""

GRACE_SECONDS = 10.0
"""Time for processes to end after a signal.

They have nothing to save, but one of them may wait for another that has ended already.
"""


@dataclass(frozen=True)
class GenerateArguments:
    """Arguments that `plait generate` passes to each of its processes."""

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
    """Device memory for streamed weights. None if weights are not streamed."""
    other_bytes: int = 0
    """Part of `budget_bytes` for the KV cache and the activations."""
    host_bytes: int = 0
    """Host memory that may be pinned."""
    scratch: str | None = None
    offload_cache: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    """Generation settings that the user passed."""

    @property
    def processes(self) -> int:
        """Number of processes of the command."""
        return self.tp * self.pp


_layout = in_panel("Layout")
_sampling = in_panel("Sampling")


@app.command()
def generate_command(
    model: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder of save_pretrained, of a run or of a checkpoint."
        ),
    ],
    adapter: Adapters = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Prompt whose answer goes to standard output."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSONL file with prompt, token_ids or messages per line."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="New JSONL file with one answer per line of --prompts."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        _sampling(min=1, metavar="N", help="Maximum new tokens. (default: the model's, or 128)"),
    ] = None,
    temperature: Annotated[
        float | None,
        _sampling(metavar="T", help="0 selects the likeliest token. (default: the model's)"),
    ] = None,
    top_k: Annotated[
        int | None, _sampling(metavar="N", help="Sample from the N likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        _sampling(metavar="P", help="Sample from the likeliest tokens with total probability P."),
    ] = None,
    min_p: Annotated[
        float | None,
        _sampling(metavar="P", help="Sample from tokens above P times the largest probability."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, _sampling(metavar="X", help="Values above 1 make earlier tokens less likely.")
    ] = None,
    num_beams: Annotated[
        int | None,
        _sampling(min=1, metavar="N", help="1 disables the beam search of the model's settings."),
    ] = None,
    stop: Annotated[
        list[str] | None, _sampling(metavar="TEXT", help="Text that ends an answer. Repeatable.")
    ] = None,
    seed: Annotated[
        int | None,
        _sampling(
            min=0, metavar="N", help="Seed of prompt 1; prompt 2 has N + 1. (default: random)"
        ),
    ] = None,
    tp: Annotated[
        str, _layout(metavar="N", help="Tensor-parallel degree. auto: the fewest devices.")
    ] = AUTO,
    pp: Annotated[
        str, _layout(metavar="N", help="Pipeline stages. auto: the fewest devices.")
    ] = AUTO,
    nproc_per_node: Annotated[
        int | None,
        _layout(min=1, metavar="N", help="Largest number of devices to use. (default: all)"),
    ] = None,
    dtype: Annotated[
        WeightDtype,
        _layout(metavar="NAME", help="float32, bfloat16, float16, or stored."),
    ] = WeightDtype.stored,
    scratch: Annotated[
        Path | None,
        _layout(metavar="FOLDER", help="Folder for converted layers to stream. (default: /tmp)"),
    ] = None,
    gpu_budget: Annotated[
        str | None,
        _layout(metavar="SIZE", help="GPU memory to use. Layers that do not fit are streamed."),
    ] = None,
    cpu_budget: Annotated[
        str | None,
        _layout(metavar="SIZE", help="Host memory to use. Other layers are read from disk."),
    ] = None,
    batch_size: Annotated[
        int, _layout(min=1, metavar="N", help="Number of prompts that are decoded together.")
    ] = 16,
    offload_cache: Annotated[
        bool, _layout("--offload-cache", help="Keep the KV cache of a GPU in host memory.")
    ] = False,
) -> None:
    """Generate text with a model on as many devices as it needs.

    With --prompt or --prompts, the command ends after their answers. Without them it is a chat in
    the terminal, which ends with an empty line. Sampling options default to the values in
    generation_config.json of the model.
    """
    from plait.inference.deployment import InferenceWork, deploy, deploy_in_budget
    from plait.inference.prompt_files import read_prompts
    from plait.inference.source import open_source

    _check_files(prompt, prompts, out)
    lines = read_prompts(prompts) if prompts is not None else []
    # The seed of the last prompt must fit into the 63 bits that torch accepts.
    max_seed = (1 << 63) - max(len(lines), 1)
    if seed is not None and seed > max_seed:
        raise InputError(
            f"--seed {seed}: each prompt uses the next number, and the last must be below 2**63;"
            f" use at most {max_seed}"
        )
    adapter_folder = single_adapter(adapter)
    source = open_source(model, adapter_folder)
    has_token_ids = bool(lines) and all("token_ids" in line.fields for line in lines)
    if source.tokenizer_folder is None and not has_token_ids:
        raise InputError(
            f"--model {model}: has no tokenizer; write the prompts as token_ids in a file of"
            " --prompts, or save the tokenizer in the folder"
        )
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "num_beams": num_beams,
        "stop_strings": list(stop or ()) or None,
    }
    # Options that are not used leave the values of generation_config.json as they are.
    settings = {name: value for name, value in options.items() if value is not None}
    gpu_bytes = parse_budget(gpu_budget, "--gpu-budget")
    cpu_bytes = parse_budget(cpu_budget, "--cpu-budget")
    if prompt is not None:
        requests: list[tuple[str, Any]] = [("--prompt", prompt)]
    else:
        requests = [(line.name, line.prompt) for line in lines]

    unloaded = source.model(dtype.torch_dtype())
    tokenizer = source.tokenizer()
    tokens = _longest_request(requests, settings, unloaded, tokenizer)
    # A chat has one request at a time.
    work = InferenceWork(
        source, unloaded, tokens, min(batch_size, len(requests) or 1), offload_cache
    )
    tp_degree = _parse_degree("--tp", tp)
    pp_degree = _parse_degree("--pp", pp)
    if gpu_bytes or cpu_bytes:
        refuse_options(
            {"--tp": tp_degree, "--pp": pp_degree, "--nproc-per-node": nproc_per_node},
            "chooses a layout of several devices, and a budget streams weights to one",
            "leave one of them out",
        )
        deployment, concurrent = deploy_in_budget(work, gpu_budget=gpu_bytes, cpu_budget=cpu_bytes)
        if concurrent < work.requests:
            print(
                f"{number_of(concurrent, 'prompt')} at once, not {work.requests}: more do not fit"
                " into the budget",
                file=sys.stderr,
            )
            batch_size = concurrent
    else:
        deployment = deploy(work, tp=tp_degree, pp=pp_degree, devices=nproc_per_node)
    if scratch is not None and not deployment.written:
        raise InputError(
            "--scratch: stores layers that are converted before they are streamed, but this model"
            " has none; leave it out"
        )
    print(deployment.why, file=sys.stderr)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if has_template and any(isinstance(text, str) for _, text in requests):
        print(
            "note: the model has a chat template, which is not applied to a prompt that is a text;"
            " to apply it, write the prompt as `messages` in a file of --prompts, or leave --prompt"
            " out for a chat",
            file=sys.stderr,
        )

    arguments = GenerateArguments(
        model=str(model),
        adapter=_optional_text(adapter_folder),
        dtype=dtype.value,
        tp=deployment.tp,
        pp=deployment.pp,
        prompt=prompt,
        prompts=_optional_text(prompts and prompts.resolve()),
        out=_optional_text(out),
        batch_size=batch_size,
        seed=seed,
        budget_bytes=deployment.budget_bytes,
        other_bytes=deployment.other_bytes,
        host_bytes=deployment.host_bytes,
        scratch=_optional_text(scratch),
        offload_cache=offload_cache,
        settings=settings,
    )
    if arguments.processes == 1:
        raise typer.Exit(_run(arguments, source, tokenizer, lines))
    with _argument_file(arguments, lines) as file:
        raise typer.Exit(
            launch.run(
                ["plait.cli.generate", str(file)],
                LaunchSettings(arguments.processes, grace_seconds=GRACE_SECONDS),
            )
        )


def _check_files(prompt: str | None, prompts: Path | None, out: Path | None) -> None:
    if prompt is not None and prompts is not None:
        raise InputError("--prompt and --prompts: pass only one of them")
    if (prompts is None) != (out is None):
        raise InputError("--prompts and --out belong together: pass both, or neither")
    if out is not None and out.exists():
        raise InputError(f"--out {out}: exists; pass another name, or remove it first")
    if out is not None and not out.parent.is_dir():
        raise InputError(
            f"--out {out}: {out.parent} is not a folder; create it first, or pass a file in an"
            " existing folder"
        )


@contextmanager
def _argument_file(arguments: GenerateArguments, lines: list[PromptLine]) -> Iterator[Path]:
    """Write the arguments of all processes to a temporary file, and yield its path.

    The lines of --prompts are written to a second temporary file, and the arguments contain its
    path. The processes do not read --prompts themselves, because it may be a pipe or change later.
    They do not receive prompts on the command line, which has a limited length and is visible to
    other users of the machine.
    """
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="plait-generate-")))
            if arguments.prompts is not None:
                prompts = folder / "prompts.jsonl"
                rows = [json.dumps(line.fields) + "\n" for line in lines]
                prompts.write_text("".join(rows), encoding="utf-8")
                arguments = replace(arguments, prompts=str(prompts))
            file = folder / "arguments.json"
            file.write_text(json.dumps(asdict(arguments)), encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"the folder for temporary files: {error.strerror}; several processes read their"
                " arguments there: free some space, or name another folder with TMPDIR"
            ) from None
        yield file


def _longest_request(
    prompts: list[tuple[str, Any]], settings: dict[str, Any], model: nn.Module, tokenizer: Any
) -> int:
    """Check all requests. Return the largest number of tokens of a prompt with its answer.

    Args:
        prompts: Pairs of a name and a prompt.
        settings: Generation settings that the user passed.
        model: The model, possibly without weights.
        tokenizer: Tokenizer of the model, or None.

    Raises:
        InputError: The model cannot answer a prompt. The message names the prompt.
    """
    from plait.inference.capacity import check_positions
    from plait.inference.generation_settings import check_ids, settings_of, tokens_of_model
    from plait.inference.requests import check_room, prompt_token_ids

    generation_settings = settings_of(model, settings)
    vocabulary = tokens_of_model(model)
    longest = 0
    for name, prompt in prompts:
        ids = prompt_token_ids(prompt, name, tokenizer)
        check_ids(ids, name, vocabulary)
        tokens = len(ids) + check_room(len(ids), name, generation_settings)
        # A shorter request fits where a longer one did.
        if tokens <= longest:
            continue
        try:
            check_positions(getattr(model, "config", None), tokens)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        longest = tokens
    return longest or CHAT_TOKENS


def _parse_degree(name: str, value: str) -> int | None:
    """Parse a parallel degree. Return None for `auto`."""
    if value == AUTO:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value)):
        raise InputError(f"{name} {value}: pass a number of devices, or auto")
    return int(value)


def _optional_path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _optional_text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _run_process(arguments: GenerateArguments) -> int:
    """Run one of several processes, and return its exit code."""
    from plait.inference.prompt_files import read_prompts
    from plait.inference.source import open_source

    source = open_source(Path(arguments.model), _optional_path(arguments.adapter))
    lines = []
    if arguments.prompts is not None:
        lines = read_prompts(Path(arguments.prompts))
    return _run(arguments, source, source.tokenizer(), lines)


def _run(
    arguments: GenerateArguments, source: Source, tokenizer: Any, lines: list[PromptLine]
) -> int:
    """Load the model, then answer the prompts or chat with the user. Collective."""
    is_first = place().rank == 0
    # Only rank 0 writes files (the answers, and converted layers for streaming) to remove.
    with exit_on_signals() if is_first else nullcontext():
        if arguments.out is not None:
            from plait.inference.generate import generate

            def answer(
                sharded: ShardedModel, prompts: list[Any], seed: int | None
            ) -> list[Generation]:
                return generate(
                    sharded,
                    prompts,
                    tokenizer=tokenizer,
                    seed=seed,
                    **_generate_settings(arguments),
                )

            job = AnswerJob(
                lines=lines,
                out=Path(arguments.out),
                batch_size=arguments.batch_size,
                seed=arguments.seed,
                command=_describe_command(arguments, source) if is_first else {},
                writes=is_first,
                several=arguments.processes > 1,
            )
            answer_lines(job, lambda: _load(arguments, source), answer)
            return 0
        with closing(_load(arguments, source)) as sharded:
            if arguments.prompt is not None:
                _answer(arguments, sharded, tokenizer, arguments.prompt, prints=is_first)
            else:
                _chat(arguments, sharded, tokenizer, is_first=is_first)
    return 0


def _load(arguments: GenerateArguments, source: Source) -> ShardedModel:
    from plait.inference.deployment import load_model
    from plait.inference.streamed_model import load_streamed

    dtype = WeightDtype(arguments.dtype).torch_dtype()
    if arguments.budget_bytes is None:
        return load_model(source, tp=arguments.tp, pp=arguments.pp, dtype=dtype)
    sharded, *_ = load_streamed(
        source,
        budget_bytes=arguments.budget_bytes,
        other_bytes=arguments.other_bytes,
        host_bytes=arguments.host_bytes,
        dtype=dtype,
        scratch=_optional_path(arguments.scratch),
    )
    return sharded


def _describe_command(arguments: GenerateArguments, source: Source) -> dict[str, Any]:
    """Return all settings that determine the tokens of an answer, keyed by option."""
    adapter = _optional_path(arguments.adapter)
    description = {
        "--model": str(Path(source.name).resolve()),
        "--adapter": _optional_text(adapter and adapter.resolve()),
        "--dtype": arguments.dtype,
        "the model's files": source.stamp(),
        "--seed": arguments.seed,
    }
    for name, value in arguments.settings.items():
        # The option of `stop_strings` is --stop.
        option = name.replace("_", "-").removesuffix("-strings")
        description[f"--{option}"] = value
    return description


def _generate_settings(arguments: GenerateArguments) -> dict[str, Any]:
    """Return the keyword arguments that every call of `generate` receives."""
    return {"offload_cache": arguments.offload_cache, **arguments.settings}


def _answer(
    arguments: GenerateArguments,
    sharded: ShardedModel,
    tokenizer: Any,
    prompt: Any,
    *,
    prints: bool,
) -> str:
    """Answer one prompt and print the text while it is generated. Collective.

    Returns:
        The answer as a turn of a conversation, without the space between prompt and answer.
    """
    from plait.inference.generate import generate
    from plait.inference.requests import TextStream, prompt_token_ids, text_of

    stream = TextStream(
        tokenizer, prompt_token_ids(prompt, "the prompt", tokenizer) if prints else ()
    )

    def print_token(_: int, token: int) -> None:
        if prints:
            _write(arguments, stream.add(token))

    (generation,) = generate(
        sharded,
        [prompt],
        tokenizer=tokenizer,
        seed=arguments.seed,
        on_token=print_token,
        **_generate_settings(arguments),
    )
    if prints:
        _write(arguments, f"{stream.remainder()}\n")
    return text_of(tokenizer, generation.token_ids, skip_special_tokens=True)


def _write(arguments: GenerateArguments, text: str) -> None:
    """Write text to standard output.

    If the write fails and the command has several processes, this process exits immediately, so
    that the launcher ends the other processes.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        if arguments.processes == 1:
            raise
        from plait.cluster.process_groups import end_process

        end_process(close_stdout(error))


def _chat(
    arguments: GenerateArguments, sharded: ShardedModel, tokenizer: Any, *, is_first: bool
) -> None:
    """Chat with the user until an empty line.

    A model without a chat template continues each line without the earlier turns. A line that is
    refused, for example because it is too long, is not part of the conversation.

    Raises:
        InputError: All lines were refused.
    """
    from plait.cluster.small_messages import broadcast_object

    turns: list[dict[str, str]] = []
    has_template = getattr(tokenizer, "chat_template", None) is not None
    several = arguments.processes > 1
    refusal: InputError | None = None
    for line in chat_lines(is_first, several=several):
        text = broadcast_object(line) if several else line
        if text is None:
            continue
        if not text:
            break
        turns.append({"role": "user", "content": text})
        prompt = list(turns) if has_template else text
        try:
            answer = _answer(arguments, sharded, tokenizer, prompt, prints=is_first)
        except InputError as error:
            refusal = error
            turns.pop()
            if is_first:
                print(f"the line of {len(text):,} characters: {error}", file=sys.stderr)
            continue
        turns.append({"role": "assistant", "content": answer})
    if refusal is not None and not turns:
        raise refusal


Answer = Callable[["ShardedModel", list[Any], int | None], "list[Generation]"]
"""Function from the model, prompts and the seed of the first prompt to the generated answers."""


@dataclass(frozen=True)
class AnswerJob:
    """File of prompts that the processes of a command answer together."""

    lines: list[PromptLine]
    out: Path
    batch_size: int
    seed: int | None
    """Seed of the first line. Each following line has the next number."""
    command: dict[str, Any]
    """Settings that determine the tokens of an answer, in addition to its line.

    The layout and the batch size are not among them, so that a command can continue with others.
    """
    writes: bool
    """True if this process writes the answers."""
    several: bool
    """True if other processes take part."""


def answer_lines(job: AnswerJob, load: Callable[[], ShardedModel], answer: Answer) -> None:
    """Answer all lines that have no answer yet. Collective over the processes of the command.

    Args:
        job: The lines and the output.
        load: Loads the model.
        answer: Generates the answers of a batch.
    """
    new_tokens = 0
    lines = job.lines
    with (
        _open_answers(job) if job.writes else nullcontext() as answers,
        closing(load()) as sharded,
        progress_bar("generate") as progress,
    ):
        for start in range(_finished_lines(answers, job), len(lines), job.batch_size):
            prompts = [line.prompt for line in lines[start : start + job.batch_size]]
            seed = job.seed
            if seed is not None:
                seed += start
            generations = answer(sharded, prompts, seed)
            new_tokens += sum(len(generation.token_ids) for generation in generations)
            if answers is not None:
                answers.add(generations)
            progress(start + len(prompts), len(lines))
    if job.writes:
        print(f"wrote {job.out}: {len(lines)} answers, {new_tokens:,} new tokens", file=sys.stderr)


@contextmanager
def _open_answers(job: AnswerJob) -> Iterator[AnswerFile]:
    from plait.inference.prompt_files import answer_file

    count = len(job.lines)
    with answer_file(job.out, job.lines, job.command) as answers:
        if answers.done:
            print(
                f"{answers.done} of {count} answers are in {answers.partial} already; continuing"
                " after them",
                file=sys.stderr,
            )
        try:
            yield answers
        except BaseException:
            # Ctrl-C as well, after which the user needs to know how to continue.
            if answers.done:
                print(
                    f"{answers.done} of {count} answers are finished and kept in {answers.partial};"
                    " the same command continues after them",
                    file=sys.stderr,
                )
            raise


def _finished_lines(answers: AnswerFile | None, job: AnswerJob) -> int:
    """Return the number of lines that have answers, the same on all processes. Collective."""
    count = answers.done if answers is not None else 0
    if job.several:
        from plait.cluster.small_messages import broadcast_object

        return broadcast_object(count)
    return count


POLL_SECONDS = 20.0
"""Interval at which processes that wait for a line receive None instead."""


def chat_lines(reads_input: bool, *, several: bool) -> Iterator[str | None]:
    """Yield the lines that the user types, and "" at the end of the input.

    Args:
        reads_input: Whether this process reads standard input. Other processes yield "" forever,
            because they receive the lines from the process that reads.
        several: Whether other processes wait for each line. If so, None is yielded every
            `POLL_SECONDS` while the user types nothing. A long wait of the other processes would be
            reported as a hang.
    """
    console = Console(stderr=True, highlight=False)
    while not reads_input:
        yield ""

    # Bytes of another encoding would raise in the thread below.
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    requests: Queue[None] = Queue()
    lines: Queue[str] = Queue()

    def read() -> None:
        while True:
            requests.get()
            lines.put(sys.stdin.readline().strip())

    # A thread, because readline has no timeout.
    Thread(target=read, daemon=True).start()
    timeout = POLL_SECONDS if several else None
    while True:
        if sys.stdin.isatty():
            console.print("> ", end="")
        requests.put(None)
        while True:
            try:
                yield lines.get(timeout=timeout)
                break
            except Empty:
                yield None


if __name__ == "__main__":
    from plait.cluster.process_groups import end_process

    content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    end_process(_run_process(GenerateArguments(**content)))
