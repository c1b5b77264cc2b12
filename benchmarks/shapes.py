"""The named workloads, for benchmarks and tests alike."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Packed rows of sequences that are causal or full.

    Attributes:
        name: Short name, as in the tables.
        B, T, N, K, H: Rows, tokens a row, query heads, key/value heads, head dim.
        dtype: Name of the dtype of query, key and value.
        sequences: Sequences a row.
        shortest, longest: Their lengths, in tokens.
    """

    name: str
    B: int
    T: int
    N: int
    K: int
    H: int
    dtype: str
    sequences: int
    shortest: int
    longest: int

    def rows(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Segment ids and policy ids (0: causal, 1: full), int32 ``[B, T]``.

        Lengths are log-uniform from `shortest` to `longest`, drawn again until they fit
        into the row; what they leave is padding. Every other sequence, in a random
        order, is causal.
        """
        rng = np.random.default_rng(seed)
        ids = np.zeros((self.B, self.T), np.int32)
        policy_ids = np.zeros_like(ids)
        low, high = np.log(self.shortest), np.log(self.longest + 1)
        for row in range(self.B):
            while True:
                draw = rng.uniform(low, high, self.sequences)
                lengths = np.exp(draw).astype(int)
                if lengths.sum() <= self.T:
                    break
            end = lengths.sum()
            numbers = np.arange(self.sequences)
            ids[row, :end] = np.repeat(numbers + 1, lengths)
            policy_ids[row, :end] = np.repeat(rng.permutation(numbers % 2), lengths)
        return ids, policy_ids


def _cpu(name: str, T: int, sequences: int) -> Workload:
    return Workload(
        name=name,
        B=1,
        T=T,
        N=8,
        K=8,
        H=64,
        dtype="float32",
        sequences=sequences,
        shortest=64,
        longest=512,
    )


CPU = (_cpu("C1", 2048, 8), _cpu("C2", 4096, 16), _cpu("C3", 8192, 32))
