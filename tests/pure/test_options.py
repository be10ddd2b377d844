"""Options: every source, their precedence, and refusals that name the option, the value and the cure."""

from pathlib import Path

import pytest
from msgspec import structs

from trimaran.frontend.launch.options import (
    ABOUT,
    OptionError,
    Options,
    Source,
    help_text,
    options_from_keywords,
    read_options,
)


def read(*arguments: str, **environment: str) -> Options:
    return read_options(arguments, environment).options


def refusal(*arguments: str, **environment: str) -> str:
    with pytest.raises(OptionError) as caught:
        read_options(arguments, environment)
    return str(caught.value)


def test_every_option_says_why_it_exists_and_has_a_default() -> None:
    fields = {field.name: field for field in structs.fields(Options)}
    assert set(fields) == set(ABOUT)
    for name, about in ABOUT.items():
        assert not fields[name].required
        assert 10 <= len(about.reason) <= 90 and not about.reason.endswith("."), name
    assert Options() == read()


def test_every_default_is_allowed_by_its_own_kind() -> None:
    for field in structs.fields(Options):
        if isinstance(field.default, str | int | float) and field.default != "":
            assert ABOUT[field.name].kind.read(field.default) == field.default, field.name


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("port: 1\nmax-n: 1\nmax_stop: 1\n")
    reading = read_options(
        ["--config", str(file), "--port", "3"], {"TRIMARAN_PORT": "2", "TRIMARAN_MAX_N": "2", "HOME": "/"}
    )
    assert (reading.options.port, reading.options.max_n, reading.options.max_stop) == (3, 2, 1)
    assert reading.options.max_logprobs == Options().max_logprobs
    assert reading.sources["port"] is Source.FLAG
    assert reading.sources["max_n"] is Source.ENVIRONMENT
    assert reading.sources["max_stop"] is Source.FILE
    assert reading.sources["max_logprobs"] is Source.DEFAULT
    by_environment = read(TRIMARAN_CONFIG=str(file))
    assert by_environment.max_stop == 1


def test_spellings_of_flags() -> None:
    options = read(
        "some/model", "--max-num-seqs=7", "--no-prefix-caching", "--enforce-eager", "--kernel", "a=b", "--kernel=c=d",
        "--without-kernel", "x,y", "--served-model-name", "m", "--memory-utilization", "0.5", "--max-model-len", "auto",
    )  # fmt: skip
    assert options.model == "some/model"
    assert options.max_num_seqs == 7
    assert options.prefix_caching is False and options.enforce_eager is True
    assert options.kernel == {"a": "b", "c": "d"}
    assert options.without_kernel == ("x", "y")
    assert options.served_model_name == "m"
    assert options.memory_utilization == 0.5
    assert options.max_model_len == "auto"


