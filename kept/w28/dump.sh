export JAX_COMPILATION_CACHE_DIR=/work/jax_cache3 JAX_PLATFORMS=cpu PYTHONPATH=/work/train/code26 LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4
cd /work/train; /work/main/.venv/bin/python -u dump2.py "$@"
