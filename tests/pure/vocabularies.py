"""Small tokenizers of every kind, made in the test run, in directories as models have them."""

import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = list(pydoc_data.topics.topics.values())[:40] + ["naïve café 漢字 かな 🙂🙃 👩‍👩‍👧 Ελληνικά"] * 5

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + "
    "' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)


def save(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """Write a tokenizer and its configuration as a model directory has them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settled = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settled))
    return directory


def _special(texts: list[str]) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def byte_level_chatml(directory: Path) -> Path:
    """GPT-2 style with ChatML markup; an added token that is not special too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(_special(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return save(directory, tokenizer, eos_token="<|im_end|>", chat_template=CHATML)


def byte_level_llama3(directory: Path) -> Path:
    """Llama 3 style: BOS in the template and in the post-processor."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    texts = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens(_special(texts))
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    return save(directory, tokenizer, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", chat_template=LLAMA3)


def sentence_piece_bpe(directory: Path) -> Path:
    """Llama 2 style: spaces as U+2581, bytes as <0xNN>, a prefix space, BOS by the post-processor."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=_special(specials + [f"<0x{byte:02X}>" for byte in range(256)]),
        limit_alphabet=80,
        show_progress=False,
        max_token_length=8,
    )
    tokenizer.train_from_iterator([line for text in CORPUS[:3] for line in text.split()], trainer)
    source = json.loads(tokenizer.to_str())
    source["added_tokens"] = [token for token in source["added_tokens"] if token["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(source))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return save(directory, tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=MISTRAL)


def unigram_metaspace(directory: Path) -> Path:
    """T5 and newer Gemma style: Unigram with Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False, max_piece_length=6
    )
    tokenizer.train_from_iterator([line for text in CORPUS[:6] for line in text.split()], trainer)
    tokenizer.add_special_tokens(_special(["<|im_start|>", "<|im_end|>"]))
    return save(directory, tokenizer, eos_token="<|im_end|>", unk_token="<unk>", chat_template=CHATML)


TOOL_CHATML = (
    "{% if tools %}{{'<|im_start|>system\n'}}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    '{{\'<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n\'}}{% endif %}'
    "{% for document in documents or [] %}{{ document.title + ': ' + document.text + '\n' }}{% endfor %}"
    "{% for message in messages %}{{'<|im_start|>' + message.role + '\n' + message.content.split('</think>')[-1]}}"
    "{% for call in message.tool_calls or [] %}{{'<tool_call>' + call.function.name + ' '}}"
    "{{ call.function.arguments | tojson }}{{'</tool_call>'}}{% endfor %}{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined %}"
    "{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def byte_level_tools(directory: Path) -> Path:
    """Hermes calls and <think>, in added tokens that are no control tokens, as Qwen3 has them."""
    tokenizer = _byte_level()
    tokenizer.add_special_tokens(_special(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    return save(directory, tokenizer, eos_token="<|im_end|>", chat_template=TOOL_CHATML)


def byte_level_mistral_tools(directory: Path) -> Path:
    """Mistral's newer calls, whose tags are control tokens."""
    tokenizer = _byte_level()
    tokenizer.add_special_tokens(_special(["</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"]))
    template = (
        "{% for message in messages %}{{ '[INST]' + message.content + '[/INST]' }}"
        "{% for call in message.tool_calls or [] %}{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}"
        "{{ call.function.arguments }}{% endfor %}{% endfor %}"
    )
    return save(directory, tokenizer, eos_token="</s>", chat_template=template)


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def qwen_like(directory: Path) -> Path:
    """Qwen style: NFC, a splitting pattern, added tokens that are not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(_special(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "<think>")])
    template = CHATML.replace("{% for", "{%- if tools %}tools{% endif %}\n{% for", 1)
    return save(directory, tokenizer, add_bos_token=False, eos_token="<|im_end|>", chat_template=template)


def gemma_like(directory: Path) -> Path:
    """Gemma style: spaces replaced, no prefix, byte fallback, BOS in the template and by the post-processor."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=_special(specials + [f"<0x{byte:02X}>" for byte in range(256)]),
        limit_alphabet=80,
        show_progress=False,
        max_token_length=8,
    )
    tokenizer.train_from_iterator([line for text in CORPUS[:3] for line in text.splitlines()], trainer)
    source = json.loads(tokenizer.to_str())
    source["added_tokens"] = [token for token in source["added_tokens"] if token["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(source))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    template = (
        "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' + "
        "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{'<start_of_turn>model\n'}}{% endif %}"
    )
    return save(directory, tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", chat_template=template)


def phi_like(directory: Path) -> Path:
    """Phi-3 style: a Llama 2 vocabulary whose markers take the white space after them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=_special(["<unk>", "<s>"] + [f"<0x{byte:02X}>" for byte in range(256)]),
        limit_alphabet=80,
        show_progress=False,
        max_token_length=8,
    )
    tokenizer.train_from_iterator([line for text in CORPUS[:3] for line in text.split()], trainer)
    source = json.loads(tokenizer.to_str())
    source["added_tokens"] = [token for token in source["added_tokens"] if token["content"] in ("<unk>", "<s>")]
    tokenizer = Tokenizer.from_str(json.dumps(source))
    markers = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False, rstrip=True) for text in markers])
    template = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    return save(directory, tokenizer, eos_token="<|end|>", unk_token="<unk>", chat_template=template)


KINDS = {
    "qwen_like": qwen_like,
    "gemma_like": gemma_like,
    "phi_like": phi_like,
    "byte_level_chatml": byte_level_chatml,
    "byte_level_llama3": byte_level_llama3,
    "sentence_piece_bpe": sentence_piece_bpe,
    "unigram_metaspace": unigram_metaspace,
}
