"""Video files, pictures, storyboards, and motion by optical flow.

containers   which of libav's containers are opened
video        H.264 clips: encoded, joined, read, enlarged
pictures     pictures of players: read, bounded, fitted to a clip
storyboard   a game at a glance, as one PNG; sheets: small pictures; fonts: text in pictures
motion       optical flow of a clip, and its motion level
"""
