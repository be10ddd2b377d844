"""POST /tokenize and /detokenize."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...client.refusals import RequestRefused
from ..asgi import read_json_body
from ..schema.chat import ChatInput
from ..schema.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from ..serving import ServedModel, Serving
from .chat_prompt import chat_prompt

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


class TokenRoutes:
    """What the tokenizer makes of a text, exactly as a request's prompt is made."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def routes(self) -> list[Route]:
        """For the router."""
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Text or messages to ids."""
        served = self._serving.ready_model()
        asked = _TOKENIZE.decode(await self._body(request))
        self._serving.check_model_name(asked.model)
        asked.check()
        ids = await self._ids(asked, served)
        limits = self._serving.client.limits
        answer = TokenizeResponse(
            count=len(ids),
            max_model_len=None if limits is None else limits.max_model_len,
            tokens=ids,
            token_strs=served.text.tokenizer.token_texts(ids) if asked.return_token_strs else None,
        )
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Ids to text."""
        served = self._serving.ready_model()
        asked = _DETOKENIZE.decode(await self._body(request))
        self._serving.check_model_name(asked.model)
        size = served.text.tokenizer.vocab_size
        for id in asked.tokens:
            if not 0 <= id < size:
                raise RequestRefused(
                    f"tokens: token id {id} is outside this tokenizer's vocabulary of {size}", param="tokens"
                )
        text = await self._serving.text_work.run(
            len(asked.tokens), lambda: served.text.tokenizer.decode(asked.tokens, skip_special_tokens=False)
        )
        return Response(msgspec.json.encode(DetokenizeResponse(text)), media_type="application/json")

    async def _ids(self, asked: TokenizeRequest, served: ServedModel) -> list[int]:
        if asked.messages:
            chat = ChatInput(
                messages=asked.messages,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                chat_template=asked.chat_template,
                chat_template_kwargs=asked.chat_template_kwargs,
                tools=asked.tools,
                documents=asked.documents,
            )
            return (await chat_prompt(self._serving, chat, served)).token_ids
        text, adds_special = asked.prompt or "", asked.add_special_tokens is not False
        return await self._serving.text_work.run(
            len(text), lambda: served.text.tokenizer.encode(text, add_special_tokens=adds_special)
        )

    async def _body(self, request: Request) -> bytes | bytearray:
        return await read_json_body(request.scope, request.receive, self._serving.limits.max_body_bytes)
