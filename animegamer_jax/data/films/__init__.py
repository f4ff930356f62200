"""From films to games, in the order in which a film flows.

`cutting` turns a film into clips, `clips` stores them, `annotation` says what they show, `games`
groups them into a game dataset. `command` has the commands, `runners` shares the films out to
processes (`pool`) or a cluster (`beam`, `beam_options`), `gallery` shows what a folder holds.
"""
