"""`trimaran chat`: a conversation with a running server in the terminal, streamed."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from .server_url import server_url


class ChatFailed(Exception):
    """The server did not answer as it should; the text says what it said."""


class Chat:
    """One conversation: each line of input is a turn, an empty line or the end of input ends it."""

    def __init__(self, url: str, *, model: str, api_key: str, system: str, max_tokens: int) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=server_url(url), headers=headers, timeout=httpx.Timeout(10.0, read=None))
        self._model = model
        self._max_tokens = max_tokens
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def talk(self) -> None:
        """Converse until the input ends.

        Raises:
            ChatFailed: no server there, or it answered with an error.
        """
        with self._client:
            try:
                model = self._model or self._first_model()
                while text := _ask():
                    self._turn(model, text)
            except httpx.HTTPError as error:
                raise ChatFailed(f"{self._client.base_url}: {error}. Is `trimaran serve` running there?") from None

    def _turn(self, model: str, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        for piece in self._stream(model):
            pieces.append(piece)
            print(piece, end="", flush=True)
        print()
        self._messages.append({"role": "assistant", "content": "".join(pieces)})

    def _stream(self, model: str) -> Iterator[str]:
        body = {"model": model, "messages": self._messages, "max_tokens": self._max_tokens, "stream": True}
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise ChatFailed(_error_of(response))
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ChatFailed(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices", []):
                    yield choice.get("delta", {}).get("content") or ""

    def _first_model(self) -> str:
        response = self._client.get("/v1/models")
        if response.status_code != 200:
            raise ChatFailed(_error_of(response))
        models: list[dict[str, Any]] = response.json()["data"]
        return str(models[0]["id"])


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _error_of(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code}: {response.text[:300]}"
