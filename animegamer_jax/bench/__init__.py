"""`animegamer bench`: times the parts of a turn and the training steps, and PyTorch if asked.

command, run, report     options; what is compiled, checked and timed; tables and JSON
names, model, programs   the networks, their inputs, and the programs of a turn
training                 the training step of each stage
torch_backend            the parts of a turn in PyTorch; torch_networks: its networks
compare, timing          differences of outputs; stopwatch, memory and peak
"""
