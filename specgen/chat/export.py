"""A conversation as a document: Markdown to read, JSON lines for other programs.

Knows: both formats. Does not know: files.
"""

from __future__ import annotations

import json

from specgen.chat.conversation import Conversation
from specgen.errors import UsageError

FORMATS = (".md", ".jsonl")


def exported(conversation: Conversation, suffix: str) -> str:
    """The document for a file name that ends so. UsageError for an unknown ending."""
    if suffix == ".md":
        return to_markdown(conversation)
    if suffix == ".jsonl":
        return to_jsonl(conversation)
    raise UsageError(f"{suffix or 'a name without an ending'} is no format", hint=f"use one of {', '.join(FORMATS)}")


def to_markdown(conversation: Conversation) -> str:
    parts = [f"# Conversation with {conversation.model}"]
    if conversation.system is not None:
        parts.append(f"*System: {conversation.system}*")
    for exchange in conversation.exchanges:
        parts += ["## User", exchange.user, "## Assistant"]
        if exchange.thinking:
            parts.append(f"<details><summary>thoughts</summary>\n\n{exchange.thinking.strip()}\n\n</details>")
        parts.append(exchange.reply)
    return "\n\n".join(parts) + "\n"


def to_jsonl(conversation: Conversation) -> str:
    """One message a line, `role` and `content` as chat templates name them."""
    messages = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    for exchange in conversation.exchanges:
        messages += [{"role": "user", "content": exchange.user}, {"role": "assistant", "content": exchange.reply}]
    return "".join(json.dumps(message) + "\n" for message in messages)
