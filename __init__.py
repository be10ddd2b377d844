"""Trimaran: serves large language models on whatever accelerator a machine has.

Every process of the engine executes this file, so it imports nothing; the public names resolve on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .frontend.client.async_llm import AsyncLLM
    from .frontend.client.llm import LLM
    from .frontend.client.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from .frontend.client.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from .frontend.client.async_llm import AsyncLLM

        return AsyncLLM
    if name == "SamplingParams":
        from .frontend.client.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'trimaran' has no attribute {name!r}")
