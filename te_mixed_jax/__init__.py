"""Attention for packed sequences, with a mask policy per sequence, exact under vmap."""

from importlib import metadata as _metadata

from te_mixed_jax import context_parallel as context_parallel
from te_mixed_jax import visualize as visualize
from te_mixed_jax._attention import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from te_mixed_jax._attention import dot_product_attention as dot_product_attention
from te_mixed_jax._descriptor import SequenceDescriptor as SequenceDescriptor
from te_mixed_jax._descriptor import (
    from_segment_ids_and_pos as from_segment_ids_and_pos,
)
from te_mixed_jax._explain import explain as explain
from te_mixed_jax._mask_types import (
    policies_from_mask_types as policies_from_mask_types,
)
from te_mixed_jax._policy import CAUSAL as CAUSAL
from te_mixed_jax._policy import CAUSAL_BOTTOM_RIGHT as CAUSAL_BOTTOM_RIGHT
from te_mixed_jax._policy import FULL as FULL
from te_mixed_jax._policy import MaskPolicy as MaskPolicy
from te_mixed_jax._policy import QueryTokens as QueryTokens
from te_mixed_jax._policy import chunked as chunked
from te_mixed_jax._policy import prefix as prefix
from te_mixed_jax._primitives import fused_attn_bwd_p as fused_attn_bwd_p
from te_mixed_jax._primitives import fused_attn_fwd_p as fused_attn_fwd_p
from te_mixed_jax._transformer_engine import (
    from_transformer_engine as from_transformer_engine,
)
from te_mixed_jax._transformer_engine import (
    to_transformer_engine as to_transformer_engine,
)

try:
    __version__ = _metadata.version("te-mixed-jax")
except _metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"
