"""Chat templates: messages in, prompt text out.

Knows: Jinja as Hugging Face's tokenizers use it. Does not know: tokens, which model this is. A template comes from an
untrusted file: it runs in Jinja's immutable sandbox, with bounds on time, memory and output. Messages are untrusted
too: special tokens spelled in them are marked (text.shield), so that a prompt cannot end its turn and open another.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, Undefined
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specgen.errors import ModelError
from specgen.text.shield import shield

MAX_TEMPLATE_CHARS = 1_000_000
MAX_OUTPUT_CHARS = 50_000_000
MAX_SECONDS = 2.0
MAX_EXTRA_BYTES = 512 << 20
MAX_INT_BITS = 64
RAW = "give the text as it is with --raw"


class _LimitError(Exception):
    """A template that used up its share of something."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, without arithmetic whose cost explodes within one operation."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value in (left, right):
            if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
                raise _LimitError("it computes with huge numbers")
        if operator == "**" and (not isinstance(right, int | float) or abs(right) > MAX_INT_BITS):
            raise _LimitError("it computes with huge numbers")
        return super().call_binop(context, operator, left, right)


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, str]],
    *,
    special: Mapping[str, str],
    shielded: Collection[str] = (),
    add_generation_prompt: bool = True,
    extra: Mapping[str, object] | None = None,
) -> str:
    """The prompt for `messages` ({"role": …, "content": …}), ending where the assistant's turn begins.

    `special`: bos_token, eos_token, … by name, for the template. `shielded`: special tokens' texts that messages must
    not forge; the result then holds marks, and only `Tokenizer.encode_chat` may tokenise it (without marks in it, it is
    what transformers' apply_chat_template returns). ModelError names the template's line.
    """
    if template is None:
        raise ModelError("the model has no chat template", hint=f"it is a base model: {RAW}")
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ModelError(f"the chat template has {len(template)} characters, at most {MAX_TEMPLATE_CHARS} are read")
    safe = [{key: shield(value, shielded) for key, value in message.items()} for message in messages]
    names = {**special, **(extra or {}), "messages": safe, "add_generation_prompt": add_generation_prompt}
    try:
        with _bounded_memory(MAX_EXTRA_BYTES):
            compiled = _environment().from_string(template)
            with _bounded_time(MAX_SECONDS):
                return _joined(compiled.generate(names))
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template is broken in line {error.lineno}: {error.message}", hint=RAW) from error
    except TemplateError as error:
        raise _failed(error, error.message or type(error).__name__) from error
    except MemoryError as error:
        raise _failed(error, "it needs too much memory") from error
    except Exception as error:  # template code can raise whatever Python can
        raise _failed(error, str(error) or type(error).__name__) from error


def starts_with_bos(ids: Sequence[int], bos: int | None) -> bool:
    """Whether the sequence begins with BOS already: adding it would double it."""
    return bos is not None and len(ids) > 0 and ids[0] == bos


def _joined(parts: Iterator[str]) -> str:
    found, length = [], 0
    for part in parts:
        length += len(part)
        if length > MAX_OUTPUT_CHARS:
            raise _LimitError(f"its output is longer than {MAX_OUTPUT_CHARS} characters")
        found.append(part)
    return "".join(found)


def _failed(error: BaseException, why: str) -> ModelError:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f" in line {line}" if line else ""
    return ModelError(f"the chat template fails{where}: {why}", hint=RAW)


def _environment() -> _Environment:
    # optimized=False: else constants are folded, that is computed without bounds, while compiling.
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False)
    environment.filters["tojson"] = _to_json
    environment.globals.pop("lipsum")
    environment.globals.update(raise_exception=_raise, strftime_now=_now)
    return environment


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes: a prompt is no web page."""
    if isinstance(value, Undefined):
        raise TemplateError("tojson of something undefined")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@contextmanager
def _bounded_time(seconds: float) -> Iterator[None]:
    """Looks at the clock at every line that runs in this thread: a loop without output is stopped as well."""
    deadline = time.monotonic() + seconds
    before = sys.gettrace()

    def trace(_frame: FrameType, _event: str, _argument: object) -> Callable[..., Any]:
        if time.monotonic() > deadline:
            raise _LimitError(f"it runs for longer than {seconds:g} seconds")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _bounded_memory(extra_bytes: int) -> Iterator[None]:
    """While inside, the process may grow by `extra_bytes` (Linux; elsewhere there is no such bound)."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (used + extra_bytes, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
