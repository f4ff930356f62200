"""From a film to two-second clips: read `process_film` first.

`video_reader` yields frames with their times; `analysis` makes the first pass over them and finds
scenes (`cuts`, `fades`, or `transnet`) and bars (`letterbox`); `filters` finds useless clips.
"""
