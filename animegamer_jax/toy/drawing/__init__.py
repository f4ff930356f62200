"""Scenes of the toy world to frames.

draw                `render`: a scene to frames (read first)
poses               where every part of a character is in each frame; characters, shapes
places              scenery in endless strips
style               what films add: transitions, held drawings, pans, flashes, bars
"""
