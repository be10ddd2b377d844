"""What the user typed: one frozen struct, and the only place that reads flags, option files and the environment.

Precedence: flags, then `TRIMARAN_*` environment variables, then the YAML file of `--config`, then defaults.
Owns names, defaults, reasons and reading. Settles nothing against facts: "auto" is settled where the facts are.
"""

import difflib
import os
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from msgspec import UNSET, Struct, UnsetType, structs

from ...ipc.configuration import MAX_RANKS
from ...ipc.facts import AttentionStrategy, QueueOrdering
from ..parsing.choosing import REASONING_PARSERS, TOOL_PARSERS
from .option_kinds import (
    BadValue,
    Choice,
    File,
    FileOrFolder,
    Folder,
    Integer,
    Kind,
    Number,
    Pairs,
    Switch,
    Text,
    Texts,
)

PREFIX = "TRIMARAN_"
CONFIG = "config"
Auto = Literal["auto"]
AUTO: Auto = "auto"

DTYPES = ("auto", "float32", "bfloat16", "float16")
PLATFORM = Text("auto, or a platform's name")
LOG_LEVELS = ("info", "warning", "error")
COUNT = Integer(1)
KEYS = Texts("text; repeat the flag; in the environment, commas separate")
COUNT_OR_AUTO = Integer(1, words=(AUTO,))


class OptionError(ValueError):
    """The user's mistake in an option; the text names the option, the value and the cure."""


