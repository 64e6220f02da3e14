"""What a sliding window lets go: the first page a sequence still needs, and the most pages it holds. Numbers alone.

A token sees the last `window` tokens, its own included. So a sequence of `length` tokens, whose next one lies at
position `length`, needs those from `length - window + 1` on. A page goes when all of it lies before them, so a page
longer than the window stays as long as one token in it is seen.
"""

from jaxkv.cache.spec import Group


def first_seen(window: int | None, length: int) -> int:
    """Returns the first of `length` tokens that the token after them needs.

    The last of them is always among those, even if a window of one does not see it.
    """
    return 0 if window is None else max(0, length - max(1, window - 1))


def first_page(group: Group, length: int) -> int:
    """Returns the first table position that a sequence of `length` tokens still needs."""
    return first_seen(group.window, length) // group.page_size


def frees_page_at(group: Group, position: int) -> int:
    """Returns the least length at which a sequence no longer needs the page at a table position, which has a window."""
    assert group.window is not None, "where everything is seen, nothing is let go"
    return (position + 1) * group.page_size + max(1, group.window - 1)


def most_pages(group: Group, num_tokens: int, ahead: int | None = None) -> int:
    """Returns the most pages that a sequence of up to `num_tokens` holds at once.

    Args:
        group: a paged group.
        num_tokens: tokens of the sequence at its end.
        ahead: tokens that are written before the pages they push out of the window are given back; `None` if that
            happens only at the end of the sequence.
    """
    whole = group.pages_for(num_tokens)
    if group.window is None or ahead is None:
        return whole
    # Of any stretch of n tokens, a page may begin one token before its end.
    seen = max(1, group.window - 1)
    return min(whole, -(-(seen + ahead - 1) // group.page_size) + 1)


def most_ahead(group: Group, num_pages: int) -> int:
    """Returns how many tokens a sequence that has `num_pages` for itself can write before it gives any back.

    Less than 1 if the window alone needs them: then a sequence can only be as long as they hold.
    """
    assert group.window is not None, "where everything is seen, nothing is given back"
    return (num_pages - 1) * group.page_size - max(1, group.window - 1) + 1
