"""The program that decodes video files, in a process that a limit may end without harm to its caller.

In: one line of JSON with the limits, then for each file a line of JSON and the file's bytes. Out: for each file the
frames that were asked for, each with a line of JSON before its bytes, and one line of JSON with the outcome.

    {"size": 71234, "start": null, "end": 8.0, "max_pixels": ..., "max_frames": ..., "decode": true,
     "indices": [0, 12], "expected": [0.0, 0.48]}
    {"index": 0, "height": 720, "width": 1280}, then 720 * 1280 * 3 bytes
    {"times": [0.0, 0.04], "height": 720, "width": 1280, "has_audio": true, "codec": "h264"} or {"reason", "detail"}

A frame is known by its own time (presentation time stamp). Neither the number of frames that a container states nor its
average rate is read: both are wrong in many files. It is run by its path and imports nothing from athanor.
"""

import io
import itertools
import json
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import psutil

# Demuxers of one file each. Not: playlists (hls, dash, concat), which open other files and addresses, and devices.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,mpegts,mpeg,ogg,asf,gif,mpegvideo,h264,hevc,m4v,ivf,obu"
# What the libraries print for data that are missing or cannot be decoded. They conceal such places in the frames and
# give no error. Other errors that they print occur in files with complete frames.
_CUT = ("ended prematurely", "partial file")
_DAMAGED = (
    *("error while decoding", "error at mb", "damaged", "invalid nal", "error splitting", "exceeds containing"),
    *("invalid data", "invalid frame", "corrupt", "header missing", "decode_slice_header error", "missing picture"),
)
_SEEK_SECONDS = 10  # a clip that starts later is sought; before it, frames are decoded and dropped


class Refused(Exception):
    """The file cannot be used: a skip reason and a detail."""


def main() -> None:
    """Answer requests until the input ends."""
    source, out = sys.stdin.buffer, sys.stdout.buffer
    settings = json.loads(source.readline())
    av.logging.set_level(av.logging.ERROR)
    av.logging.set_skip_repeated(False)  # the next file may be damaged in the same way
    plain = psutil.Process().memory_info().vms
    for line in source:
        request = json.loads(line)
        limit = plain + settings["memory"] + 2 * request["size"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        # The signal's default action ends the process, even in the middle of one long operation.
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])
        data = source.read(request["size"])
        with av.logging.Capture() as printed:
            try:
                outcome = _read(data, request, out)
                _check_printed(printed)
            except Refused as refused:
                outcome = dict(zip(("reason", "detail"), refused.args))
            except (MemoryError, av.error.MemoryError):
                outcome = {"reason": "bomb", "detail": f"decoding needs over {settings['memory'] >> 20} MiB of memory"}
            except av.error.FFmpegError as error:
                cause = error.log[2].strip() if error.log else ""
                text = f"{error.strerror} ({cause})" if cause else error.strerror
                text = "no video format that is read here" if "whitelist" in cause else " ".join(text.split())[:200]
                outcome = {"reason": "decode_error", "detail": text}
            except Exception as error:  # hostile bytes make a demuxer or decoder raise nearly any exception
                text = f"{type(error).__name__}: {' '.join(str(error).split())}"
                outcome = {"reason": "decode_error", "detail": text[:200]}
        if outcome.get("reason") in ("decode_error", "no_frames") and _is_cut(data, printed):
            outcome["reason"] = "truncated_image"
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(json.dumps(outcome).encode() + b"\n")
        out.flush()


def _read(data: bytes, request: dict[str, Any], out: io.BufferedWriter) -> dict[str, Any]:
    """Write the frames that are asked for; return the times of all frames between start and end, and other facts."""
    start, end = request["start"] or 0.0, float("inf") if request["end"] is None else request["end"]
    wanted = None if request["indices"] is None else dict(zip(request["indices"], request["expected"], strict=True))
    times: list[float] = []
    size: tuple[int, int] | None = None
    # Names in a file's metadata need not be Unicode.
    options = {"format_whitelist": _CONTAINERS}
    with av.open(io.BytesIO(data), options=options, metadata_errors="ignore") as container:
        stream = _stream_of(container)
        context = stream.codec_context
        _check_size(context.height, context.width, request)
        # Frames may become larger than the header says. Decoders compare with sides that are rounded up to blocks.
        context.options = {"max_pixels": str(2 * request["max_pixels"] + (1 << 16))}
        context.thread_count = 1  # the caller runs a process for each core
        walk = _decoded(container, stream, start) if request["decode"] else _packet_times(container, stream)
        for time, frame in walk:
            if time > end:
                break
            if frame is not None:
                found = (frame.height, frame.width) if frame.rotation % 180 == 0 else (frame.width, frame.height)
                if size not in (None, found):
                    raise Refused("decode_error", f"its frames change from {size} to {found} pixels (height, width)")
                size = found
                _check_size(*size, request)
            if times and time <= times[-1]:
                raise Refused("no_times", f"the times of frames do not rise: {time:.6g} s after {times[-1]:.6g} s")
            if time < start:
                continue
            if len(times) == request["max_frames"]:
                raise Refused("too_many_frames", f"over {len(times)} frames between {start:g} s and {end:g} s")
            times.append(time)
            if wanted is not None and len(times) - 1 in wanted:
                if (expected := wanted.pop(len(times) - 1)) is not None and expected != time:
                    # The container's times are not those of the frames: the numbers of frames were chosen by them.
                    raise Refused("no_times", f"a frame at {time:.6g} s is at {expected:.6g} s in the container")
                _write_frame(out, len(times) - 1, frame)
                if not wanted:
                    break
        if not times:
            raise Refused("no_frames", f"no frame between {start:g} s and {end:g} s")
        if wanted:
            raise Refused("no_frames", f"frame {min(wanted)} is asked for, and there are {len(times)}")
        if size is None:  # from the header: rotation is known of decoded frames alone
            size = _header_size(container, stream)
        return {
            "times": times,
            "height": size[0],
            "width": size[1],
            "has_audio": bool(container.streams.audio),
            "codec": context.codec.canonical_name,
        }


