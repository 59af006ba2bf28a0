"""Drawn clips whose frames carry their own number in their colours, of any rate, codec and container.

A frame is 96 x 64 pixels: blocks of 16 x 16 in white or black are the twelve lower bits of its number, the largest
first, row by row, and the column at the left is red, so that a frame that is turned or mirrored cannot be read.
"""

import io
import struct
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np

from dataset_builders.pictures.images import pixels_png

WIDTH, HEIGHT = 96, 64
_BLOCK, _ROWS, _COLUMNS = 16, 4, 5  # of bits, behind the red column
_TIME_BASE = Fraction(1, 90_000)  # of times that are given one by one
NTSC = Fraction(30_000, 1001)  # 29.97 frames a second
_MATRICES = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}  # a, b, c, d of a tkhd box, clockwise


def numbered_frame(number: int) -> np.ndarray:
    """Return (64, 96, 3) uint8 with the number in its blocks, from 0 to 2^20 - 1."""
    bits = [(number >> bit) & 1 for bit in reversed(range(_ROWS * _COLUMNS))]
    grey = np.kron(np.array(bits, np.uint8).reshape(_ROWS, _COLUMNS) * 255, np.ones((_BLOCK, _BLOCK), np.uint8))
    frame = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    frame[:, :_BLOCK, 0] = 255
    frame[:, _BLOCK:] = grey[:, :, None]
    return frame


def number_of(frame: np.ndarray) -> int:
    """Return the number of a decoded frame, (64, 96, 3) uint8."""
    assert frame.shape == (HEIGHT, WIDTH, 3), frame.shape
    red = frame[:, :_BLOCK].astype(int).mean((0, 1))
    assert red[0] > 180 and red[1:].max() < 70, f"no red column at the left: {red}"
    grey = frame[:, _BLOCK:].mean(2).reshape(_ROWS, _BLOCK, _COLUMNS, _BLOCK).mean((1, 3))
    assert ((grey < 60) | (grey > 195)).all(), f"neither black nor white: {grey}"
    return int("".join("1" if value > 127 else "0" for value in grey.ravel()), 2)


def numbered_pngs(count: int, first: int = 0) -> tuple[bytes, ...]:
    """Return frames as PNG files."""
    return tuple(pixels_png(numbered_frame(number)) for number in range(first, first + count))


def numbered_clip(
    count: int,
    rate: Fraction | int = 25,
    *,
    times: Sequence[float] | None = None,
    codec: str = "libx264",
    container: str = "mp4",
    audio: bool = False,
    turned: int = 0,
    first: int = 0,
    size: tuple[int, int] | None = None,
    **options: str,
) -> bytes:
    """Return a file of the frames `first`, `first` + 1, ...

    Args:
        rate: frames a second.
        times: the second at which each frame is shown, in place of a rate.
        turned: degrees clockwise by which a player turns the frames (mp4 alone); frames are stored turned back.
        size: (height, width) of plain grey frames in place of numbered ones.
        options: of the encoder, such as g="5", or bf="2".
    """
    out = io.BytesIO()
    with av.open(out, "w", format={"mkv": "matroska"}.get(container, container)) as file:
        stream = file.add_stream(codec, rate=rate, options=options)
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.time_base = stream.codec_context.time_base = _TIME_BASE if times is not None else 1 / Fraction(rate)
        height, width = size or (HEIGHT, WIDTH)
        stream.width, stream.height = (height, width) if turned % 180 else (width, height)
        sound = file.add_stream("aac" if container == "mp4" else "libopus", rate=48_000) if audio else None
        for number in range(count):
            pixels = numbered_frame(first + number) if size is None else np.full((*size, 3), 128, np.uint8)
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(np.rot90(pixels, turned // 90)), "rgb24")
            picture.pts = number if times is None else round(times[number] / _TIME_BASE)
            picture.time_base = stream.codec_context.time_base
            file.mux(stream.encode(picture))
        file.mux(stream.encode(None))
        if sound is not None:
            for second in range(int(count / rate) + 1):
                wave = (np.sin(np.arange(48_000) / 20) * 8000).astype(np.int16)[None]
                tone = av.AudioFrame.from_ndarray(wave, "s16", "mono")
                tone.sample_rate, tone.pts, tone.time_base = 48_000, second * 48_000, Fraction(1, 48_000)
                file.mux(sound.encode(tone))
            file.mux(sound.encode(None))
    data = out.getvalue()
    return _turn(data, turned) if turned else data


def _turn(data: bytes, degrees: int) -> bytes:
    """Write a rotation into the matrix of the track header of an mp4 (ISO 14496-12, 8.3.2)."""
    place = data.index(b"tkhd") + 4 + 40  # version 0: 40 bytes from the version to the matrix
    a, b, c, d = (value << 16 for value in _MATRICES[degrees])
    return data[:place] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[place + 36 :]
