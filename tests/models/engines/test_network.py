"""Proxies and certificates of the environment: what is used is named, and what can't be used is refused by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import certifi
import pytest

from grmpipe.models.engines.network import find_network_path
from grmpipe.models.engines.openai.openai_engine import OpenAIEngine
from grmpipe.models.settings import OpenAIConfig
from grmpipe.models.types import Message, RequestContext, SamplingParams

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


class Proxy(BaseHTTPRequestHandler):
    """Refuses each request, and notes what was asked."""

    asked: list[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path)
        self.send_response(407)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[HTTPServer]:
    Proxy.asked = []
    server = HTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(base_url: str) -> str:
    """The words of the error."""

    async def chat() -> None:
        engine = OpenAIEngine("m", "grm", OpenAIConfig(base_url=base_url, api_key_env="", max_retries=0))
        context = RequestContext(request_id="r", group_id="g", role="grm")
        try:
            await engine.chat((Message(role="user", content="?"),), SamplingParams(max_new_tokens=4), context)
        finally:
            await engine.close()

    with pytest.raises(Exception) as failed:
        asyncio.run(chat())
    return str(failed.value)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_is_asked_and_named_with_its_variable_and_without_its_password(
    environment: pytest.MonkeyPatch, proxy: HTTPServer, variable: str
) -> None:
    address = f"127.0.0.1:{proxy.server_port}"
    environment.setenv(variable, f"http://joe:hunter22@{address}")
    words = ask("http://judge.example/v1")
    assert Proxy.asked == ["http://judge.example/v1/chat/completions"]
    named = f"judge.example (by the proxy http://{address} of {variable}) answered HTTP 407"
    assert words.startswith(f"engine.openai.base_url: {named}") and "hunter22" not in words


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.9.9.9", "0.0.0.0", "judge.localhost"])
def test_this_machine_is_never_reached_by_a_proxy(environment: pytest.MonkeyPatch, host: str) -> None:
    environment.setenv("HTTP_PROXY", "http://proxy:3128")
    environment.setenv("ALL_PROXY", "socks5://proxy:1080")
    assert find_network_path(f"http://{host}:9/v1").proxy is None


def test_a_judge_on_this_machine_is_asked_itself(environment: pytest.MonkeyPatch, proxy: HTTPServer) -> None:
    environment.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
    assert ask("http://127.0.0.1:9/v1").startswith("127.0.0.1 gave no answer")
    assert Proxy.asked == []


@pytest.mark.parametrize(
    ("no_proxy", "proxied"),
    [("example", False), (".example", False), ("judge.example:80", True), ("*", False), ("other", True)],
)
def test_no_proxy_is_heeded(environment: pytest.MonkeyPatch, no_proxy: str, proxied: bool) -> None:
    environment.setenv("HTTPS_PROXY", "proxy:3128")
    environment.setenv("NO_PROXY", no_proxy)
    assert find_network_path("https://judge.example/v1").proxy == ("http://proxy:3128" if proxied else None)


@pytest.mark.parametrize(
    ("proxy_url", "words"),
    [
        ("socks5://joe:hunter22@proxy:1080", r"ALL_PROXY, which needs the package socksio; type: pip install"),
        ("ftp://proxy", r"ALL_PROXY, which isn't one of http, https, socks5, socks5h"),
        ("http://proxy:99999", r"ALL_PROXY, but is no URL: Port out of range"),
        ("http://pro xy", r"ALL_PROXY, but a URL has no spaces"),
    ],
)
def test_a_proxy_that_cant_be_used_is_refused_by_its_variable(
    environment: pytest.MonkeyPatch, proxy_url: str, words: str
) -> None:
    environment.setattr("importlib.util.find_spec", lambda name: None)
    environment.setenv("ALL_PROXY", proxy_url)
    with pytest.raises(ValueError, match=rf"^judge\.example would be asked .* of {words}") as refused:
        find_network_path("https://judge.example/v1")
    assert "export NO_PROXY=judge.example" in str(refused.value) and "hunter22" not in str(refused.value)


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_certificates_that_arent_there_are_named_by_their_variable(
    environment: pytest.MonkeyPatch, variable: str, tmp_path: Path
) -> None:
    environment.setenv(variable, str(tmp_path / "none"))
    with pytest.raises(ValueError, match=rf"^{variable} names .*none, and there is nothing; .*unset {variable}"):
        find_network_path("https://judge.example/v1")
    assert find_network_path("http://127.0.0.1:8000/v1").tls is None


def test_a_file_without_certificates_is_refused_and_one_with_them_counts(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    environment.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with pytest.raises(ValueError, match=r"^SSL_CERT_FILE names .*ca\.pem, which holds no certificates"):
        find_network_path("https://judge.example/v1")
    environment.setenv("SSL_CERT_FILE", certifi.where())
    assert find_network_path("https://judge.example/v1").tls is not None
    environment.delenv("SSL_CERT_FILE")
    environment.setenv("SSL_CERT_DIR", f"{tmp_path}:{tmp_path / 'none'}")
    assert find_network_path("https://judge.example/v1").tls is not None
