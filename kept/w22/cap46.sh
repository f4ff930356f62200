# cap46.sh STEPS MODEL OUT
export JAX_COMPILATION_CACHE_DIR=/work/jax_cache3 JAX_PLATFORMS=cpu PYTHONPATH=/work/train/code24 LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4
export XLA_FLAGS=--xla_force_host_platform_device_count=2
cd /work/train
/work/main/.venv/bin/python -u -m animegamer_jax.cli train mllm --model $2 --data d/features --out $3 --steps $1 --batch-size 64 --dtype float32 --targets captions --word-weight ${WW:-0.01} --save-every 100 ${@:4}
date; echo end
