"""What a terminal gets of a text that someone else has written."""

from __future__ import annotations

import sys
import unicodedata

from ada_loss.lab.errors import printable

# Of the Unicode Bidirectional Algorithm (UAX 9, table 4): embeddings, overrides and isolates, with their ends.
BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def test_of_all_characters_controls_halves_of_pairs_and_signs_of_direction_are_escaped() -> None:
    for code in range(sys.maxunicode + 1):
        c = chr(code)
        stays = c in "\n\t" or not (unicodedata.category(c) in ("Cc", "Cs") or unicodedata.bidirectional(c) in BIDI)
        assert (printable(c) == c) is stays, hex(code)
