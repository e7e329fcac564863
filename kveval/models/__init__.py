"""What --model means: the catalogue, fetching, loading, hashing."""
