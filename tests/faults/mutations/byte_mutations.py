"""Changes of bytes of any file; the same seed makes the same change."""

import random
import struct
from pathlib import Path

HUGE = (0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 1 << 40)
_FOREIGN = {
    "ffconcat": b"ffconcat version 1.0\nfile 'turn_001.mp4'\nfile 'turn_001.mp4'\n",
    "SDP": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nt=0 0\nm=video 5004 RTP/AVP 96\n",
    "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n",
    "pickle": b"cposix\nsystem\n(S'touch pickled'\ntR.",
    "HTML": b"<html><script>alert(1)</script></html>\n" * 10,
    "gzip": bytes.fromhex("1f8b0800000000000003") + b"\xff" * 100,
    "ELF": b"\x7fELF" + bytes(200),
    "PNG": b"\x89PNG\r\n\x1a\n" + bytes(50),
}


def change_bytes(data: bytes, rng: random.Random, _: Path) -> tuple[str, bytes] | None:
    if not data:
        return "bytes in an empty file", rng.randbytes(20)
    found, size = bytearray(data), len(data)
    place = rng.randrange(size)
    length = min(size, 1 << rng.randrange(1, 13))

    def flip(count: int) -> None:
        for _ in range(count):
            at = rng.randrange(size)
            found[at] ^= 1 << rng.randrange(8)

    match rng.randrange(14):
        case 0 | 1:
            flip(1)
            return "one bit", bytes(found)
        case 2:
            flip(rng.randrange(2, 64))
            return "some bits", bytes(found)
        case 3:
            return f"cut at {place}", data[:place]
        case 4:
            return f"{length} bytes removed", data[:place] + data[place + length :]
        case 5:
            return f"{length} bytes inserted", data[:place] + rng.randbytes(length) + data[place:]
        case 6:
            return f"{length} zeros written", data[:place] + bytes(length) + data[place + length :]
        case 7:
            block = data[place : place + length]
            return "a block twice", data[:place] + block + data[place:]
        case 8 if size > 8:
            a, b = sorted((rng.randrange(size), rng.randrange(size)))
            return "two parts swapped", data[b:] + data[a:b] + data[:a]
        case 9 | 10 if size > 16:
            number, order = rng.choice(HUGE), rng.choice("<>")
            form = order + rng.choice("IQ")
            number &= 0xFFFFFFFF if form[1] == "I" else 0xFFFFFFFFFFFFFFFF
            at = rng.randrange(min(size, 1 << rng.randrange(5, 30)) - 8)
            struct.pack_into(form, found, at, number)
            return f"{number} at {at}", bytes(found)
        case 11:
            return "random bytes", rng.randbytes(max(1, min(size, 100_000)))
        case 12:
            name = rng.choice(list(_FOREIGN))
            return f"{name} in its place", _FOREIGN[name]
        case _:
            return "bytes at the end", data + rng.randbytes(1 + length)
