"""`animegamer plan`: compiles a program for a TPU slice and estimates its memory, time and cost.

command, report              options and progress; the text and the JSON object
topology, interconnect       a slice, and the links that its collectives use
configurations               what the options mean, what a sweep tries, what is nearest
programs, abstract_inputs    the programs, and shapes in place of weights and data
compiled/                    the compiled program, from its text to seconds
"""
