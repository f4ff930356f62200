"""Which of libav's containers and codecs are opened: those with their own data, and usual ones.

Other containers are lists of files or addresses, such as ffconcat, HLS and SDP; libav recognises
them by their content, whatever the file is called. Of its decoders, some hundred are for formats
that hardly anybody has any more, and few people look for faults in those.
"""

import errno
from collections.abc import Mapping
from typing import Any, cast

import av
from av.container import InputContainer
from av.error import InvalidDataError
from av.video.stream import VideoStream

from animegamer_jax.errors import UserError

CLIP_FORMAT = "mp4"
"""Name of the one container of clips."""

_FORMATS = (
    *("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi", "mpegts", "mpeg", "flv", "ogg", "asf"),
    *("mpegvideo", "h264", "hevc", "m4v"),
)

# Names of libav's decoders; sound is not decoded.
_CODECS = (
    *("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mjpeg", "gif", "png", "theora"),
    *("mpeg1video", "mpeg2video", "h263", "flv", "msmpeg4", "msmpeg4v2", "wmv1", "wmv2", "wmv3"),
    *("vc1", "ffv1", "prores"),
)

CLIP_OPTIONS: Mapping[str, str] = {
    "protocol_whitelist": "file",
    "codec_whitelist": ",".join(_CODECS),
}
"""Options of `av.open` for clips, whose container is named."""

OPTIONS: Mapping[str, str] = {**CLIP_OPTIONS, "format_whitelist": ",".join(_FORMATS)}
"""Options of `av.open` for videos of any kind."""


def open_input(
    file: Any, *, options: Mapping[str, str], format: str | None = None
) -> InputContainer:
    """Opens a file for reading; all that is wrong with its content is an FFmpegError.

    Raises:
        FFmpegError, OSError: It cannot be opened; `strerror` says why in a few words.
    """
    try:
        opened = av.open(file, mode="r", format=format, options=dict(options))
        return cast(InputContainer, opened)
    except UnicodeDecodeError as error:  # of PyAV before 19, which reads the tags at once
        raise InvalidDataError(errno.EINVAL, "tags that are not UTF-8") from error


def check_codec(stream: VideoStream, name: object) -> None:
    """Refuses a stream whose decoder is none of the usual ones, before anything is decoded.

    Raises:
        UserError: It is in another codec; begins with `name`.
    """
    codec = getattr(stream.codec_context, "name", "an unknown one")
    if codec not in _CODECS:
        raise UserError(
            f"{name}: expected a video in a usual codec, such as H.264, found {codec}: convert it "
            "to H.264 in MP4"
        )
