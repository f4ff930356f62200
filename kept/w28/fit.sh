# fit.sh FIT REPS STEPS MODEL OUT BATCH [more]
export JAX_COMPILATION_CACHE_DIR=/work/jax_cache3 JAX_PLATFORMS=cpu PYTHONPATH=/work/train/code26 LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4
export XLA_FLAGS=--xla_force_host_platform_device_count=2
cd /work/train; export SHARE=${SHARE:-0.5}
/work/main/.venv/bin/python -u $1 $2 --model $4 --data d/features --history-shown 0 --batch-size $6 --context-dropout 0.15 --dtype float32 --save-every 200 --steps $3 --out $5 ${@:7}
date; echo end
