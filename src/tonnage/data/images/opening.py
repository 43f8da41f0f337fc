"""Image files, opened within bounds: what they hold becomes an RGB image, or a sentence that says why not.

A path comes from a row, which a stranger may have written: it leads to a file below the folder that the rows' images
are in, links followed, and nowhere else. What a file is said to be large enough for is looked at before memory is
taken for it. Images are turned as their EXIF data say, as transformers turns them; of 16 bits a channel the high eight
are kept. An image that moves, or has several pages, is refused, as is one whose numbers have no range.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.errors import user_error
from tonnage.forms.conversation import Image, RowError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

MOST_BYTES = 64 << 20
"""Of a file."""
MOST_PIXELS = 100_000_000
"""Of an image; RGB takes three bytes for each."""
MOST_RATIO = 200
"""Of the longer side to the shorter one, beyond which processors fail or take all memory."""
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""In the words of Pillow, of what is read; others start programs, or are no images."""
WIDE = ("I;16", "I;16L", "I;16B", "I;16N")
NARROW = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
INSTALL = "pip install 'tonnage[pictures]'"


@dataclass(frozen=True)
class EncodedImage:
    """The bytes of an image file, and where they are from."""

    content: bytes
    digest: str
    path: str = ""
    """Of a file; empty of bytes that stand in a row."""
    size: int = 0
    modified: int = 0
    """Nanoseconds, of a file."""


def load_image(image: Image, folder: Path | None) -> EncodedImage:
    """The bytes of an image whose path, if it has one, starts from ``folder``; None of a path that was located.
    Raises ``RowError``."""
    if image.content:
        if len(image.content) > MOST_BYTES:
            raise _bad(f"an image of {len(image.content):,} bytes; at most {MOST_BYTES:,} are read")
        return EncodedImage(image.content, digest_of(image.content))
    return load_file(Path(image.path) if folder is None else located(image.path, folder))


def located(path: str, folder: Path) -> Path:
    """The file that a row's ``path`` leads to. Raises ``RowError`` where that is outside of ``folder``."""
    shown = repr(path[:200])
    try:
        whole = (folder / path).resolve()
        is_inside, is_file = whole.is_relative_to(folder.resolve()), whole.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise _bad(f"{shown} is no name of a file ({error})") from None
    if not is_inside:
        raise _bad(
            f"{shown} leads out of {folder}, the folder of its images",
            "name the folder that all of them are in: images of the source (images: / takes any path of the machine)",
        )
    if not is_file:
        reason = "is no regular file" if whole.exists() else "is not there"
        raise _bad(f"{shown} {reason} (looked for in {folder})", "write the folder of the images: images of the source")
    return whole


def load_file(file: Path) -> EncodedImage:
    """A file's bytes. Raises ``RowError``."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        stat = file.stat()
    except OSError as error:
        raise _bad(f"{file} cannot be read ({error.strerror or error})") from None
    if len(content) > MOST_BYTES:
        raise _bad(f"{file} has {stat.st_size:,} bytes; at most {MOST_BYTES:,} are read")
    return EncodedImage(content, digest_of(content), str(file), stat.st_size, stat.st_mtime_ns)


def digest_of(content: bytes) -> str:
    """By which bytes are known again: 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def decode(encoded: EncodedImage) -> Pixels:
    """An image in RGB. Raises ``RowError`` where it is none that can be used, ``UserError`` without Pillow."""
    try:
        from PIL import Image as Pillow
        from PIL import ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise user_error(f"rows with images, and {error}", "Pillow", INSTALL, "data.train") from error
    name = encoded.path or "an image in the row"
    if not encoded.content:
        raise _bad(f"{name} is empty (0 bytes)")
    try:
        with warnings.catch_warnings(action="ignore"):  # of sizes, which are looked at here
            Pillow.init()
            opened = Pillow.open(
                io.BytesIO(encoded.content), formats=[name for name in IMAGE_FORMATS if name in Pillow.OPEN]
            )
            _check_size(opened, name)
            opened.load()
            turned = ImageOps.exif_transpose(opened)
            return _rgb(turned, name)
    except RowError:
        raise
    except UnidentifiedImageError:
        raise _bad(f"{name} is no image of a kind that is read ({', '.join(IMAGE_FORMATS)})") from None
    except Pillow.DecompressionBombError:
        raise _bad(f"{name} says that it has far too many pixels; at most {MOST_PIXELS:,} are decoded") from None
    except MemoryError:
        raise
    except Exception as error:  # whatever broken files make of the parsers of a dozen formats
        raise _bad(f"{name} is damaged ({type(error).__name__}: {first_line(error)[:200]})") from None


def _check_size(opened: Pixels, name: str) -> None:
    width, height = opened.size
    if width * height > MOST_PIXELS:
        raise _bad(f"{name} has {width:,} x {height:,} pixels; at most {MOST_PIXELS:,} are decoded")
    if min(width, height) < 1 or max(width, height) > MOST_RATIO * min(width, height):
        raise _bad(f"{name} has {width:,} x {height:,} pixels; one side may be {MOST_RATIO} times the other at most")
    frames = int(getattr(opened, "n_frames", 1))
    if frames > 1 and opened.format != "MPO":  # of cameras: a photograph, and a small one of it
        raise _bad(f"{name} has {frames:,} frames or pages; an image of one is needed", "keep one of them")


def _rgb(image: Pixels, name: str) -> Pixels:
    if image.mode in WIDE:
        import numpy as np
        from PIL import Image as Pillow

        return Pillow.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode not in NARROW:
        change = "save it with 8 bits a channel"
        raise _bad(f"{name} has pixels of mode {image.mode}, whose numbers have no range that is known", change)
    return image.convert("RGB")


def _bad(reason: str, change: str = "") -> RowError:
    return RowError("image", reason, change)
