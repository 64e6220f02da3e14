"""The view of a file of saved prefixes, in the form of `jaxkv.serve.dashboard.view`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.cache.page_map import CACHED, CHECKPOINT, GroupMap, TreeSummary, runs_of
from jaxkv.offload.prefix_listing import GroupListing, Listing
from jaxkv.version import __version__
from jaxkv.wording import clip


def file_view(listing: Listing, path: Path) -> dict[str, Any]:
    """Returns the view of a file; `server_view` documents it.

    Args:
        listing: what the file holds.
        path: its path, of which the view has the last part.
    """
    sizes = {group.name: group.num_bytes for group in listing.groups}
    pages = [group for group in listing.groups if group.unit == "page"]
    tree = TreeSummary(
        name="all groups",
        page_size=listing.page_size,
        pages=listing.num_rows,
        ends=listing.ends,
        deepest=listing.deepest,
    )
    return {
        "model": path.name,
        "about": f"saved prefixes, jaxkv {__version__}; {clip(listing.model, 120)}",
        "state": "a file; its pages are listed, not checked",
        "facts": [
            ["size", f"{listing.num_bytes:,} bytes"],
            ["tokens per page", f"{listing.page_size:,}"],
            ["cached texts", f"{listing.ends:,}"],
            ["state checkpoints", f"{len(listing.checkpoints):,}"],
            ["pages of all groups", f"{sum(group.num_units for group in pages):,}"],
            ["checksum of the weights", clip(listing.weights, 20)],
        ],
        "stats": None,
        "sizes": sizes,
        "maps": [asdict(_map(group, listing)) for group in listing.groups],
        "trees": [asdict(tree)],
        "checkpoints": len(listing.checkpoints),
        "requests": None,
        "program_list": None,
        "rate": None,
        "first_token": None,
        "inter_token": None,
        "finished": None,
    }


def _map(group: GroupListing, listing: Listing) -> GroupMap:
    lengths = listing.checkpoints
    if group.unit == "page":
        lengths = [one for one, tail in zip(lengths, listing.tails, strict=True) if tail]
    kinds = [CACHED] * len(group.depths) + [CHECKPOINT] * len(lengths)
    holders = [*group.depths, *lengths]
    columns = np.array([kinds, holders, [0] * len(kinds)], np.int64)
    return runs_of(group.name, group.unit, 0, (columns[0], columns[1], columns[2]))
