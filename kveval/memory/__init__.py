"""The shape of a KV cache and the bytes that it takes, by formula."""
