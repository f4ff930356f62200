"""Which of libav's containers are opened: those that hold their own data.

Others are lists of files or addresses, such as ffconcat, HLS and SDP; libav recognises them by
their content, whatever the file is called.
"""

from collections.abc import Mapping

CLIP_FORMAT = "mp4"
"""Name of the one container of clips."""

_FORMATS = (
    *("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi", "mpegts", "mpeg", "flv", "ogg", "asf"),
    *("mpegvideo", "h264", "hevc", "m4v"),
)

OPTIONS: Mapping[str, str] = {"format_whitelist": ",".join(_FORMATS), "protocol_whitelist": "file"}
"""Options of `av.open` for videos of any kind."""