class Source(StrEnum):
    """Where an option's value came from, strongest first."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


class About(Struct, frozen=True):
    """What an option is for, and how its value is read. The group is its heading in the help."""

    group: str
    kind: Kind
    reason: str


class Options(Struct, frozen=True, kw_only=True):
    """Every option of `trimaran serve` and of `LLM`. Sizes in bytes, times in seconds."""

    model: Annotated[
        str | None,
        About("Model", Text("a folder, a GGUF file or a hub name"), "what to serve"),
    ] = None
    demo_embedding: Annotated[
        bool, About("Model", Switch(), "serve the packaged embedding model instead of the packaged chat model")
    ] = False
    served_model_name: Annotated[
        str | None, About("Model", Text(), "the name clients ask for, instead of the model's own")
    ] = None
    revision: Annotated[str | None, About("Model", Text(), "branch, tag or commit of a hub model")] = None
    tokenizer: Annotated[
        Path | None,
        About("Model", FileOrFolder(), "tokenizer.json or its folder, when the model lacks a right one"),
    ] = None
    chat_template: Annotated[
        Path | None, About("Model", File(), "Jinja file, when the model has no chat template or a wrong one")
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"],
        About("Model", Choice(("auto", "dummy")), "dummy makes random weights, to try a shape without its files"),
    ] = "auto"
    model_code: Annotated[
        Literal["auto", "own", "transformers"],
        About(
            "Model",
            Choice(("auto", "own", "transformers")),
            "whose code computes the model; auto takes transformers' for families that we have none for",
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        About("Model", Choice(DTYPES), "dtype of weights and activations; auto keeps the checkpoint's or a faster one"),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        About("Model", Choice(DTYPES), "dtype of the KV cache; auto is that of the activations"),
    ] = "auto"
    max_model_len: Annotated[
        int | Auto, About("Model", COUNT_OR_AUTO, "longest sequence, prompt and output together, in tokens")
    ] = AUTO
    seed: Annotated[
        int, About("Model", Integer(0, 2**63 - 1), "seeds dummy weights and the draws of requests that bring no seed")
    ] = 0

    host: Annotated[str, About("Server", Text(), "address to listen on; 0.0.0.0 is all of them")] = "127.0.0.1"
    port: Annotated[int, About("Server", Integer(0, 65535), "port to listen on; 0 takes a free one")] = 8000
    frontends: Annotated[
        int, About("Server", Integer(1, 64), "processes that share the port; more carry more streams, a core each")
    ] = 1
    api_key: Annotated[
        tuple[str, ...],
        About(
            "Server",
            KEYS,
            "keys clients must send; the environment hides them from process lists",
        ),
    ] = ()
    api_key_file: Annotated[Path | None, About("Server", File(), "more keys, one a line; # begins a comment")] = None
    admin_key: Annotated[
        tuple[str, ...],
        About(
            "Server",
            KEYS,
            "keys for the /admin routes, which are not there without one",
        ),
    ] = ()
    admin_key_file: Annotated[Path | None, About("Server", File(), "more admin keys, one a line")] = None
    tls_certificate: Annotated[
        Path | None, About("Server", File(), "certificate chain (PEM): HTTPS instead of HTTP, from TLS 1.2 on")
    ] = None
    tls_key: Annotated[Path | None, About("Server", File(), "the certificate's private key (PEM), no passphrase")] = (
        None
    )
    cors_origin: Annotated[
        tuple[str, ...],
        About(
            "Server",
            Texts("origins such as https://app.example; * is all; repeat the flag, or separate by commas", splits=True),
            "web pages of these origins may ask; without it no other page may",
        ),
    ] = ()
    max_requests_per_minute: Annotated[
        int | Auto, About("Server", COUNT_OR_AUTO, "of each key; one more is answered 429; auto is no limit")
    ] = AUTO
    max_queued_requests: Annotated[
        int | Auto, About("Server", COUNT_OR_AUTO, "requests that may wait; one more is answered 429 at once")
    ] = AUTO
    max_queued_tokens: Annotated[
        int | Auto,
        About("Server", COUNT_OR_AUTO, "prompt tokens that may wait; auto follows the KV cache"),
    ] = AUTO
    max_body_bytes: Annotated[int, About("Server", Integer(1024), "largest request body")] = 32 * 1024 * 1024
    max_header_bytes: Annotated[int, About("Server", Integer(8192), "largest request head")] = 64 * 1024
    max_prompts: Annotated[int, About("Server", COUNT, "most prompts in one completions request")] = 2048
    max_n: Annotated[int, About("Server", COUNT, "largest n of a request")] = 128
    max_logprobs: Annotated[int, About("Server", Integer(0), "largest number of log-probabilities per token")] = 20
    max_stop: Annotated[int, About("Server", Integer(0), "most stop strings of a request")] = 16
    max_grammar_bytes: Annotated[
        int, About("Server", COUNT, "largest schema, regex, choice or grammar of a request")
    ] = 1024 * 1024
    grammar_cache: Annotated[int, About("Server", COUNT, "compiled grammars that are kept, those used last")] = 256
    grammar_timeout: Annotated[
        float, About("Server", Number(1, unit="seconds"), "a grammar that takes longer to compile is refused")
    ] = 10.0
    default_max_tokens: Annotated[
        int | Auto,
        About("Server", COUNT_OR_AUTO, "length of an answer where the request has none; auto is what fits"),
    ] = AUTO
    generation_defaults: Annotated[
        bool, About("Server", Switch(), "sampling defaults from the model's generation_config.json")
    ] = True
    matryoshka: Annotated[
        bool, About("Server", Switch(), "let clients cut an embedding model's vectors (dimensions) to any size")
    ] = False
    reranker: Annotated[
        bool, About("Server", Switch(), "score texts by the model's yes and no, as Qwen3-Reranker is trained to answer")
    ] = False
    control_tokens_in_content: Annotated[
        bool, About("Server", Switch(), "let users' text hold control tokens, which lets them forge other roles")
    ] = False
    tool_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "mistral", "deepseek", "plain_json"],
        About("Server", Choice(TOOL_PARSERS), "how the model writes tool calls; auto is as its chat template shows"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think", "mistral", "seed", "cohere"],
        About("Server", Choice(REASONING_PARSERS), "how the model marks its reasoning; auto is as its template shows"),
    ] = "auto"
    trust_request_templates: Annotated[
        bool, About("Server", Switch(), "let requests bring a chat template of their own")
    ] = False
    log_requests: Annotated[bool, About("Server", Switch(), "one line per request, without its text")] = False

    max_num_seqs: Annotated[
        int | Auto, About("Engine", COUNT_OR_AUTO, "sequences that run at once: throughput against latency")
    ] = AUTO
    max_batched_tokens: Annotated[
        int | Auto,
        About("Engine", COUNT_OR_AUTO, "token budget of a step: prefill speed against latency"),
    ] = AUTO
    max_chunk_tokens: Annotated[
        int | Auto, About("Engine", COUNT_OR_AUTO, "most tokens of one prompt in a step; auto is the whole budget")
    ] = AUTO
    prompt_step: Annotated[
        float | Auto,
        About(
            "Engine",
            Number(0.001, unit="seconds", words=(AUTO,)),
            "how long a step with prompts may take while others wait: first tokens against throughput",
        ),
    ] = AUTO
    queue_ordering: Annotated[
        str, About("Engine", Choice((AUTO, *QueueOrdering)), "who is seated first among equals in priority")
    ] = AUTO
    prefix_caching: Annotated[bool, About("Engine", Switch(), "reuse the KV blocks of prompts that begin alike")] = True
    block_size: Annotated[
        int | Auto, About("Engine", Integer(1, 1024, words=(AUTO,)), "tokens per KV block; kernels have a preference")
    ] = AUTO
    num_blocks: Annotated[
        int | Auto, About("Engine", COUNT_OR_AUTO, "KV blocks; auto fills the memory that may be used")
    ] = AUTO

    platform: Annotated[str, About("Device", PLATFORM, "vendor family; auto takes what is there")] = AUTO
    device: Annotated[
        tuple[str, ...],
        About(
            "Device",
            Texts("indices or identifiers (UUIDs); repeat the flag, or separate by commas", splits=True),
            "the devices to use, one per worker; else the first ones",
        ),
    ] = ()
    device_config: Annotated[
        str | None,
        About(
            "Device",
            Text("a capability file, or the name of a packaged one such as hopper"),
            "values that override what is declared and detected; `trimaran diagnose` writes such a file",
        ),
    ] = None
    device_type: Annotated[
        str | None,
        About("Device", Text("a packaged capability file's name"), "--device-config by a node's label, in a cluster"),
    ] = None
    allow_mismatch: Annotated[
        bool, About("Device", Switch(), "take a capability file although it is of another architecture")
    ] = False
    tensor_parallel: Annotated[int, About("Device", Integer(1, MAX_RANKS), "devices to split the model over")] = 1
    memory_utilization: Annotated[
        float, About("Device", Number(0.01, 1.0), "share of device memory to use; the rest is left to others")
    ] = 0.9
    kv_memory_bytes: Annotated[
        int | Auto, About("Device", COUNT_OR_AUTO, "size of the KV cache per device, instead of what memory allows")
    ] = AUTO
    kernel: Annotated[
        dict[str, str],
        About("Device", Pairs(), "pins an implementation, such as paged_attention=plain_paged_attention"),
    ] = {}
    without_kernel: Annotated[
        tuple[str, ...], About("Device", Texts(), "never use this implementation, such as one that misbehaves here")
    ] = ()
    enforce_eager: Annotated[
        bool, About("Device", Switch(), "no captured graphs: slower steps, less memory, easier to debug")
    ] = False
    batch_invariant: Annotated[
        bool, About("Device", Switch(), "the same text alone and in any batch, by slower kernels")
    ] = False
    graph_buckets: Annotated[
        tuple[str, ...],
        About("Device", Texts("numbers of tokens with commas between"), "sizes to capture graphs for, instead of ours"),
    ] = ()
    attention_strategy: Annotated[
        str,
        About("Device", Choice((AUTO, *AttentionStrategy)), "how attention walks the cache; auto follows the device"),
    ] = AUTO
    worker_threads: Annotated[
        int | Auto,
        About("Device", Integer(1, 1024, words=(AUTO,)), "OpenMP threads per worker; auto shares cores out"),
    ] = AUTO
    spin_us: Annotated[
        int,
        About("Device", Integer(0, 1_000_000), "a worker polls so long before it sleeps: quick, but a busy core"),
    ] = 0
    null_script: Annotated[
        str, About("Device", Text(), "words of times and faults for the null platform, such as 'step_ms=10 die_at=50'")
    ] = ""

    watch_interval: Annotated[
        float, About("Life cycle", Number(0, unit="seconds"), "how often device health is read; 0 never")
    ] = 10.0
    drain_timeout: Annotated[
        float, About("Life cycle", Number(0, unit="seconds"), "time for live requests to end after SIGTERM")
    ] = 30.0
    stall_limit: Annotated[
        float, About("Life cycle", Number(1, unit="seconds"), "a step without progress for so long makes /ready fail")
    ] = 20.0
    start_timeout: Annotated[
        float, About("Life cycle", Number(1, unit="seconds"), "a start that takes longer is ended with its cause")
    ] = 1800.0
    memory_growth_limit: Annotated[
        int | Auto,
        About(
            "Life cycle",
            Integer(1 << 20, words=(AUTO,)),
            "bytes a worker may grow by before it is restarted in order; auto is no limit",
        ),
    ] = AUTO
    max_restarts: Annotated[
        int, About("Life cycle", Integer(0, 1000), "restarts in a row of a part that dies, before giving up")
    ] = 5
    cache_dir: Annotated[Path | None, About("Life cycle", Folder(), "converted models and compiled kernels")] = None
    run_dir: Annotated[
        Path | None, About("Life cycle", Folder(), "parent of the private folder for sockets; a short path")
    ] = None
    log_level: Annotated[
        Literal["info", "warning", "error"],
        About("Life cycle", Choice(LOG_LEVELS), "the least important lines to print"),
    ] = "info"

    def cache_folder(self) -> Path:
        """Where converted models and compiled kernels live; made by whoever writes there first."""
        if self.cache_dir is not None:
            return self.cache_dir
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "trimaran"

    def run_parent(self) -> Path:
        """The folder that holds run directories: the user's runtime folder where it exists and can be written."""
        if self.run_dir is not None:
            return self.run_dir
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        if runtime and os.access(runtime, os.W_OK):
            return Path(runtime)
        return Path(tempfile.gettempdir())


