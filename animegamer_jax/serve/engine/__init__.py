"""Turns of many players, played in batches.

engine        takes the requests that wait, in batches that give way to each other
batch_player  plays a batch and saves its turns
turn_request  a turn that a player asked for
fair_queue    those that wait: clients take turns
"""
