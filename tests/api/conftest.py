"""A real frontend process over a scripted core."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from trimaran.frontend.text.model_text import ModelText
from trimaran.ipc.server_info import EngineLimits
from trimaran.tests.api.fake_core import FakeCore, echo
from trimaran.tests.api.frontend_process import FrontendProcess
from trimaran.tests.pure import vocabularies

CONTEXT = 2048


@dataclass
class Served:
    """What a test talks to."""

    core: FakeCore
    frontend: FrontendProcess
    model: ModelText
    http: httpx.Client
    openai: OpenAI  # the official client

    def says(self, text: str, *, ends: bool = True) -> None:
        """From now on every answer is this text."""
        ids = self.model.tokenizer.encode(text, add_special_tokens=False)
        self.core.script = lambda submit, prompt, choice: [*ids, *(submit.sampling.end_token_ids[:1] if ends else ())]


@contextmanager
def talking_to(core: FakeCore, frontend: FrontendProcess, model: ModelText) -> Iterator[Served]:
    """With clients, closed in the end."""
    with (
        httpx.Client(base_url=frontend.url, timeout=10) as http,
        OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, timeout=10) as openai,
    ):
        yield Served(core, frontend, model, http, openai)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vocabularies.byte_level_chatml(tmp_path_factory.mktemp("model"))


@contextmanager
def serving(model_directory: Path, **options: Any) -> Iterator[Served]:
    """A frontend of that model over a scripted core of its own."""
    model = ModelText.load(model_directory)
    with tempfile.TemporaryDirectory(prefix="tri") as directory:
        core = FakeCore(Path(directory), limits_of(model)).start()
        frontend = FrontendProcess(core.address, model_directory, **options)
        try:
            with talking_to(core, frontend.wait_ready(), model) as served:
                yield served
        finally:
            frontend.stop()
            core.stop()


@pytest.fixture(scope="session")
def shared(model_directory: Path) -> Iterator[Served]:
    with serving(model_directory) as served:
        yield served


@pytest.fixture
def served(shared: Served) -> Served:
    """The shared frontend with its core as new."""
    core = shared.core
    core.script, core.step_s, core.reject, core.fail_after = echo, 0.001, None, None
    core.paused = core.silent = core.draining = False
    core.max_queued, core.cached_tokens = None, 0
    for log in (core.submits, core.prompts, core.aborts, core.finishes, core.terminals):
        log.clear()
    return shared


def limits_of(model: ModelText) -> EngineLimits:
    """Of the scripted core."""
    return EngineLimits(
        max_model_len=CONTEXT,
        vocab_size=model.tokenizer.vocab_size,
        max_num_seqs=64,
        num_blocks=999,
        block_size=16,
        dtype="float32",
    )


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until the condition holds; fail when it never does."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s} s"
        time.sleep(0.01)