class Reading(Struct, frozen=True):
    """Options with the source of each."""

    options: Options
    sources: dict[str, Source]


def _described() -> dict[str, About]:
    hints = get_type_hints(Options, include_extras=True)
    return {name: next(a for a in get_args(hint) if isinstance(a, About)) for name, hint in hints.items()}


ABOUT: Mapping[str, About] = _described()
_SECRETS = ("api_key", "admin_key")
_FOR_CLIENTS = {  # options that mean nothing without HTTP
    *("served_model_name", "host", "port", "frontends", "api_key", "log_requests", "trust_request_templates"),
    *("tool_parser", "reasoning_parser"),
    *("max_body_bytes", "max_header_bytes", "max_prompts", "max_requests_per_minute"),
    *("api_key_file", "admin_key", "admin_key_file", "tls_certificate", "tls_key", "cors_origin"),
}


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def inherited_environment() -> dict[str, str]:
    """The environment this process was started with, for its children to inherit."""
    return dict(os.environ)


def read_options(arguments: Sequence[str], environment: Mapping[str, str]) -> Reading:
    """Reads the options of a command from its arguments, the environment and the YAML file they may name.

    Raises:
        OptionError: an unknown name, a value that is not allowed, or an unreadable file.
    """
    _check_encoding(arguments)
    flags = dict(_read_flags(arguments))
    variables = dict(_read_environment(environment))
    config = flags.pop(CONFIG, variables.pop(CONFIG, None))
    file = {} if config is None else dict(_read_file(str(config)))
    return _settle({Source.FLAG: flags, Source.ENVIRONMENT: variables, Source.FILE: file})


