"""Content of messages: text as it stands, images as ``image_url`` parts, everything else refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from nemo_gym.gateway.dialects.fields import Body, object_at, objects_in, optional_text, refuse, text_at

Part = dict[str, Any]
_UNSERVED = {
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
    "input_video": "video",
    "file": "a file",
    "input_file": "a file",
    "document": "a document",
    "search_result": "a search result",
    "container_upload": "a container's file",
}
_URL = re.compile(r"\A(?:https?://|data:image/)", re.IGNORECASE)
BETWEEN_PARTS = "\n"
"""Between text parts of one message, where a template takes text only. They are separate things: glued together, the
end of one would read as the beginning of the next."""


def joined(parts: list[Part]) -> str | list[Part]:
    """Content of parts: one text where there is nothing else."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return BETWEEN_PARTS.join(part["text"] for part in parts)


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def image_part(url: str, where: str, detail: Any = None) -> Part:
    """An image by its URL or data URL."""
    if not _URL.match(url):
        refuse(where, "must be an http(s) URL or a data URL of an image (data:image/…;base64,…)")
    image = {"url": url}
    if isinstance(detail, str) and detail != "auto":
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def openai_part(part: Body, where: str) -> Part | None:
    """A content part of Chat Completions or Responses; nothing for one without content."""
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", "summary_text", "reasoning_text"):
        return text_part(text_at(part, "text", where))
    if kind == "refusal":
        return text_part(text_at(part, "refusal", where))
    if kind == "image_url":
        value = part.get("image_url")
        if isinstance(value, str):
            return image_part(value, f"{where}.image_url")
        image = object_at(part, "image_url", where)
        return image_part(text_at(image, "url", f"{where}.image_url"), f"{where}.image_url.url", image.get("detail"))
    if kind == "input_image":
        if part.get("image_url") is None:
            refuse(where, "holds an image by file id; nothing is stored here: send it as a data URL in 'image_url'")
        return image_part(text_at(part, "image_url", where), f"{where}.image_url", part.get("detail"))
    refuse_part(kind, where)


def anthropic_image(block: Body, where: str) -> Part:
    """An ``image`` block of Messages."""
    source = object_at(block, "source", where)
    where = f"{where}.source"
    kind = source.get("type")
    if kind == "base64":
        media = text_at(source, "media_type", where)
        return image_part(f"data:{media};base64,{text_at(source, 'data', where)}", where)
    if kind == "url":
        return image_part(text_at(source, "url", where), f"{where}.url")
    refuse(f"{where}.type", f"is {kind!r}: nothing is stored here; send an image as 'base64' or 'url'")


def refuse_part(kind: Any, where: str) -> NoReturn:
    """Refuse content of a type that cannot be shown to the policy."""
    name = _UNSERVED.get(kind) if isinstance(kind, str) else None
    if name is not None:
        refuse(where, f"is {name} (type '{kind}'): this model takes text and images only")
    refuse(f"{where}.type", f"is {kind!r}: content of this type is not known here")


def openai_content(value: Any, where: str) -> str | list[Part] | None:
    """The content of a message or of a tool's output: text, parts or nothing."""
    if value is None or isinstance(value, str):
        return value
    found = (openai_part(part, at) for at, part in objects_in(value, where))
    return joined([part for part in found if part is not None])


def answer_text(value: Any, where: str) -> str | None:
    """The text of an assistant's message. Its parts are one text: it was sampled as one."""
    if value is None or isinstance(value, str):
        return value
    texts = []
    for at, part in objects_in(value, where):
        found = openai_part(part, at)
        if found is None or found["type"] != "text":
            refuse(at, "is no text: the assistant's own messages hold text only")
        texts.append(found["text"])
    return "".join(texts)


def lead_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with several system messages at the beginning made one: most templates take one only."""
    end = 0
    while end < len(messages) and messages[end]["role"] == "system":
        end += 1
    if end < 2:
        return messages
    texts = [text for message in messages[:end] if (text := plain_text(message["content"]))]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[end:]]


def plain_text(content: str | list[Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return BETWEEN_PARTS.join(part["text"] for part in content if part["type"] == "text")


def system_text(value: Any, where: str) -> str:
    """A system prompt: text, or parts that are text."""
    content = openai_content(value, where)
    if isinstance(content, list):
        refuse(where, "holds an image: system messages hold text only")
    return content or ""


def reasoning_of(message: Mapping[str, Any], where: str) -> str | None:
    """The reasoning that a harness sends back, by either of its names in Chat Completions."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str) and message[key]:
            return str(message[key])
    return optional_text(message, "reasoning_content", where)
