"""A URL that no request can go to is refused by its key, before anything starts."""

from __future__ import annotations

import pytest

from grmpipe.config.env import mcp_server
from grmpipe.models.settings import OpenAIConfig, SglangConfig
from grmpipe.models.urls import check_url, join_path

WRONG = [
    ("api.openai.com/v1", "must begin with http:// or https://"),
    ("ftp://host", "must begin with http:// or https://"),
    (" https://host", "must begin with http:// or https://"),
    ("http://host:99999/v1", "Port out of range 0-65535"),
    ("http://host:0", "port 0"),
    ("http://host:abc", "Port could not be cast"),
    ("http://ho st/v1", "no spaces or control characters"),
    ("http://host/v1\x1b[2J", "no spaces or control characters"),
    ("http:///v1", "'' is no host"),
    ("http://<host>/v1", "'<host>' is no host"),
    ("http://$HOST/v1", "is no host"),
    ("http://a..b/v1", "'a..b' is no host"),
    ("http://999.1.1.1/v1", "'999.1.1.1' is no host"),
    ("http://[::1/v1", "Invalid IPv6 URL"),
    ("http://host/v1#models", "no #fragment"),
]


@pytest.mark.parametrize(("url", "words"), WRONG)
def test_a_url_that_no_request_can_go_to_is_refused_by_each_key_of_a_url(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^base_url: .*{words}"):
        OpenAIConfig(base_url=url)
    with pytest.raises(ValueError, match=rf"^urls: .*{words}"):
        SglangConfig(urls=["http://localhost:30000", url])
    with pytest.raises(ValueError, match=rf"^mcp\.search\.url: .*{words}"):
        mcp_server("search", {"url": url})


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match=r"^urls: .* type 'http://host/v1', export the key") as refused:
        SglangConfig(urls=["http://joe:hunter22@host/v1"])
    assert "hunter22" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["http://localhost:8000/v1", "https://höst.example/v1", "http://[::1]:8000/v1", "http://10.0.0.1", "http://my_host/",
     "https://x.azure.com/openai/deployments/g?api-version=2024-06-01"],
)  # fmt: skip
def test_urls_of_servers_pass(url: str) -> None:
    check_url("base_url", url)


def test_a_query_is_of_an_endpoint_and_not_of_a_joined_server() -> None:
    with pytest.raises(ValueError, match="^urls: the address of a server has no query"):
        SglangConfig(urls=["http://host:30000?x=1"])


@pytest.mark.parametrize("base", ["http://h/v1", "http://h/v1/"])
def test_a_path_comes_before_the_query(base: str) -> None:
    assert join_path(base, "/chat") == "http://h/v1/chat"
    assert join_path(f"{base}?a=1&b=2/", "/chat") == "http://h/v1/chat?a=1&b=2/"
