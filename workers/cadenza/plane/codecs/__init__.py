"""How values become bytes and back: wire formats, and the sender's memory of what they left out.

Imports neither ray nor torch. docs/codecs.md compares the codecs.
"""

from cadenza.plane.codec_names import CODEC_NAMES, check_codec
from cadenza.plane.codecs.base import Codec, Turn
from cadenza.plane.codecs.compressor import Compressor
from cadenza.plane.codecs.feedback import compress
from cadenza.plane.codecs.registry import codec_named

__all__ = [
    "CODEC_NAMES",
    "Codec",
    "Compressor",
    "Turn",
    "check_codec",
    "codec_named",
    "compress",
]
