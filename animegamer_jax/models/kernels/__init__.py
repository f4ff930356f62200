"""Attention: one entry point, and the ways to compute it.

attend.py   Projects into heads and attends; chooses the kernel and the memory layout. Start here.
masks.py    Which query sees which key, as arrays or as numbers known when a program is traced.
blocked.py  Plain and blocked attention in JAX: for CPUs, small sizes and masks known at run time.
splash.py   JAX's splash attention, for training on a TPU; flash.py: our kernel for playing on one;
            flash_training.py: ours for training on one.
cudnn.py    The flash kernel of NVIDIA's cuDNN, for one GPU.
"""
