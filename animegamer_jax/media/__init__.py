"""Video files, storyboards, and motion by optical flow.

video        H.264 clips: encoded, joined, read, enlarged
storyboard   a game at a glance, as one PNG
motion       optical flow of a clip, and its motion level
"""
