"""Layer embeddings: each layer adds an embedding of its own of each token to the residual stream (Gemma 3n and 4).

The tables of all layers lie side by side in one table. A row of it is read once per token, so it costs memory and next
to no time.
"""

import jax
from jaxtyping import Array, Float

from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.linear import project
from jaxkv.layers.norm import rms_norm
from pallas_kernels.activations import activate


def layer_embeddings(
    params: LayerParams,
    of_ids: Float[Array, "tokens all_sizes"],
    embeddings: Float[Array, "tokens hidden_size"],
    *,
    eps: float,
) -> Float[Array, "tokens layers size"]:
    """Returns each layer's embedding of each token: one of the token's id, and a projection of its embedding.

    Args:
        params: "layer_embed_in" [layers * size, hidden_size]; "layer_embed_norm" [size], the norm of each layer's part
            of the projection.
        of_ids: each token's row of the table of all layers, [tokens, layers * size].
        embeddings: the embeddings with which the residual stream begins.
        eps: epsilon of the norm.
    """
    weight = params["layer_embed_norm"]
    size, shape = weight.shape[0], (len(of_ids), -1, weight.shape[0])
    of_ids = of_ids * size**0.5
    projected = project(params["layer_embed_in"], embeddings) * embeddings.shape[1] ** -0.5
    normed = rms_norm(weight, projected.reshape(shape), eps=eps)
    # Without the barrier XLA would compute each layer's part in a kernel of its own.
    return jax.lax.optimization_barrier((normed + of_ids.reshape(shape)) * 0.5**0.5)


def add_layer_embedding(
    params: LayerParams,
    hidden: Float[Array, "tokens hidden_size"],
    own: Float[Array, "tokens size"],
    *,
    activation: str,
    eps: float,
) -> Float[Array, "tokens hidden_size"]:
    """Returns the residual stream after a layer's embeddings are added to it.

    Args:
        params: "layer_gate" [size, hidden_size]; "layer_out" [hidden_size, size]; "layer_out_norm" [hidden_size].
        hidden: the residual stream after the layer's feed-forward.
        own: the layer's embeddings.
        activation: name of the gate's activation.
        eps: epsilon of the norm.
    """
    gate = activate(project(params["layer_gate"], hidden), activation=activation)
    # Without the barrier XLA would cut out the layer's part in a kernel of its own, before the projection.
    added = project(params["layer_out"], jax.lax.optimization_barrier(gate * own))
    return hidden + rms_norm(params["layer_out_norm"], added, eps=eps)
