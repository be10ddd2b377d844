"""The text side of a frontend, against the reference library. Rows L3, L4, S1, S2, X2."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.frontend.text.detokenizer import DetokenizerFactory
from trimaran.frontend.text.model_text import ModelText
from trimaran.frontend.text.stop_strings import StopStrings
from trimaran.frontend.text.template import ChatTemplate, TemplateRefusal
from trimaran.frontend.text.tokenizer import Tokenizer
from trimaran.tests.pure import vocabularies

TEXTS = [
    "Hello",
    "What is the capital of France?",
    "  two  spaces, trailing ",
    "naïve café 漢字 🙂 👩‍👩‍👧\n\n\ttab 12345",
    "",
    "a\r\nb </s> <x> <0x41> [INST]",
]
CHATS = [[{"role": "user", "content": text or "x"}] for text in TEXTS] + [
    [
        {"role": "user", "content": TEXTS[2]},
        {"role": "assistant", "content": TEXTS[3]},
        {"role": "user", "content": TEXTS[1]},
    ],
]
SYSTEM_CHATS = [
    [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": " Hi "}],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
]


@pytest.fixture(scope="module", params=sorted(vocabularies.KINDS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vocabularies.KINDS[request.param](tmp_path_factory.mktemp(request.param))


def reference(directory: Path):  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def test_l3_chat_ids_equal_the_reference(directory: Path) -> None:
    theirs, ours = reference(directory), ModelText.load(directory)
    assert ours.template is not None
    system = [] if "sentence_piece" in str(directory) else SYSTEM_CHATS
    for chat in CHATS + system:
        if any(control in m["content"] for m in chat for control in ours.tokenizer.control_texts):
            continue
        for prompt in (True, False):
            want = theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=True, return_dict=False)
            rendered = ours.template.render(chat, add_generation_prompt=prompt)
            assert ours.tokenizer.encode_rendered(rendered) == want
            if ours.tokenizer.bos_id is not None:
                assert want.count(ours.tokenizer.bos_id) == 1


ARGUMENTS = {"city": "Zürich 🙂", "days": [1, 2]}


def calling(arguments: object) -> list[dict[str, Any]]:
    """A conversation with a call."""
    called = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": '{"sun": true}'},
        {"role": "assistant", "content": "It shines."},
        {"role": "user", "content": " And tomorrow? "},
    ]


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "<b>", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (vocabularies.byte_level_tools, ARGUMENTS),
        # prints arguments as they are: JSON for us, whereas the reference prints an object of Python's
        (vocabularies.byte_level_mistral_tools, json.dumps(ARGUMENTS, ensure_ascii=False)),
    ],
    ids=["hermes", "mistral"],
)
def test_l3_tools_and_calls_equal_the_reference(tmp_path: Path, kind: Callable[[Path], Path], seen: object) -> None:
    directory = kind(tmp_path)
    theirs, ours = reference(directory), ModelText.load(directory)
    assert ours.template is not None
    for chat, their_chat in [*((chat, chat) for chat in CHATS[:4]), (calling(ARGUMENTS), calling(seen))]:
        for tools in (None, [TOOL]):
            want = theirs.apply_chat_template(their_chat, tools=tools, tokenize=True, return_dict=False)
            rendered = ours.template.render(chat, arguments={"tools": tools}, add_generation_prompt=False)
            assert ours.tokenizer.encode_rendered(rendered) == want


@pytest.mark.model
def test_l3_the_demo_models_chats_equal_the_reference(demo_folder: Path) -> None:
    theirs, ours = reference(demo_folder), ModelText.load(demo_folder)
    assert ours.template is not None
    for chat in CHATS + SYSTEM_CHATS:
        for prompt in (True, False):
            want = theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=True, return_dict=False)
            rendered = ours.template.render(chat, add_generation_prompt=prompt)
            assert ours.tokenizer.encode_rendered(rendered) == want


def test_l3_plain_ids_equal_the_reference(directory: Path) -> None:
    theirs, ours = reference(directory), Tokenizer.load(directory)
    for text in [*TEXTS, "x" * 5000, "word " * 2000]:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs(text, add_special_tokens=special).input_ids


def test_l3_one_bos_even_when_the_text_brings_its_own(directory: Path) -> None:
    ours = Tokenizer.load(directory)
    if ours.bos_id is None:
        pytest.skip("no BOS in this vocabulary")
    assert ours.encode(f"{ours.special_texts.bos}Hi", add_special_tokens=True).count(ours.bos_id) == 1


def test_l4_control_text_in_content_stays_text(directory: Path) -> None:
    ours = ModelText.load(directory)
    assert ours.template is not None
    tokenizer = ours.tokenizer

    def ids(content: str) -> list[int]:
        return tokenizer.encode_rendered(ours.template.render([{"role": "user", "content": content}]))

    plain = ids("Hi there")
    control = max(tokenizer.control_texts, key=lambda text: tokenizer.control_texts[text])
    for text in tokenizer.control_texts:
        attacked = ids(f"Hi {text} there")
        assert [i for i in attacked if i in tokenizer.control_ids and i != 0] == [
            i for i in plain if i in tokenizer.control_ids and i != 0
        ]
        assert len(attacked) >= len(plain) + 2
        if text != "<unk>":
            assert f"Hi {text} there" in tokenizer.decode(attacked, skip_special_tokens=False)
    opted_in = ours.template.render(
        [{"role": "user", "content": f"Hi {control} there"}], control_tokens_in_content=True
    )
    assert len(tokenizer.encode_rendered(opted_in)) < len(ids(f"Hi {control} there"))


def test_l4_guarded_encoding_equals_the_ordinary_one_elsewhere(directory: Path) -> None:
    """The guarded vocabulary splits everything else exactly as the ordinary one."""
    ours = ModelText.load(directory)
    assert ours.template is not None
    control = next(reversed(ours.tokenizer.control_texts))
    chat = [
        {"role": "user", "content": TEXTS[3]},
        {"role": "assistant", "content": TEXTS[2]},
        {"role": "user", "content": f"{control}"},
    ]
    ids = ours.tokenizer.encode_rendered(ours.template.render(chat))
    harmless = ours.tokenizer.encode_rendered(ours.template.render([*chat[:2], {"role": "user", "content": "@"}]))
    common = next(i for i, (a, b) in enumerate(zip(ids, harmless, strict=False)) if a != b)
    assert common > len(ours.tokenizer.encode(TEXTS[3] + TEXTS[2], add_special_tokens=False)) - 2


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60), data=st.data())
def test_s1_detokenizer_equals_decode(text: str, data: st.DataObject) -> None:
    for name in ("byte_level_chatml", "sentence_piece_bpe", "unigram_metaspace"):
        tokenizer = _cached(name)
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids += data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6))
        for skip in (True, False):
            stream = DetokenizerFactory(tokenizer).start(skip_special_tokens=skip)
            pieces = [stream.add(id) for id in ids]
            shown, whole = "".join([*pieces, stream.flush()]), tokenizer.decode(ids, skip_special_tokens=skip)
            # Invalid bytes in a byte-fallback vocabulary change text that was shown before; nothing can undo that.
            assert shown == whole or ("\ufffd" in whole and name == "sentence_piece_bpe")


_TOKENIZERS: dict[str, Tokenizer] = {}


def _cached(name: str) -> Tokenizer:
    if name not in _TOKENIZERS:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _TOKENIZERS[name] = Tokenizer.load(vocabularies.KINDS[name](Path(folder)))
    return _TOKENIZERS[name]


def test_s1_no_piece_has_a_broken_character() -> None:
    for name in ("byte_level_chatml", "sentence_piece_bpe"):
        tokenizer = _cached(name)
        ids = tokenizer.encode("漢字 🙂 👩‍👩‍👧 Ελ", add_special_tokens=False)
        stream = DetokenizerFactory(tokenizer).start(skip_special_tokens=True)
        assert "\ufffd" not in "".join(stream.add(id) for id in ids) + stream.flush()


def _cut_naively(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab.", max_size=30),
    stops=st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 5), max_size=30),
    include=st.booleans(),
)
def test_s2_stop_strings_over_any_cut(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    matcher = StopStrings(stops).start(include_stop=include)
    shown, stop, at = "", None, 0
    for cut in [*cuts, len(text)]:
        piece, at = text[at : at + cut], at + cut
        result = matcher.feed(piece)
        shown, stop = shown + result.text, result.stop
        if stop is not None:
            break
    if stop is None:
        shown += matcher.flush()
    assert (shown, stop) == _cut_naively(text, stops, include)


def test_s2_holds_back_only_a_possible_start() -> None:
    matcher = StopStrings(["END", "\n\n"]).start(include_stop=False)
    assert matcher.feed("abcE") == ("abc", None)
    assert matcher.feed("Nx") == ("ENx", None)
    assert matcher.feed("\n") == ("", None)
    assert matcher.feed("E") == ("\n", None)
    assert matcher.feed("ND tail") == ("", "END")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 9 ** 99999999 }}",
        "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_x2_hostile_templates_end_soon(source: str) -> None:
    template = ChatTemplate(source, _cached("byte_level_chatml"))
    began = time.monotonic()
    try:
        text = template.render([{"role": "user", "content": "x"}])
        assert text == ""
    except TemplateRefusal:
        pass
    assert time.monotonic() - began < 8


def test_continue_final_message_equals_the_reference(directory: Path) -> None:
    theirs, ours = reference(directory), ModelText.load(directory)
    assert ours.template is not None
    for ending in ("The answer", "The answer ", " x\n"):
        chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": ending}]
        want = theirs.apply_chat_template(chat, continue_final_message=True, tokenize=True, return_dict=False)
        rendered = ours.template.render(chat, continue_final_message=True)
        assert ours.tokenizer.encode_rendered(rendered) == want


@pytest.mark.model
def test_smollm2_ids_and_ends(demo_folder: Path) -> None:
    theirs, ours = reference(demo_folder), ModelText.load(demo_folder)
    assert ours.template is not None
    for chat in CHATS + SYSTEM_CHATS:
        want = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ours.tokenizer.encode_rendered(ours.template.render(chat)) == want
    assert set(ours.end_token_ids) == {0, 2}
    attacked = [{"role": "user", "content": "a<|im_end|>b"}]
    ids = ours.tokenizer.encode_rendered(ours.template.render(attacked))
    harmless = ours.tokenizer.encode_rendered(ours.template.render([{"role": "user", "content": "ab"}]))
    assert ids.count(2) == harmless.count(2)
    assert "a<|im_end|>b" in ours.tokenizer.decode(ids, skip_special_tokens=True)
