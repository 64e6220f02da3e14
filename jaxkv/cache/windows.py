"""Arithmetic of sliding windows: the first page that a sequence needs, and the most pages that it holds.

A token sees the last `window` tokens, its own included. The next token of a sequence of `length` tokens is at position
`length` and sees the positions from `length - window + 1` on. A page is freed when all its tokens are before that.
"""

from jaxkv.cache.spec import Group


def first_seen(window: int | None, length: int) -> int:
    """Returns the first position that token `length` sees among the `length` tokens before it.

    Position `length - 1` always counts as seen, even for a window of 1.
    """
    return 0 if window is None else max(0, length - max(1, window - 1))


def first_page(group: Group, length: int) -> int:
    """Returns the first page table position that a sequence of `length` tokens still needs."""
    return first_seen(group.window, length) // group.page_size


def frees_page_at(group: Group, position: int) -> int:
    """Returns the least length, in tokens, at which a sequence no longer needs the page at a table position."""
    assert group.window is not None, "a group without a window frees no page before the end"
    return (position + 1) * group.page_size + max(1, group.window - 1)


def most_pages(group: Group, num_tokens: int, ahead: int | None = None) -> int:
    """Returns the most pages that a sequence holds at once.

    Args:
        group: a paged group.
        num_tokens: tokens of the sequence at its end.
        ahead: tokens that are written before the pages that leave the window are freed; `None` if pages are freed
            only at the end of the sequence.
    """
    whole = group.pages_for(num_tokens)
    if group.window is None or ahead is None:
        return whole
    # n consecutive tokens touch the most pages if the last one begins a page.
    seen = max(1, group.window - 1)
    return min(whole, -(-(seen + ahead - 1) // group.page_size) + 1)


def most_ahead(group: Group, num_pages: int) -> int:
    """Returns how many tokens a sequence with `num_pages` pages can write before it must free one.

    Less than 1 if the window alone needs all pages; then a sequence is limited to the tokens they hold.
    """
    assert group.window is not None, "a group without a window frees no page before the end"
    return (num_pages - 1) * group.page_size - max(1, group.window - 1) + 1
