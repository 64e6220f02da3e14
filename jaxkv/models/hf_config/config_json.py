"""Reads a parsed `config.json` key by key, and rejects keys that were not read. Executes nothing."""

from collections.abc import Mapping, Sequence

from jaxkv.errors import UnknownConfig
from jaxkv.weights.quantised import read_quantised
from jaxkv.wording import clip, listed, shown

_REFUSED = {
    "auto_map": "names Python code in the model's directory, and jaxkv runs no code from there; jaxkv's own "
    "implementation is used only if AutoModelForCausalLM names the one class in `architectures`",
    "model_file": "names Python code in the model's directory, and jaxkv runs no code from there",
    "_attn_implementation": "chooses code to run, which a model's directory may not do",
}
"""Prefix of a key that is rejected with any value -> the reason."""

_HARMLESS = (
    # Origin of the file, and its tokenizer.
    "transformers_version _name_or_path  model_type tokenizer_class pad_token_id sep_token_id prefix "
    "is_llama_config unsloth_fixed unsloth_version transformers.js_config "
    # Storage of weights, which `read_quantised` checks.
    "quantization_config "
    # Training, and outputs of a call besides logits.
    "pretraining_tp cache_implementation max_sequence_length "
    "initializer_range attention_dropout use_cache return_dict return_dict_in_generate "
    "output_attentions output_hidden_states output_scores gradient_checkpointing "
    # Tasks other than causal language modelling, which `architectures` must name.
    "id2label label2id num_labels problem_type task_specific_params finetuning_task "
    # Defaults of generation, for which jaxkv uses `SamplingParams` only.
    "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values decoder_start_token_id "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    # Options of torch, and a flag that names no code.
    "torchscript use_bfloat16 tf_legacy_loss _attn_implementation_autoset"
)
HARMLESS = frozenset(_HARMLESS.split())
"""Keys that cannot change the logits of these families."""

NEUTRAL: Mapping[str, object] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "chunk_size_feed_forward": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
"""Key that a family may lack -> its value that has no effect."""

_REQUIRED = object()


class ConfigJson:
    """Reads the values of one JSON object; `finish` rejects the keys that were not read.

    Args:
        raw: the parsed object.
        place: name of the object in messages.

    Attributes:
        is_quantised: whether the checkpoint's weights are quantised.

    Raises:
        UnknownConfig: a key names code to run.
    """

    def __init__(self, raw: Mapping[str, object], *, place: str = "config.json") -> None:
        self._raw = raw
        self._place = place
        self._taken: set[str] = set()
        for key, value in raw.items():
            reason = next((why for name, why in _REFUSED.items() if key.startswith(name)), None)
            if key == "auto_map" and self._names_the_architecture(value):
                self._taken.add(key)
            elif reason is not None and value is not None and key not in HARMLESS:
                raise UnknownConfig(f"{place} sets {clip(key)} = {shown(value)}, which {reason}")
        self.is_quantised = read_quantised(raw) is not None

    def _names_the_architecture(self, auto_map: object) -> bool:
        """Whether `auto_map`'s causal language model is the class that `architectures` names.

        Models are published in this way before Transformers has their family, for instance
        `modeling_deepseek.DeepseekV3ForCausalLM`. Then our own implementation is used, as Transformers does; the family
        checks that it implements this class.
        """
        named = self._raw.get("architectures")
        if not isinstance(auto_map, Mapping) or not isinstance(named, Sequence) or len(named) != 1:
            return False
        code = auto_map.get("AutoModelForCausalLM")
        return isinstance(code, str) and code.rpartition(".")[2] == named[0]

    def take(self, key: str, default: object = _REQUIRED) -> object:
        """Returns a value of any type; the default replaces a missing key, but not null."""
        self._taken.add(key)
        if key not in self._raw and default is _REQUIRED:
            raise ValueError(f"{self._place} lacks {key}")
        return self._raw.get(key, default)

    def take_int(self, key: str, default: object = _REQUIRED, *, low: int = 1, high: int) -> int:
        """Returns an integer in [`low`, `high`]."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(
                f"{self._place}: {key} must be an integer in [{low}, {high}], got {shown(value)}"
            )
        return value

    def take_float(self, key: str, default: object = _REQUIRED) -> float:
        """Returns a finite number as a float."""
        value = self.take(key, default)
        # The bound rejects NaN, infinity, and integers out of a float's range.
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30:
            return float(value)
        raise ValueError(f"{self._place}: {key} must be a finite number, got {shown(value)}")

    def take_bool(self, key: str, default: object = _REQUIRED) -> bool:
        """Returns a bool."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self._place}: {key} must be true or false, got {shown(value)}")
        return value

    def take_choice(self, key: str, default: str, choices: Mapping[str, str]) -> str:
        """Returns `choices[value]`; raises `UnknownConfig` if the value is not in `choices`."""
        value = self.take(key, default)
        if not isinstance(value, str) or value not in choices:
            raise UnknownConfig(
                f"{self._place} sets {key} = {shown(value)}; supported are {', '.join(choices)}"
            )
        return choices[value]

    def take_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Returns one id, a list of ids or null as a tuple, without ids that are not below `vocab_size`.

        Files of models with a reduced vocabulary still have such ids; they have no logits.
        """
        value = self.take(key, None)
        given = [] if value is None else value if isinstance(value, Sequence) else [value]
        ids = [token for token in given if isinstance(token, int) and not isinstance(token, bool)]
        if len(ids) != len(given) or min(ids, default=0) < 0:
            raise ValueError(f"{self._place}: {key} must hold token ids, got {shown(value)}")
        return tuple(token for token in ids if token < vocab_size)

    def take_object(self, key: str) -> Mapping[str, object]:
        """Returns a nested object; an empty one for null or a missing key."""
        value = self.take(key, None)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{self._place}: {key} must be an object, got {shown(value)}")
        return value

    def ignore(self, names: str) -> None:
        """Marks keys, separated by blanks, as read; for keys of a family that do not change its logits."""
        self._taken.update(names.split())

    def take_floats(self, key: str, default: Sequence[float]) -> tuple[float, ...]:
        """Returns a list of finite numbers of the default's length; the default replaces null."""
        value = self.take(key, None)
        value = default if value is None else value
        if not isinstance(value, Sequence) or len(value) != len(default):
            raise ValueError(
                f"{self._place}: {key} must hold {len(default)} numbers, got {shown(value)}"
            )
        parts = ConfigJson(
            {f"{key}[{index}]": part for index, part in enumerate(value)}, place=self._place
        )
        return tuple(parts.take_float(f"{key}[{index}]") for index in range(len(value)))

    def finish(self) -> None:
        """Raises `UnknownConfig` if keys were not read that may change the result; the message names them."""
        unknown = {
            key: value
            for key, value in self._raw.items()
            if key not in self._taken and key not in HARMLESS and not _is_neutral(key, value)
        }
        if unknown:
            settings = [f"{clip(key)} = {shown(value)}" for key, value in unknown.items()]
            raise UnknownConfig(
                f"{self._place} sets {listed(settings)}, which may change the result and is not supported"
            )


def _is_neutral(key: str, value: object) -> bool:
    return value is None or (key in NEUTRAL and value == NEUTRAL[key])
