"""Who may ask: keys, before anything else of a request is read."""

import hashlib
import hmac
from collections.abc import Sequence

from .asgi import Scope, header
from .errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})
ADMIN_PREFIX = "/admin/"


class Access:
    """Guards every route but OPEN_PATHS; without clients' keys it lets everybody in, except to the admin routes: those
    want an admin key, and are not there where there is none. An admin key opens every route.
    """

    def __init__(self, api_keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        # Digests have one length, so that comparing takes the same time whatever was sent.
        self._clients = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._admins = [hashlib.sha256(key.encode()).digest() for key in admin_keys]

    def check(self, scope: Scope) -> int | None:
        """The place of the client's key; None where none was needed, or an admin's was sent. Raises ApiError."""
        path = scope["path"]
        if path.startswith(ADMIN_PREFIX):
            self._check_admin(scope)
            return None
        if not self._clients or path in OPEN_PATHS:
            return None
        digest = _digest(scope)
        place = _place(digest, self._clients)
        if place is None and _place(digest, self._admins) is None:
            raise _unknown("the API key is missing or wrong; send the header Authorization: Bearer KEY")
        return place

    def _check_admin(self, scope: Scope) -> None:
        digest = _digest(scope)
        is_client = _place(digest, self._clients) is not None
        if self._clients and not is_client and _place(digest, self._admins) is None:
            raise _unknown("the API key is missing or wrong; send the header Authorization: Bearer KEY")
        if not self._admins:
            raise ApiError(404, "there is no such path; a server that is started with --admin-key has it")
        if is_client:
            raise ApiError(403, "this key is a client's; send an admin key", code="not_an_admin")
        if _place(digest, self._admins) is None:
            raise _unknown("the admin key is missing or wrong; send the header Authorization: Bearer KEY")


def _digest(scope: Scope) -> bytes:
    """Of the key that was sent; of none where the scheme is another."""
    scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
    return hashlib.sha256(key.strip()).digest() if scheme.lower() == b"bearer" else b""


def _place(digest: bytes, known: list[bytes]) -> int | None:
    """All are compared, so that time does not tell which one was near."""
    matches = [hmac.compare_digest(digest, one) for one in known]
    return matches.index(True) if any(matches) else None


def _unknown(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))
