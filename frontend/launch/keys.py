"""Who may ask, as the operator said it: keys from options and files, the certificate, and what is said of an open door.

Read once, before anything is started. Knows nothing of requests.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from ...ipc.conditions import Refusal
from .options import Options


class Keys(Struct, frozen=True, kw_only=True):
    """Of clients, and of those who may use the admin routes too. Without any of the first everybody is a client."""

    clients: tuple[str, ...] = ()
    admins: tuple[str, ...] = ()


def read_keys(options: Options) -> Keys:
    """From options and key files. Raises Refusal."""
    keys = Keys(
        clients=(*options.api_key, *_lines(options.api_key_file, "--api-key-file")),
        admins=(*options.admin_key, *_lines(options.admin_key_file, "--admin-key-file")),
    )
    if shared := set(keys.clients) & set(keys.admins):
        raise Refusal(
            f"client and admin keys have {len(shared)} in common; give each once, since an admin key opens every route"
        )
    if options.max_requests_per_minute != "auto" and not keys.clients:
        raise Refusal("--max-requests-per-minute counts by key, and there is none; add --api-key or --api-key-file")
    return keys


def _lines(file: Path | None, flag: str) -> Iterator[str]:
    """One key a line; empty lines and those that begin with # are none."""
    if file is None:
        return
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{flag} {file} cannot be read ({error}); give a text file with one key a line") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise Refusal(f"{flag} {file} holds no key; write one a line, or leave the option out")
    yield from keys


def check_certificate(options: Options) -> None:
    """That both files are there and belong together. Raises Refusal."""
    certificate, key = options.tls_certificate, options.tls_key
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        given, missing = ("--tls-certificate", "--tls-key") if key is None else ("--tls-key", "--tls-certificate")
        raise Refusal(f"{given} needs {missing} beside it")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise Refusal(
            f"--tls-certificate {certificate} and --tls-key {key} cannot be used ({error}); give a certificate chain "
            "and its own key in PEM form, without a passphrase"
        ) from None


def open_door(options: Options, keys: Keys) -> str | None:
    """What to say of an address that others reach, where they need no key; None where it is closed."""
    if keys.clients or options.host == "localhost":
        return None
    try:
        if ipaddress.ip_address(options.host).is_loopback:
            return None
    except ValueError:
        pass  # a name: it may be anybody's
    return f"warning: whoever reaches {options.host} may use this server: add --api-key, or listen on 127.0.0.1"
