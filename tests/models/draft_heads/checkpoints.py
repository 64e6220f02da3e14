"""Tiny heads in their published layouts beside models of Transformers, and their definitions."""

import json
from functools import cached_property

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from tests.models.draft_heads.eagle3_files import SMALL, WIDTH
from tests.models.families.cases import Case


class Verifier:
    """A model of Transformers."""

    def __init__(self, model):
        self.model = model.eval()

    def streams(self, text):
        """Returns the residual stream before each layer, and what the final norm makes of it: [layers + 1, ...]."""
        with torch.no_grad():
            out = self.model.model(torch.tensor([text]), output_hidden_states=True, use_cache=False)
        return np.stack([one[0].numpy() for one in out.hidden_states])

    def greedy(self, prompt, count):
        """Returns the most likely tokens behind a prompt."""
        text = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                text.append(int(self.model(torch.tensor([text])).logits[0, -1].argmax()))
        return text[len(prompt) :]


class Head:
    """The definition of a head, to be completed by `run` and `kept`."""

    def projected(self, kept):
        """Returns the hidden states that the head's positions begin with."""
        return kept

    def chain(self, text, most):
        """Returns the greedy drafts behind a text, and the logits of each."""
        tokens, hidden = list(text[1:]), self.projected(self.kept(text[:-1]))
        drafts, every = [], []
        for _ in range(most):
            made, logits = self.run(tokens, hidden)
            drafts.append(int(logits[-1].argmax()))
            every.append(logits[-1])
            tokens.append(drafts[-1])
            hidden = np.concatenate((hidden, made[-1:]))
        return drafts, every