def options_from_keywords(
    keywords: Mapping[str, object],
    environment: Mapping[str, str],
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> Reading:
    """As `read_options`, with keyword arguments of the Python API in the place of flags, and `defaults` in the place of
    the options' own.
    """
    for name in keywords:
        _known(name, f"keyword {name}")
        if name in _FOR_CLIENTS:
            raise OptionError(f"keyword {name}: only for `trimaran serve`, which has clients. Leave it out.")
    variables = dict(_read_environment(environment))
    keywords = {name: value for name, value in keywords.items() if value is not None and value != ""}
    config = keywords.pop(CONFIG, variables.pop(CONFIG, None))
    file = {} if config is None else dict(_read_file(str(config)))
    return _settle({Source.FLAG: keywords, Source.ENVIRONMENT: variables, Source.FILE: file, Source.DEFAULT: defaults})


def _settle(given: Mapping[Source, Mapping[str, object]]) -> Reading:
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name, about in ABOUT.items():
        source = next((source for source, found in given.items() if name in found), None)
        sources[name] = source or Source.DEFAULT
        if source is not None:
            values[name] = _read_value(name, about, given[source][name], source)
    options = Options(**values)
    _check_together(options)
    return Reading(options, sources)


def _read_value(name: str, about: About, raw: object, source: Source) -> object:
    try:
        return about.kind.read(raw)
    except BadValue:
        where = {
            Source.FLAG: flag_name(name),
            Source.ENVIRONMENT: f"environment variable {PREFIX}{name.upper()}",
            Source.FILE: f"{name} in the option file",
        }[source]
        shown = "its value" if name in _SECRETS else repr(raw)
        raise OptionError(f"{where}: {shown} is not allowed. Allowed: {about.kind.allowed}.") from None


def _check_together(options: Options) -> None:
    if options.null_script and options.platform != "null":
        raise OptionError(
            f"--null-script is for the null platform, and --platform is {options.platform!r}. "
            "Use --platform null, or leave --null-script out."
        )
    for size in options.graph_buckets:
        if not size.isdigit() or int(size) < 1:
            raise OptionError(f"--graph-buckets: {size!r} is not allowed. Write numbers of tokens, such as 1,2,4,8.")
    if options.device and len(options.device) != options.tensor_parallel:
        raise OptionError(
            f"--device names {len(options.device)} devices, and --tensor-parallel {options.tensor_parallel} uses "
            f"{options.tensor_parallel}. Name as many as are used, or use --tensor-parallel {len(options.device)}."
        )
    twice = sorted({name for name in options.device if options.device.count(name) > 1})
    if twice:
        raise OptionError(f"--device names {', '.join(twice)} twice. Each worker needs a device of its own.")
    budget, sequences = options.max_batched_tokens, options.max_num_seqs
    if isinstance(budget, int) and isinstance(sequences, int) and budget < sequences:
        raise OptionError(
            f"--max-batched-tokens {budget} is less than --max-num-seqs {sequences}: a step could not hold a token of "
            f"each sequence. Use --max-batched-tokens {sequences} or more, or fewer sequences."
        )


def _check_encoding(arguments: Sequence[str]) -> None:
    """Options travel to other processes as UTF-8."""
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = word.encode(errors="backslashreplace").decode()
            raise OptionError(
                f"{shown}: not readable as text. Rename the file, or set a UTF-8 locale such as LC_ALL=C.UTF-8."
            ) from None


def _known(name: str, where: str) -> None:
    if name in ABOUT or name == CONFIG:
        return
    near = difflib.get_close_matches(name, [*ABOUT, CONFIG], n=1, cutoff=0.4)
    hint = f" Did you mean {flag_name(near[0])}?" if near else ""
    raise OptionError(f"{where}: no such option.{hint} `trimaran serve --help` lists them.")


def _read_flags(arguments: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Pairs of name and raw value. Flags that repeat give a list; one that doesn't may stand only once."""
    found: dict[str, object] = {}
    repeated: dict[str, list[str]] = {}
    words = iter(arguments)
    for word in words:
        if not word.startswith("--"):
            if word.startswith("-") and word != "-":
                raise OptionError(f"{word}: no such option. Options begin with two dashes.")
            _once(found, "model", word, word)
            continue
        name, value = _split_flag(word, words)
        if name in ABOUT and ABOUT[name].kind.repeats:
            repeated.setdefault(name, []).extend([str(value)] if name in _SECRETS else str(value).split(","))
        else:
            _once(found, name, value, word)
    yield from found.items()
    yield from repeated.items()


def _split_flag(word: str, rest: Iterator[str]) -> tuple[str, object]:
    text, equals, value = word[2:].partition("=")
    name = text.replace("-", "_")
    if name.startswith("no_") and name[3:] in ABOUT and isinstance(ABOUT[name[3:]].kind, Switch):
        if equals:
            raise OptionError(f"{word}: a switch takes no value. Use --{text}.")
        return name[3:], False
    _known(name, f"--{text}")
    if equals:
        return name, value
    if name in ABOUT and isinstance(ABOUT[name].kind, Switch):
        return name, True
    given = next(rest, None)
    if given is None or given.startswith("--"):
        allowed = ABOUT[name].kind.allowed if name in ABOUT else "the path of a YAML file"
        raise OptionError(f"--{text} needs a value. Allowed: {allowed}.")
    return name, given


def _once(found: dict[str, object], name: str, value: object, word: str) -> None:
    if name in found:
        raise OptionError(f"{word}: {flag_name(name)} is given twice. Leave one out.")
    found[name] = value


def _read_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    for variable, value in environment.items():
        if variable.startswith(PREFIX) and value != "":
            name = variable.removeprefix(PREFIX).lower()
            _known(name, f"environment variable {variable}")
            yield name, value


def _read_file(path: str) -> Iterator[tuple[str, object]]:
    import yaml  # 25 ms, and most starts have no file

    try:
        content = yaml.safe_load(Path(path).expanduser().read_text())
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror}. Name a readable YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path}: not YAML: {error}. Write lines such as `port: 8000`.") from None
    if content is None:
        return
    if not isinstance(content, dict):
        raise OptionError(f"--config {path}: holds no mapping. Write lines such as `port: 8000`.")
    for key, value in content.items():
        name = str(key).replace("-", "_")
        _known(name, f"{key} in {path}")
        if name == CONFIG:
            raise OptionError(f"config in {path}: an option file cannot name another. Merge the two.")
        if value is not None:
            yield name, value


