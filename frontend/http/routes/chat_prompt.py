"""The prompt of a conversation, through the model's chat template."""

from typing import Any, NamedTuple

from ...client.refusals import RequestRefused
from ...client.thinking import Thinking, thinking_after
from ...client.tools import template_call, template_tool
from ...text.template import ChatTemplate
from ..errors import ApiError
from ..schema.chat import ChatInput, ChatMessage
from ..serving import ServedModel, Serving

_MESSAGE_COST = 64  # characters: what rendering a message costs beside its text


class ChatPrompt(NamedTuple):
    """A conversation as the model sees it."""

    token_ids: list[int]
    thinking: Thinking


async def chat_prompt(serving: Serving, request: ChatInput, model: ServedModel) -> ChatPrompt:
    """Raises RequestRefused, TemplateRefusal."""
    _check_template_fields(serving, request)
    messages = [_template_message(index, message) for index, message in enumerate(request.messages)]
    tools = [template_tool(tool) for tool in request.tools or ()]
    size = sum(len(message["content"]) + _MESSAGE_COST for message in messages) + len(repr(tools))

    def work() -> ChatPrompt:
        template = _template(request, model)
        arguments = dict(request.chat_template_kwargs or {})
        arguments |= {name: value for name, value in (("tools", tools), ("documents", request.documents)) if value}
        if request.documents and not template.knows_documents:
            raise RequestRefused(
                "documents: this model's chat template does not take documents; put them into a message",
                param="documents",
            )
        rendered = template.render(
            messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            control_tokens_in_content=serving.configuration.control_tokens_in_content,
            arguments=arguments,
        )
        continued = messages[-1]["content"] if request.continue_final_message else None
        thinking = thinking_after(rendered, continued, model.parsers.reasoning_format)
        return ChatPrompt(model.text.tokenizer.encode_rendered(rendered), thinking)

    return await serving.text_work.run(size, work)


def _template(request: ChatInput, model: ServedModel) -> ChatTemplate:
    if request.chat_template is not None:
        return ChatTemplate(request.chat_template, model.text.tokenizer)
    if model.text.template is None:
        raise ApiError(
            400,
            "this model has no chat template, so it cannot chat; start the server with --chat-template FILE, "
            "or use /v1/completions",
            code="no_chat_template",
        )
    return model.text.template


def _check_template_fields(serving: Serving, request: ChatInput) -> None:
    arguments = request.chat_template_kwargs or {}
    is_given = request.chat_template is not None or "chat_template" in arguments
    if is_given and not serving.configuration.trust_request_templates:
        raise RequestRefused("chat_template: this server does not run templates from requests", param="chat_template")
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestRefused(
            "continue_final_message: not together with add_generation_prompt", param="continue_final_message"
        )


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    param = f"messages[{index}].content"
    content = _flat_content(param, message)
    if content is None and message.role != "assistant":
        raise RequestRefused(f"{param}: a {message.role} message needs content", param=param)
    told = {"role": message.role, "content": content or ""}
    extra = {
        "name": message.name,
        "reasoning_content": message.reasoning if message.reasoning_content is None else message.reasoning_content,
        "tool_call_id": message.tool_call_id,
        "tool_calls": None if message.tool_calls is None else [template_call(call) for call in message.tool_calls],
    }
    return told | {name: value for name, value in extra.items() if value is not None}


def _flat_content(param: str, message: ChatMessage) -> str | None:
    if message.content is None or isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for position, part in enumerate(message.content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise RequestRefused(
                f"{param}[{position}].type: content of type {part.type!r} is not supported by this server; send text",
                param=f"{param}[{position}].type",
            )
        if text is None:
            raise RequestRefused(f"{param}[{position}]: a text part needs text", param=f"{param}[{position}].text")
        texts.append(text)
    return "\n".join(texts)