def test_lists_and_pairs_in_every_source(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("kernel: {a: b}\nwithout_kernel: [x, y]\napi_key: one\n")
    options = read("--config", str(file))
    assert (options.kernel, options.without_kernel, options.api_key) == ({"a": "b"}, ("x", "y"), ("one",))
    options = read(TRIMARAN_KERNEL="a=b,c=d", TRIMARAN_WITHOUT_KERNEL="x,y")
    assert (options.kernel, options.without_kernel) == ({"a": "b", "c": "d"}, ("x", "y"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-num-seq", "4"], ["--max-num-seq", "Did you mean --max-num-seqs?"]),
        (["--port", "70000"], ["--port", "'70000'", "from 0 to 65535"]),
        (["--port", "http"], ["--port", "'http'", "from 0 to 65535"]),
        (["--dtype", "fp8"], ["--dtype", "'fp8'", "auto, float32, bfloat16, float16"]),
        (["--memory-utilization", "1.5"], ["--memory-utilization", "'1.5'", "0.01 to 1"]),
        (["--stall-limit", "nan"], ["--stall-limit", "'nan'", "seconds"]),
        (["--stall-limit", "inf"], ["--stall-limit", "'inf'", "seconds"]),
        (["--chat-template", "/no/such/file"], ["--chat-template", "'/no/such/file'", "readable file"]),
        (["--kernel", "paged_attention"], ["--kernel", "paged_attention", "NAME=VALUE"]),
        (["--kernel", "a=b", "--kernel", "a=c"], ["--kernel", "each name once"]),
        (["--port", "1", "--port", "2"], ["--port", "given twice"]),
        (["a", "b"], ["--model", "given twice"]),
        (["--port"], ["--port needs a value", "65535"]),
        (["--port", "--host"], ["--port needs a value"]),
        (["-p", "1"], ["-p", "two dashes"]),
        (["--no-enforce-eager=1"], ["--no-enforce-eager", "no value"]),
        (["--config", "/no/such.yaml"], ["/no/such.yaml", "No such file", "readable YAML"]),
        (["--platform", "cpu", "--null-script", __file__], ["--null-script", "'cpu'", "--platform null"]),
        (["--max-num-seqs", "9", "--max-batched-tokens", "8"], ["--max-batched-tokens 8", "--max-num-seqs 9"]),
    ],
)
def test_refusals_name_option_value_and_cure(arguments: list[str], words: list[str]) -> None:
    text = refusal(*arguments)
    assert all(word in text for word in words), text


def test_a_key_is_never_printed() -> None:
    assert "sesame" not in refusal("--api-key", "sesame", "--api-key", "")


def test_refusals_of_other_sources(tmp_path: Path) -> None:
    assert "TRIMARAN_PROT: no such option. Did you mean --port?" in refusal(TRIMARAN_PROT="1")
    assert "environment variable TRIMARAN_PORT: 'x' is not allowed" in refusal(TRIMARAN_PORT="x")
    file = tmp_path / "options.yaml"
    for text, expected in [
        ("prot: 1", "prot in"),
        ("port: yes", "port in the option file: True is not allowed"),
        ("port: 1.5", "1.5 is not allowed"),
        ("- port", "holds no mapping"),
        ("a: [", "not YAML"),
        ("config: other.yaml", "cannot name another"),
    ]:
        file.write_text(text)
        assert expected in refusal("--config", str(file))


def test_keywords_of_the_python_api() -> None:
    reading = options_from_keywords({"model": "m", "max_num_seqs": 3, "seed": None, "kernel": {"a": "b"}}, {})
    assert (reading.options.model, reading.options.max_num_seqs, reading.options.kernel) == ("m", 3, {"a": "b"})
    with pytest.raises(OptionError, match="max_num_seq: no such option. Did you mean --max-num-seqs"):
        options_from_keywords({"max_num_seq": 3}, {})
    with pytest.raises(OptionError, match="keyword port: only for `trimaran serve`"):
        options_from_keywords({"port": 3}, {})
    assert options_from_keywords({"model": "m"}, {"TRIMARAN_PORT": "3"}).options.port == 3, "the environment is shared"


def test_defaults_of_the_python_api_give_way() -> None:
    defaults = {"prompt_step": 1.0}
    assert options_from_keywords({"model": "m"}, {}, defaults).options.prompt_step == 1.0
    assert options_from_keywords({"model": "m"}, {"TRIMARAN_PROMPT_STEP": "0.3"}, defaults).options.prompt_step == 0.3
    assert options_from_keywords({"model": "m", "prompt_step": "auto"}, {}, defaults).options.prompt_step == "auto"


def test_a_file_of_options_by_keyword(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("max_n: 3")
    assert options_from_keywords({"config": str(tmp_path / "options.yaml")}, {}).options.max_n == 3


def test_the_help_states_precedence_and_every_option() -> None:
    text = help_text()
    assert "Flags win over the environment" in " ".join(text.split())
    for name in ABOUT:
        assert f"--{name.replace('_', '-')}" in text


def test_folders_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert read().cache_folder() == tmp_path / "c" / "trimaran"
    assert read().run_parent() == tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    assert read().run_parent() != tmp_path / "absent"
    options = read("--cache-dir", str(tmp_path / "x"), "--run-dir", str(tmp_path / "r"))
    assert (options.cache_folder(), options.run_parent()) == (tmp_path / "x", tmp_path / "r")
