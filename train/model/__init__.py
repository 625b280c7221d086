"""Models in Flax nnx: a decoder, an encoder, their blocks, and text sampling."""
