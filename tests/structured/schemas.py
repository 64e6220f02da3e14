"""Random JSON schemas with short instances.

They are drawn from hypothesis alone: hypothesis-jsonschema 0.23 draws no objects with hypothesis 6.170.
"""

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

_WORDS = st.text('abcXYZ "\\é0', max_size=6)
_VALUES = st.one_of(_WORDS, st.integers(-9999, 9999), st.booleans(), st.none())


def _keys(**strategies):
    return st.fixed_dictionaries(strategies)


_LEAVES = st.one_of(
    _keys(type=st.just("integer"), minimum=st.integers(-500, 0), maximum=st.integers(0, 500)),
    _keys(type=st.just("integer"), exclusiveMinimum=st.integers(-9, 9), maximum=st.just(1234)),
    _keys(type=st.just("string"), minLength=st.integers(0, 2), maxLength=st.integers(2, 6)),
    _keys(type=st.just("string"), pattern=st.sampled_from(["^[a-c]{2,4}$", "^(x|yy)-[0-9]{3}$"])),
    _keys(type=st.just("string"), format=st.sampled_from(["date", "uuid", "ipv4"])),
    _keys(type=st.sampled_from(["boolean", "null", ["boolean", "null"]])),
    _keys(enum=st.lists(_VALUES, min_size=1, max_size=4, unique_by=repr)),
    _keys(const=_VALUES),
)


@st.composite
def _objects(draw, inner):
    names = draw(st.lists(st.sampled_from(["a", "b c", "é", 'q"']), min_size=1, unique=True))
    return {
        "type": "object",
        "properties": {name: draw(inner) for name in names},
        "required": draw(st.lists(st.sampled_from(names), unique=True)),
        "additionalProperties": False,
    }


def _around(inner):
    array = _keys(
        type=st.just("array"),
        items=inner,
        minItems=st.integers(0, 1),
        maxItems=st.integers(1, 3),
    )
    pair = _keys(
        type=st.just("array"),
        prefixItems=st.lists(inner, min_size=2, max_size=2),
        items=st.just(False),
        minItems=st.just(2),
    )
    choice = _keys(anyOf=st.lists(inner, min_size=1, max_size=3))
    shared = st.builds(
        lambda one: {
            "$defs": {"one": one},
            "type": "array",
            "items": {"$ref": "#/$defs/one"},
            "maxItems": 2,
        },
        _LEAVES,
    )
    return st.one_of(_objects(inner), _objects(inner), array, pair, choice, shared)


def draw_schemas(count):
    """Returns so many schemas, the same ones at each call."""
    found = []

    @settings(
        max_examples=2 * count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.recursive(_LEAVES, _around, max_leaves=6))
    def collect(schema):
        if "$defs" not in repr(schema)[1:] or "$defs" in schema:
            found.append(schema)

    collect()
    return found[-count:]
