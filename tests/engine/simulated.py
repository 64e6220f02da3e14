"""A device in NumPy behind the real engine: any wrong page, state, slot or order shows at once, and nothing compiles.

Instead of keys and values, a slot holds (token, position, chain). The chain is a number computed from all tokens up to
this one. A state holds (chain, length). A row that reads another text than its own, or writes a shared page, raises
`WrongUse`. The next token is computed from the chain, so an oracle without pages can compute it too.
"""

from collections import Counter

import numpy as np

from jaxkv.offload.programs import role_stacks
from tests.engine.simulated_memory import on_device
from tests.engine.simulated_text import VOCAB, chains_of, choose, is_finite, link, weigh


class WrongUse(AssertionError):
    """A row read something else than its own text, or wrote what is not its own."""


class SimulatedDevice:
    """Stands in for the programs of an sequence_runner whose cache is `put_caches_on_device`.

    Args:
        sequence_runner: whose; it compiles nothing any more.
        broken_every: see `is_finite`.

    Attributes:
        asked: how often each program was asked for.
    """

    def __init__(self, sequence_runner, *, broken_every=0):
        self.layout, self.owner, self.packer = (
            sequence_runner.runner.layout,
            sequence_runner.runner.owner,
            sequence_runner.packer,
        )
        self.asked = Counter()
        self._sequence_runner, self._broken_every = sequence_runner, broken_every
        self._num_layers = sequence_runner.runner.model.num_layers
        sequence_runner.runner.program, sequence_runner.runner.read = self.program, np.asarray

    def program(self, declared):
        """Returns what runs a program, and notes that it was asked for."""
        self.asked[declared] += 1
        self._sequence_runner.runner._known.setdefault(declared, None)
        if declared.kind == "swap_out":
            return lambda cache, ids: self.read_out(declared, cache, ids)
        if declared.kind == "swap_in":
            return lambda cache, ids, units: self.write_in(declared, cache, ids, units)
        if declared.kind == "copy":
            return lambda params, cache, ids: self.copy(cache, ids)
        if declared.kind in ("admit", "readmit"):
            return lambda params, cache, *arrays: self.admit(cache, *arrays)
        if declared.kind == "sample":
            return lambda params, *arguments: self.sample(declared, *arguments)
        return lambda params, cache, *packed: self.run(declared, cache, *packed)

    def fill_free(self):
        """Writes junk into every free page and state. Biases stay clean, as the engine promises to keep them."""
        if self.owner.poisoned:
            return
        self.owner.announce_donation()
        arrays = self._by_place(self.owner.handle().cache)
        for group in self.layout.groups:
            pool, first = (
                self._sequence_runner.allocator.pool(group.name),
                int(group.unit != "page"),
            )
            ids = range(first, self.owner.counts[group.name])
            free = [at for at in ids if not pool.references(at)]
            for spec in group.spec.arrays:
                for layer in [] if spec.role.startswith("bias") else group.layers:
                    array = arrays[layer, spec.role]
                    array[free] = np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max

    # Programs beside the steps.

    def copy(self, cache, ids):
        for group, (sources, targets) in zip(self.layout.groups, ids, strict=True):
            for array in self._arrays(cache, group):
                real = targets < len(array)
                array[targets[real]] = array[sources[real]].copy()
        return cache, ()

    def read_out(self, declared, cache, ids):
        group, arrays = self.layout.groups[declared.group], self._by_place(cache)
        last = self.owner.counts[group.name] - 1
        return tuple(
            tuple(
                np.stack(
                    [
                        [
                            np.asarray(arrays[layer, spec.role][min(at, last)])
                            for layer in group.layers
                        ]
                        for spec in stack
                    ]
                )
                for stack in role_stacks(group)
            )
            for at in ids.tolist()
        )

    def write_in(self, declared, cache, ids, units):
        group, arrays = self.layout.groups[declared.group], self._by_place(cache)
        for at, unit in zip(ids.tolist(), units, strict=True):
            parts = [part for array in unit for part in np.asarray(array)]
            for spec, values in zip(group.spec.arrays, parts, strict=True):
                for layer, value in zip(group.layers, values, strict=True):
                    if at < self.owner.counts[group.name]:
                        arrays[layer, spec.role][at] = value
        return cache, ()

    def admit(self, cache, slots, prompts, *rest):
        choices = self._choices(cache)
        biases = rest[-2:] if "bias_ids" in choices else ()
        generated = rest[: len(rest) - len(biases)]
        for row, slot in enumerate(slots.tolist()):
            if slot >= self.owner.counts["sampling"]:
                continue
            choices["last_token"][slot] = 0
            if "token_history" in choices:
                text = [*prompts[row], *(generated[0][row] if generated else ())]
                text = [token for token in text if token < VOCAB]
                choices["token_history"][slot][: len(text)] = text
            if "output_counts" in choices:
                choices["prompt_seen"][slot] = np.minimum(1, _histogram(prompts[row]))
                choices["output_counts"][slot] = _histogram(generated[0][row] if generated else ())
            for role, values in zip(("bias_ids", "bias_values"), biases, strict=False):
                choices[role][slot] = values[row]
        return cache, ()

    # Steps.

    def run(self, shape, cache, ints, floats=None):
        """Runs a step, or several, and returns the cache and the packed choices."""
        places, float_places = self.packer.packed_layout.arrangements(shape)
        fields = places.split(np.array(ints))
        fields |= {} if floats is None else float_places.split(np.array(floats))
        if shape.drafts:
            return cache, on_device(self._verify(shape, cache, fields))
        if shape.forward_only:
            return cache, on_device([chain or 0 for chain in self._forward(shape, cache, fields)])
        turns = [self._turn(shape, cache, fields, turn) for turn in range(shape.steps)]
        return cache, on_device(turns if shape.steps > 1 else turns[0])

    def sample(self, spec, choices, hidden, ints, masks, floats=None):
        """Samples from what a `forward_only` step has returned, and returns the choices and the packed tokens."""
        places, float_places = self.packer.packed_layout.arrangements(spec)
        fields = places.split(np.array(ints))
        fields |= self.packer.packed_layout.mask_arrangement(spec).split(np.array(masks))
        fields |= {} if floats is None else float_places.split(np.array(floats))
        rows = np.count_nonzero(fields["seq_lens"])
        chains = [*np.asarray(hidden)[:rows].tolist(), *[None] * (spec.rows - rows)]
        return choices, on_device(self._choose(spec, choices, fields, chains))

    def _verify(self, shape, cache, fields):
        """Returns the packed tokens of each position of a step whose rows end with drafts."""
        if shape.drafter is not None:
            self._take_own_drafts(shape, cache, fields)
        width = shape.drafts + 1
        columns = 2 if shape.features.logprobs is None else 3 + 2 * shape.features.logprobs
        out, chosen, states = np.zeros((width, shape.rows, columns + 1), np.int32), [], []
        choices = self._choices(cache)
        for row in range(np.count_nonzero(fields["seq_lens"])):
            drafts = int(fields["drafts"][row])
            start, tokens, places = self._tokens(shape, cache, fields, row, 0)
            chains = self._compute(cache, fields, row, start, tokens, places, 0)
            if drafts >= len(tokens):
                raise WrongUse(f"row {row} has {drafts} drafts among {len(tokens)} tokens")
            drafted, accepted = tokens[len(tokens) - drafts :], 0
            for column in range(drafts + 1):
                chain = chains[len(chains) - 1 - drafts + column]
                packed = out[column, row, :-1]
                token = self._sample(
                    shape, choices, fields, row, chain, packed, drafted[:column], column
                )
                if column == accepted < drafts and packed[1] and token == drafted[column]:
                    accepted += 1
            out[:, row, -1] = accepted
            count = len(tokens) - drafts + accepted
            states += self._written(shape, fields, row, start, chains[: count + 1], places[:count])
            slot, first = int(fields["sampling_states"][row]), start + len(tokens) - drafts
            kept = out[: accepted + 1, row, 0].tolist()
            chosen += [(slot, first + at, token) for at, token in enumerate(kept)]
        self._leave_states(cache, states)
        self._remember(shape, choices, chosen, each_once=False)
        if shape.drafter is not None:
            self._draft(shape, cache, fields)
        return out

    def _take_own_drafts(self, shape, cache, fields):
        """Gives the rows that carry a token on the tokens and places that the device has for them."""
        choices = self._choices(cache)
        for row in np.flatnonzero(fields["carry"]).tolist():
            slot, drafts = int(fields["sampling_states"][row]), int(fields["drafts"][row])
            first, stop = fields["cu_q_lens"][row : row + 2].tolist()
            start = int(choices["text_length"][slot]) - 1
            if not 0 <= start <= int(fields["seq_lens"][row]) - (stop - first):
                raise WrongUse(f"row {row} is at {start}, past the place that the host expects")
            fields["tokens"][first + 1 : stop] = choices["drafts"][slot][:drafts]
            fields["positions"][first:stop] = range(start, start + stop - first)
            fields["seq_lens"][row] = start + stop - first
            for group in self.layout.paged_groups:
                table, size = fields[f"{group.name}.page_table"][row], group.page_size
                slots = [
                    int(table[at // size]) * size + at % size
                    for at in range(start, start + stop - first)
                ]
                fields[f"{group.name}.write_slots"][first:stop] = slots

    def _draft(self, shape, cache, fields):
        choices = self._choices(cache)
        for row in range(np.count_nonzero(fields["seq_lens"])):
            slot = int(fields["sampling_states"][row])
            text = choices["token_history"][slot][: choices["text_length"][slot]].tolist()
            kept = choices["drafts"][slot]
            kept[:] = shape.drafter.draft(slot, text, len(kept))

    def _turn(self, shape, cache, fields, turn):
        chains = self._forward(shape, cache, fields, turn)
        return self._choose(shape, self._choices(cache), fields, chains, turn)

    def _forward(self, shape, cache, fields, turn=0):
        """Computes the rows' tokens; returns the chain of each row, `None` for those that take no part."""
        after, states = [None] * shape.rows, []
        for row in range(np.count_nonzero(fields["seq_lens"])):
            if shape.steps > 1 and turn >= fields["left"][row]:
                continue
            start, tokens, places = self._tokens(shape, cache, fields, row, turn)
            chains = self._compute(cache, fields, row, start, tokens, places, turn)
            states += self._written(shape, fields, row, start, chains, places)
            after[row] = chains[-1]
        self._leave_states(cache, states)
        return after

    def _choose(self, spec, choices, fields, chains, turn=0):
        """Samples a token after each row's chain, remembers them, and returns them packed."""
        top = spec.features.logprobs
        out = np.zeros((spec.rows, 2 if top is None else 3 + 2 * top), np.int32)
        chosen = []
        for row, chain in enumerate(chains):
            if chain is None:
                continue
            slot = int(fields["sampling_states"][row])
            token = self._sample(spec, choices, fields, row, chain, out[row])
            if slot < self.owner.counts["sampling"]:
                chosen.append((slot, int(fields["seq_lens"][row]) + turn, token))
        self._remember(spec, choices, chosen)
        return out

    def _sample(self, shape, choices, fields, row, chain, packed, drafted=(), column=0):
        """Samples the token after a chain, packs what is reported of it, and returns it."""
        top = shape.features.logprobs
        mixed, forbidden = self._wishes(shape, choices, fields, row, chain, drafted, column)
        token, logprob = choose(mixed, forbidden)
        packed[:2] = token, is_finite(chain, self._broken_every)
        if top is not None:
            values = packed.view(np.float32)
            values[2], values[3 + top :] = logprob, logprob
            packed[3 : 3 + top] = (token + np.arange(top)) % VOCAB
        return token

    def _tokens(self, shape, cache, fields, row, turn):
        """Returns the first position, the tokens, and where they lie in the packed step."""
        first, stop = (
            (row, row + 1) if shape.decode else fields["cu_q_lens"][row : row + 2].tolist()
        )
        tokens = fields["tokens"][first:stop].tolist()
        start = int(fields["seq_lens"][row]) + turn - len(tokens)
        positions = fields["positions"][first:stop] + turn
        if positions.tolist() != list(range(start, start + len(tokens))):
            raise WrongUse(f"row {row} has the positions {positions}, but begins at {start}")
        if turn or fields["carry"][row]:
            slot = int(fields["sampling_states"][row])
            if slot >= self.owner.counts["sampling"]:
                raise WrongUse(f"row {row} carries a token on, but has no slot")
            tokens[0] = int(self._choices(cache)["last_token"][slot])
        return start, tokens, range(first, stop)

    def _compute(self, cache, fields, row, start, tokens, places, turn):
        """Writes and reads in every group, and returns the chain before the tokens and after each."""
        told = []
        for group in self.layout.state_groups:
            role = "write_states" if turn else "read_states"
            state = int(fields[f"{group.name}.{role}"][row])
            for array in self._arrays(cache, group):
                chain, length = array[state].reshape(-1)[:2].tolist()
                if length != start:
                    raise WrongUse(
                        f"{group.name}: state {state} is after {length} tokens, not {start}"
                    )
                told.append(chains_of(int(chain), tokens))
        for group in self.layout.paged_groups:
            told.append(self._attend(cache, fields, group, row, start, tokens, places, turn))
        if any(one != told[0] for one in told):
            raise WrongUse(f"row {row} has another text in each group: {told}")
        return told[0]

    def _attend(self, cache, fields, group, row, start, tokens, places, turn):
        table, arrays = fields[f"{group.name}.page_table"][row], self._arrays(cache, group)
        before = range(max(0, start - 1), start)
        chain = int(self._seen(group, arrays, table, before)[-1, 2]) if start else 0
        chains = chains_of(chain, tokens)
        slots = self._write_slots(
            fields, group, row, range(start, start + len(tokens)), places, turn
        )
        for position, token, chain, slot in zip(
            range(start, start + len(tokens)), tokens, chains[1:], slots, strict=True
        ):
            if slot >= self.owner.counts[group.name] * group.page_size:
                continue
            page, offset = divmod(slot, group.page_size)
            self._check_own(group, page)
            for array in arrays:
                record = array[page, offset].reshape(-1)
                record[:] = np.nan
                record[:3] = token, position, chain
        # What the first of these tokens sees, and everything after it: each later one sees a part of that.
        first = 0 if group.window is None else max(0, start - group.window + 1)
        seen = self._seen(group, arrays, table, range(first, start + len(tokens)))
        links = link(seen[:-1, 2], seen[1:, 0])
        if not np.array_equal(links, seen[1:, 2]) or seen[-1, 2] != chains[-1]:
            raise WrongUse(f"{group.name}: row {row} reads the text of another before {start}")
        if first == 0 and seen[0, 2] != link(0, seen[0, 0]):
            raise WrongUse(f"{group.name}: row {row} reads another beginning")
        return chains

    @staticmethod
    def _write_slots(fields, group, row, positions, places, turn):
        """Returns where a row's tokens are written: in later turns of several, as the page table has it."""
        if not turn:
            return fields[f"{group.name}.write_slots"][places.start : places.stop].tolist()
        table, size = fields[f"{group.name}.page_table"][row], group.page_size
        return [int(table[at // size]) * size + at % size for at in positions]

    @staticmethod
    def _seen(group, arrays, table, positions):
        """Returns the records at some positions, which the first and the last array must agree on."""
        size, at = group.page_size, np.asarray(positions)
        if at[-1] // size >= len(table):
            raise WrongUse(f"{group.name}: position {at[-1]} lies beyond the table")
        pages = table[at // size]
        one, other = (
            array[pages, at % size].reshape(len(at), -1)[:, :3] for array in (arrays[0], arrays[-1])
        )
        # Junk is not a number, so it differs from everything.
        if not (np.array_equal(one, other) and np.array_equal(one[:, 1], at)):
            raise WrongUse(
                f"{group.name}: other records are read at {at}: the pages {pages} hold {one} and {other}"
            )
        return np.asarray(one).astype(np.int64)

    def _written(self, shape, fields, row, start, chains, places):
        """Returns the states that a row leaves behind: group, state, chain and length of each."""
        left = []
        for group in self.layout.state_groups:
            state = int(fields[f"{group.name}.write_states"][row])
            if state < self.owner.counts[group.name]:
                left.append((group, state, chains[-1], start + len(places)))
            for index in range(shape.pending_checkpoints):
                length = int(fields["snapshot_ends"][index]) - places.start
                if 0 < length <= len(places):
                    state = int(fields[f"{group.name}.snapshot_states"][index])
                    left.append((group, state, chains[length], start + length))
        return left

    def _wishes(self, shape, choices, fields, row, chain, drafted, column):
        """Returns what decides a row's token behind some drafts, and the tokens that it may not have."""
        features, slot = shape.features, int(fields["sampling_states"][row])
        seed, counts, biases = None, None, ()
        if features.draws and fields["temperature"][row] > 0:
            seed = int(fields["seed_low"][row]), int(fields["seed_high"][row])
        if features.penalties and slot < self.owner.counts["sampling"]:
            if fields["presence"][row]:
                roles = ("output_counts", "prompt_seen")
                output, seen = (np.asarray(choices[role][slot], np.int64) for role in roles)
                counts = output + _histogram(drafted), seen
            biases = zip(choices["bias_ids"][slot], choices["bias_values"][slot], strict=True)
        blocked = features.min_tokens and fields["block_stop"].reshape(shape.rows, -1)[row, column]
        forbidden = fields["stop_ids"][row].tolist() if blocked else []
        if features.grammar:
            mask = int(fields["mask_of_row"][row])
            # An index past the end allows every token.
            if mask < shape.masks:
                words = fields["token_masks"][mask]
                bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]
                forbidden += np.flatnonzero(bits == 0).tolist()
        return weigh(chain, seed=seed, counts=counts, biases=biases), forbidden

    def _remember(self, shape, choices, chosen, *, each_once=True):
        """Writes choices, once every row has read."""
        slots = [slot for slot, *_ in chosen]
        if each_once and len(set(slots)) < len(slots):
            raise WrongUse(f"the slots {slots} are written twice")
        for slot, position, token in chosen:
            choices["last_token"][slot] = token
            if "token_history" in choices and position < choices["token_history"].shape[1]:
                choices["token_history"][slot, position] = token
                choices["text_length"][slot] = position + 1
            if shape.features.penalties:
                # Of a row without penalties this counts on from junk, which may wrap around.
                choices["output_counts"][[slot], [token]] += 1

    def _leave_states(self, cache, states):
        """Writes states, once every row has read."""
        for group, state, chain, length in states:
            self._check_own(group, state)
            for array in self._arrays(cache, group):
                array[state].reshape(-1)[:2] = chain, length

    # The cache.

    def _check_own(self, group, unit):
        """Raises if a step writes what is free, or what others hold as well."""
        holders = self._sequence_runner.allocator.pool(group.name).references(unit)
        if holders != 1:
            raise WrongUse(f"{group.name}: {group.unit} {unit}, which {holders} hold, is written")

    @staticmethod
    def _by_place(cache):
        return dict(zip(cache.keys, cache.arrays, strict=True))

    def _arrays(self, cache, group):
        arrays = self._by_place(cache)
        return [arrays[layer, spec.role] for layer in group.layers for spec in group.spec.arrays]

    def _choices(self, cache):
        return {
            role: array
            for (layer, role), array in self._by_place(cache).items()
            if layer == self._num_layers
        }


def _histogram(tokens):
    real = [int(token) for token in tokens if token < VOCAB]
    return np.bincount(np.asarray(real, np.int64), minlength=VOCAB)
