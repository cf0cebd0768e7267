"""What a synthetic model says: a function of the token prefix alone, as compiled loops over the rows of a forward.

Each position has a 64-bit *state*, kept in its slot of the paged cache as a key is: a hash of the token there, of the
state before it, and of the state of one earlier position that its own position picks. So a row costs the same however
long its prefix is, and a cache that serves one wrong slot, near or far, changes what is said.

Logits are a stretch of one table of normal noise, with a favourite and a second choice above it. Knows slots and rows;
refuses to know caches, sessions and time.

Legend: M rows of the forward, W rows with logits, V vocabulary.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import GAMMA, finalised
from specdec.kernel_cache import kept
from specdec.model.block_pool import BLOCK_SIZE

NUM_STRETCHES = 1 << 16
"""Places in the table where a row's noise may begin. The table has V numbers more."""
IMPOSSIBLE = np.float32(-1e4)
"""The logit of an end of sequence that must not come: beyond the reach of any bias, temperature and noise."""

_ANOTHER_TARGET = np.uint64(0xD1B54A32D192ED03)
_UNIT = 2.0**-53


_compiled = kept(nogil=True)


@_compiled
def mixed(bits: Any, salt: Any) -> Any:
    """64 bits that depend on all bits of both."""
    return finalised((bits ^ (salt * GAMMA)) + GAMMA)


@_compiled
def append_states(
    seed: Any,
    token_ids: Any,
    positions: Any,
    num_direct_keys: Any,
    ancestor_slots: Any,
    sessions: Any,
    block_tables: Any,
    write_slots: Any,
    slots: Any,
    states: Any,
) -> None:
    """The states of a forward's rows, into `states` [M] and into the rows' own slots, one after the other.

    The arrays between are those of AttentionPlan, read as attention reads them. `slots` is the storage, uint64.
    """
    for row in range(len(token_ids)):
        position, table = positions[row], block_tables[sessions[row]]
        state = mixed(np.uint64(token_ids[row]), seed)
        if position > 0:
            # Which one depends on the position alone, so that chunks and trees cannot change it.
            earlier = np.int64(mixed(np.uint64(position), _ANOTHER_TARGET) % np.uint64(position))
            for key in (position - 1, earlier):
                beyond = key - num_direct_keys[row]
                slot = ancestor_slots[row, beyond] if beyond >= 0 else key
                state = mixed(state, slots[table[slot // BLOCK_SIZE] * BLOCK_SIZE + slot % BLOCK_SIZE])
        states[row] = state
        slots[write_slots[row]] = state


@_compiled
def write_logits(
    states: Any, noise: Any, first_word_id: int, end_token_id: int, acceptance: float, end_rate: float, logits: Any
) -> None:
    """Fills `logits` [W, V] from `states` [W]. With probability 1 - `acceptance` a row has another favourite."""
    vocabulary_size = logits.shape[1]
    num_words = np.uint64(vocabulary_size - first_word_id)
    for row in range(len(states)):
        bits = mixed(states[row], np.uint64(1))
        favourite = first_word_id + np.int64(mixed(bits, np.uint64(2)) % num_words)
        ends = _unit(mixed(bits, np.uint64(3))) < end_rate
        if _unit(mixed(bits, np.uint64(4))) >= acceptance:
            bits = mixed(bits, _ANOTHER_TARGET)
            other = np.int64(mixed(bits, np.uint64(2)) % (num_words - np.uint64(1)))
            favourite = first_word_id + (favourite - first_word_id + 1 + other) % np.int64(num_words)
            ends = False
        second = first_word_id + np.int64(mixed(bits, np.uint64(5)) % num_words)
        stretch = np.int64(mixed(bits, np.uint64(6)) % np.uint64(NUM_STRETCHES))
        logits[row] = noise[stretch : stretch + vocabulary_size]
        # Noise weighs as much as one logit of log V + 1/2: the favourite has most of the probability, more or less.
        height = np.log(vocabulary_size) + 1.0 + 4.0 * _unit(mixed(bits, np.uint64(7)))
        logits[row, second] = height - 2.0
        logits[row, favourite] = height
        logits[row, end_token_id] = height + 10.0 if ends else IMPOSSIBLE


@_compiled
def _unit(bits: Any) -> float:
    return np.float64(bits >> np.uint64(11)) * _UNIT


def noise_table(seed: int, vocabulary_size: int) -> NDArray[np.float32]:
    """[NUM_STRETCHES + V] standard normal, cut at 4 so that no noise reaches a favourite."""
    noise = np.random.default_rng(seed).standard_normal(NUM_STRETCHES + vocabulary_size, dtype=np.float32)
    return np.clip(noise, -4.0, 4.0)
