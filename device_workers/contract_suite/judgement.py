"""How a clause says that it is broken: in words, under its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

from ..platforms.contract import Clause


class Violation(Exception):
    """The platform does not keep a clause. The text says what was asked and what came instead."""


def violated(text: str) -> NoReturn:
    raise Violation(text)


def demand(is_kept: bool, text: str) -> None:
    if not is_kept:
        raise Violation(text)


@contextmanager
def raises(expected: type[BaseException], what: str) -> Iterator[None]:
    """The body must raise exactly what the contract says."""
    try:
        yield
    except expected:
        return
    except Exception as error:
        raise Violation(f"{what} raised {told(error)}; the contract says {expected.__name__}") from error
    raise Violation(f"{what} raised nothing; the contract says {expected.__name__}")


def told(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


Function = Callable[..., Any]


def clause(name: str, *optional: Clause, computes: bool = True) -> Callable[[Function], Function]:
    """Names what a test judges, and the parts of the contract that it needs: where one of them is declined, the test is
    passed over. Computing is one, unless `computes` is False.
    """
    needs = (Clause.COMPUTE, *optional) if computes else optional

    def mark(function: Function) -> Function:
        return pytest.mark.clause(name, needs)(function)

    return mark
