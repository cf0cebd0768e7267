"""Counter-based noise: every random number is a function of who asks for it, never of who asked before.

A number belongs to (seed, sample index, epoch, position, purpose, index), so that neither the batch, nor the drafts,
nor a restart changes it. BLAKE2b turns everything but the index into a key, SplitMix64 (Steele, Lea and Flood, "Fast
Splittable Pseudorandom Number Generators", OOPSLA 2014) turns key and index into 64 bits. The index is a token id for
Gumbel values, so that padding rows change nothing, and a sibling's rank for acceptance.
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding.rows.arithmetic import exact
from specdec.kernel_cache import kept

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)

_STEP = 2.0**-52
MIN_GUMBEL = -math.log(53 * math.log(2))
MAX_GUMBEL = -math.log(-math.log1p(-(2.0**-53)))
"""Gumbel values lie in [MIN_GUMBEL, MAX_GUMBEL], about -3.6 to 36.7: they come from uniforms in [2^-53, 1 - 2^-53]."""


class Purpose(Enum):
    """What a number is for. Numbers of different purposes are independent. Values are part of the key."""

    ACCEPT = 1
    """Whether a draft token is accepted; index: its rank among its siblings."""
    RECOVER = 2
    """The token drawn from the residual that rejected siblings left."""
    TARGET_SAMPLE = 3
    """The token drawn from the target itself: every token under `coupled`; bonus and plain tokens under the others."""


@dataclass(frozen=True)
class Noise:
    """The noise of one sample of one request.

    `epoch` is for `one_hot` and `rejection` alone, where a replay after a failover must not meet the same numbers with
    another draft; under `greedy` and `coupled` it is 0, so that a replay gives the same tokens.
    """

    seed: int
    sample_index: int = 0
    epoch: int = 0

    def uniform(self, position: int, purpose: Purpose, index: int = 0) -> float:
        """One number in [0, 1), a multiple of 2^-53."""
        number: float = uniform_of(np.uint64(self.key(position, purpose)), index)
        return number

    def gumbel(self, position: int, token_ids: Tensor | None, vocabulary_size: int) -> Tensor:
        """Standard Gumbel values of `token_ids`, or of all ids below `vocabulary_size`.

        Returns [len(token_ids)] or [vocabulary_size] float64 on the CPU. A token's value depends on no other token.
        """
        indices = np.arange(vocabulary_size) if token_ids is None else token_ids.cpu().numpy()
        return torch.from_numpy(_gumbels(np.uint64(self.key(position, Purpose.TARGET_SAMPLE)), indices))

    def key(self, position: int, purpose: Purpose) -> int:
        """64 bits that stand for all but the index."""
        message = struct.pack("<qqqqB", self.seed, self.sample_index, self.epoch, position, purpose.value)
        digest = hashlib.blake2b(message, digest_size=8, person=b"specdec noise").digest()
        return int.from_bytes(digest, "little")


@exact
def splitmix64(key: np.uint64, index: int) -> np.uint64:
    """Output number `index` of the SplitMix64 generator whose state is `key`. Wraps modulo 2^64."""
    return finalised(np.uint64(index + 1) * GAMMA + key)


@exact
def finalised(bits: np.uint64) -> np.uint64:
    """SplitMix64's last step: 64 bits, each of which depends on all of these."""
    bits ^= bits >> np.uint64(30)
    bits *= MULTIPLIER_1
    bits ^= bits >> np.uint64(27)
    bits *= MULTIPLIER_2
    return bits ^ (bits >> np.uint64(31))


@kept()
def uniform_of(key: np.uint64, index: int) -> float:
    """The uniform number in [0, 1) of an index, a multiple of 2^-53."""
    return float(splitmix64(key, index) >> np.uint64(11)) * 2.0**-53


@exact
def gumbel_of(key: np.uint64, token_id: int) -> float:
    """A token's Gumbel value. (n + 1/2) / 2^52 is a uniform strictly between 0 and 1, and exact in a double."""
    step = splitmix64(key, token_id) >> np.uint64(12)
    return -math.log(-math.log((float(step) + 0.5) * _STEP))


@kept()
def _gumbels(key: np.uint64, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    values = np.empty(len(token_ids))
    for index in range(len(token_ids)):
        values[index] = gumbel_of(key, token_ids[index])
    return values