def help_text() -> str:
    """Every option with its reason, what it allows and its default; the precedence first."""
    lines = [
        "usage: trimaran serve [MODEL] [OPTIONS]",
        "",
        *textwrap.wrap(
            "Serves MODEL over the OpenAI API; without one, the packaged demo model. "
            "Every option may come as a flag (--max-n 64), as an environment variable (TRIMARAN_MAX_N=64) or as "
            "a line of a YAML file (max_n: 64) named by --config. "
            "Flags win over the environment, the environment over the file, the file over defaults.",
            width=100,
        ),
    ]
    defaults = {field.name: field for field in structs.fields(Options)}
    group = ""
    for name, about in ABOUT.items():
        if about.group != group:
            group = about.group
            lines += ["", f"{group}:"]
        flag = flag_name(name)
        if isinstance(about.kind, Switch):
            flag += f" / --no-{flag[2:]}"
        lines.append(f"  {flag}")
        default = defaults[name].default
        notes = f"{about.reason}. Allowed: {about.kind.allowed}." + _shown_default(default)
        lines += textwrap.wrap(notes, width=100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    lines += ["", "Other:", "  --config", "      YAML file of options.", "  --help", "      This text."]
    return "\n".join(lines)


def _shown_default(default: object | UnsetType) -> str:
    if default in (None, (), UNSET) or not isinstance(default, str | int | float):
        return ""
    return f" Default: {str(default).lower() if isinstance(default, bool) else default}."
