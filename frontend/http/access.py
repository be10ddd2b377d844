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
        is_for_admins = path.startswith(ADMIN_PREFIX)
        if path in OPEN_PATHS or not (self._clients or is_for_admins):
            return None
        digest = _digest(scope)
        place, is_admin = _place(digest, self._clients), _place(digest, self._admins) is not None
        if is_admin:
            return None
        if place is None and (self._clients or self._admins):
            raise ApiError(
                401,
                f"the {'admin' if is_for_admins else 'API'} key is missing or wrong; send the header Authorization: "
                "Bearer KEY",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        if is_for_admins and not self._admins:
            raise ApiError(404, "there are no admin routes; start the server with --admin-key to have them")
        if is_for_admins:
            raise ApiError(403, "this key is a client's; send an admin key", code="not_an_admin")
        return place


def _digest(scope: Scope) -> bytes:
    """Of the key that was sent; of none where the scheme is another."""
    scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
    return hashlib.sha256(key.strip()).digest() if scheme.lower() == b"bearer" else b""


def _place(digest: bytes, known: list[bytes]) -> int | None:
    """All are compared, so that time does not tell which one was near."""
    matches = [hmac.compare_digest(digest, one) for one in known]
    return matches.index(True) if any(matches) else None
