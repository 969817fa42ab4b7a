"""Layer numbers in tensor names, whoever's they are."""

from __future__ import annotations

import re

LAYER = re.compile(r"(?<=\blayers\.)\d+(?=\.)")


def renumbered(name: str, layer: int) -> str:
    """The name of the same tensor in another decoder layer; a name without a layer stays."""
    return LAYER.sub(str(layer), name, count=1)


def layer_order(name: str) -> list[tuple[int, int | str]]:
    """Sort key that keeps a layer's tensors together and layer 2 before layer 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
