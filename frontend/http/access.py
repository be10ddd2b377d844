"""Who may ask: API keys, before anything else of a request is read."""

import hashlib
import hmac

from .asgi import Scope, header
from .errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})


class Access:
    """Guards every route but OPEN_PATHS; without keys it lets everybody in."""

    def __init__(self, api_keys: tuple[str, ...]) -> None:
        # Digests have one length, so that comparing takes the same time whatever was sent.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    def check(self, scope: Scope) -> None:
        """Raises ApiError 401."""
        if not self._digests or scope["path"] in OPEN_PATHS:
            return
        sent = header(scope, b"authorization") or b""
        scheme, _, key = sent.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