def _stream_of(container: Any) -> Any:
    # A cover of a piece of music is a video stream, too.
    cover = av.stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not streams:
        raise Refused("no_frames", "the file has no stream of frames")
    return streams[0]


def _check_size(height: int, width: int, request: dict[str, Any]) -> None:
    if height * width > request["max_pixels"]:
        raise Refused("bomb", f"frames of {width} x {height} pixels, the limit is {request['max_pixels']} in all")


def _decoded(container: Any, stream: Any, start: float) -> Iterator[tuple[float, Any]]:
    """Yield (seconds since the first frame, frame) of every frame in order, from some frame before `start` on."""
    frames = _frames_of(container, stream)
    first = next(frames, None)
    if first is None:
        return
    base = first.pts
    if start < _SEEK_SECONDS:
        frames = itertools.chain([first], frames)
    else:
        yield 0.0, first
        container.seek(base + int(start / stream.time_base), stream=stream)
        frames = _after_seek(container, stream, base, start)
    for frame in frames:
        yield float((frame.pts - base) * stream.time_base), frame


def _after_seek(container: Any, stream: Any, base: int, start: float) -> Iterator[Any]:
    """Yield the frames from a key frame before `start` on, or from the second on if the container finds none."""
    frames = _frames_of(container, stream)
    first = next(frames, None)
    if first is not None and base < first.pts and (first.pts - base) * stream.time_base <= start:
        yield first
    else:
        container.seek(base, stream=stream)
        frames = (frame for frame in _frames_of(container, stream) if frame.pts > base)
    yield from frames


def _frames_of(container: Any, stream: Any) -> Iterator[Any]:
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise Refused("truncated_image", "a packet of the file is incomplete")
        try:
            frames = packet.decode()
        except (MemoryError, av.error.MemoryError):
            raise
        except av.error.FFmpegError as error:
            raise Refused("decode_error", f"{type(error).__name__} in a frame: {error.strerror}"[:200]) from None
        for frame in frames:
            if frame.is_corrupt:
                raise Refused("decode_error", "a frame cannot be decoded to its end")
            if frame.pts is None:
                raise Refused("no_times", "a frame without a time; write the file again as mp4, or give frames and fps")
            yield frame


def _packet_times(container: Any, stream: Any) -> Iterator[tuple[float, None]]:
    """Yield (seconds since the first frame, None) of every frame in order, from the container alone."""
    times = []
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise Refused("truncated_image", "a packet of the file is incomplete")
        if packet.size and not packet.is_discard:
            if packet.pts is None:
                raise Refused("no_times", "a frame without a time in the container; set convert.decode_check: full")
            times.append(packet.pts)
    times.sort()  # packets come in the order in which they are decoded
    yield from ((float((time - times[0]) * stream.time_base), None) for time in times)


def _header_size(container: Any, stream: Any) -> tuple[int, int]:
    """Return (height, width) after rotation, from the first frame."""
    container.seek(0)
    frame = next(_frames_of(container, stream))
    return (frame.height, frame.width) if frame.rotation % 180 == 0 else (frame.width, frame.height)


def _write_frame(out: io.BufferedWriter, index: int, frame: Any) -> None:
    """Write a frame as RGB, upright."""
    pixels = np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24", threads=1), frame.rotation // 90))
    head = {"index": index, "height": pixels.shape[0], "width": pixels.shape[1]}
    out.write(json.dumps(head).encode() + b"\n")
    out.write(pixels)


def _is_cut(data: bytes, printed: list[tuple[int, str, str]]) -> bool:
    """Whether the file ends before an end that it states itself."""
    if any(mark in text.lower() for *_, text in printed for mark in _CUT):
        return True
    if data[:4] == b"RIFF":
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    place = 0
    while data[4:8] == b"ftyp" and place + 16 <= len(data):  # boxes of ISO 14496-12, 4.2
        size = int.from_bytes(data[place : place + 4], "big")
        size = int.from_bytes(data[place + 8 : place + 16], "big") if size == 1 else size or len(data) - place
        if size < 8:
            return False
        place += size
    return place > len(data)


def _check_printed(printed: list[tuple[int, str, str]]) -> None:
    """Raise Refused if a line that the libraries printed means that data are missing or cannot be decoded."""
    for *_, text in printed:
        for reason, marks in (("truncated_image", _CUT), ("decode_error", _DAMAGED)):
            if any(mark in text.lower() for mark in marks):
                raise Refused(reason, " ".join(text.split())[:200])


if __name__ == "__main__":
    main()
