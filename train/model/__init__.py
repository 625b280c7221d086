"""Models in Flax nnx: a decoder, an encoder, their blocks, and the sampling of text."""
