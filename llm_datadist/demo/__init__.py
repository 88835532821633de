"""The demo: a prompt process computes the KV cache of a text, a decoder process pulls it and goes on writing."""
