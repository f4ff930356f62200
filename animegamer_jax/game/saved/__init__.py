"""What a saved game consists of.

turns                 a turn, its meters, what a player sets after it
tree                  the lines of turns: set aside, brought back, left for another
game_file             game.json: read and checked, written
representation_file   the file of a turn's shot representation, and of its first frame's latents if
                      the decoder has a memory
board, film, card     a game's pictures in one: a storyboard, a film, a day's card to share
"""
