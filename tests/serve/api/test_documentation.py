from pathlib import Path

from jaxkv.serve.api.app import OPERATIONS
from jaxkv.serve.api.chat_body import ChatBody
from jaxkv.serve.api.completions import CompletionBody

PAGE = Path(__file__).parents[3] / "docs" / "server.md"


def test_the_page_of_the_server_names_every_field_and_route():
    text = PAGE.read_text()
    fields = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    assert [name for name in sorted(fields) if f"`{name}`" not in text] == []
    paths = {each.path.replace(":path", "") for each in OPERATIONS}
    assert [path for path in sorted(paths) if path not in text] == []
