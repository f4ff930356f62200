# lm.sh STEPS MODEL OUT [more]
export JAX_COMPILATION_CACHE_DIR=/work/jax_cache3 JAX_PLATFORMS=cpu PYTHONPATH=/work/train/${CODE:-code26} LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4
export XLA_FLAGS=--xla_force_host_platform_device_count=2
cd /work/train
/work/main/.venv/bin/python -u -m animegamer_jax.cli train mllm --model $2 --data d/features --out $3 --steps $1 --batch-size 8 --dtype float32 --history-noise 0.2 --caption-weight 1 --naming-weight ${WW:-0.02} --save-every 200 ${@:4}
date; echo end
