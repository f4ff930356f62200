"""Local folders and buckets: paths, atomic writes, serialization."""
