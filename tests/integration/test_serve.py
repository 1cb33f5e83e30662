"""`plait serve`, in a process of its own: OpenAI's client, errors, clients that go, many at once, and the end. `make serving` runs these
where FastAPI and OpenAI's client are."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from plait.cli.main import main
from plait.importing import install_line
from tests.integration.model_folder import adapter_of, model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("llama"))


@dataclass
class Running:
    process: subprocess.Popen[str]
    port: int

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        to = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        raw = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        to.request(method, path, raw, {"Content-Type": "application/json", **(headers or {})})
        answer = to.getresponse()
        content = answer.read()
        to.close()
        return answer.status, json.loads(content) if content.startswith(b"{") else content.decode()

    def running(self) -> int:
        return int(self.call("GET", "/health")[1]["running"])

    def post(self, body: Any, kind: str = "completions") -> tuple[int, Any]:
        return self.call("POST", f"/v1/{kind}", body)


def started(path: Path, *options: str) -> Running:
    command = [sys.executable, "-m", "plait", "serve", "--model", str(path), "--port", "0", "--served-model-name", "tiny", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if (found := re.search(r"http://127.0.0.1:(\d+)/v1 has 'tiny', (\d+) requests of (\d+) tokens at once", line)) is not None:
            return Running(process, int(found[1]))
    raise AssertionError("".join(lines))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(folder)
    words.chat_template = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}\n{% endfor %}"
    words.save_pretrained(folder)
    made = started(folder, "--batch-size", "8")
    yield made
    made.process.kill()
    made.process.wait()


def by_generate(folder: Path, prompt: str, tokens: int) -> str:
    from transformers import AutoTokenizer, LlamaForCausalLM

    words = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([words(prompt)["input_ids"]])
    made = LlamaForCausalLM.from_pretrained(folder).generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return str(words.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def test_completions_and_models(server: Running, folder: Path) -> None:
    status, answer = server.post({"model": "tiny", "prompt": ["def read", "a"], "max_tokens": 8, "temperature": 0})
    assert status == 200 and [one["text"] for one in answer["choices"]] == [by_generate(folder, text, 8) for text in ("def read", "a")]
    assert answer["usage"]["completion_tokens"] == 16
    assert server.call("GET", "/v1/models")[1]["data"][0]["id"] == "tiny"
    one, other = (server.post({"prompt": "def", "max_tokens": 9, "temperature": 1.1, "seed": 4})[1] for _ in range(2))
    assert one["choices"] == other["choices"]


def test_openais_client(server: Running, folder: Path) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    turns = [{"role": "user", "content": "def read"}]
    full = client.chat.completions.create(model="tiny", messages=turns, max_tokens=10, temperature=0)
    assert full.choices[0].message.content and full.choices[0].finish_reason == "length"
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=turns, max_tokens=10, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == full.choices[0].message.content
    assert chunks[-1].usage == full.usage and chunks[-2].choices[0].finish_reason == "length"
    text = client.completions.create(model="tiny", prompt="def read", max_tokens=8, temperature=0).choices[0].text
    assert text == by_generate(folder, "def read", 8)
    stop = text[3:5]
    cut = client.completions.create(model="tiny", prompt="def read", max_tokens=8, temperature=0, stop=[stop]).choices[0]
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"
    parts = client.completions.create(model="tiny", prompt="def read", max_tokens=8, temperature=0, stop=[stop], stream=True)
    assert "".join(part.choices[0].text for part in parts) == cut.text
    with pytest.raises(openai.BadRequestError, match="257 together; this server keeps keys and values of 256"):
        client.completions.create(model="tiny", prompt=[5, 6], max_tokens=255)
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not here"):
        client.completions.create(model="gpt-4", prompt="a")


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "words"),
    [
        ("POST", "/v1/completions", b"{", {}, 400, "is not JSON"),
        ("POST", "/v1/completions", {"prompt": "a", "n": 3}, {}, 400, "n = 3 is not supported"),
        ("POST", "/v1/completions", {"prompt": "a"}, {"Content-Type": "text/plain"}, 415, "application/json"),
        ("POST", "/v1/embeddings", {}, {}, 404, "there is no /v1/embeddings"),
        ("GET", "/v1/completions", None, {}, 405, "GET is not for /v1/completions"),
        ("POST", "/v1/completions", b"x" * (17 << 20), {}, 413, "may be sent"),
    ],
)
def test_errors_are_openais(server: Running, method: str, path: str, body: Any, headers: dict[str, str], status: int, words: str) -> None:
    got, answer = server.call(method, path, body, headers)
    assert got == status and words in answer["error"]["message"] and set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_page_of_another_name_is_refused(server: Running) -> None:
    assert server.call("GET", "/v1/models", None, {"Host": "evil.example"})[0] == 400


def test_clients_that_go_are_freed(server: Running) -> None:
    for stream in (True, False):
        to = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"prompt": "def read", "max_tokens": 240, "stream": stream}
        to.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        if stream:
            to.getresponse().read(10)
        else:
            wait_until(lambda: server.running() == 1)
        to.close()
        wait_until(lambda: server.running() == 0)


def test_a_hundred_at_once(server: Running) -> None:
    def one(index: int) -> tuple[int, Any]:
        return server.post({"prompt": "def " * (1 + index % 5), "max_tokens": 3 + index % 7, "temperature": 1.0, "seed": index})

    with ThreadPoolExecutor(100) as pool:
        found = list(pool.map(one, range(100)))
    assert all(status == 200 for status, _ in found)
    for index in (0, 17, 63):
        assert one(index)[1]["choices"] == found[index][1]["choices"]
    wait_until(lambda: server.running() == 0)


def test_a_server_that_is_killed_under_load(folder: Path, server: Running) -> None:
    """Every client has an error within ten seconds, nothing of the server is left, and its port is free."""
    other = started(folder, "--batch-size", "4", "--max-model-len", "200")
    children = psutil.Process(other.process.pid).children(recursive=True)

    def one(index: int) -> float:
        to = http.client.HTTPConnection("127.0.0.1", other.port, timeout=60)
        body = {"prompt": "def read", "max_tokens": 190, "stream": index % 2 == 0, "temperature": 1.0, "seed": index}
        to.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        try:
            text = to.getresponse().read()
        except (http.client.HTTPException, OSError):
            return time.monotonic()
        assert b"[DONE]" in text or b'"finish_reason"' in text  # it had ended before
        return 0.0

    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(one, index) for index in range(20)]
        wait_until(lambda: other.running() == 4)
        other.process.kill()
        killed = time.monotonic()
        ended = [one.result() for one in asked]
    assert sum(bool(at) for at in ended) >= 10 and all(at < killed + 10 for at in ended)
    other.process.wait(10)
    assert not [child for child in children if child.is_running()]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", other.port))


def test_weights_that_cannot_be_read_any_more(folder: Path, tmp_path: Path, server: Running) -> None:
    """Requests that run fail with what was wrong, and so do later ones; the server answers."""
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    other = started(model, "--cpu-budget", "420KiB", "--max-model-len", "64", "--batch-size", "1")
    body = {"prompt": "def read", "max_tokens": 4, "temperature": 0}
    try:
        assert other.post(body)[0] == 200
        os.truncate(model / "model.safetensors", 100_000)
        for stream in (False, True):
            began = time.monotonic()
            _, answer = other.post({**body, "stream": stream})
            assert time.monotonic() - began < 10
            assert "ends at byte" in json.dumps(answer) and "Traceback" not in json.dumps(answer)
        assert other.call("GET", "/health")[1] == {"status": "ok", "running": 0}
    finally:
        other.process.kill()
        other.process.wait()


def test_a_body_that_does_not_come(server: Running) -> None:
    """A client that sends half of a request, and one that reads nothing, keep nobody waiting."""
    with socket.create_connection(("127.0.0.1", server.port)) as half, socket.create_connection(("127.0.0.1", server.port)) as deaf:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{")
        body = json.dumps({"prompt": "def read", "max_tokens": 240, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        deaf.sendall(head.encode() + body)
        assert server.post({"prompt": "a", "max_tokens": 3})[0] == 200
    wait_until(lambda: server.running() == 0)


def test_sigterm(folder: Path, tmp_path: Path, server: Running) -> None:
    """Also after a client has left in the middle of its body: that is no failure of the server."""
    quantised = ["--quant", "int8", "--scratch", str(tmp_path)]
    other = started(folder, "--cpu-budget", "270KiB", *quantised, "--max-model-len", "64", "--batch-size", "1")
    for path in ("completions", "chat/completions"):
        with socket.create_connection(("127.0.0.1", other.port)) as half:
            head = f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{{"
            half.sendall(head.encode())
            assert other.running() == 0
    assert other.post({"prompt": "def", "max_tokens": 5})[0] == 200
    other.process.send_signal(signal.SIGTERM)
    assert other.process.wait(20) == 0
    assert other.process.stderr is not None
    assert not (said := other.process.stderr.read()), said


@pytest.mark.proof
def test_sigterm_under_load(folder: Path, server: Running) -> None:
    """What runs after the grace is told so, in a stream and without; a body that does not come gets an answer; the log has no traceback."""
    other = started(folder, "--batch-size", "1")
    body = {"prompt": ["def read"] * 400, "max_tokens": 240, "temperature": 1.0}
    with ThreadPoolExecutor(2) as pool, socket.create_connection(("127.0.0.1", other.port)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{")
        asked = [pool.submit(other.post, {**body, "stream": stream}) for stream in (False, True)]
        wait_until(lambda: other.running() == 1)
        other.process.send_signal(signal.SIGTERM)
        (plain, said), (_, events) = (one.result() for one in asked)
        assert plain == 500 and "the server was stopped" in said["error"]["message"] and "the server was stopped" in events
        half.settimeout(20)
        assert half.recv(4096).startswith(b"HTTP/1.1 503")
    assert other.process.wait(30) == 0 and other.process.stderr is not None
    assert "Traceback" not in (log := other.process.stderr.read()), log


def test_an_adapter(folder: Path, tmp_path: Path, server: Running) -> None:
    adapter = adapter_of(folder, tmp_path / "adapter")
    body = {"prompt": "def read", "max_tokens": 8, "temperature": 0}
    other = started(folder, "--adapter", str(adapter), "--max-model-len", "64", "--batch-size", "2")
    try:
        said = other.post(body)[1]["choices"][0]["text"]
    finally:
        other.process.kill()
        other.process.wait()
    assert said != server.post(body)[1]["choices"][0]["text"]
    from peft import PeftModel
    from transformers import AutoTokenizer, LlamaForCausalLM

    words, model = AutoTokenizer.from_pretrained(folder), PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folder), adapter)
    ids = torch.tensor([words("def read")["input_ids"]])
    made = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert said == words.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_port_that_is_taken(server: Running, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--model", str(folder), "--port", str(server.port)])
    assert end.value.code == 2 and f"--port {server.port}: Address already in use" in capsys.readouterr().err


def test_keys_and_values_on_the_host_are_for_a_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    for budget in ([], ["--cpu-budget", "1GiB"]):
        with pytest.raises(SystemExit) as end:
            main(["serve", "--model", str(folder), "--offload-cache", *budget])
        assert end.value.code == 2 and "on the CPU keys and values are in host memory already; leave it out" in capsys.readouterr().err


def test_a_folder_for_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    with pytest.raises(SystemExit) as end:
        main(["serve", "--model", str(folder), "--quant", "int8", "--scratch", str(tmp_path)])
    assert end.value.code == 2 and "--scratch: holds layers that are written anew to be streamed, and none are" in capsys.readouterr().err


def test_without_fastapi(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.importing.find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        main(["serve", "--model", str(folder)])
    assert f"needs FastAPI and uvicorn, which are not installed; run {install_line('serve')}" in capsys.readouterr().err


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
