"""The named workloads, for benchmarks and tests alike."""

import dataclasses
import functools

import numpy as np

# Draws of a workload that a benchmark may use: seeds from 0.
DRAWS = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Packed rows of sequences that are causal or full.

    Attributes:
        name: Short name, as in the tables.
        B, T, N, K, H: Rows, tokens a row, query heads, key/value heads, head dim.
        dtype: Name of the dtype of query, key and value.
        shortest, longest: Lengths of the sequences, in tokens; log-uniform.
        sequences: Sequences a row; None: as many as fit, one after the other.
        kinds: Which kinds of sequences there are, "causal" and "full".
        window: Keys that a causal query sees, its own included; None: all.
    """

    name: str
    B: int = 1
    T: int
    N: int
    K: int
    H: int
    dtype: str
    shortest: int
    longest: int
    sequences: int | None = None
    kinds: tuple[str, ...] = ("causal", "full")
    window: int | None = None

    @property
    def one_sequence_a_row(self) -> bool:
        return self.shortest == self.T

    @functools.cached_property
    def most_sequences(self) -> int:
        """The most sequences of a row in the first draws: the bound to be given."""
        return max(int(self.rows(seed)[0].max()) for seed in range(DRAWS))

    def rows(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Segment ids and policy ids (index into `kinds`), int32 ``[B, T]``.

        With a number of sequences: lengths are drawn again until they fit into the row,
        and the kinds take turns, in a random order. Without: a row ends before the
        first sequence that does not fit, and each kind is as likely for a sequence.
        What is left is padding.
        """
        rng = np.random.default_rng(seed)
        ids = np.zeros((self.B, self.T), np.int32)
        policy_ids = np.zeros_like(ids)
        for row in range(self.B):
            lengths = self._lengths(rng)
            end, numbers = sum(lengths), np.arange(len(lengths))
            if self.sequences is None:
                kinds = rng.integers(len(self.kinds), size=numbers.size)
            else:
                kinds = rng.permutation(numbers % len(self.kinds))
            ids[row, :end] = np.repeat(numbers + 1, lengths)
            policy_ids[row, :end] = np.repeat(kinds, lengths)
        return ids, policy_ids

    def _lengths(self, rng: np.random.Generator) -> list[int]:
        low, high = np.log(self.shortest), np.log(self.longest + 1)
        if self.sequences is not None:
            while True:
                lengths = np.exp(rng.uniform(low, high, self.sequences)).astype(int)
                if lengths.sum() <= self.T:
                    return lengths.tolist()
        lengths = []
        while True:
            length = int(np.exp(rng.uniform(low, high)))
            if sum(lengths) + length > self.T:
                return lengths
            lengths.append(length)


def _cpu(name: str, T: int, sequences: int) -> Workload:
    return Workload(
        name=name,
        T=T,
        N=8,
        K=8,
        H=64,
        dtype="float32",
        sequences=sequences,
        shortest=64,
        longest=512,
    )


def _gpu(name: str, **changes) -> Workload:
    usual = {"B": 4, "T": 8192, "N": 16, "H": 128, "shortest": 256, "longest": 4096}
    settings = {**usual, **changes}
    settings.setdefault("K", settings["N"])
    return Workload(name=name, dtype="bfloat16", **settings)


CPU = (_cpu("C1", 2048, 8), _cpu("C2", 4096, 16), _cpu("C3", 8192, 32))
GPU = (
    _gpu("M1"),
    _gpu("M2", N=32, H=64),
    _gpu("M3", N=8, H=256),
    _gpu("M4", N=32, K=8),
    _gpu("M5", B=1, T=32768, shortest=512, longest=16384),
    _gpu("M6", shortest=64, longest=512),
    _gpu("M7", kinds=("causal",), window=1024),
    _gpu("M8", kinds=("causal",), shortest=8192, longest=8192),
    _gpu("M9", kinds=("causal",)),
    _gpu("M10", kinds=("full",)),
    _gpu("M11", kinds=("causal",), shortest=8192, longest=8192, window=1024),
    _gpu("M12", kinds=("causal",), shortest=8192, longest=8192, N=8, H=256),
)
ALL = CPU + GPU

# For benchmarks.scaling: many rows, and one long row. Those for CPUs show that it runs.
SCALING = {
    "gpu": (GPU[0], _gpu("L1", B=1, T=131072, shortest=1024, longest=65536)),
    "cpu": (
        dataclasses.replace(CPU[0], name="S1", B=8, T=512, H=16, sequences=2),
        dataclasses.replace(CPU[0], name="S2", T=4096, H=16, sequences=None),
    ),
}
