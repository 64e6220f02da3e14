"""Checks of the tree of cached pages."""

import pytest

from jaxkv.cache.kept_pages import tree as module
from jaxkv.cache.kept_pages.keys import PageKeys
from jaxkv.cache.kept_pages.tree import PrefixTree


@pytest.mark.parametrize("broken", [0, 3, 9])
def test_checks_find_every_wrong_key_in_turn(broken, monkeypatch):
    """Of ten pages, with four keys computed per check."""
    monkeypatch.setattr(module, "_HASHED", 4)
    tree = PrefixTree(leaf_only=False)
    for index, key in enumerate(PageKeys(b"root", None).pages(range(20), 2, 20)):
        wrong = key._replace(tokens=b"others") if index == broken else key
        tree.add(wrong, index, index, 0)
    found = []
    for _ in range(6):
        try:
            tree.check()
        except ValueError as error:
            found.append(str(error))
    assert len(found) == 2
    assert "the prefix tree of 10 pages is corrupt: wrong nodes" in found[0]


def test_pages_that_are_removed_meanwhile_keep_no_other_from_being_checked(monkeypatch):
    monkeypatch.setattr(module, "_HASHED", 4)
    tree = PrefixTree(leaf_only=False)
    keys = PageKeys(b"root", None).pages(range(20), 2, 20)
    tree.add(keys[0]._replace(tokens=b"others"), 0, 0, 0)
    for index, key in enumerate(keys[1:], 1):
        tree.add(key, index, index, 0)
    with pytest.raises(ValueError, match="is corrupt"):
        tree.check()
    tree.check()
    for node in list(tree)[4:]:
        tree.remove(node, 1)
    with pytest.raises(ValueError, match="is corrupt"):
        tree.check()
