"""URLs of servers outside, as the configuration names them: what is refused of them, and paths under them."""

import ipaddress
import re
from urllib.parse import urlsplit

KEY_IN_A_VARIABLE = "export the key in an environment variable and give its name as api_key_env"


def check_url(key: str, url: str, instead_of_password: str = KEY_IN_A_VARIABLE, *, allow_query: bool = True) -> None:
    """Check the URL of a server. Raises ValueError that begins with the key.

    URLs are written to logs and files, so none may hold a user name or a password.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{key}: must begin with http:// or https://, got {url!r}")
    if re.match(r"\w+://[^/?#]*@", url):
        host = re.sub(r"^(\w+://)[^/?#]*@", r"\1", url)
        raise ValueError(
            f"{key}: a URL must not contain a user name or a password; type {host!r}, {instead_of_password}"
        )
    wrong = find_fault(url)
    if not wrong and "?" in url and not allow_query:
        wrong = "the address of a server has no query"
    if wrong:
        raise ValueError(f"{key}: {wrong}, got {url!r}; type it as in http://localhost:8000/v1")


def find_fault(url: str) -> str:
    """What makes a URL one that no request can go to; empty: nothing. It is found before the start, because HTTP
    clients find it at the first request, each in words of its own.
    """
    if any(char.isspace() or not char.isprintable() for char in url):
        return "a URL has no spaces or control characters"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:  # a port that is no number or above 65535, an open bracket
        return f"is no URL: {error}"
    if parts.fragment or url.endswith("#"):
        return "a URL of requests has no #fragment"
    if port == 0:
        return "port 0 is none that a server can have"
    try:
        if is_address := bool(re.fullmatch(r"[\d.]+", host)) or ":" in host:
            ipaddress.ip_address(host)
        host.encode("idna")  # labels that are empty or too long
    except ValueError:
        return f"{host!r} is no host"
    return "" if is_address or re.fullmatch(r"[\w.-]+", host) else f"{host!r} is no host"


def join_path(base_url: str, path: str) -> str:
    """The URL of a path under a base, whose query comes last: gateways are told versions and deployments by it."""
    base, mark, query = base_url.partition("?")
    return base.rstrip("/") + path + mark + query
