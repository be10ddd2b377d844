"""How a user may name a running server."""


def server_url(given: str) -> str:
    """The address that paths are appended to: with a scheme, without the /v1 that clients of the API are given."""
    url = given if "://" in given else f"http://{given}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
