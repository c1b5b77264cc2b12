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
    """

    name: str
    B: int
    T: int
    N: int
    K: int
    H: int
    dtype: str
    sequences: int

    def rows(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Segment ids and policy ids (0: causal, 1: full), int32 ``[B, T]``.

        Lengths are uniform between a half and one and a half times their mean and
        fill the row; half of a row's sequences, rounded up, are causal.
        """
        rng = np.random.default_rng(seed)
        ids, policy_ids = [], []
        for _ in range(self.B):
            shares = rng.uniform(0.5, 1.5, self.sequences)
            ends = np.round(np.cumsum(shares) / shares.sum() * self.T).astype(int)
            lengths = np.diff(ends, prepend=0)
            policies = rng.permutation(np.arange(self.sequences) % 2)
            ids.append(np.repeat(np.arange(1, self.sequences + 1), lengths))
            policy_ids.append(np.repeat(policies, lengths))
        return np.stack(ids).astype(np.int32), np.stack(policy_ids).astype(np.int32)


_CPU = {"B": 1, "N": 8, "K": 8, "H": 64, "dtype": "float32"}
CPU = (
    Workload(name="C1", T=2048, sequences=8, **_CPU),
    Workload(name="C2", T=4096, sequences=16, **_CPU),
    Workload(name="C3", T=8192, sequences=32, **_CPU),
)
