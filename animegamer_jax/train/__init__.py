"""Training: one loop and one step for all stages.

loop                     restore, step, log, evaluate, save, finish: read this first
step, optimizer, mesh    one optimizer step; AdamW, Muon, the average; devices and what they divide
checkpoint, evaluation, metric_logger, signals   what the loop uses
stages/, registry        the stages, and how they are found by name
command, run, result     options and checks; what is trained; the bundle that it leaves
"""
