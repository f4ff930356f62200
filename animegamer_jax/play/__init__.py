"""`animegamer play`: a game in the terminal.

command    options, and the checks before a game starts
terminal   the prompt, the turns and their progress
"""
