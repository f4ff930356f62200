"""A compiled TPU program, from its text to seconds and GB.

compiler   compiles a program in a process of its own
hlo        reads the program's text
schedule   the cycles that the compiler gives each instruction
costs      walks the program and adds up cycles, bytes and collectives
matmuls, traffic    what one instruction multiplies, and what it moves in HBM
estimate   memory, time and cost of the whole
"""