class Eagle3(Head):
    """EAGLE-3 as its authors' `cnets.py` has it, in float64: a Llama layer over embedding and hidden state together."""

    def __init__(self, tensors, config, verifier, embed, reads):
        self.tensors = {
            name: value.astype(np.float64)
            for name, value in tensors.items()
            if value.dtype.kind == "f"
        }
        self.config, self.verifier, self.reads = config, verifier, reads
        self.embed = self.tensors.get("embed_tokens.weight", embed)
        count = config["draft_vocab_size"]
        self.ids = np.arange(count) + tensors.get("d2t", np.zeros(count, np.int64))

    def kept(self, text):
        streams = self.verifier.streams(text)
        return np.concatenate([streams[at] for at in self.reads], axis=1)

    def projected(self, kept):
        return kept @ self.tensors["fc.weight"].T

    def run(self, tokens, hidden):
        """Returns the layer's output and the logits at each position; position t has token t + 1 of the text."""
        part = {
            name.removeprefix("midlayer.").removesuffix(".weight"): value
            for name, value in self.tensors.items()
        }
        embeddings = self._norm(self.embed[tokens], part["input_layernorm"])
        x = np.concatenate((embeddings, self._norm(hidden, part["hidden_norm"])), axis=1)
        q, k, v = (self._heads(x @ part[f"self_attn.{name}_proj"].T) for name in "qkv")
        q, k = self._rotated(q), self._rotated(k)
        k, v = (np.repeat(one, q.shape[1] // one.shape[1], axis=1) for one in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[2])
        scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", weights, v).reshape(len(tokens), -1)
        hidden = hidden + mixed @ part["self_attn.o_proj"].T
        y = self._norm(hidden, part["post_attention_layernorm"])
        gate = y @ part["mlp.gate_proj"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (y @ part["mlp.up_proj"].T)) @ (
            part["mlp.down_proj"].T
        )
        logits = np.full((len(tokens), self.config["vocab_size"]), -np.inf)
        logits[:, self.ids] = self._norm(hidden, part["norm"]) @ part["lm_head"].T
        return hidden, logits

    def _norm(self, x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def _heads(self, x):
        size = self.config["hidden_size"] // self.config["num_attention_heads"]
        return x.reshape(len(x), -1, size)

    @staticmethod
    def _rotated(x):
        half = x.shape[2] // 2
        angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        left, right = x[..., :half], x[..., half:]
        return np.concatenate((left * cos - right * sin, right * cos + left * sin), axis=-1)


class Mtp(Head):
    """A layer that predicts further tokens: projection of normed embedding and hidden state, a block, a norm, the head.

    Norms and block are modules of Transformers, in float32, as which its experts alone can run.
    """

    def __init__(self, verifier, block, norms, join, embed, head):
        self.verifier, self.block, self.join = verifier, block, join
        self.norms, self.embed, self.head = norms, embed, head

    def kept(self, text):
        return self.verifier.streams(text)[-1]

    def run(self, tokens, hidden):
        embedding_norm, hidden_norm = self.norms
        with torch.no_grad():
            sides = (
                embedding_norm(torch.tensor(self.embed[tokens])),
                hidden_norm(torch.tensor(hidden)),
            )
            stream = torch.cat(sides, dim=1) @ torch.tensor(self.join).T
            made = self.block(inputs_embeds=stream[None], use_cache=False).last_hidden_state[0]
        return made.numpy(), made.numpy() @ self.head.T


def llama(folder, *, layers=4, seed=0):
    """Writes a random Llama and returns it."""
    case = Case("Llama", {"num_hidden_layers": layers}, seed=seed, shape=SMALL)
    model = case.build()
    model.save_pretrained(folder)
    return Verifier(model.double())


class MtpCase:
    """A model of Transformers with one layer too many, which becomes the layer that predicts further tokens.

    Args:
        case: the model with that layer.
        own: beginning of the names of that layer's own tensors; `{after}` is the number of the other layers.
        block: the same of its block.
        names: of embedding norm, hidden norm, projection and final norm.
        keys: config keys that such checkpoints have.
    """

    def __init__(self, case, own, block, names, **keys):
        self.case, self.names, self.keys = case, names, keys
        self.layers = case.config().num_hidden_layers - 1
        self.own, self.block = (text.format(after=self.layers) for text in (own, block))

    def save(self, folder):
        """Writes the checkpoint and returns the definition of the head."""
        self.whole.save_pretrained(folder)
        stored = load_file(folder / "model.safetensors")
        last = f"model.layers.{self.layers}."
        tensors = {name.replace(last, self.block, 1): value for name, value in stored.items()}
        draw = np.random.default_rng(self.case.seed)
        norm = stored["model.norm.weight"]
        around = 0.0 if self.case.around_zero else 1.0
        embedding_norm, hidden_norm, join, final_norm = self.names
        for name in (embedding_norm, hidden_norm, final_norm):
            drawn = around + 0.2 * draw.standard_normal(norm.shape)
            tensors[f"{self.own}{name}.weight"] = drawn.astype(np.float32)
        projection = 0.15 * draw.standard_normal((WIDTH, 2 * WIDTH))
        tensors[f"{self.own}{join}.weight"] = projection.astype(np.float32)
        if self.own == self.block:
            # DeepSeek's files have copies of what the layer shares.
            tensors[f"{self.own}embed_tokens.weight"] = stored["model.embed_tokens.weight"].copy()
            tensors[f"{self.own}shared_head.head.weight"] = stored["lm_head.weight"].copy()
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_hidden_layers": self.layers} | self.keys
        for name in ("layer_types", "mlp_layer_types"):
            if config.get(name):
                config[name] = config[name][: self.layers]
        (folder / "config.json").write_text(json.dumps(config))
        return self._head(tensors)

    @cached_property
    def whole(self):
        return self.case.build()

    def _head(self, tensors):
        parts = {name: tensors[f"{self.own}{name}.weight"] for name in self.names}
        embedding_norm, hidden_norm, join, final_norm = self.names
        block = self._cut(slice(self.layers, None))
        norms = [self._cut(slice(0)).norm for _ in range(3)]
        for norm, name in zip(norms, (embedding_norm, hidden_norm, final_norm), strict=True):
            norm.weight.data = torch.tensor(parts[name])
        block.norm = norms[2]
        verifier = self.case.build()
        verifier.model = self._cut(slice(self.layers))
        return Mtp(
            Verifier(verifier),
            block,
            norms[:2],
            parts[join],
            tensors["model.embed_tokens.weight"],
            tensors["lm_head.weight"],
        )

    def _cut(self, layers):
        """Returns the model with some of its layers."""
        model = self.case.build().model
        model.layers = torch.nn.ModuleList(list(model.layers)[layers])
        model.config.num_hidden_layers = len(model.layers)
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(model.config, name, None):
                setattr(model.config, name, getattr(model.config, name)[layers])
        return model
