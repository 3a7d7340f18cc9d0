"""What of a model's output may reach a terminal.

Knows: which characters move the cursor, change settings or hide and reorder text. Does not know: terminals.
Every character is judged by itself, so cutting a text anywhere changes nothing: sanitise(a) + sanitise(b) ==
sanitise(a + b). An escape sequence loses its first character and stays as harmless letters.
"""

from __future__ import annotations

_KEPT_CONTROLS = {"\n", "\t"}
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]  # C0, DEL, C1 (0x9B is CSI in one byte)
# Embeddings, overrides and isolates make text read other than it is ("Trojan Source", CVE-2021-42574). The plain marks
# U+200E, U+200F and U+061C stay: right-to-left text needs them and they cannot reorder what stands around them.
_BIDI = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
# Byte order mark, deprecated format characters, annotations, tags (invisible letters). Joiners and variation selectors
# stay: emoji, Arabic and Indic scripts are spelled with them.
_INVISIBLE = [0xFEFF, *range(0x206A, 0x2070), *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080)]
_LINE_ENDS = (0x2028, 0x2029)

_TABLE: dict[int, str | None] = {
    **{code: None for code in (*_CONTROLS, *_BIDI, *_INVISIBLE) if chr(code) not in _KEPT_CONTROLS},
    **dict.fromkeys(_LINE_ENDS, "\n"),
}


def sanitise(text: str) -> str:
    """`text` without control characters (newline and tab stay), bidirectional overrides and invisible letters."""
    return text.translate(_TABLE)
