"""Accidents of files, for the fuzz tests: flipped bits, cut ends, zeroed blocks, foreign bytes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

KINDS = ("flipped", "overwritten", "cut", "zeroed", "grown", "moved", "junk")


@st.composite
def accidents(draw: st.DrawFn, most: int = 3) -> list[tuple[str, float, Any]]:
    """Some accidents: what happens, where as a share of the file, and how."""
    how = st.one_of(st.integers(0, 7), st.binary(min_size=1, max_size=8))
    one = st.tuples(st.sampled_from(KINDS), st.floats(0, 1, exclude_max=True, allow_nan=False), how)
    return draw(st.lists(one, min_size=1, max_size=most))


def damaged(content: bytes, happened: list[tuple[str, float, Any]]) -> bytes:
    """The bytes of a file after accidents.

    >>> damaged(b"\\x00\\x00", [("flipped", 0.5, 3)]), damaged(b"abcd", [("cut", 0.5, 0)])
    (b'\\x00\\x08', b'ab')
    """
    for kind, share, how in happened:
        at = int(share * len(content))
        text = how if isinstance(how, bytes) else bytes([how])
        bit = how if isinstance(how, int) else how[0] % 8
        if kind == "flipped" and content:
            content = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
        elif kind == "overwritten":
            content = content[:at] + text + content[at + len(text) :]
        elif kind == "cut":
            content = content[:at]
        elif kind == "zeroed":  # as a file system leaves it after a power cut
            content = content[:at] + bytes(min(512, len(content) - at)) + content[at + 512 :]
        elif kind == "grown":
            content = content + 8 * text
        elif kind == "moved":
            content = content[:at] + text + content[at:]
        elif kind == "junk":
            content = text
    return content
