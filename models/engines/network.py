"""How a server outside is reached: by which proxy, with which certificates."""

import importlib.util
import ipaddress
import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from grmpipe.models.urls import find_fault

PROXY_SCHEMES = ("http", "https", "socks5", "socks5h")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPath:
    """The way to a server.

    proxy: URL of the proxy, with its password; None: none.
    by:    the proxy in words, for errors, with a space before them; empty: none.
    tls:   the certificates that the environment names; None: the HTTP client's own.
    """

    proxy: str | None = None
    by: str = ""
    tls: ssl.SSLContext | None = None


def find_network_path(url: str) -> NetworkPath:
    """The path to a server by the environment: HTTPS_PROXY, ALL_PROXY, NO_PROXY and the like, but to this machine no
    proxy; SSL_CERT_FILE, SSL_CERT_DIR. Raises ValueError that names the variable.
    """
    parts = urlsplit(url)
    host, tls = parts.hostname or "", load_certificates() if parts.scheme == "https" else None
    proxy, variable = find_proxy(parts)
    if not proxy:
        return NetworkPath(tls=tls)
    shown = re.sub(r"(?<=//)[^/?#]*@", "", proxy)
    named, way_out = f"the proxy {shown} of {variable}", f"or export NO_PROXY={host} to reach {host} without it"
    scheme = urlsplit(proxy).scheme
    if scheme not in PROXY_SCHEMES:
        known = ", ".join(PROXY_SCHEMES)
        raise ValueError(f"{host} would be asked by {named}, which isn't one of {known}; correct it, {way_out}")
    if wrong := find_fault(shown):
        raise ValueError(f"{host} would be asked by {named}, but {wrong}; correct it, {way_out}")
    if scheme.startswith("socks") and importlib.util.find_spec("socksio") is None:
        raise ValueError(
            f"{host} would be asked by {named}, which needs the package socksio; type: pip install 'httpx[socks]', "
            f"{way_out}"
        )
    return NetworkPath(proxy=proxy, by=f" (by {named})", tls=tls)


def find_proxy(parts: SplitResult) -> tuple[str, str]:
    """The proxy of a URL, and the variable that names it; empty if there is none."""
    host, proxies = parts.hostname or "", getproxies()
    scheme = next((name for name in (parts.scheme, "all") if proxies.get(name)), "")
    if not scheme or is_this_machine(host) or proxy_bypass(parts.netloc):
        return "", ""
    proxy = proxies[scheme] if "://" in proxies[scheme] else f"http://{proxies[scheme]}"
    names = [name for name in os.environ if name.lower() == f"{scheme}_proxy"]
    return proxy, min(names, default="the system's settings", key=str.isupper)  # the lower-case one counts


def is_this_machine(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def load_certificates() -> ssl.SSLContext | None:
    """The certificates that the environment names; None if it names none. OpenSSL takes a folder that isn't there for
    an empty one, and every server would be unknown.
    """
    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR"):  # the first that is set counts
        if not (path := os.environ.get(variable)):
            continue
        way_out = f"correct it, or unset {variable} for the usual certificates"
        file, folders = (path, None) if variable == "SSL_CERT_FILE" else (None, path)
        if not any(Path(one).exists() for one in ([file] if file else path.split(os.pathsep))):
            raise ValueError(f"{variable} names {path}, and there is nothing; {way_out}")
        try:
            return ssl.create_default_context(cafile=file, capath=folders)
        except OSError as error:
            raise ValueError(f"{variable} names {path}, which holds no certificates: {error}; {way_out}") from None
    return None
