"""The ids that mark each family's reasoning, and answers drawn at random from the masks that follow from them."""

import json
import random

import jsonschema_rs
import numpy as np
import pytest
import tokenizers

from jaxkv import StructuredOutputs, default_model
from jaxkv.serve.parsers.choose import choose_parsers, open_parser
from jaxkv.serve.parsers.events import Content, Reasoning
from jaxkv.serve.parsers.reasoning_ids import reasoning_tokens
from jaxkv.structured.grammar import TokenConstraint
from jaxkv.structured.grammars import Grammars
from jaxkv.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b", "</think>"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}
TURN = "<|im_start|>assistant\n"
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|return|>", "<|call|>")
# Reasoning parser, markers that are tokens, whether they are special, the end of the prompt, and the end of a turn.
FAMILIES = {
    "Qwen3": ("qwen3", ("<think>", "</think>"), False, TURN, "<|im_end|>"),
    "DeepSeek R1": (
        "deepseek_r1",
        ("<think>", "</think>"),
        False,
        TURN + "<think>\n",
        "<|im_end|>",
    ),
    "Magistral": ("mistral", ("[THINK]", "[/THINK]"), True, TURN, "</s>"),
    "Seed-OSS": ("seed_oss", ("<seed:think>", "</seed:think>"), True, TURN, "<seed:eos>"),
    "Command A": (
        "cohere_command3",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        True,
        TURN,
        "<|END_OF_TURN_TOKEN|>",
    ),
    "GPT-OSS": ("openai_gptoss", HARMONY, True, "<|start|>assistant", "<|return|>"),
}


class Family:
    """The tokenizer of the model in the package with a family's markers, and the family's parsers."""

    def __init__(self, reasoning, markers, special, prompt_end, turn_end):
        library = tokenizers.Tokenizer.from_file(str(default_model.path() / "tokenizer.json"))
        added = [tokenizers.AddedToken(each, normalized=False, special=special) for each in markers]
        (library.add_special_tokens if special else library.add_tokens)(added)
        library.add_special_tokens([turn_end])
        library.add_tokens([tokenizers.AddedToken("final", normalized=False)])
        self.tokenizer = Tokenizer(library, model_vocab_size=library.get_vocab_size())
        self.end = library.token_to_id(turn_end)
        self.markers = [library.token_to_id(marker) for marker in markers]
        self.prompt_end = prompt_end
        self.choice = choose_parsers(None, self.tokenizer.special_texts(), "", reasoning=reasoning)

    def tokens(self, thinking=None, prompt_end=None):
        return reasoning_tokens(
            self.choice,
            self.tokenizer.id_of,
            thinking=thinking,
            prompt_end=self.prompt_end if prompt_end is None else prompt_end,
        )

    def names(self, ids):
        return [self.tokenizer.piece(token) for token in ids]

    def events(self, generated):
        """Returns reasoning and content of an answer, read in pieces."""
        parser = open_parser(
            self.choice, tools=None, thinking=None, prompt_end=self.prompt_end, has_form=True
        )
        text = self.tokenizer.decode(generated, skip_special_tokens=False)
        events = [
            event for at in range(0, len(text), 3) for event in parser.push(text[at : at + 3])
        ]
        events += parser.finish()
        return [
            "".join(event.text for event in events if isinstance(event, kind))
            for kind in (Reasoning, Content)
        ]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return Family(*FAMILIES[request.param])


def draw_answer(grammar, family, draw):
    """Returns an answer whose tokens are drawn from the masks; markers are likelier than others."""
    constraint = TokenConstraint(grammar, reasoning=family.tokens())
    final, channel = family.tokenizer.id_of("final"), family.tokenizer.id_of("<|channel|>")
    generated = []
    while not generated or not (generated[-1] == family.end or constraint.ends(generated)):
        if generated and not constraint.stays_free(generated):
            masks = np.zeros((1, grammar.forbidden.size), np.uint32)
            grammar.fill([constraint.matcher], masks)
            constraint.settle(masks[0], generated)
        bits = np.unpackbits(constraint.mask.view(np.uint8), bitorder="little")
        liked = [final] if generated[-1:] == [channel] else family.markers
        liked = [token for token in liked if bits[token]]
        chosen = liked if liked and draw.random() < 0.3 else np.flatnonzero(bits).tolist()
        generated.append(draw.choice(chosen))
    return generated


def test_what_follows_the_reasoning_is_always_the_form(family):
    grammars = Grammars(family.tokenizer, (family.end,), family.tokenizer.num_ids)
    grammar = grammars.compile(StructuredOutputs(json=SCHEMA))
    draw = random.Random(1)
    thoughts = 0
    for _ in range(20):
        generated = draw_answer(grammar, family, draw)
        reasoning, content = family.events(generated)
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(content)), (reasoning, content)
        thoughts += bool(reasoning)
    assert thoughts > 3
    grammars.close()


def test_the_ids_are_those_of_the_familys_markers(family):
    tokens = family.tokens()
    if family.choice.reasoning == "openai_gptoss":
        assert family.names(tokens.header) == ["<|channel|>", "final"]
        assert family.names(tokens.ends) == ["<|message|>"]
        assert family.tokens(prompt_end="<|start|>assistant<|channel|>final<|message|>{") is None
        return
    begin, end = (
        family.tokenizer.piece(family.markers[0]),
        family.tokenizer.piece(family.markers[1]),
    )
    assert family.names(tokens.ends) == [end]
    opened = family.prompt_end.endswith(f"{begin}\n")
    assert family.names(tokens.begins) == ([] if opened else [begin])
    assert family.names(family.tokens(prompt_end=TURN + begin).begins) == []
    assert family.tokens(thinking=False) is None


def test_markers_that_are_no_tokens_leave_no_room_for_reasoning():
    for reasoning in ("qwen3", "granite", "openai_gptoss", "none"):
        assert Family(reasoning, (), False, TURN + "<think>", "</s>").tokens() is None
